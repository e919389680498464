"""bf16 master weights, gradients and Adam states on NVMe: half the bytes, and a curve that fp32 could have made."""

from __future__ import annotations

import statistics

import pytest
from trainings import Job, train_all

pytestmark = pytest.mark.deepspeed

SEEDS = (0, 1, 2)
LAST = 10  # steps over which the final loss is averaged


def final_loss(result) -> float:
    return statistics.fmean(micro[0] for micro in result["losses"][-LAST:])


def curves(folder, arms, seeds, steps):
    """The same text for all; a seed is a set of first weights."""
    jobs = [
        Job(name=f"{arm}-{seed}", arm=arm, dtype="bf16", init_seed=seed, steps=steps) for arm in arms for seed in seeds
    ]
    return train_all(jobs, folder)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return curves(tmp_path_factory.mktemp("bf16"), ["memascend", "memascend_bf16"], SEEDS[:1], 30)


def test_a_step_moves_little_more_than_half_the_bytes(short):
    """fp32: 16 + 2 x 2 read, 18 written for each parameter; bf16: 8 + 2 x 2 and 10. Small tensors stay in memory."""
    fp32, bf16 = short["memascend-0"], short["memascend_bf16-0"]
    assert 20 < bf16["io_bytes"][-1] / bf16["parameters"] < 22.01
    assert bf16["io_bytes"][-1] / fp32["io_bytes"][-1] == pytest.approx(22 / 38, rel=0.03)


def test_it_learns_as_fp32_does(short):
    assert final_loss(short["memascend_bf16-0"]) == pytest.approx(final_loss(short["memascend-0"]), abs=0.03)
    assert final_loss(short["memascend_bf16-0"]) < 0.9 * short["memascend_bf16-0"]["losses"][0][0]


@pytest.mark.slow
def test_the_curve_is_within_the_run_to_run_spread_of_fp32(tmp_path):
    """The mean distance from fp32 over the seeds is under the standard deviation of fp32 over them; DeepSpeed's AdamW,
    which rounds to nearest and loses small updates, is further away than ours on every seed."""
    results = curves(tmp_path, ["memascend", "memascend_bf16", "memascend_bf16_nearest"], SEEDS, 60)
    fp32 = [final_loss(results[f"memascend-{seed}"]) for seed in SEEDS]
    ours = [final_loss(results[f"memascend_bf16-{seed}"]) for seed in SEEDS]
    nearest = [final_loss(results[f"memascend_bf16_nearest-{seed}"]) for seed in SEEDS]
    spread = statistics.stdev(fp32)
    assert abs(statistics.fmean(a - b for a, b in zip(ours, fp32))) < spread
    assert all(abs(a - c) < abs(b - c) for a, b, c in zip(ours, nearest, fp32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fp16": {"enabled": True}}, "fp16.enabled"),
        ({"bf16": {"enabled": False}}, "contradicts bf16.enabled"),
        ({"bf16": {"bf16_optimizer_states": False}}, "contradicts bf16.bf16_optimizer_states"),
        ({"zero_optimization": {"stage": 3}}, "offload_optimizer.device"),
        ({"optimizer": {"type": "AdamW", "params": {"fp32_optimizer_states": True}}}, "fp32_optimizer_states"),
        ({"memascend": {"numerics": "fast", "overflow": "chain"}}, "overflow"),
    ],
)
def test_contradictions_are_refused_in_one_line_and_change_nothing(change, message):
    import memascend

    config = {
        "memascend": {"optimizer_states": "bf16"},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    } | change
    before = repr(config)
    with pytest.raises(ValueError, match=message) as caught:
        memascend.enable(config)
    assert "\n" not in str(caught.value)
    assert repr(config) == before


def test_deepspeeds_own_keys_on_nvme_are_refused_because_they_crash(tmp_path):
    import memascend

    config = {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}},
    }
    with pytest.raises(ValueError, match="optimizer_states to 'bf16'"):
        memascend.enable(config)


def test_the_configuration_is_given_back():
    import memascend

    config = {
        "memascend": {"optimizer_states": "bf16"},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }
    before = repr(config)
    memascend.enable(config)
    try:
        assert config["bf16"]["bf16_optimizer_states"]
    finally:
        memascend.disable()
    assert repr(config) == before
