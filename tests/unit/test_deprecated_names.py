"""Names of version 1.0 that have changed work as before, and warn with the new name."""

import importlib
import warnings
from dataclasses import dataclass

import pytest

import memascend
from memascend.baselines.protocol import PlannedSystem
from memascend.engine import errors
from memascend.planner import Workload, model_spec, plan_result


def test_planned_system_still_accepts_chooses_fates():
    with pytest.warns(FutureWarning, match=r"chooses_fates.* is now chooses_policies.* removed in 2\.0"):
        old = PlannedSystem(name="mine", arms={}, buffers=print, chooses_fates=True)
    assert old.chooses_policies
    with pytest.warns(FutureWarning, match=r"chooses_fates is now"):
        assert old.chooses_fates
    assert not PlannedSystem(name="mine", arms={}, buffers=print).chooses_policies


@dataclass(frozen=True, kw_only=True)
class OfTheUser(PlannedSystem):
    chooses_fates: bool = True

    def __post_init__(self):
        object.__setattr__(self, "made", True)


def test_system_subclass_may_use_old_field_and_own_post_init():
    mine = OfTheUser(name="mine", arms={}, buffers=print)
    assert mine.made
    with pytest.warns(FutureWarning, match="chooses_fates of a system is now chooses_policies"):
        assert plan_result._chooses_policies(mine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan_result._chooses_policies(PlannedSystem(name="m", arms={}, buffers=print, chooses_policies=True))
        assert not plan_result._chooses_policies(PlannedSystem(name="m", arms={}, buffers=print))


def test_workload_still_has_fates_attribute():
    work = Workload(spec=model_spec("llama3.2-1b"), system="ssdtrain", activation_policies=("keep",))
    with pytest.warns(FutureWarning, match="Workload.fates is now Workload.activation_policies"):
        assert work.fates == ("keep",)


def test_torn_states_still_names_interrupted_update(monkeypatch):
    monkeypatch.delitem(vars(memascend), "TornStates", raising=False)  # an earlier test may have looked it up
    with pytest.warns(FutureWarning, match=r"memascend\.TornStates is now memascend\.InterruptedUpdate") as found:
        from memascend import TornStates
    assert len(found) == 1
    assert TornStates is memascend.InterruptedUpdate
    assert "TornStates" not in memascend.__all__


@pytest.mark.parametrize(
    ("module", "name", "now"),
    [("home", "TornStates", "InterruptedUpdate"), ("blocks", "NotStreamable", "NotStreamable")],
)
def test_errors_are_still_importable_from_their_former_modules(module, name, now):
    old = importlib.import_module(f"memascend.engine.{module}")
    with pytest.warns(FutureWarning, match=rf"engine\.{module}\.{name} is now memascend\.engine\.errors\.{now}"):
        assert getattr(old, name) is getattr(errors, now)
    with pytest.raises(AttributeError, match="no attribute 'StateHome': it is"):
        old.StateHome  # noqa: B018
