"""A pretrained folder is read from its files into the engine's states:
equal bits, flat memory, one line for a bad file."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from memascend.engine.mmap_parameters import flat_values
from memascend.integrations.lazy_loading import NotAsStored, lazy_model, model_without_values
from memascend.memory.ledger import Ledger
from memascend.training.backends.in_memory import InMemoryBackend
from memascend.training.backends.streaming import StreamingBackend
from memascend.training.config import TrainConfig

CONFIG = TrainConfig(model="m", data=["d"], system="lohan", clip=0.0)
LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500, "tie_word_embeddings": False, "attention_bias": True,
}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 500, "n_positions": 64}
GPT2 |= dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
BATCH = torch.arange(2 * 16).reshape(2, 16) % 128


def saved(folder, config=LLAMA, dtype=torch.float32, shard="40KB"):
    torch.manual_seed(7)
    config = dict(config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config)).to(dtype)
    with torch.no_grad():  # as after training: no value is zero or one
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter, dtype=torch.float32).to(dtype) * 0.02)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def backends(folder, source, **changes):
    """Build the engine's model and plain PyTorch's, both from the folder `source`."""
    config = dataclasses.replace(CONFIG, **changes)
    ours = StreamingBackend(config, {"folder": str(folder / "states"), "arm": "optimized"}, Ledger())
    settings = {"update": "memascend", "group_elements": None, "vocabulary_slices": False}
    theirs = InMemoryBackend(dataclasses.replace(config, checkpointing="none"), settings, Ledger())
    for backend in (ours, theirs):
        torch.manual_seed(3)
        backend.build(source)
    return ours, theirs


@pytest.mark.parametrize(
    ("config", "stored", "dtype"),
    [
        (LLAMA, torch.float32, "bf16"),
        (LLAMA | {"tie_word_embeddings": True}, torch.bfloat16, "fp32"),
        (LLAMA, torch.float16, "fp16"),
        (GPT2, torch.float32, "fp32"),
        (MIXTRAL, torch.float32, "bf16"),
    ],
    ids=["converted", "tied", "the same type", "gpt2", "experts that are fused"],
)
def test_streamed_folder_trains_bitwise_as_one_in_memory(tmp_path, caplog, config, stored, dtype):
    source = saved(tmp_path / "model", config, stored)
    assert len(list(source.glob("*.safetensors"))) > 2
    ours, theirs = backends(tmp_path, source, dtype=dtype)
    assert ("read into memory" in caplog.text) == (config is MIXTRAL)
    for _ in range(2):
        assert ours.step([BATCH], 1e-3) == theirs.step([BATCH], 1e-3)
    expected = {name: values.clone() for name, values in theirs.weights()}
    for name, values in ours.weights():
        assert torch.equal(values, expected.pop(name)), name
    assert not expected
    ours.close()


def test_resumed_run_reads_no_weights_from_the_folder(tmp_path):
    source = saved(tmp_path / "model")
    ours, theirs = backends(tmp_path, source)
    ours.step([BATCH], 1e-3)
    ours.keep({"step": 1})
    ours.engine.close()
    for path in source.glob("*.safetensors"):
        path.unlink()
    again = StreamingBackend(ours._config, ours._settings, Ledger())
    assert again.go_on(source)["step"] == 1
    theirs.step([BATCH], 1e-3)
    assert again.step([BATCH], 1e-3) == theirs.step([BATCH], 1e-3)
    again.close()


def test_lazy_model_holds_shapes_and_buffers_but_no_values(tmp_path):
    source = saved(tmp_path / "model", LLAMA | {"tie_word_embeddings": True}, torch.bfloat16)
    ours, theirs = lazy_model(source, torch.float32), AutoModelForCausalLM.from_pretrained(source)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    for (name, mine), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert mine.shape == other.shape
        assert mine.untyped_storage().nbytes() == mine.element_size()
        assert torch.equal(flat_values(mine).float(), other.detach().flatten().float()), name
    for (name, mine), (_, other) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert torch.equal(mine, other), name


def test_tensors_unknown_to_the_model_are_named_and_skipped(tmp_path, caplog):
    source = saved(tmp_path / "model")
    lazy_model(source, torch.float32)
    assert "left out" not in caplog.text
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    lazy_model(source, torch.float32)
    (said,) = caplog.messages
    assert said.startswith(
        f"memascend: 26 tensors in {source} are not part of the model that its config.json describes"
    )
    assert "(model.layers.1.input_layernorm.weight and others)" in said


def rewritten(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def lose_a_shard(folder):
    sorted(folder.glob("*.safetensors"))[1].unlink()


def lose_a_tensor(folder):
    rewritten(folder / "model.safetensors", lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def lose_an_indexed_tensor(folder):
    path = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]["model.norm.weight"]
    rewritten(path, lambda tensors: tensors.pop("model.norm.weight"))


def take_another_shape(folder):
    rewritten(folder / "model.safetensors", lambda tensors: tensors.update({"lm_head.weight": torch.zeros(500, 16)}))


def cut(folder):
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1000)


def spoil(folder):
    (folder / "model.safetensors").write_bytes(b"<html>not found</html>")


def spoil_the_index(folder):
    (folder / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "shard", "said"),
    [
        (
            lose_a_shard,
            "40KB",
            r"lacks model-00002-of-\d+.safetensors \(1 of \d+ shards are missing\): copy or download",
        ),
        (
            lose_a_tensor,
            "1GB",
            r"has no tensor model.layers.1.mlp.up_proj.weight \(64, 32\), which its config.json requires",
        ),
        (
            lose_an_indexed_tensor,
            "40KB",
            r"lacks the tensor model.norm.weight, which model.safetensors.index.json says",
        ),
        (take_another_shape, "1GB", r"lm_head.weight in .* is \(500, 16\), but its config.json requires \(500, 32\)"),
        (cut, "1GB", r"model.safetensors is cut short: \d+ of \d+ bytes; copy or download the folder again"),
        (spoil, "1GB", "model.safetensors is not a safetensors file"),
        (spoil_the_index, "40KB", "model.safetensors.index.json is not an index of shards"),
    ],
)
def test_damaged_folder_is_refused_in_one_line_leaving_nothing(tmp_path, damage, shard, said):
    source = saved(tmp_path / "model", shard=shard)
    damage(source)
    backend = StreamingBackend(CONFIG, {"folder": str(tmp_path / "states"), "arm": "optimized"}, Ledger())
    with pytest.raises(ValueError, match=said) as raised:
        backend.build(source)
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_tied_weights_with_different_values_are_left_to_transformers(tmp_path):
    source = saved(tmp_path / "model", shard="1GB")
    settings = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(settings))
    with pytest.raises(NotAsStored, match="are tied, and have different values"):
        lazy_model(source, torch.float32)


_START = """
import re, sys
from pathlib import Path

