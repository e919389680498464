"""The streaming engine on an accelerator: on the tests' own, whose copies are late, and on a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memascend.engine.options import EngineOptions
from memascend.engine.runtime import StreamingEngine
from tests import late_device
from tests.late_device.plugin import HostAdamW
from tests.unit import test_streaming_engine as on_the_cpu

ROOT = Path(__file__).resolve().parents[2]
CASES = "tests/late_device/cases.py"
SOME_OF_THEM = "cases or every_arm_trains"
WRITTEN_FOR_THE_CPU = (
    "test_streaming_engine",
    "test_sliced_matrices",
    "test_streaming_loop",
    "test_engine_swapping",
    "test_in_place_update",
    "test_interrupted_updates",
    "test_streamed_blocks",
)
# These count the CPU's own products, add modules on the CPU, or continue with torch's AdamW there.
NOT_THERE = (
    "swapping_everything",
    "only_chosen_products",
    "recomputing_other_products",
    "computes_otherwise",
    "schedulers_and_groups",
    "goes_on_in_another_folder_and_in_torch",
)


@pytest.mark.parametrize(
    ("names", "some"),
    [(WRITTEN_FOR_THE_CPU[:1], SOME_OF_THEM), pytest.param(WRITTEN_FOR_THE_CPU, "test", marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_engine_tests_pass_on_device_with_late_copies(names, some):
    """In a separate process, since torch knows the device from then on."""
    files = [CASES, *(f"tests/unit/{name}.py" for name in names)]
    chosen = " and ".join([f"({some})", *(f"not {name}" for name in NOT_THERE)])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.late_device.plugin", "-p", "no:cacheprovider"]
    command += ["-k", chosen, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_stale_compile_lock_does_not_block_compilation(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / late_device.NAME / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setattr(late_device.cpp_extension, "load", lambda *args, **options: not lock.exists())
    assert late_device.compiled()


def test_missing_device_is_refused_and_leaves_model_unchanged(tmp_path):
    of = on_the_cpu.model()
    missing = "xpu" if torch.cuda.is_available() else "cuda"
    with pytest.raises(ValueError, match=f"torch sees no {missing} device with streams .*: leave device out"):
        StreamingEngine.start(of, tmp_path / "session", on_the_cpu.groups(of), EngineOptions(device=missing))
    assert of(on_the_cpu.batches(1)[0]).isfinite()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.parametrize("arm", ["optimized", "naive", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_streamed_gpu_training_matches_model_on_gpu_bit_for_bit(tmp_path, arm, dtype):
    ours, theirs = on_the_cpu.model(dtype=dtype, depth=6), on_the_cpu.model(dtype=dtype, depth=6).cuda()
    engine = on_the_cpu.streamed(ours, tmp_path, arm=arm, device="cuda")
    data = [ids.cuda() for ids in on_the_cpu.batches(4)]
    losses = on_the_cpu.train(ours, engine, data)
    optimizer, expected = HostAdamW(theirs.parameters(), **on_the_cpu.SETTINGS), []
    for ids in data:
        loss = theirs(ids)
        loss.backward()
        expected.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses == expected
    on_the_cpu.assert_equal(engine, theirs)
    engine.close(destroy=True)
