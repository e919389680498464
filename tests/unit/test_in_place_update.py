"""One version of the states: less space, and a kill at any instant loses only the current step."""

import copy
import logging
import re
import shutil

import pytest
import torch
from torch import nn

from memascend.engine import in_place_update, state_store
from memascend.engine.errors import NotThisModel
from memascend.engine.options import EngineOptions
from memascend.engine.runtime import StreamingEngine
from memascend.engine.state_store import StateStore
from memascend.engine.streaming import streaming
from memascend.engine.traffic import auxiliary_file_bytes
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.storage import freed_space
from memascend.storage.errors import StorageError
from tests.crash_loop import CrashLoop

SETTINGS = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
RATES = [1e-2, 5e-3, 2e-3, 1e-3]


class Model(nn.Module):
    """A model with a layer that gets no gradient in odd steps."""

    def __init__(self, depth=3, hidden=32):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, hidden), nn.Linear(hidden, 50)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.sometimes = nn.Linear(hidden, hidden)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        if int(ids[0]) % 2:
            x = x + self.sometimes(x)
        return nn.functional.cross_entropy(self.head(x), ids)


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return Model().to(dtype)


def batch(step):
    return torch.arange(step, step + 20) % 50


def begin(of, folder, **options):
    groups = [{"params": list(of.parameters()), "lr": 0.0, **SETTINGS}]
    chosen = EngineOptions(**{"versions": 1, "piece_elements": 1 << 16, **options})
    return StreamingEngine.start(of, folder, groups, chosen, allocator=PageAlignedPinnedAllocator(Ledger(), lock=False))


def resume(of, folder, **options):
    groups = [{"params": list(of.parameters()), "lr": 0.0, **SETTINGS}]
    chosen = EngineOptions(**{"versions": 1, "piece_elements": 1 << 16, **options})
    return StreamingEngine.resume(
        of, folder, groups, chosen, allocator=PageAlignedPinnedAllocator(Ledger(), lock=False)
    )


def train(of, engine, steps, accumulate=1):
    for step in steps:
        engine.groups[0]["lr"] = RATES[step]
        for number in range(accumulate):
            (of(batch(step + number)) / accumulate).backward()
        facts = {"step": step + 1}
        engine.finish_step(keep=False, facts=facts)
        engine.keep(facts)


def contents(engine):
    weights = {name: values.clone() for name, values in engine.read_weights()}
    return weights, {name: engine.read_states(name) for name in engine.layout.order}, dict(engine.steps)


def assert_same(found, expected):
    for name, values in expected[0].items():
        assert torch.equal(found[0][name], values), name
        assert all(torch.equal(found[1][name][key], each) for key, each in expected[1][name].items()), name
    assert found[2] == expected[2]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {}),
        (torch.float32, {"clip": 0.1, "zero_missing": True}),
        (torch.bfloat16, {"accumulate": 2, "gradients": torch.bfloat16}),
    ],
    ids=["bf16", "fp32, clipped", "two passes"],
)
def test_one_version_trains_like_two_at_its_planned_size(tmp_path, dtype, options):
    passes = options.get("accumulate", 1)
    ours, theirs = model(dtype), model(dtype)
    one, two = (
        begin(ours, tmp_path / "one", **options),
        begin(theirs, tmp_path / "two", versions=2, wait=True, **options),
    )
    train(ours, one, range(4), passes)
    train(theirs, two, range(4), passes)
    assert_same(contents(one), contents(two))
    sizes = [(tmp_path / name / "states").stat().st_size for name in ("one", "two")]
    assert sizes[0] == in_place_update.bytes_of(one.layout, 1, one.options.gradients, 3)
    assert sizes[1] == in_place_update.bytes_of(two.layout, 2, two.options.gradients, 3)
    one.close(destroy=True)
    two.close(destroy=True)
    assert list(tmp_path.iterdir()) == []


def instants(monkeypatch, folder, copies):
    """Copy the states before and after every change to them, as a kill at that instant would leave them."""

    def taken(*_):
        copies.mkdir(exist_ok=True)
        place = copies / str(len(list(copies.iterdir())))
        place.mkdir()
        shutil.copy(folder / "states", place / "states")

    for name in ("write", "commit", "erase"):
        stock = getattr(StateStore, name)

        def around(self, *args, stock=stock, **options):
            if self.folder == folder:
                taken()
            done = stock(self, *args, **options)
            if self.folder == folder:
                if hasattr(done, "wait"):
                    done.wait()
                taken()
            return done

        monkeypatch.setattr(StateStore, name, around)


