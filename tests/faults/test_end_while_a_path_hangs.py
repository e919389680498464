"""A process that ends while a path of its tier hangs, or while a thread is in the core, ends as its script does.

An interpreter that ends stops its threads by an exception, which aborts the process (status 134) if it reaches C++.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HANGS = """
import sys
import torch
from memascend import _C
from memascend.storage.direct_engine import DirectEngineConfig
from memascend.storage.engine_tiers import DirectTier, FileTier
from memascend.storage.multi_path import MultiPathTier, StoragePath

folder, kind = sys.argv[1:]
faults, healthy = _C.FaultLayer(), _C.FaultLayer()

def opened(name, faults):
    if kind == "files":
        return FileTier(folder, "tests", faults=faults)
    return DirectTier.in_file(folder, "tests", DirectEngineConfig(control_folder=folder), faults)

paths = [StoragePath("a", opened("a", faults)), StoragePath("b", opened("b", healthy))]
tier = MultiPathTier(paths, placement=[1, 1], hang_s=0.5)
tensor = torch.ones(20_000)
for key in "0123":
    tier.write(key, tensor).wait()
faults.add("any", delay_us=3_000_000)
for key in "0123":
    tier.write(key, tensor).wait()
assert "hangs" in tier.report()[0].failure
assert all(tier.path_of(key) == "b" for key in "0123")
print("it hangs", flush=True)
"""
TRIED = """
import time
way = tier._paths[0]
while way.hanging:
    time.sleep(0.1)
faults.clear()
faults.add("write", times=1, delay_us=3_000_000)
for _ in range(4):
    tier.observe()
assert tier._idle.measuring(way)
"""
ENDS = {
    "normally": ("", 0, ""),
    "closed": ("tier.close()", 0, ""),
    "by an exception": ("raise ValueError('of the script')", 1, "ValueError: of the script"),
    "while it is tried again": (TRIED, 0, ""),
    "by an exit": ("sys.exit(7)", 7, ""),
}


ALWAYS = (("by an exception", "direct"),)  # some seconds each
EACH = [(end, kind) for end in ENDS for kind in ("direct", "files")]


@pytest.mark.parametrize(
    ("end", "kind"), [pytest.param(*each, marks=[] if each in ALWAYS else pytest.mark.slow) for each in EACH]
)
def test_exit_status_is_that_of_the_script(tmp_path, end, kind):
    code, status, said = ENDS[end]
    command = [sys.executable, "-c", HANGS + code, str(tmp_path), kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "it hangs\n", done.stderr
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert not any(word in done.stderr for word in ("terminate called", "Aborted", "Fatal Python error")), done.stderr


IN_THE_CORE = """
import threading
import time
import torch
from memascend import _C

def wander():
    while True:  # for as long as the interpreter ends: the core comes back to Python all the time
        _C.load_latency_ns(memory.data_ptr(), memory.nbytes, 100_000)

class Late:
    def __del__(self):  # the modules go last, when threads may no longer run Python
        sleep(0.5)

memory, sleep = torch.zeros(1 << 16, dtype=torch.uint8), time.sleep
threading.Thread(target=wander, daemon=True).start()
torch.late = Late()
"""


def test_thread_returning_from_core_after_interpreter_end_does_not_abort():
    command = [sys.executable, "-c", IN_THE_CORE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
