"""Ctrl-C while a drive hangs ends the wait and then the process, with one line that names the path.

Memory that the kernel may still write to is not freed. A drive that works is waited for.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BEGIN = """
import os, signal, sys, threading, time
import torch
from memascend import _C
from memascend.storage.direct_engine import DirectEngineConfig
from memascend.storage.engine_tiers import DirectTier, FileTier
from memascend.storage.file_engine import FileEngine

folder, kind = sys.argv[1:]
faults, tensor = _C.FaultLayer(), torch.ones(500_000)

def opened():
    if kind == "files":
        return FileTier(folder, "tests", faults=faults)
    return DirectTier.in_file(folder, "tests", DirectEngineConfig(control_folder=folder), faults)

def hang(op="any", delay_s=300):  # a process that waits for that fails the test by its time limit
    faults.add(op, delay_us=delay_s * 1_000_000)
    threading.Thread(target=interrupt, daemon=True).start()

def interrupt():
    time.sleep(0.3)
    while True:  # one that falls into a destructor is lost, as always in Python
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(20)
"""
ENDS = {
    "a context": """
with opened() as tier:
    tier.write("a", tensor).wait()
    hang()
    tier.read("a", tensor).wait()
""",
    "nothing closes it": """
tier = opened()
tier.write("a", tensor).wait()
hang()
tier.write("b", tensor).wait()
""",
    "close": """
tier = opened()
tier.write("a", tensor).wait()
hang()
tier.write("a", tensor)
tier.close()
""",
    "the file engine": """
with FileEngine(faults=faults) as engine:
    hang()
    engine.wait(engine.async_write(tensor, os.path.join(folder, "x")))
""",
    "the activation cache": """
from memascend.activation.cache import ActivationCache
from memascend.activation.options import CacheOptions

cache = ActivationCache(opened(), CacheOptions(amount="all"))
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
try:
    with cache.active():
        for step in range(1_000_000):
            if step == 2:
                hang("read")
            model(torch.randn(2048, 256)).square().mean().backward()
finally:
    cache.close()
""",
}
STREAMED = """
from memascend.engine.runtime import StreamingEngine
from memascend.engine.streaming import streaming
from tests.unit.test_streaming_engine import SETTINGS, batches, model

start = StreamingEngine.start.__func__
StreamingEngine.start = classmethod(lambda cls, *args, **named: start(cls, *args, faults=faults, **named))
with streaming(os.path.join(folder, "run")) as session:
    ours = session.hook(model())
    optimizer = session.optimizer(torch.optim.AdamW, **SETTINGS)
    for step, ids in enumerate(batches(100_000)):
        if step == 2:
            hang(kind)
        ours(ids).backward()
        optimizer.step()
"""
CAUGHT = """
tier = opened()
tier.write("a", tensor).wait()
hang("read")
read = tier.read("a", tensor)
try:
    read.wait()
except KeyboardInterrupt:
    print("interrupted")
for again in (read.wait, lambda: tier.write("b", tensor)):
    try:
        again()
    except OSError as error:
        print(error.errno, error)
tier.close()
"""


def ended(tmp_path, code, kind):
    command = [sys.executable, "-c", BEGIN + code, str(tmp_path), kind]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def assert_left_with_one_line(done, path):
    assert "KeyboardInterrupt" in done.stderr
    lines = [line for line in done.stderr.splitlines() if "unfinished transfers in flight" in line]
    assert len(lines) == 1, done.stderr
    assert str(path) in lines[0]
    assert not any(word in done.stderr for word in ("terminate called", "Aborted", "Fatal Python error")), done.stderr


ALWAYS = (("the activation cache", "direct"),)  # some seconds each
EACH = [(end, kind) for end in ENDS for kind in ("direct", "files") if (end, kind) != ("the file engine", "direct")]


@pytest.mark.parametrize(
    ("end", "kind"), [pytest.param(*each, marks=[] if each in ALWAYS else pytest.mark.slow) for each in EACH]
)
def test_ctrl_c_ends_the_process_and_names_the_hanging_path(tmp_path, end, kind):
    assert_left_with_one_line(ended(tmp_path, ENDS[end], kind), tmp_path)


@pytest.mark.parametrize("op", ["read", *(pytest.param(op, marks=pytest.mark.slow) for op in ("write", "flush"))])
def test_ctrl_c_ends_streamed_training_and_names_the_hanging_path(tmp_path, op):
    assert_left_with_one_line(ended(tmp_path, STREAMED, op), tmp_path / "run")


def test_abandoned_read_and_later_write_report_the_hang(tmp_path):
    done = ended(tmp_path, CAUGHT, "direct")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0] == "interrupted"
    assert len(said) == 3
    assert all(line.startswith("110 ") and "the drive or the mount hangs" in line for line in said[1:])


@pytest.mark.slow
def test_process_waits_for_a_slow_drive_after_ctrl_c(tmp_path):
    code = """
try:
    with opened() as tier:
        tier.reserve(10 * tensor.nbytes)
        hang("write", delay_s=1)
        written = [tier.write(key, tensor) for key in "abc"]
        tier.wait()
except KeyboardInterrupt:
    print([each.error() for each in written])
"""
    done = ended(tmp_path, code, "files")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[None, None, None]\n", "")
    assert not list(tmp_path.iterdir())
