"""On a GPU the drop-in trains exactly as DeepSpeed does: same losses, same master weights, to the last bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.deepspeed]

ROOT = Path(__file__).resolve().parents[2]
MODEL = ("--model", "qwen2.5-7b", "--k", "16", "--device", "cuda", "--steps", "6")


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """Return the record of a run, which is made once; each run is a
    separate process, since a process has one accelerator."""
    folder = tmp_path_factory.mktemp("runs")

    def made(system: str, arm: str, dtype: str) -> dict:
        run_id = f"{system}-{arm}-{dtype}"
        out = folder / f"{run_id}.json"
        if not out.exists():
            words = ["--run-id", run_id, "--system", system, "--arm", arm, "--dtype", dtype, *MODEL]
            command = [sys.executable, "-m", "workflows.run.training", *words]
            files = ["--nvme", str(folder / "nvme"), "--out", str(out)]
            run = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, timeout=600)
            assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
        return json.loads(out.read_text())

    return made


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("system", "arm"), [("zero_infinity", "as_published"), ("memascend", "memascend")], ids=lambda word: word
)
def test_losses_and_master_weights_equal_those_of_cpu_offload(record, system, arm, dtype):
    reference, found = record("zero_offload", "today", dtype), record(system, arm, dtype)
    assert len(set(reference["losses"])) == 6
    assert found["losses"] == reference["losses"]
    assert found["master_weights_sha256"] == reference["master_weights_sha256"]


def test_weights_lie_on_ssd_and_gpu_memory_is_used(record):
    found = record("memascend", "memascend", "fp16")
    assert found["parameters_on_nvme"] >= 7 * 28
    assert found["cuda_peak_bytes"] > 0


def test_memascend_takes_less_host_memory_than_zero_infinity(record):
    """Memory of the process for torch and CUDA is left out, since it is the same for both."""
    peaks = [
        record(*words, "fp16")["memory"]["host_peak_net_bytes"]
        for words in (("memascend", "memascend"), ("zero_infinity", "as_published"))
    ]
    assert peaks[0] < peaks[1]
