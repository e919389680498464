"""`kill -9` at any instant of the streaming engine: it resumes from its
last completed step and reaches the same bits."""

import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from memascend.engine import state_store
from memascend.engine.model_units import ModelUnits
from memascend.engine.options import EngineOptions
from memascend.engine.runtime import StreamingEngine
from memascend.storage.names import SCRATCH_PREFIX
from tests import forked

STEPS = 40
PROGRAM = r"""
import sys, torch
from pathlib import Path
from torch import nn
from memascend.engine import state_store
from memascend.engine.options import EngineOptions
from memascend.engine.runtime import StreamingEngine

def made():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*layers).to(torch.bfloat16)

def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 8, 256, generator=generator).to(torch.bfloat16)

def run(folder, steps, options, say=lambda step: None):
    model = made()
    groups = [{"params": list(model.parameters()), "lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}]
    step = 0
    if "step" in (state_store.kept_facts(folder) if state_store.holds_states(folder) else {}):
        engine, facts = StreamingEngine.resume(model, folder, groups, options)
        step = facts["step"]
    else:
        state_store.remove(folder)
        engine = StreamingEngine.start(model, folder, groups, options)
    while step < steps:
        model(batch(step)).float().square().mean().backward()
        engine.finish_step(keep=False, facts={"step": step + 1})
        step += 1
        engine.keep({"step": step})
        say(step)
    weights = {name: values.clone() for name, values in engine.read_weights()}
    engine.close()
    return weights
"""
CHILD = (
    PROGRAM
    + r"""
torch.set_num_threads(1)
options = EngineOptions(arm=sys.argv[2], clip=float(sys.argv[3]), states=getattr(torch, sys.argv[5]))
run(Path(sys.argv[1]), int(sys.argv[4]), options, lambda step: print(step, flush=True))
"""
)

CUT_OFF = (
    PROGRAM
    + r"""
import os, random, signal
from memascend.engine.model_units import ModelUnits

calls, before, dies_at = [], 0, 0

def counted(method):
    def call(self, *args, **named):
        calls.append(0)
        if len(calls) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(self, *args, **named)
    return call

Store = state_store.StateStore
Store.write, Store.commit = counted(Store.write), counted(Store.commit)

def say(step):
    global before, dies_at
    if step == 2:
        dies_at = len(calls) + random.Random(int(sys.argv[3])).randint(1, len(calls) - before)
    before = len(calls)

torch.set_num_threads(1)
earlier = ModelUnits(made()).layout.earlier_piece_elements
options = EngineOptions(versions=int(sys.argv[2]), piece_elements=earlier)
run(Path(sys.argv[1]), 4, options, say)
"""
)


def program():
    names = {}
    exec(compile(PROGRAM, "program", "exec"), names)
    return names


@pytest.mark.parametrize("rounds", [2, pytest.param(25, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("arm", "clip", "states"),
    [
        ("optimized", 0.0, "float32"),
        pytest.param("none", 0.5, "float32", marks=pytest.mark.slow),
        pytest.param("optimized", 0.0, "int8", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(1800)
def test_killed_engine_resumes_from_last_completed_step_to_same_bits(tmp_path, arm, clip, states, rounds):
    parts, instants, said, kills = program(), random.SystemRandom(), 0, 0
    folder = tmp_path / "session"
    steps = STEPS * rounds
    while kills < rounds and said < steps:
        command = [sys.executable, "-c", CHILD, str(folder), arm, str(clip), str(steps), states]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            first = child.stdout.readline()
            assert first, "the child could not begin"
            assert int(first) in (said + 1, said + 2)  # the step in which it was killed may have been kept
            time.sleep(instants.random() * 0.5)
            child.send_signal(signal.SIGKILL)
            said = [int(first), *(int(line) for line in child.stdout if line.endswith("\n"))][-1]
        kills += child.returncode == -signal.SIGKILL
    kept = state_store.kept_facts(folder)["step"]
    assert kept in (said, said + 1)
    torch.set_num_threads(1)
    options = EngineOptions(arm=arm, clip=clip, states=getattr(torch, states))
    ours = parts["run"](folder, kept + 1, options)
    theirs = parts["run"](tmp_path / "never killed", kept + 1, options)
    for name, values in theirs.items():
        assert torch.equal(ours[name], values), name
    left = [path.name for path in folder.iterdir() if path.name.startswith(SCRATCH_PREFIX)]
    assert left == []  # files that were offloaded to the tier when the process was killed


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 30), marks=pytest.mark.slow)], ids=["2", "28"])
@pytest.mark.parametrize(
    "versions",
    [pytest.param(2, marks=pytest.mark.slow, id="two versions"), pytest.param(1, id="one version and a redo")],
)
@pytest.mark.timeout(1800)
def test_killed_store_of_earlier_layout_resumes_to_same_bits(tmp_path, versions, seeds):
    """The kill comes at a write or commit of the third step, which a seed chooses."""
    parts, kept = program(), []
    now = ModelUnits(parts["made"]()).layout
    earlier = ModelUnits(parts["made"](), piece_elements=now.earlier_piece_elements).layout
    assert len(earlier.pieces) > len(now.pieces)
    torch.set_num_threads(1)
    theirs = parts["run"](tmp_path / "never killed", 4, EngineOptions())
    for seed in seeds:
        folder = tmp_path / f"seed {seed}"
        killed = subprocess.run([sys.executable, "-c", CUT_OFF, str(folder), str(versions), str(seed)], check=False)
        assert killed.returncode == -signal.SIGKILL
        kept.append(state_store.kept_facts(folder)["step"])
        ours = parts["run"](folder, 4, EngineOptions())
        for name, values in theirs.items():
            assert torch.equal(ours[name], values), (seed, name)
    assert set(kept) == ({2} if versions == 2 else {2, 3})  # a step that still has to be repeated counts


def test_states_in_use_by_another_process_are_refused(tmp_path):
    parts = program()
    model = parts["made"]()
    groups = [{"params": list(model.parameters()), "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}]
    engine = StreamingEngine.start(model, tmp_path / "session", groups, EngineOptions())
    asking = "import sys; from memascend.engine import state_store as s; s._DEAD_S = 0.1; s.kept_facts(sys.argv[1])"
    try:
        done = forked.run([sys.executable, "-c", asking, str(tmp_path / "session")])
    finally:
        engine.close()
    assert done.returncode == 1
    assert "session is in use by another process: wait for it, or name another" in done.stderr
