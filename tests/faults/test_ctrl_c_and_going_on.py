"""Ctrl-C at random instants of a step, after which the same process trains on, as in a notebook.

The folder holds the step that `session.steps` reports, and the result equals that of the same steps in memory bit by
bit.
"""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memascend.engine import state_store
from memascend.storage.engine_tiers import DirectTier
from memascend.storage.interrupts import uninterrupted, whole
from tests.unit.test_streaming_engine import assert_equal, batches, model, streamed, train, train_in_memory

ROOT = Path(__file__).parents[2]
GOES_ON = """
import os, random, signal, sys, threading, time
import torch
from memascend.engine.options import EngineOptions
from memascend.engine.streaming import streaming
from tests.unit.test_streaming_engine import SETTINGS, batches, model, train_in_memory

folder, kind, seed, presses = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
KINDS = {
    "as they come": {},
    "waiting": {"wait": True},
    "one version": {"wait": True, "options": EngineOptions(versions=1)},
    "one that may tear": {"wait": True, "options": EngineOptions(versions=1, redo=False)},
}
chance, hits, data = random.Random(seed), 0, batches(4 * presses + 2)
ours, theirs = model(), model()

def press():
    os.kill(os.getpid(), signal.SIGINT)

with streaming(folder) as session:
    session.hook(ours)
    optimizer = session.optimizer(torch.optim.AdamW, **SETTINGS, **KINDS[kind])

    def step(ids):
        ours(ids).backward()
        optimizer.step()

    step(data[0])
    began = time.monotonic()
    step(data[1])
    span = time.monotonic() - began
    while hits < presses and session.steps < len(data):
        pressed = threading.Timer(chance.random() * span, press)
        try:
            pressed.start()
            try:
                step(data[session.steps])
            finally:
                pressed.join()
        except KeyboardInterrupt:
            hits += 1
            optimizer.zero_grad()
        if session.steps < len(data):
            step(data[session.steps])  # undisturbed
    done = session.steps
    ended = {name: values.clone() for name, values in ours.state_dict().items()}
train_in_memory(theirs, data[:done])
different = [name for name, values in theirs.state_dict().items() if not torch.equal(values, ended[name])]
again = model(seed=3)
with streaming(folder, resume=True) as session:
    session.hook(again)
    session.optimizer(torch.optim.AdamW, **SETTINGS, **KINDS[kind])
    kept = session.steps
    different += [name for name, values in again.state_dict().items() if not torch.equal(values, ended[name])]
print(hits, "hits,", done - kept, "steps more than kept, different:", different)
"""


def presses(kind, seed, count, *, slow):
    return pytest.param(kind, seed, count, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "seed", "count"),
    [
        presses("as they come", 0, 8, slow=False),
        *(presses("as they come", seed, 40, slow=True) for seed in (1, 2, 3)),
        *(presses(kind, 4, 40, slow=True) for kind in ("waiting", "one version")),
    ],
)
def test_loop_continues_exactly_after_each_of_many_interrupts(tmp_path, kind, seed, count):
    command = [sys.executable, "-c", GOES_ON, str(tmp_path / "run"), kind, str(seed), str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout == f"{count} hits, 0 steps more than kept, different: []\n", done.stderr
    # a destructor's exception, which Python drops
    assert "Traceback" not in done.stderr or "Exception ignored in" in done.stderr


@pytest.mark.parametrize("kept", [True, False])
def test_interrupted_commit_counts_only_if_the_folder_holds_it(tmp_path, monkeypatch, kept):
    data, ours, theirs = batches(4), model(), model()
    engine = streamed(ours, tmp_path)
    train(ours, engine, data[:1])
    stock = DirectTier.commit

    def interrupted(tier):
        if kept:
            stock(tier)
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(DirectTier, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(ours, engine, data[1:2])
    assert max(engine.completed_steps().values()) == 1 + kept
    train(ours, engine, data[1 + kept : 3])
    train_in_memory(theirs, data[:3])
    assert_equal(engine, theirs)
    engine.close()
    assert state_store.kept_facts(tmp_path / "session") == {}


@pytest.mark.parametrize("commits", range(1, 9))
def test_interrupted_update_of_only_version_completes_at_next_use(tmp_path, monkeypatch, commits):
    data, ours, theirs = batches(4), model(), model()
    engine = streamed(ours, tmp_path, wait=True, versions=1)
    train(ours, engine, data[:1])
    stock, left = DirectTier.commit, [commits]

    def interrupted(tier):
        left[0] -= 1
        stock(tier)
        if not left[0]:
            raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(DirectTier, "commit", interrupted)
        try:
            train(ours, engine, data[1:2])
        except KeyboardInterrupt:
            assert left[0] == 0
    assert max(engine.completed_steps().values()) == 2
    train(ours, engine, data[2:])
    train_in_memory(theirs, data)
    assert_equal(engine, theirs)
    engine.close()


def test_interrupt_waits_for_outermost_block_and_handler_is_restored():
    done, before = [], signal.getsignal(signal.SIGINT)

    @whole
    def pressed():
        signal.raise_signal(signal.SIGINT)
        done.append("inner")

    def around():
        with uninterrupted:
            pressed()
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        around()
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
