"""`kill -9` at random instants: every committed tensor reads back whole, and nothing of an incomplete commit is
visible.

The child prints a line after each commit that returned. At least the commit that it printed last must be readable.
"""

import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from memascend.storage.direct_engine import DirectEngine, DirectEngineConfig
from memascend.storage.native import _C

CHILD = r"""
import random, sys, torch
from memascend.storage.direct_engine import DirectEngine, DirectEngineConfig
folder, backend, seed, start, *devices = sys.argv[1:]
rng, step = random.Random(int(seed)), int(start)
config = DirectEngineConfig(control_folder=folder, backend=backend, workers=2, depth=4, block_bytes=1 << 14)
with DirectEngine(devices, "tests", config) as engine:
    while True:
        step += 1
        for key in range(6):  # one step of training: all of them or none
            tensor = torch.full((rng.randrange(1, 60_000) if key else 1000,), (step * 6 + key) % 251, dtype=torch.uint8)
            engine.write(f"k{key}", tensor)
        engine.write("step", torch.tensor(step))
        engine.wait()
        engine.commit()
        print(step, flush=True)
"""


def make_store(folder, count=2, size=8 << 20):
    paths = [str(folder / f"device{number}") for number in range(count)]
    for path in paths:
        with open(path, "wb") as file:
            file.truncate(size)
    _C.storage_format(paths, "tests", [], 4096, 16384)
    return paths


def check(engine, at_least):
    """Check that all tensors are of the same step, not before `at_least`, and return that step."""
    assert engine.verify() == {}
    if at_least == 0 and "step" not in engine:
        assert engine.items() == []
        return 0
    step = int(engine.read_new("step"))
    assert at_least <= step <= at_least + 1
    assert [key for key, _ in engine.items()] == ["k0", "k1", "k2", "k3", "k4", "k5", "step"]
    for key in range(6):
        tensor = engine.read_new(f"k{key}")
        assert bool((tensor == (step * 6 + key) % 251).all())
    return step


def collect_after_the_dead(engine):
    """Collect the space of killed processes: one counts as alive until the kernel has taken down its rings."""
    deadline = time.monotonic() + 30
    while engine.space().processes > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    engine.collect()
    assert engine.space().reserved_bytes == 0


@pytest.mark.parametrize("rounds", [2, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["io_uring", "libaio"])
@pytest.mark.timeout(1800)
def test_committed_tensors_survive_a_kill_at_any_instant(tmp_path, backend, rounds):
    if _C.aio_missing(backend):
        pytest.skip(_C.aio_missing(backend))
    devices, rng, step, kills = make_store(tmp_path), random.Random(rounds), 0, 0
    config = DirectEngineConfig(control_folder=str(tmp_path), backend=backend)
    for number in range(rounds):
        arguments = [sys.executable, "-c", CHILD, str(tmp_path), backend, str(number), str(step), *devices]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as child:
            first = child.stdout.readline()
            assert first, "the child could not open the store"
            time.sleep(rng.random() * 0.15)
            child.send_signal(signal.SIGKILL)
            said = [int(first), *(int(line) for line in child.stdout if line.endswith("\n"))]
        kills += child.returncode == -signal.SIGKILL
        with DirectEngine(devices, "tests", config) as engine:
            step = check(engine, said[-1])
            collect_after_the_dead(engine)
    assert kills == rounds
    assert step > rounds


def test_killed_process_does_not_stop_the_others(tmp_path):
    devices = make_store(tmp_path, size=16 << 20)
    config = DirectEngineConfig(control_folder=str(tmp_path))
    with DirectEngine(devices, "tests", config) as engine:
        for number in range(3):
            seen = int(engine.read_new("step")) if "step" in engine else 0
            arguments = [sys.executable, "-c", CHILD, str(tmp_path), "auto", str(number), str(seen), *devices]
            with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as child:
                child.stdout.readline()
                time.sleep(0.05)
                child.send_signal(signal.SIGKILL)
                said = [int(line) for line in child.stdout if line.endswith("\n")] or [seen + 1]
            engine.write("mine", torch.full((30_000,), number))
            engine.wait()
            engine.commit()
            assert int(engine.read_new("step")) >= said[-1]
            assert bool((engine.read_new("mine") == number).all())
            engine.erase("mine")
            engine.commit()
            check(engine, int(engine.read_new("step")))
        collect_after_the_dead(engine)
