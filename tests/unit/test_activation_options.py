"""Attention, loss and checkpointing of transformers models by name: chosen, undone, refused."""

import gc
import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch

from memascend.activation import cache_of
from memascend.integrations.memory_options import MemoryOptions, apply_memory_options
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from tests import forked

transformers = pytest.importorskip("transformers", reason="transformers is not installed (make setup)")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "use_cache": False,
}
MODELS = {
    "qwen2": {},
    "llama": {"tie_word_embeddings": True},
    "qwen3_moe": {
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
    },
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 5.0},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
}


def make(model_type, dtype=torch.float32, **settings):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **SIZES | MODELS[model_type] | settings)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()


def batch(seed=1):
    ids = torch.randint(0, SIZES["vocab_size"], (2, 11), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def loss_and_gradients(model, before_backward=lambda: None, **inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    before_backward()
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def assert_close(found, expected, tolerance=2e-6):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    assert len(found[1]) == len(expected[1])
    for a, b in zip(found[1], expected[1]):
        assert (a - b).abs().max() <= tolerance * max(b.abs().max(), 1e-3)


@pytest.mark.parametrize("model_type", MODELS)
def test_chunked_loss_trains_like_the_models_own_loss(model_type):
    expected = loss_and_gradients(make(model_type), **batch())
    model = make(model_type)
    applied = apply_memory_options(model, MemoryOptions(loss="chunked"), chunk_bytes=1)
    assert_close(loss_and_gradients(model, **batch()), expected)
    assert_close(
        loss_and_gradients(model, **batch(), num_items_in_batch=40),
        loss_and_gradients(make(model_type), **batch(), num_items_in_batch=40),
    )
    assert model(**batch()).logits is None
    applied.undo()
    assert model(**batch()).logits is not None
    assert not {"forward", "_loss_function"} & set(vars(model))


def test_already_shifted_labels_are_used_unchanged():
    inputs = batch()
    shifted = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[..., 1:]
    expected = loss_and_gradients(make("qwen2"), **inputs)
    model = make("qwen2")
    apply_memory_options(model, MemoryOptions(loss="chunked"))
    assert_close(loss_and_gradients(model, **inputs, shift_labels=shifted), expected)


# peft uses the old name of a transformers function.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_chunked_loss_trains_a_model_of_peft_like_its_own_loss():
    peft = pytest.importorskip("peft", reason="needs peft: pip install -c constraints.txt '.[test]'")

    def adapted():
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        model = make("llama")
        return peft.get_peft_model(model, lora).train()

    expected, model = loss_and_gradients(adapted(), **batch()), adapted()
    applied = apply_memory_options(model, MemoryOptions(loss="chunked"), chunk_bytes=1)
    assert_close(loss_and_gradients(model, **batch()), expected)
    assert model(**batch()).logits is None
    applied.undo()
    assert_close(loss_and_gradients(model, **batch()), expected)
    assert model(**batch()).logits is not None


def test_chunked_loss_returns_a_tuple_on_request():
    model = make("qwen2")
    loss = model(**batch()).loss
    apply_memory_options(model, MemoryOptions(loss="chunked"))
    output = model(**batch(), return_dict=False)
    torch.testing.assert_close(output[0], loss)
    assert output[1] is None


def test_evaluation_and_calls_without_labels_keep_their_logits():
    model = make("qwen2")
    apply_memory_options(model, MemoryOptions(loss="chunked"))
    assert model(input_ids=batch()["input_ids"]).logits.shape == (2, 11, 61)
    model.eval()
    output = model(**batch())
    assert output.logits.shape == (2, 11, 61)
    assert output.loss is not None


def test_unknown_logit_change_is_refused_on_the_first_step():
    class Doubled(transformers.Qwen2ForCausalLM):
        def forward(self, input_ids, labels=None, **kwargs):
            hidden = self.model(input_ids=input_ids).last_hidden_state
            logits = 2 * self.lm_head(hidden)
            return (self.loss_function(logits=logits, labels=labels, vocab_size=61), logits)

    model = Doubled(make("qwen2").config).train()
    apply_memory_options(model, MemoryOptions(loss="chunked"))
    with pytest.raises(RuntimeError, match="changes its logits or labels between head and loss"):
        model(**batch())


def test_models_without_linear_head_or_with_another_loss_are_refused():
    encoder = transformers.AutoModel.from_config(make("qwen2").config)
    with pytest.raises(ValueError, match="no linear language-model head"):
        apply_memory_options(encoder, MemoryOptions(loss="chunked"))
    model = make("qwen2")
    model.loss_function = lambda logits, labels, **kwargs: logits.sum()
    with pytest.raises(ValueError, match="causal LM loss"):
        apply_memory_options(model, MemoryOptions(loss="chunked"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_options_apply_together_and_are_undone(dtype):
    ledger = Ledger()
    expected = loss_and_gradients(make("qwen2", dtype), **batch())
    model = make("qwen2", dtype)
    before = dict(vars(model))
    applied = apply_memory_options(
        model,
        MemoryOptions(attention="auto", loss="chunked", checkpointing="offloaded"),
        allocator=PageAlignedPinnedAllocator(ledger, lock=False),
    )
    assert str(applied) == "attention sdpa, loss chunked, checkpointing offloaded"
    assert_close(loss_and_gradients(model, **batch()), expected, tolerance=2e-6 if dtype == torch.float32 else 0.02)
    assert ledger.peak_bytes() >= 2 * 11 * 2 * 32 * dtype.itemsize == applied.store.requested_bytes
    applied.undo()
    assert {k: v for k, v in vars(model).items() if k in before} == before
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    torch.testing.assert_close(loss_and_gradients(model, **batch())[0], expected[0])
    apply_memory_options(model, MemoryOptions(loss="chunked", checkpointing="offloaded"))


def test_checkpointing_is_chosen_by_name_and_undone():
    model = make("qwen2")

    def is_on():
        return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())

    plain = apply_memory_options(model, MemoryOptions(checkpointing="plain"))
    assert is_on()
    none = apply_memory_options(model, MemoryOptions(checkpointing="none"))
    assert not is_on()
    none.undo()
    assert is_on()
    plain.undo()
    assert not is_on()
    loss_and_gradients(model, **batch())


def test_attention_is_chosen_by_name_and_undone():
    model = make("qwen2")
    expected = model(**batch()).loss
    applied = apply_memory_options(model, MemoryOptions(attention="eager"))
    assert model.config._attn_implementation == "eager"
    torch.testing.assert_close(model(**batch()).loss, expected)
    applied.undo()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("option", [{"attention": "flash"}, {"loss": "liger"}, {"checkpointing": "unsloth"}])
def test_missing_gpu_or_library_is_refused_by_name(option, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a CUDA GPU") as error:
        apply_memory_options(make("qwen2"), MemoryOptions(**option))
    assert "\n" not in str(error.value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="which is not installed: make setup CUDA=1"):
        apply_memory_options(make("qwen2"), MemoryOptions(**option))


def test_failed_option_leaves_the_model_unchanged(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = make("qwen2")
    before = dict(vars(model))
    with pytest.raises(ValueError, match="CUDA"):
        apply_memory_options(model, MemoryOptions(attention="eager", loss="chunked", checkpointing="unsloth"))
    assert dict(vars(model)) == before
    assert model.config._attn_implementation == "sdpa"


def test_unknown_option_names_are_refused():
    with pytest.raises(ValueError, match=r"memascend.loss: 'fused' is unknown; choose one of plain, chunked, liger"):
        MemoryOptions(loss="fused")
    assert not MemoryOptions()


def test_ssd_activations_keep_gradients_equal_and_undo_removes_files(tmp_path):
    expected = loss_and_gradients(make("qwen2"), **batch())
    model = make("qwen2")
    section = {"folder": str(tmp_path), "amount": "all", "minimum_bytes": 512, "reserve_bytes": 0, "device": "cpu"}
    applied = apply_memory_options(model, MemoryOptions(checkpointing="ssd", activations=section))

    def wait_for_writes():  # backward takes tensors that are still being written from memory, and does not read them
        while any(saved.writing is not None for saved in tuple(applied.cache._live)):
            time.sleep(0.001)

    found = loss_and_gradients(model, wait_for_writes, **batch())
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
    facts = applied.activation_facts()["activations"]
    assert (facts["read"] > 0, applied.moved()["written_bytes"]) == (True, facts["written"])
    with torch.no_grad():
        model(**batch())
    assert applied.moved()["written_bytes"] == facts["written"]  # evaluation saves nothing
    assert cache_of(model) is applied.cache
    applied.undo()
    assert (cache_of(model), list(tmp_path.iterdir())) == (None, [])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_each_block_follows_the_policy_of_the_mix(use_reentrant, tmp_path):
    """Gradients are equal to the last bit, and after forward memory has what the policies say, to the byte."""
    expected = loss_and_gradients(make("llama", num_hidden_layers=6), **batch())
    section = {"folder": str(tmp_path), "minimum_bytes": 64, "reserve_bytes": 0, "device": "cpu"}

    def one(mix):
        model, in_memory = make("llama", num_hidden_layers=6), {}
        options = MemoryOptions(checkpointing="ssd", activations=section | {"mix": mix})
        applied = apply_memory_options(model, options, use_reentrant=use_reentrant)

        def look():
            while any(saved.writing is not None for saved in tuple(applied.cache._live)):
                time.sleep(0.001)
            for saved in applied.cache._live:
                block = re.search(r"layers\.(\d)", saved.name)
                key = int(block.group(1)) if block else "outside"
                in_memory[key] = in_memory.get(key, 0) + (0 if saved.memory is None else saved.nbytes)

        for _ in range(2):
            in_memory.clear()
            found = loss_and_gradients(model, look, **batch())
            assert torch.equal(found[0], expected[0])
            assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
        facts, chosen = applied.activation_facts()["activations"], applied.chosen["checkpointing"]
        assert chosen == f"ssd ({mix})"
        applied.undo()
        assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        return in_memory, facts

    kept, nothing = one("keep:6")
    assert nothing["written"] == 0
    mixed, moved = one("offload:3,recompute:2,keep:1")
    entry = 4 * 2 * 11 * SIZES["hidden_size"]
    assert [mixed[block] for block in range(6)] == [0, 0, 0, entry, entry, kept[5]]
    assert mixed["outside"] == kept["outside"]
    assert moved["written"] == moved["read"] == 2 * sum(kept[block] for block in range(3))


def test_cache_files_are_removed_with_the_model(tmp_path):
    model = make("qwen2")
    apply_memory_options(model, MemoryOptions(checkpointing="ssd"), folder=str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1
    del model
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"checkpointing": "ssd"}, "checkpointing 'ssd' needs a folder on the SSD"),
        ({"activations": {}}, "set it to 'ssd', or remove activations"),
        ({"checkpointing": "ssd", "activations": "all"}, "must be a section such as"),
        (
            {"checkpointing": "ssd", "activations": {"amountt": "all"}},
            r"unknown key 'amountt' \(did you mean amount\?\); known: folder, mix, amount, minimum_bytes",
        ),
        (
            {"checkpointing": "ssd", "activations": {"folder": ".", "device": "gpu"}},
            "'gpu' is unknown to torch; use 'cuda'",
        ),
        ({"checkpointing": "ssd", "activations": {"foldr": "."}}, "did you mean folder"),
        ({"checkpointing": "ssd", "activations": {"folder": 5}}, "folder must be the path of a folder on the SSD"),
        ({"checkpointing": "ssd", "activations": {"folder": ""}}, "folder must be the path of a folder on the SSD"),
        (
            {"checkpointing": "ssd", "activations": {"mix": "offload:1", "amount": "all"}},
            "'amount' and 'mix' are mutually exclusive",
        ),
        (
            {"checkpointing": "ssd", "activations": {"mix": "swap:2"}},
            "mix: 'swap:2' is an invalid activation policy: expected",
        ),
        (
            {"checkpointing": "ssd", "activations": {"mix": "offload:1,keep:2", "folder": "."}},
            "mix: offload:1,keep:2 covers 3 blocks and the model has 2; cover all",
        ),
        (
            {"checkpointing": "ssd", "activations": {"folder": "/no/such/ssd"}},
            "folder: /no/such/ssd cannot be created",
        ),
    ],
)
def test_bad_ssd_options_are_refused_in_one_line(options, line):
    model = make("qwen2")
    with pytest.raises(ValueError, match=line) as caught:
        apply_memory_options(model, MemoryOptions(**options))
    assert "\n" not in str(caught.value)
    assert cache_of(model) is None


def test_compiled_model_with_ssd_activations_is_refused_when_called(tmp_path):
    model = make("qwen2")
    applied = apply_memory_options(model, MemoryOptions(checkpointing="ssd"), folder=str(tmp_path))
    model.compile(backend="eager")
    with pytest.raises(RuntimeError, match=r"leave out torch\.compile or the offloading"):
        model(**batch())
    applied.undo()


COMPILED = """
import sys, torch
from memascend.integrations.memory_options import MemoryOptions, apply_memory_options
from tests.unit.test_activation_options import batch, make

model = make("qwen2")
compiled = torch.compile(model, backend="eager")
assert isinstance(compiled, torch._dynamo.eval_frame.OptimizedModule)
apply_memory_options(model, MemoryOptions(checkpointing="ssd"), folder=sys.argv[1])
compiled(**batch())
"""


def test_torch_compile_wrapper_with_ssd_activations_is_refused(tmp_path):
    """Runs without the variable by which the tests disable torch's compiler: with it nothing is compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    root = str(Path(__file__).parents[2])
    done = forked.run(
        [sys.executable, "-c", COMPILED, str(tmp_path)], cwd=root, env=environment | {"PYTHONPATH": root}, timeout=200
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("RuntimeError: activations of a model under torch.compile cannot be")


@pytest.mark.gpu
@pytest.mark.parametrize("option", [{"attention": "flash"}, {"loss": "liger"}, {"checkpointing": "unsloth"}])
def test_gpu_libraries_train_like_torch(option):
    for module in {"attention": "flash_attn", "loss": "liger_kernel", "checkpointing": "unsloth_zoo"}.items():
        if module[0] in option:
            pytest.importorskip(module[1], reason=f"{module[1]} is not installed (make setup CUDA=1)")
    inputs = {name: value.cuda() for name, value in batch().items()}
    expected = loss_and_gradients(make("qwen2", torch.bfloat16).cuda(), **inputs)
    model = make("qwen2", torch.bfloat16).cuda()
    apply_memory_options(model, MemoryOptions(**option))
    found = loss_and_gradients(model, **inputs)
    torch.testing.assert_close(found[0], expected[0], rtol=0.01, atol=0)
    for a, b in zip(found[1], expected[1]):
        assert (a - b).abs().max() <= 0.05 * b.abs().max()
