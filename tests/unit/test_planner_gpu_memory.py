"""GPU memory of a plan: the activation formula against what autograd saves, and the stacks of Fig. 2."""

import json

import pytest
import torch

from memascend.planner import Workload, model_spec
from memascend.planner import gpu_memory as module
from memascend.planner.footprint import GIB
from memascend.planner.gpu_memory import STACKS, block_bytes_per_token, logits_bytes
from memascend.planner.options import DEFAULT_STACK, Stack

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BATCH, CONTEXT = 2, 128


def gpu_memory(spec, stack=DEFAULT_STACK, **workload):
    return module.gpu_memory(Workload(spec=spec, stack=stack, **workload))


def saved_bytes(config: dict, attention: str) -> tuple[float, float]:
    """Return (bytes per token and block, bytes per token outside the
    blocks) that autograd keeps for a training loss."""
    transformers = pytest.importorskip("transformers")
    totals = {}
    for layers in (2, 4):
        keys = {**config, "num_hidden_layers": layers}
        built = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
        built.use_cache = False
        model = transformers.AutoModelForCausalLM.from_config(
            built, attn_implementation=attention, dtype=torch.bfloat16
        ).train()
        weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        kept: dict[int, tuple[int, torch.Tensor]] = {}

        def pack(tensor, weights=weights, kept=kept):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        ids = torch.randint(0, config["vocab_size"], (BATCH, CONTEXT))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(input_ids=ids, labels=ids).loss
        totals[layers] = sum(size for size, _ in kept.values()) / (BATCH * CONTEXT)
        del loss
    a_block = (totals[4] - totals[2]) / 2
    return a_block, totals[2] - 2 * a_block


@pytest.fixture
def small(tmp_path):
    def make(**keys):
        path = tmp_path / "small.json"
        path.write_text(json.dumps({**SMALL, **keys}))
        return model_spec(path)

    return make


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "llama"},
        {"model_type": "llama", "num_key_value_heads": 4},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "head_dim": 32},
        {"model_type": "mistral", "head_dim": 48},
    ],
    ids=lambda keys: "-".join(map(str, keys.values())),
)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_activation_formula_matches_what_autograd_saves(keys, attention, small):
    spec = small(**keys)
    measured, _ = saved_bytes({**SMALL, **keys}, attention)
    assert block_bytes_per_token(spec, CONTEXT, flash=attention == "sdpa", fused=False) == pytest.approx(
        measured, rel=0.02
    )


def test_loss_saves_between_four_and_ten_bytes_per_logit(small):
    """log-probabilities in fp32 are saved; the 16-bit logits live until
    the loss is computed, and gradients come later."""
    spec = small(model_type="llama")
    _, outside = saved_bytes({**SMALL, "model_type": "llama"}, "sdpa")
    assert 4 * spec.vocab < outside < 10 * spec.vocab + 16 * spec.hidden
    assert logits_bytes(spec, 10, chunked=False) == 10 * 10 * spec.vocab


def test_each_technique_of_figure_2_lowers_the_peak():
    spec = model_spec("llama3.1-8b")
    for context in (512, 32768):
        peaks = [gpu_memory(spec, stack, batch=4, context=context).device_bytes for stack in STACKS.values()]
        assert peaks == sorted(peaks, reverse=True)
        assert len(set(peaks)) == len(STACKS)
    assert gpu_memory(spec, STACKS["+GC"], batch=4, context=32768).device_bytes > 80 * GIB
    assert gpu_memory(spec, STACKS["+Offloaded-GC"], batch=4, context=32768).device_bytes < 80 * GIB


def test_components_add_up_and_are_all_on_the_device():
    made = gpu_memory(model_spec("qwen2.5-7b"), batch=2, context=4096)
    assert sum(made.components().values()) == made.device_bytes
    assert {entry.role for entry in made.entries} == {"device"}


def test_all_in_gpu_holds_sixteen_bytes_per_parameter():
    spec = model_spec("llama3.2-1b")
    states = gpu_memory(spec, system="all_in_gpu").components()["model states"]
    assert states == 16 * spec.parameters


@pytest.mark.parametrize(("states", "each"), [("fp32", 16), ("bf16", 10), ("int8", 8 + 2 / 32)])
def test_states_in_memory_take_the_bytes_of_their_dtype(states, each):
    spec = model_spec("llama3.2-1b")
    options = {"system": "in_memory", "arm": "memascend_adamw", "dtype": "bf16", "states": states}
    assert gpu_memory(spec, **options).components()["model states"] == round(each * spec.parameters)


def test_partitioned_weights_that_stay_on_the_gpu_are_counted():
    spec = model_spec("llama3.2-1b")
    weights = {}
    for arm in ("mlp_offload", "zero3", "weights_on_paths"):
        made = gpu_memory(spec, system="mlp_offload", arm=arm, ranks=2, batch=1, context=1024)
        weights[arm] = made.components().get("partitioned weights")
    assert weights == {"mlp_offload": spec.parameters, "zero3": spec.parameters, "weights_on_paths": None}


def test_all_checkpoints_stay_on_the_gpu_unless_offloaded():
    spec = model_spec("llama3.2-1b")
    for stack, system in ((Stack(checkpointing="plain"), "memascend"), (Stack(), "all_in_gpu")):
        made = gpu_memory(spec, stack, system=system, batch=2, context=4096).components()
        assert made["activation checkpoints"] == spec.layers * 2 * 2 * 4096 * spec.hidden
    assert (
        gpu_memory(spec, batch=2, context=4096).components()["activation checkpoints"] == 2 * 2 * 2 * 4096 * spec.hidden
    )


def test_unknown_checkpointing_is_refused():
    with pytest.raises(ValueError, match="unknown checkpointing 'magic': use one of none, plain, offloaded"):
        Stack(checkpointing="magic")