@pytest.mark.parametrize(
    ("options", "every"),
    [
        pytest.param({}, 6, id="some instants"),
        pytest.param({}, 1, id="all", marks=pytest.mark.slow),
        pytest.param({"clip": 0.1, "zero_missing": True}, 1, id="clipped, all", marks=pytest.mark.slow),
    ],
)
def test_resume_after_kill_at_any_instant_gives_same_bits(tmp_path, options, every, monkeypatch, caplog):
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
    kills = sorted((tmp_path / "kills").iterdir(), key=lambda path: int(path.name))
    assert len(kills) > 40
    caplog.set_level(logging.INFO, "memascend")
    reached = []
    for kill in [*kills[:-1:every], kills[-1]]:
        caplog.clear()
        kept = state_store.kept_facts(kill)["step"]
        again = model(torch.bfloat16)
        engine, facts = resume(again, kill, **options)
        reached.append((facts["step"], "completing it from its gradients" in caplog.text))
        assert facts["step"] == kept
        train(again, engine, range(facts["step"], 3))
        assert_same(contents(engine), expected)
        engine.close()
    assert reached == sorted(reached, key=lambda each: (each[0], not each[1]))  # step 1, its redo, then step 2
    assert {(1, False), (2, True), (2, False)} == set(reached)


def test_infinite_gradient_leaves_space_for_the_next_step(tmp_path):
    ours, theirs = model(), model()
    one, two = begin(ours, tmp_path / "one"), begin(theirs, tmp_path / "two", versions=2, wait=True)
    for of, engine in ((ours, one), (theirs, two)):
        train(of, engine, range(1))
        for _ in range(5):
            (of(batch(1)) * float("inf")).backward()
            assert engine.finish_step() is None
        train(of, engine, range(1, 3))
    assert_same(contents(one), contents(two))
    one.close()
    two.close()


def test_resume_completes_an_update_interrupted_by_an_error(tmp_path, monkeypatch):
    whole = model()
    engine = begin(whole, tmp_path / "whole")
    train(whole, engine, range(2))
    expected = contents(engine)
    engine.close()
    ours = model()
    engine = begin(ours, tmp_path / "ours")
    train(ours, engine, range(1))
    with monkeypatch.context() as broken:
        commits, stock = [], StateStore.commit

        def commit(self, facts):
            commits.append(facts)
            if len(commits) == 3:
                raise OSError("no more")
            stock(self, facts)

        broken.setattr(StateStore, "commit", commit)
        with pytest.raises(OSError, match="no more"):
            train(ours, engine, range(1, 2))
    with pytest.raises(RuntimeError, match="close the engine, and resume, which completes it"):
        ours(batch(1))
    with pytest.raises(RuntimeError, match="close the engine, and resume"):
        engine.keep({})
    engine.close()
    with pytest.raises(NotThisModel, match="resume once with the same options"):
        resume(model(), tmp_path / "ours", zero_missing=True)
    again = model()
    engine, facts = resume(again, tmp_path / "ours")
    assert facts == {"step": 2}
    assert_same(contents(engine), expected)
    engine.close()


def test_restored_states_count_as_a_step_only_when_complete(tmp_path):
    ours = model()
    engine = begin(ours, tmp_path / "ours")
    train(ours, engine, range(2))
    names, states = engine.layout.order, contents(engine)
    engine.write_states(states[1].get, {names[0]: 2})
    engine.close()
    assert state_store.kept_facts(tmp_path / "ours") == {}
    with pytest.raises(NotThisModel, match="holds no completed step"):
        resume(model(), tmp_path / "ours")
    shutil.rmtree(tmp_path / "ours")
    ours = model()
    engine = begin(ours, tmp_path / "ours")
    engine.write_states(states[1].get, states[2])
    engine.keep({"step": 2})
    assert_same(contents(engine), states)
    train(ours, engine, range(2, 3))
    engine.close()


