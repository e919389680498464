"""`kill -9` at any instant of the streaming engine: it goes on from its last completed step, to the same bits."""

import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from memascend.engine import home as homes
from memascend.engine.options import EngineOptions
from memascend.engine.runtime import StreamingEngine
from memascend.storage.names import SCRATCH_PREFIX

STEPS = 40
PROGRAM = r"""
import sys, torch
from pathlib import Path
from torch import nn
from memascend.engine import home as homes
from memascend.engine.options import EngineOptions
from memascend.engine.runtime import StreamingEngine

def made():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*layers).to(torch.bfloat16)

def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 8, 64, generator=generator).to(torch.bfloat16)

def run(folder, steps, options, say=lambda step: None):
    model = made()
    groups = [{"params": list(model.parameters()), "lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}]
    step = 0
    if "step" in (homes.kept_facts(folder) if homes.is_home(folder) else {}):
        engine, facts = StreamingEngine.resume(model, folder, groups, options)
        step = facts["step"]
    else:
        homes.remove(folder)
        engine = StreamingEngine.start(model, folder, groups, options)
    while step < steps:
        model(batch(step)).float().square().mean().backward()
        engine.finish_step(keep=False)
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
options = EngineOptions(arm=sys.argv[2], clip=float(sys.argv[3]))
run(Path(sys.argv[1]), int(sys.argv[4]), options, lambda step: print(step, flush=True))
"""
)


def program():
    names = {}
    exec(compile(PROGRAM, "program", "exec"), names)
    return names


@pytest.mark.parametrize("rounds", [2, pytest.param(25, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("arm", "clip"), [("optimized", 0.0), ("none", 0.5)])
@pytest.mark.timeout(1800)
def test_a_killed_engine_goes_on_from_its_last_completed_step_to_the_same_bits(tmp_path, arm, clip, rounds):
    parts, instants, said, kills = program(), random.SystemRandom(), 0, 0
    folder = tmp_path / "home"
    steps = STEPS * rounds
    while kills < rounds and said < steps:
        command = [sys.executable, "-c", CHILD, str(folder), arm, str(clip), str(steps)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            first = child.stdout.readline()
            assert first, "the child could not begin"
            assert int(first) in (said + 1, said + 2)  # the step in which it was killed may have been kept
            time.sleep(instants.random() * 0.5)
            child.send_signal(signal.SIGKILL)
            said = [int(first), *(int(line) for line in child.stdout if line.endswith("\n"))][-1]
        kills += child.returncode == -signal.SIGKILL
    kept = homes.kept_facts(folder)["step"]
    assert kept in (said, said + 1)
    torch.set_num_threads(1)
    options = EngineOptions(arm=arm, clip=clip)
    ours = parts["run"](folder, kept + 1, options)
    theirs = parts["run"](tmp_path / "never killed", kept + 1, options)
    for name, values in theirs.items():
        assert torch.equal(ours[name], values), name
    left = [path.name for path in folder.iterdir() if path.name.startswith(SCRATCH_PREFIX)]
    assert left == []  # what waited on the tier when it was killed


def test_states_that_somebody_else_uses_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(homes, "_DEAD_S", 0.1)
    parts = program()
    model = parts["made"]()
    groups = [{"params": list(model.parameters()), "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}]
    engine = StreamingEngine.start(model, tmp_path / "home", groups, EngineOptions())
    with pytest.raises(ValueError, match="is in use by another process"):
        homes.kept_facts(tmp_path / "home")
    engine.close()
