"""Names of version 1.0 that have changed work as before, and say what to use."""

import pytest

from memascend.baselines.protocol import PlannedSystem
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


def test_the_module_of_torn_states_may_still_be_called_home():
    from memascend.engine import home, state_store

    with pytest.warns(
        FutureWarning, match=r"engine\.home\.TornStates is now memascend\.engine\.state_store\.TornStates"
    ):
        assert home.TornStates is state_store.TornStates
    with pytest.raises(AttributeError, match="no attribute 'StateHome': it is"):
        home.StateHome  # noqa: B018
