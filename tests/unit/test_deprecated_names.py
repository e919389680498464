"""Names of version 1.0 that have changed work as before, and say what to use."""

import importlib

import pytest

import memascend
from memascend.baselines.protocol import PlannedSystem
from memascend.engine import errors
from memascend.planner import Workload, model_spec


def test_a_system_may_still_say_chooses_fates():
    with pytest.warns(FutureWarning, match=r"chooses_fates.* is now chooses_policies.* removed in 2\.0"):
        old = PlannedSystem(name="mine", arms={}, buffers=print, chooses_fates=True)
    assert old.chooses_policies
    assert not PlannedSystem(name="mine", arms={}, buffers=print).chooses_policies


def test_a_workload_still_has_its_fates():
    work = Workload(spec=model_spec("llama3.2-1b"), system="ssdtrain", activation_policies=("keep",))
    with pytest.warns(FutureWarning, match="Workload.fates is now Workload.activation_policies"):
        assert work.fates == ("keep",)


def test_torn_states_is_still_the_name_of_an_interrupted_update():
    with pytest.warns(FutureWarning, match=r"memascend\.TornStates is now memascend\.InterruptedUpdate"):
        assert memascend.TornStates is memascend.InterruptedUpdate
    assert "TornStates" not in memascend.__all__


@pytest.mark.parametrize(
    ("module", "name", "now"),
    [("home", "TornStates", "InterruptedUpdate"), ("blocks", "NotStreamable", "NotStreamable")],
)
def test_errors_are_still_found_in_the_modules_that_had_them(module, name, now):
    old = importlib.import_module(f"memascend.engine.{module}")
    with pytest.warns(FutureWarning, match=rf"engine\.{module}\.{name} is now memascend\.engine\.errors\.{now}"):
        assert getattr(old, name) is getattr(errors, now)
    with pytest.raises(AttributeError, match="no attribute 'StateHome': it is"):
        old.StateHome  # noqa: B018
