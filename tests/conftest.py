"""What a machine must have for a marked test; without it the test is skipped with the reason."""

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.numa_vm import in_guest

# A background job of a shell ignores Ctrl-C, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test downloads anything: configurations are committed, weights are initialised, text is the standard library.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Otherwise DeepSpeed's Muon, imported for its list of optimizers, loads
# torch's compiler, which takes seconds per process.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# Several test processes share the cores. With torch's threads in each of them, small tensors spent more time waiting
# for threads than computing, and the suite took twice as long. Tests that are about threads ask for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # for tests that use threads: they do not spin between products

# With several processes (make test; pytest -n 2) all tests of a file run in one of them, and so do files that share
# trainings or results that take long to compute.
STAYS_WITH = {
    "tests/faults/test_train_kill.py": "tests/integration/test_train.py",
    "tests/integration/test_first_step.py": "tests/integration/test_memory_is_accounted.py",
    "tests/unit/test_planner_lane.py": "tests/workflow/test_plots.py",
    "tests/workflow/test_claims.py": "tests/workflow/test_plots.py",
    "tests/workflow/test_derive.py": "tests/workflow/test_plots.py",
    "tests/workflow/test_report_in_a_browser.py": "tests/workflow/test_report.py",
}
# The longest run first, so that no process is left with one of them at the end.
LONGEST = ("tests/integration/", "tests/faults/", "tests/workflow/")

GUEST = pytest.StashKey[in_guest.Guest]()
NUMA_NODES = Path("/sys/devices/system/node")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run the tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.collectonly or in_guest.REPORTS in os.environ:  # tests in a guest start no programs
        return
    from tests import forked

    if forked.ADDRESS not in os.environ:
        server = forked.serving()
        server.__enter__()
        config.add_cleanup(lambda: server.__exit__(None, None, None))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return STAYS_WITH.get(file, file)

    config.option.loadscopereorder = False
    return ByFile(config, log)


def gpu_missing() -> str | None:
    """Return why tests marked gpu cannot run here, or None."""
    import torch

    return None if torch.cuda.is_available() else "no CUDA device"


def several_numa_nodes() -> bool:
    """Return whether tests marked numa_vm can run in this process; otherwise they need the emulated guest.

    In the guest they always can: one with CXL cards has a single node until the cards are brought up.
    """
    return in_guest.REPORTS in os.environ or len(list(NUMA_NODES.glob("node[0-9]*"))) > 1


def deepspeed_missing() -> str | None:
    """Return why tests marked deepspeed cannot run here, or None."""
    found = importlib.util.find_spec("deepspeed")
    return None if found else "DeepSpeed is not installed (make setup)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: [not item.nodeid.startswith(folder) for folder in LONGEST])
    reasons = {
        "slow": lambda: None if config.getoption("--run-slow") else "slow; runs with --run-slow",
        "gpu": gpu_missing,
        "numa_vm": lambda: None if several_numa_nodes() else in_guest.missing(config),
        "deepspeed": deepspeed_missing,
        "deepspeed_suite": lambda: None if os.environ.get("DEEPSPEED_CHECKOUT") else "no DEEPSPEED_CHECKOUT=FOLDER",
    }
    for mark, missing in reasons.items():
        marked = [item for item in items if item.get_closest_marker(mark)]
        reason = missing() if marked else None
        for item in marked if reason else []:
            item.add_marker(pytest.mark.skip(reason=reason))
        if mark == "numa_vm" and marked and not reason and not several_numa_nodes():
            wanted = [item for item in marked if not item.get_closest_marker("skip")]
            config.stash[GUEST] = in_guest.Guest(config, wanted)


def pytest_collection_finish() -> None:
    """Exclude what stays until the end, thousands of tests and their modules, from later garbage collections.

    Each took half a second, and they are many, since tests that check for freed memory run one.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    guest = session.config.stash.get(GUEST, None)
    if guest is not None and not session.config.option.collectonly:
        guest.run()  # here, because the time limit of a test does not apply to the guest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    guest = item.config.stash.get(GUEST, None)
    if guest is None or item not in guest or item.get_closest_marker("skip"):
        return None
    in_guest.replay(guest, item)
    return True


@pytest.fixture(autouse=True)
def linear_layers_compute_as_before() -> Iterator[None]:
    """Restore the linear layers: a test may leave a training open, whose
    fp32 products would be those of all later tests."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and getattr(torch.nn.functional.linear, "__module__", "") == "memascend.ops.half_linear":
        torch.nn.functional.linear = torch._C._nn.linear
