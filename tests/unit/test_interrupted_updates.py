"""One version of the states without a redo: no extra bytes are written, and incomplete states are refused."""

import hashlib
import logging

import pytest
import torch

from memascend.engine import in_place_update, state_store
from memascend.engine.errors import InterruptedUpdate
from memascend.engine.options import EngineOptions
from memascend.engine.streaming import streaming
from tests.crash_loop import CrashLoop
from tests.unit import test_in_place_update as with_redo
from tests.unit.test_in_place_update import Model, assert_same, batch, contents, instants, model, train


def begin(of, folder, **options):
    return with_redo.begin(of, folder, **{"redo": False, **options})


def resume(of, folder, **options):
    return with_redo.resume(of, folder, **{"redo": False, **options})


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {}),
        (torch.float32, {"clip": 0.1, "zero_missing": True}),
        (torch.bfloat16, {"accumulate": 2, "arm": "naive"}),
        (torch.bfloat16, {"arm": "none"}),
    ],
    ids=["bf16", "fp32, clipped", "naive, two passes", "optimizer after backward"],
)
def test_one_version_without_redo_trains_like_two_in_less_space(tmp_path, dtype, options, caplog):
    caplog.set_level(logging.INFO, "memascend")
    passes = options.get("accumulate", 1)
    ours, theirs = model(dtype), model(dtype)
    one, two = (
        begin(ours, tmp_path / "one", **options),
        begin(theirs, tmp_path / "two", versions=2, redo=True, **options),
    )
    assert (
        "without gradients to redo a step from: after a kill in the middle of a step training continues from"
        in caplog.text
    )
    moved = [engine.transferred for engine in (one, two)]
    train(ours, one, range(4), passes)
    train(theirs, two, range(4), passes)
    moved = [[a - b for a, b in zip(e.transferred, m, strict=True)] for e, m in zip((one, two), moved, strict=True)]
    assert moved[0] == pytest.approx(moved[1], abs=1 << 16)  # except for the marks
    assert_same(contents(one), contents(two))
    sizes = [(tmp_path / name / "states").stat().st_size for name in ("one", "two")]
    gradients, slots = one.options.gradients, one.options.state_slots
    assert sizes[0] == in_place_update.bytes_of(one.layout, 1, gradients, slots, redo=False)
    assert sizes[0] < in_place_update.bytes_of(one.layout, 1, gradients, slots) < sizes[1]
    one.close(destroy=True)
    two.close(destroy=True)
    assert list(tmp_path.iterdir()) == []


def test_space_for_fresh_copies_lasts_for_many_steps(tmp_path):
    ours = model(torch.bfloat16)
    engine = begin(ours, tmp_path / "ours")
    for step in range(24):
        ours(batch(step)).backward()
        engine.finish_step(facts={"step": step + 1})
    engine.close()
    engine, facts = resume(model(torch.bfloat16), tmp_path / "ours")
    assert facts == {"step": 24}
    engine.close()


@pytest.mark.parametrize("options", [{}, {"clip": 0.1, "zero_missing": True}], ids=["plain", "clipped"])
def test_kill_leaves_a_whole_step_or_refused_incomplete_states(tmp_path, options, monkeypatch):
    whole = model(torch.bfloat16)
    engine = begin(whole, tmp_path / "whole", **options)
    train(whole, engine, range(3))
    expected = contents(engine)
    engine.close()
    ours = model(torch.bfloat16)
    engine = begin(ours, tmp_path / "ours", **options)
    train(ours, engine, range(1))
    with monkeypatch.context() as during:
        instants(during, tmp_path / "ours", tmp_path / "kills")
        train(ours, engine, range(1, 2))
    engine.close()
    reached = []
    for kill in sorted((tmp_path / "kills").iterdir(), key=lambda path: int(path.name)):
        try:
            reached.append(state_store.kept_facts(kill)["step"])
        except InterruptedUpdate:
            reached.append("partial")
            with pytest.raises(
                InterruptedUpdate, match=f"{kill}: .* are incomplete .*: continue from the last checkpoint"
            ):
                resume(model(torch.bfloat16), kill, **options)
            continue
        if reached[-2:-1] != reached[-1:]:  # the first of its kind
            again = model(torch.bfloat16)
            engine, facts = resume(again, kill, **options)
            train(again, engine, range(facts["step"], 3))
            assert_same(contents(engine), expected)
            engine.close()
    counts = [reached.count(each) for each in (1, "partial", 2)]
    assert reached == [1] * counts[0] + ["partial"] * counts[1] + [2] * counts[2]
    assert min(counts) > 0


def test_step_can_be_given_up_only_before_anything_is_replaced(tmp_path):
    ours = model()
    engine = begin(ours, tmp_path / "ours")
    train(ours, engine, range(1))
    (ours(batch(1)) * float("inf")).backward()
    assert engine.finish_step() is None
    ours(batch(1))
    engine.give_up()
    ours(batch(1)).backward()
    engine.finish_step(keep=False)
    with pytest.raises(InterruptedUpdate):
        engine.give_up()
    with pytest.raises(InterruptedUpdate, match="which are incomplete"):
        ours(batch(1))
    with pytest.raises(InterruptedUpdate, match="which are incomplete"):
        engine.keep({})
    engine.close()
    with pytest.raises(InterruptedUpdate):
        resume(model(), tmp_path / "ours")