def test_two_versions_or_one_are_chosen_by_free_space(tmp_path, monkeypatch, caplog):
    ours = model()
    probe = begin(copy.deepcopy(ours), tmp_path / "probe")
    two, one = (in_place_update.bytes_of(probe.layout, count, torch.float32, 3) for count in (2, 1))
    probe.close(destroy=True)
    assert one < two
    caplog.set_level(logging.INFO, "memascend")

    def begin_with(free):
        caplog.clear()
        usage = shutil.disk_usage(tmp_path)._replace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        monkeypatch.setattr(freed_space, "_removed", [])  # no removed file's space is expected back
        return begin(copy.deepcopy(ours), tmp_path / "states", versions=None)

    engine = begin_with(two)
    assert engine.options.versions == 2
    assert "one version" not in caplog.text
    engine.close(destroy=True)
    engine = begin_with(two - 1)
    assert engine.options.redoes
    assert re.search(r"one version of the states \(two take 0.01 GiB and 0.01 are free\)", caplog.text)
    engine.close(destroy=True)
    with pytest.raises(StorageError, match="two versions of all states do not fit"):
        begin_with(one - 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"clip": 1.0}, {"accumulate": 2}, {"wait": True}], ids=str)
def test_waiting_gradients_need_space_in_addition_to_two_versions(tmp_path, monkeypatch, options):
    """They are stored with one version, and in addition to two: without space for both a first step would fail."""
    monkeypatch.setattr(freed_space, "_MOST_S", 0.0)  # the reported free space is all there is
    ours = model()
    probe = begin(copy.deepcopy(ours), tmp_path / "probe", versions=2, **options)
    needed = in_place_update.bytes_of(probe.layout, 2, torch.float32, 3) + auxiliary_file_bytes(
        probe.layout, probe.options
    )
    probe.close(destroy=True)
    for free, versions in ((needed, 2), (needed - 1, 1)):
        usage = shutil.disk_usage(tmp_path)._replace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        engine = begin(copy.deepcopy(ours), tmp_path / "states", versions=None, **options)
        assert engine.options.versions == versions
        engine.close(destroy=True)


def test_simple_loop_resumes_with_its_note_after_kill_in_update(tmp_path, monkeypatch):
    def loop(session, of, steps):
        session.hook(of)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2, options=EngineOptions(versions=1))
        for step in steps(session):
            session.note = {"seen": step + 1}
            of(batch(step)).backward()
            optimizer.step()
        return contents(session.engine)

    with streaming(tmp_path / "whole") as session:
        expected = loop(session, model(), lambda _: range(3))
    with streaming(tmp_path / "ours") as session, monkeypatch.context() as during:
        ours = model()
        instants(during, tmp_path / "ours", tmp_path / "kills")
        loop(session, ours, lambda _: range(2))
    kills = sorted((tmp_path / "kills").iterdir(), key=lambda path: int(path.name))
    seen = set()
    for kill in kills[-30::5]:
        with streaming(kill, resume=True) as session:
            assert_same(loop(session, model(), lambda session: range(session.note["seen"], 3)), expected)
        seen.add(session.note["seen"])
    assert seen == {3}


_LOOP = """
import hashlib, sys
import torch
from memascend.engine import state_store
from tests.unit.test_in_place_update import begin, batch, contents, model, resume

folder, steps = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
of, done = model(torch.bfloat16), 0
if state_store.holds_states(folder) and state_store.kept_facts(folder):
    engine, facts = resume(of, folder)
    done = facts["step"]
else:
    state_store.remove(folder)
    engine = begin(of, folder)
    engine.keep({"step": 0})
print("ready", done, flush=True)
for step in range(done, steps):
    engine.groups[0]["lr"] = 1e-3 / (1 + step)
    of(batch(step)).backward()
    engine.finish_step(keep=False, facts={"step": step + 1})
    engine.keep({"step": step + 1})
    print(step, flush=True)
"""


@pytest.mark.slow  # some twenty processes
def test_process_killed_repeatedly_reaches_the_same_weights(tmp_path):
    expected = CrashLoop(_LOOP, tmp_path / "whole", 150).digest()
    ours = CrashLoop(_LOOP, tmp_path / "ours", 150)
    reached = [int(step) for (step,) in ours.killed(12, 5)]
    assert 10 < reached[-1] < 150
    assert reached == sorted(reached)
    assert ours.digest() == expected
