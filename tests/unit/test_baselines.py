"""Every folder in baselines/ describes and configures the arms that it offers."""

import pytest

from memascend.baselines.protocol import DeepSpeedSystem, RunSpec, Sizes, load_system, scaled, system_names
from memascend.integrations.deepspeed.config import enable_options

SIZES = Sizes(largest_tensor=1000, parameters=10_000, pool_buffers=9)
DEEPSPEED = [name for name in system_names() if isinstance(load_system(name), DeepSpeedSystem)]
ARMS = [(name, arm) for name in DEEPSPEED for arm, parts in load_system(name).arms.items() if parts.runs]


def run_of(system: str, arm: str, **changes) -> RunSpec:
    fields = {"run_id": "r", "model": "m", "k": 8, "dtype": "bf16", "sequence": 32, "batch": 1, "steps": 3, "seed": 0}
    return RunSpec(system=system, arm=arm, **(fields | {"ranks": 1} | changes))


@pytest.mark.parametrize("name", system_names())
def test_described_arms_are_exactly_the_existing_arms(name):
    assert set(load_system(name).describe()["arms"]) == set(load_system(name).arms)


@pytest.mark.parametrize(("name", "arm"), ARMS)
def test_parts_of_every_arm_are_compatible(name, arm):
    system = load_system(name, arm)
    enable_options(system.deepspeed_config(run_of(name, arm), SIZES, "/somewhere"), system.parts(arm))


@pytest.mark.parametrize(("name", "arm"), ARMS)
def test_every_arm_keeps_the_settings_a_twin_needs(name, arm):
    zero = load_system(name).deepspeed_config(run_of(name, arm), SIZES, "/somewhere")["zero_optimization"]
    assert zero["stage3_max_reuse_distance"] == 0
    assert zero["memory_efficient_linear"] is False
    assert zero["offload_param"]["device"] in ("cpu", "none") or zero["offload_param"]["max_in_cpu"] == 0


def test_compared_arms_have_the_same_deepspeed_configuration():
    published, ours = (
        load_system(name).deepspeed_config(run_of(name, arm), SIZES, "/somewhere")
        for name, arm in (("zero_infinity", "as_published"), ("memascend", "memascend"))
    )
    assert published == ours


def test_thresholds_shrink_with_the_square_of_the_divisor():
    assert scaled(1 << 20, 8) == (1 << 20) // 64
    assert scaled(3, 8) == 1


def test_error_for_unknown_system_or_arm_names_known_ones():
    with pytest.raises(ValueError, match="zero_infinity"):
        load_system("zero-infinity")
    with pytest.raises(ValueError, match="as_published"):
        load_system("zero_infinity", "published")