class LateInfinity(Model):
    """A model whose embedding, the last in backward, gets an infinite gradient."""

    def forward(self, ids):
        self.embedding.register_forward_hook(
            lambda _, __, out: out.register_hook(lambda gradient: gradient * float("inf")) and None
        )
        return super().forward(ids)


@pytest.mark.parametrize("wait", [False, True])
def test_late_infinite_gradient_interrupts_update_unless_gradients_wait(tmp_path, wait):
    torch.manual_seed(0)
    ours = LateInfinity()
    engine = begin(ours, tmp_path / "ours", wait=wait)
    if wait:
        before = contents(engine)
        ours(batch(1)).backward()
        assert engine.finish_step() is None
        assert_same(contents(engine), before)
    else:
        ours(batch(1)).backward()
        with pytest.raises(InterruptedUpdate, match="a gradient was infinite or NaN"):
            engine.finish_step()
    engine.close()


def test_without_redo_one_version_is_kept(tmp_path):
    engine = begin(model(), tmp_path / "states", versions=None)
    assert engine.options.versions == 1
    assert engine.versions_why == "as asked for"
    engine.close()
    with pytest.raises(ValueError, match=r"EngineOptions\.redo: False requires versions=1, got versions=2"):
        EngineOptions(versions=2, redo=False)


def test_closed_states_are_whole_and_a_checkpoint_is_a_copy(tmp_path):
    """The state dict of a simple loop does not change in later steps."""
    options = EngineOptions(versions=1, redo=False)

    def loop(session, of, steps, saved=None):
        session.hook(of)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2, options=options)
        if saved is not None:
            optimizer.load_state_dict(saved["optimizer"])
        for step in steps(session):
            session.note = {"seen": step + 1}
            of(batch(step)).backward()
            optimizer.step()
        return contents(session.engine), optimizer

    def digest(state):
        tensors = [v for each in state["state"].values() for v in each.values()]
        return [hashlib.sha256(t.numpy().tobytes()).hexdigest() for t in tensors]

    with streaming(tmp_path / "whole") as session:
        expected, _ = loop(session, model(), lambda _: range(4))
    with streaming(tmp_path / "ours") as session:
        ours = model()
        _, optimizer = loop(session, ours, lambda _: range(2))
        saved = {"optimizer": optimizer.state_dict(), "model": ours.state_dict()}
        of_saving = digest(saved["optimizer"])
        ours(batch(2)).backward()
        optimizer.step()
        assert digest(saved["optimizer"]) == of_saving
        assert digest(optimizer.state_dict()) != of_saving
    with streaming(tmp_path / "ours", resume=True) as session:
        assert_same(loop(session, model(), lambda _: range(3, 4))[0], expected)
    again = model()
    again.load_state_dict(saved["model"])
    with streaming(tmp_path / "again") as session:
        assert_same(loop(session, again, lambda _: range(2, 4), saved)[0], expected)


_LOOP = """
import hashlib, os, sys
import torch
from memascend.engine import state_store
from tests.unit.test_in_place_update import batch, contents, model
from tests.unit.test_interrupted_updates import begin, resume

folder, steps, saved = sys.argv[1], int(sys.argv[2]), sys.argv[1] + ".checkpoint"
torch.set_num_threads(1)
of, done = model(torch.bfloat16), 0
try:
    kept, how = state_store.holds_states(folder) and state_store.kept_facts(folder).get("step"), "kept"
except state_store.InterruptedUpdate:
    kept, how = None, "partial"
if kept:
    engine, facts = resume(of, folder)
    done = facts["step"]
else:
    state_store.remove(folder)
    checkpoint = torch.load(saved) if os.path.exists(saved) else None
    if checkpoint is not None:
        of.load_state_dict(checkpoint["weights"])
    engine = begin(of, folder)
    if checkpoint is not None:
        done = checkpoint["step"]
        engine.write_states(checkpoint["states"].get, checkpoint["steps"])
    engine.keep({"step": done})
print("ready", done, how, flush=True)
for step in range(done, steps):
    engine.groups[0]["lr"] = 1e-3 / (1 + step)
    of(batch(step)).backward()
    engine.finish_step(facts={"step": step + 1})
    if step % 10 == 9:
        weights, states, counts = contents(engine)
        torch.save({"weights": weights, "states": states, "steps": counts, "step": step + 1}, saved + ".partial")
        os.replace(saved + ".partial", saved)
    print(step, flush=True)
"""


@pytest.mark.slow  # some twenty processes
def test_process_killed_repeatedly_reaches_same_weights_from_checkpoints(tmp_path):
    expected = CrashLoop(_LOOP, tmp_path / "whole", 100).digest()
    ours = CrashLoop(_LOOP, tmp_path / "ours", 100)
    found = [(int(step), how) for step, how in ours.killed(15, 9)]
    assert all(step % 10 == 0 for step, how in found if how == "partial")
    assert {how for _, how in found} == {"partial", "kept"}
    assert ours.digest() == expected
