"""DeepSpeed's own unit tests pass with memascend enabled wherever they pass without it.

Needs a checkout of DeepSpeed's repository, of a release near the installed one: ``DEEPSPEED_CHECKOUT=FOLDER make test
PYTEST=tests/deepspeed_suite``. Each group runs twice, stock and enabled (``enabled/sitecustomize.py``), in about 20
minutes. Its tests import the checkout's DeepSpeed, whose ops are compiled first into a separate folder: a compilation
that a test's time limit interrupts would leave broken ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytestmark = [pytest.mark.deepspeed, pytest.mark.deepspeed_suite, pytest.mark.timeout(3600)]

ROOT = Path(__file__).resolve().parents[2]
GROUPS = {
    "aio": ["v1/nvme/test_aio.py", "v1/nvme/test_aio_gil.py"],
    "pinned": ["v1/nvme/test_pinned_manager.py"],
    # test_cpu_adam_gpu_error hangs until its ten minutes are over without a GPU, on stock too
    "cpu_adam": ["ops/adam/test_cpu_adam.py", "-k", "not gpu_error"],
    "nvme_offload": ["runtime/zero/test_zero_tensor_fragment.py", "-k", "nvme"],
    "nvme_checkpointing": ["runtime/zero/test_nvme_checkpointing.py"],
    "overflow": ["runtime/half_precision/test_zero_optim_overflow.py"],
}


OPS = ("AsyncIOBuilder", "CPUAdamBuilder", "FusedAdamBuilder", "ShareMemCommBuilder", "PinMemoryBuilder")
COMPILE = f"""
import deepspeed
from deepspeed.accelerator import get_accelerator
for name in {OPS}:
    builder = get_accelerator().create_op_builder(name)
    if builder is not None:
        builder.load(verbose=False)
"""


@pytest.fixture(scope="session")
def compiled_ops(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ops")
    checkout = os.environ["DEEPSPEED_CHECKOUT"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(folder), "PYTHONPATH": checkout}
    subprocess.run([sys.executable, "-c", COMPILE], env=environment, check=True)
    return folder


@pytest.fixture(scope="session")
def unit_tests(compiled_ops) -> Path:
    os.environ["TORCH_EXTENSIONS_DIR"] = str(compiled_ops)
    return Path(os.environ["DEEPSPEED_CHECKOUT"]) / "tests" / "unit"


def outcomes(unit_tests: Path, group: str, mode: str, folder: Path) -> dict[str, str]:
    """Return ``passed``, ``failed`` or ``skipped`` by test id."""
    report = folder / f"{group}-{mode}.xml"
    environment = os.environ | {
        "MEMASCEND_SUITE": mode,
        "PYTHONPATH": f"{Path(__file__).parent / 'enabled'}{os.pathsep}{ROOT}",
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    everything = ["-m", "sequential or not sequential", "-p", "no:cacheprovider", "-q", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", "-c", str(unit_tests.parent / "pytest.ini"), *everything, *GROUPS[group]]
    with (folder / f"{group}-{mode}.log").open("w") as log:
        subprocess.run(command, cwd=unit_tests, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    assert report.exists(), (folder / f"{group}-{mode}.log").read_text()[-3000:]
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.get("classname") is None:  # the test that was running when the suite's watchdog ended it
            continue
        state = {child.tag for child in case} & {"failure", "error", "skipped"}
        result = "failed" if state & {"failure", "error"} else "skipped" if state else "passed"
        found[f"{case.get('classname')}::{case.get('name')}"] = result
    return found


@pytest.mark.parametrize("group", GROUPS)
def test_deepspeed_tests_that_pass_on_stock_pass_with_memascend(unit_tests, group, tmp_path, record_property):
    stock = outcomes(unit_tests, group, "stock", tmp_path)
    enabled = outcomes(unit_tests, group, "enabled", tmp_path)
    counts = {m: {s: list(o.values()).count(s) for s in set(o.values())} for m, o in (("s", stock), ("e", enabled))}
    record_property("counts", f"stock {counts['s']}, enabled {counts['e']}")
    print(f"{group}: stock {counts['s']}, enabled {counts['e']}")
    assert "passed" in stock.values()
    lost = sorted(test for test, result in stock.items() if result == "passed" and enabled.get(test) != "passed")
    assert not lost


def test_all_checkpoint_cases_pass_with_memascend(unit_tests, tmp_path):
    """On stock three of the five fail: a resumed training differs from the interrupted one."""
    enabled = outcomes(unit_tests, "nvme_checkpointing", "enabled", tmp_path)
    assert list(enabled.values()) == ["passed"] * 5
