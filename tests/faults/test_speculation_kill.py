"""`kill -9` in each phase of a step that is clipped after its gradients
were used: after a resume the bits are the same."""

import signal
import subprocess
import sys

import pytest
import torch

from memascend.engine import state_store
from memascend.engine.options import EngineOptions

# LOUD: the step (from 0) that is clipped; from the third step on gradients do not wait for their norm
STEPS, LOUD = 9, 6
PROGRAM = r"""
import torch
from torch import nn
from memascend.engine import state_store
from memascend.engine.options import EngineOptions
from memascend.engine.runtime import StreamingEngine
from memascend.training import random_state

def run(folder, steps, options, loud, say=lambda engine, step: None, repeatable=True):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.Dropout(0.1)) for _ in range(6)]
    model = nn.Sequential(*layers).to(torch.bfloat16)
    groups = [{"params": list(model.parameters()), "lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}]
    torch.manual_seed(1)
    step = 0
    if state_store.holds_states(folder):
        engine, facts = StreamingEngine.resume(model, folder, groups, options)
        engine.speculation.take_over(facts["clipping"])
        random_state.restore_json(facts["random"])
        step = facts["step"]
    else:
        engine = StreamingEngine.start(model, folder, groups, options)
    norms = {}
    while step < steps:
        say(engine, step)
        batch = torch.randn(8, 128, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)

        def passes(batch):
            (model(batch).float().square().mean() * (1000.0 if step == loud else 0.01)).backward()

        engine.accumulate(passes, [batch], repeatable=repeatable)
        norms[step] = engine.finish_step(keep=False)
        step += 1
        facts = {"step": step, "random": random_state.as_json(), "clipping": engine.speculation.facts()}
        engine.keep(facts)
    made = {name: values.clone() for name, values in engine.read_weights()}
    for name in engine.steps:
        made |= {f"{name} {state}": values for state, values in engine.read_states(name).items()}
    made |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    again = engine.speculation.done_again
    engine.close()
    return made, norms, again
"""
CHILD = (
    PROGRAM
    + r"""
import os, signal, sys
from pathlib import Path

owner, method, count, loud = sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
calls = 0

def die_in(engine, step):
    if step != loud:
        return
    part = {"store": engine.state_store, "engine": engine, "updates": engine.updates}[owner]
    plain = getattr(part, method)
    def counted(*args, **named):
        global calls
        calls += 1
        if calls == count and owner != "engine":
            os.kill(os.getpid(), signal.SIGKILL)
        result = plain(*args, **named)
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(part, method, counted)

torch.set_num_threads(1)
run(Path(sys.argv[1]), loud + 1, EngineOptions(clip=1.0, versions=2), loud, die_in)
"""
)
# The process is killed at this call of this function in the clipped step: (object, function, number of the call).
# States and weights are written of six blocks of one piece each.
PHASES = {
    "speculation": ("store", "write", 5),
    "its last write": ("store", "write", 12),
    "before the roll back": ("store", "roll_back", 1),
    "between roll back and repeat": ("engine", "_is_to_be_clipped", 1),
    "the repeat's backward": ("updates", "_spill", 3),
    "the repeat's update": ("store", "write", 12 + 7),
    "before the step is completed": ("store", "commit", 1),
}


ALWAYS = ("speculation", "between roll back and repeat", "before the step is completed")  # three seconds each


@pytest.fixture(scope="module", name="never_killed")
def _never_killed(tmp_path_factory):
    names = {}
    exec(compile(PROGRAM, "program", "exec"), names)
    torch.set_num_threads(1)
    folder, options = tmp_path_factory.mktemp("never killed"), EngineOptions(clip=1.0, versions=2)
    waiting = names["run"](folder / "waiting", STEPS, options, LOUD, repeatable=False)
    return names["run"], options, waiting


@pytest.mark.parametrize(
    "phase", [phase if phase in ALWAYS else pytest.param(phase, marks=pytest.mark.slow) for phase in PHASES]
)
def test_run_killed_in_a_clipped_step_resumes_to_same_bits(tmp_path, never_killed, phase):
    run, options, (expected, norms, _) = never_killed
    folder, what = tmp_path / "session", map(str, (*PHASES[phase], LOUD))
    killed = subprocess.run([sys.executable, "-c", CHILD, str(folder), *what], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert state_store.kept_facts(folder)["step"] == LOUD
    found, of_rest, again = run(folder, STEPS, options, LOUD)
    assert again == 1
    assert of_rest == {step: norm for step, norm in norms.items() if step >= LOUD}
    assert norms[LOUD] > 1
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
