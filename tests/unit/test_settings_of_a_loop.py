"""Settings and states that AdamW does not accept are refused in one
line, and the last completed step stays unchanged."""

import copy

import pytest
import torch

from memascend.engine.options import EngineOptions
from memascend.ops.adamw import AdamW
from tests.unit.test_streaming_engine import SETTINGS, batches, model
from tests.unit.test_streaming_loop import assert_equal, begin, loop

WRONG = {
    "lr": (-0.005, float("nan"), float("inf"), "x", None),
    "betas": ((0.9,), None, (1.0, 0.9), "ab"),
    "eps": (-1.0, None),
    "weight_decay": (-0.1, float("nan"), None),
}
EACH = [(name, value) for name, values in WRONG.items() for value in values]


@pytest.mark.parametrize("options", [{"versions": 1}, {"versions": 2}, {"versions": 2, "wait": True}], ids=str)
def test_invalid_adamw_setting_is_refused_before_update_and_loop_continues(tmp_path, options):
    ours, theirs, data = model(), model(), batches(3)
    session, optimizer = begin(ours, tmp_path / "run", options=EngineOptions(**options))
    other = AdamW(theirs.parameters(), **SETTINGS)
    assert loop(ours, optimizer, data[:1]) == loop(theirs, other, data[:1])
    group = optimizer.param_groups[0]
    for name, value in EACH:
        before, group[name] = group[name], value
        with pytest.raises(ValueError, match=rf"^{name} of a parameter group (is|are) .*: use "):
            loop(ours, optimizer, data[1:2])
        group[name] = before
        optimizer.zero_grad()
        assert session.steps == 1
    assert loop(ours, optimizer, data[1:2]) == loop(theirs, other, data[1:2])
    session.close()
    ours = model()
    session, optimizer = begin(ours, tmp_path / "run", resume=True, options=EngineOptions(**options))
    assert session.steps == 2
    assert loop(ours, optimizer, data[2:]) == loop(theirs, other, data[2:])
    assert_equal(session, theirs)
    session.remove()


def shape(state):
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].mT


def short(state):
    state["state"][0]["exp_avg"] = torch.zeros(3)


def nothing(state):
    state["state"][0]["exp_avg_sq"] = None


def negative(state):
    state["state"][0]["step"] = -4


def no_step(state):
    del state["state"][0]["step"]


def rate(state):
    state["param_groups"][0]["lr"] = float("nan")


def members(state):
    state["param_groups"][0]["params"] = [0]


@pytest.mark.parametrize(
    "wrong", [shape, short, nothing, negative, no_step, rate, members], ids=lambda each: each.__name__
)
def test_invalid_state_dict_is_refused_and_changes_nothing(tmp_path, wrong):
    ours, theirs, data = model(), model(), batches(2)
    session, optimizer = begin(ours, tmp_path / "run")
    other = AdamW(theirs.parameters(), **SETTINGS)
    assert loop(ours, optimizer, data[:1]) == loop(theirs, other, data[:1])
    state = copy.deepcopy(other.state_dict())
    state["param_groups"][0]["lr"] = 7.0
    wrong(state)
    with pytest.raises(ValueError, match=r"\w") as error:
        optimizer.load_state_dict(state)
    assert "\n" not in str(error.value)
    assert optimizer.param_groups[0]["lr"] == SETTINGS["lr"]
    assert loop(ours, optimizer, data[1:]) == loop(theirs, other, data[1:])
    assert_equal(session, theirs)
    session.remove()


@pytest.mark.parametrize("options", [{}, {"wait": True}, {"versions": 1}], ids=str)
def test_backward_refuses_a_graph_from_before_the_last_step(tmp_path, options):
    ours, theirs, data = model(), model(), batches(2)
    session, optimizer = begin(ours, tmp_path / "run", options=EngineOptions(**options))
    loss = ours(data[0])
    optimizer.step()
    with pytest.raises(RuntimeError, match="over a graph from before the last"):
        loss.backward()
    optimizer.zero_grad()
    assert loop(ours, optimizer, data) == loop(theirs, AdamW(theirs.parameters(), **SETTINGS), data)
    assert_equal(session, theirs)
    session.remove()


def test_storages_tracked_per_unit_do_not_grow_with_steps(tmp_path):
    ours = model()
    session, optimizer = begin(ours, tmp_path / "run")
    loop(ours, optimizer, batches(30))
    assert max(map(len, session.engine.weights._storages.values())) <= 4
    session.remove()