import torch

from memascend.memory.ledger import Ledger
from memascend.training.backends.streaming import StreamingBackend
from memascend.training.config import TrainConfig

def resident(name):
    return 1024 * int(re.search(rf"{name}:\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1))

def started(name, source):
    config = TrainConfig(model="m", data=["d"], system="lohan", dtype="bf16", clip=0.0)
    backend = StreamingBackend(config, {"folder": sys.argv[1] + "/" + name, "arm": "optimized"}, Ledger())
    backend.build(Path(source))
    return backend

first = started("first", sys.argv[2])
first.step([torch.zeros(1, 8, dtype=torch.int64)], 1e-3)
first.close()
for source in sys.argv[3:]:
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    again = started("again", source)
    print(resident("VmHWM") - before)
    again.close()
"""


@pytest.mark.slow  # a separate process, with the allocator's settings of a run
def test_start_up_memory_does_not_grow_with_the_model(tmp_path):
    wide = LLAMA | {"hidden_size": 256, "intermediate_size": 1024, "attention_bias": False}
    sources = [saved(tmp_path / str(layers), wide | {"num_hidden_layers": layers}) for layers in (4, 8, 64)]
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}
    command = [sys.executable, "-c", _START, str(tmp_path / "states"), *map(str, sources)]
    (tmp_path / "states").mkdir()
    said = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=True).stdout
    grown = list(map(int, said.split()))
    weights = sum(path.stat().st_size for path in sources[2].glob("*.safetensors"))
    assert weights > 200e6
    assert grown[1] - grown[0] < 0.1 * weights, grown  # for 56 more layers
    assert list((tmp_path / "states").iterdir()) == []


def test_model_without_values_needs_no_memory_for_them():
    model = model_without_values(
        LLAMA | {"num_hidden_layers": 2, "hidden_size": 8192, "intermediate_size": 1 << 20}, torch.bfloat16
    )
    assert sum(parameter.numel() for parameter in model.parameters()) > 50e9
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
