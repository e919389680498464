"""bf16 master weights, gradients and Adam states on NVMe: half the
bytes, and a loss curve that fp32 could have produced."""

from __future__ import annotations

import os
import statistics
import sys

import pytest
from trainings import Job, train_all

from tests import forked

pytestmark = pytest.mark.deepspeed

SEEDS = (0, 1, 2)
LAST = 10  # final steps whose losses are averaged


def final_loss(result) -> float:
    return statistics.fmean(micro[0] for micro in result["losses"][-LAST:])


def curves(folder, arms, seeds, steps):
    """Train all arms on the same text; each seed is another set of initial weights."""
    jobs = [
        Job(name=f"{arm}-{seed}", arm=arm, dtype="bf16", init_seed=seed, steps=steps) for arm in arms for seed in seeds
    ]
    return train_all(jobs, folder)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return curves(tmp_path_factory.mktemp("bf16"), ["memascend", "memascend_bf16"], SEEDS[:1], 30)


@pytest.mark.slow
def test_bf16_step_moves_little_more_than_half_the_bytes(short):
    """fp32 reads 16 + 2 x 2 and writes 18 bytes for each parameter; bf16 8 +
    2 x 2 and 10. Small tensors stay in memory."""
    fp32, bf16 = short["memascend-0"], short["memascend_bf16-0"]
    assert 20 < bf16["io_bytes"][-1] / bf16["parameters"] < 22.01
    assert bf16["io_bytes"][-1] / fp32["io_bytes"][-1] == pytest.approx(22 / 38, rel=0.03)


@pytest.mark.slow
def test_bf16_states_learn_as_well_as_fp32(short):
    assert final_loss(short["memascend_bf16-0"]) == pytest.approx(final_loss(short["memascend-0"]), abs=0.03)
    assert final_loss(short["memascend_bf16-0"]) < 0.9 * short["memascend_bf16-0"]["losses"][0][0]


@pytest.mark.slow
def test_bf16_curve_is_within_fp32_spread_over_seeds(tmp_path):
    """The mean distance from fp32 over the seeds is below the standard deviation of fp32 over them.

    DeepSpeed's AdamW, which rounds to nearest and loses small updates, is further from fp32 than ours for every seed.
    """
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


def test_deepspeeds_own_bf16_keys_on_nvme_are_refused(tmp_path):
    import memascend

    config = {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}},
    }
    with pytest.raises(ValueError, match="optimizer_states to 'bf16'"):
        memascend.enable(config)


READ_BY_DEEPSPEED = """
import base64, json, sys
import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
import memascend

plain = {"train_batch_size": 1, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
config = plain | {"memascend": {"optimizer_states": "bf16"}, "bf16": {"enabled": "auto"}}
json.dump(config, open("ds.json", "w"))
forms = (config, "ds.json", base64.urlsafe_b64encode(json.dumps(config).encode()).decode(), plain)

def has_bf16_states(form):
    bf16 = DeepSpeedConfig(form).bfloat16_config
    return bf16.enabled and bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states

found = []
for enabled in forms[:3]:
    memascend.enable(enabled)
    found += [has_bf16_states(form) for form in forms]
    assert not has_bf16_states({"train_batch_size": 1})  # a second model that trains nothing
    memascend.disable()
    assert not any(has_bf16_states(form) for form in forms)
assert found == [True] * 12, found
assert config["bf16"] == {"enabled": "auto"}
"""


def test_every_configuration_form_read_by_deepspeed_gets_bf16_states(tmp_path):
    """DeepSpeed reads a file again, and the Trainer and Accelerate copy dicts: enable changes whichever is read."""
    run_python(READ_BY_DEEPSPEED, tmp_path)


TRAINED = """
import base64, copy, json, os, sys, types
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
import deepspeed, torch
import memascend

config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "memascend": {"optimizer_states": "bf16"},
}
json.dump(config, open("ds.json", "w"))
text = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
found = []
for first, keywords in (
    (None, {"config": copy.deepcopy(config)}),
    (None, {"config": "ds.json"}),
    (None, {"config_params": text}),
    (None, {"args": types.SimpleNamespace(deepspeed_config="ds.json")}),
    ("ds.json", {"config": "ds.json"}),
    (text, {"config_params": copy.deepcopy(config)}),
):
    with deepspeed.zero.Init(config_dict_or_path=first, enabled=first is not None):
        model = torch.nn.Linear(8, 8)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), **keywords)
    engine.backward(engine(torch.ones(1, 8, dtype=torch.bfloat16)).sum())
    engine.step()
    found.append({group.dtype for group in engine.optimizer.fp32_partitioned_groups_flat})
    engine.destroy()
    memascend.disable()
assert found == [{torch.bfloat16}] * 6, found
"""


def test_states_are_bf16_for_every_configuration_form(tmp_path):
    run_python(TRAINED, tmp_path)


def run_python(code: str, folder) -> None:
    done = forked.run([sys.executable, "-c", code], cwd=folder, env=os.environ | {"DS_ACCELERATOR": "cpu"}, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
