"""Activations of real models on the SSD: gradients equal to the last bit,
the predicted peak, faults that name the tensor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import memascend
from memascend._C import FaultLayer
from memascend.activation import ActivationError
from memascend.storage.engine_tiers import DirectTier

ROOT = Path(__file__).parents[2]
WIDTHS = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 128}
DECODER = WIDTHS | {"intermediate_size": 160, "num_key_value_heads": 2, "max_position_embeddings": 128}


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread, so that sums are always taken in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model(kind):
    import transformers as hf

    torch.manual_seed(0)
    made = {
        "gpt": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=128)),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**WIDTHS, intermediate_size=160)),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(d_model=64, num_layers=2, num_heads=4, d_ff=160, vocab_size=128, decoder_start_token_id=0)
        ),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)),
        "qwen": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**DECODER)),
    }
    return made[kind]().train()


def train(kind, steps=2, accumulate=2):
    """Return (losses, weights) of a plain loop with accumulation; the model's own dropout is on."""
    trained = model(kind)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    losses = []
    torch.manual_seed(1)
    for step in range(steps):
        for micro in range(accumulate):
            seed = torch.Generator().manual_seed(10 * step + micro)
            ids = torch.randint(0, 128, (4, 64), generator=seed)
            loss = trained(input_ids=ids, labels=ids).loss / accumulate
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach().clone() for name, p in trained.named_parameters()}


@pytest.mark.parametrize("kind", ["gpt", "bert", "t5", "llama", "qwen"])
def test_offloading_activations_changes_no_bit_of_training(kind, tmp_path):
    losses, weights = train(kind)
    options = {"amount": "all", "minimum_bytes": 4096, "reserve_bytes": 0, "device": "cpu"}
    with memascend.offload_activations(tmp_path, **options) as cache:
        offloaded_losses, offloaded = train(kind)
        assert cache.statistics.read > 0
        assert cache.statistics.written > 3 * 2 * 4 * 64 * 64 * 4
    assert offloaded_losses == losses
    different = {name: float((weights[name] - offloaded[name]).abs().max()) for name in weights}
    assert {name: most for name, most in different.items() if most} == {}
    assert list(tmp_path.iterdir()) == []


def forward_then_backward(cache):
    """Train two steps; backward begins when all writes have ended, so that none of them is cancelled as needless."""
    trained = model("llama")
    ids = torch.randint(0, 128, (4, 64), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        loss = trained(input_ids=ids, labels=ids).loss
        while any(saved.writing is not None for saved in list(cache._live)):
            time.sleep(0.001)
        loss.backward()


@pytest.mark.parametrize(("op", "number"), [("write", 3), ("write", 40), ("read", 3), ("read", 60)])
def test_io_error_raises_an_error_naming_the_lost_activation(op, number, tmp_path):
    """The kernel returns EIO at four instants; afterwards the same process trains as if nothing had happened.

    Space is reserved from the start, since a file that cannot grow by the wanted amount is tried again with less.
    """
    faults = FaultLayer()
    tier = DirectTier.in_file(tmp_path, "activations", faults=faults)
    tier.reserve(64 << 20)
    options = {"amount": "all", "minimum_bytes": 4096, "reserve_bytes": 0, "device": "cpu"}
    faults.add(op, after=number, times=1, error=5)
    lost = pytest.raises(ActivationError, match=r"activation .+ \(\d+ bytes\) is lost: .*")
    with lost, memascend.offload_activations(tier, **options) as cache:
        forward_then_backward(cache)
    assert faults.injected == 1
    assert list(tmp_path.iterdir()) == []


def test_unknown_option_is_refused_with_the_known_ones(tmp_path):
    with (
        pytest.raises(ValueError, match=r"unknown key 'amuont' \(did you mean amount\?\); known: amount"),
        memascend.offload_activations(tmp_path, amuont="all"),
    ):
        pass


def test_readme_snippet_runs_as_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snippet = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    names = {}
    exec(compile(snippet, "README.md", "exec"), names)
    assert all(each.grad is not None for each in names["model"].parameters())
    assert list((tmp_path / "swap").iterdir()) == []  # the folder is created, and the file in it removed


def test_context_can_be_entered_again_but_not_inside_itself(tmp_path):
    offloading = memascend.offload_activations(tmp_path, amount="all", minimum_bytes=512)
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())

    @offloading
    def step(depth=0):
        module(torch.randn(64, 64)).square().sum().backward()
        if depth:
            step(depth - 1)

    for _ in range(2):
        with offloading as cache:
            module(torch.randn(64, 64)).square().sum().backward()
        assert cache.statistics.written > 0
    step(depth=1)
    with offloading, pytest.raises(RuntimeError, match="is already active"), offloading:
        pass
    assert list(tmp_path.iterdir()) == []


def test_folder_with_missing_parent_is_refused(tmp_path):
    with (
        pytest.raises(
            ValueError, match=r"offload_activations: .*/nvme/swap cannot be created, since .*/nvme does not exist"
        ),
        memascend.offload_activations(tmp_path / "nvme/swap"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_peak_resident_memory_falls_as_predicted(kind, tmp_path):
    """Measured in separate processes, whose allocator returns large blocks at once, by the kernel's counters.

    Each step is compared with the prediction from its own sizes, times and rates; the median of three decides.
    """
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "scripts" / "activation_peak.py"), kind, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    steps = json.loads(done.stdout.splitlines()[-1])
    assert all(step["saved_bytes"] > 100e6 for step in steps)
    off = sorted(abs(step["measured_reduction"] - step["predicted_reduction"]) for step in steps)
    assert off[len(off) // 2] < 0.05, steps
    assert all(step["measured_reduction"] > 0.2 for step in steps), steps
