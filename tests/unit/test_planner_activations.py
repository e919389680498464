"""The fastest mix of keeping, recomputing and offloading within a memory limit, against all possible mixes."""

import dataclasses
import json
import re

import pytest

from memascend.cli import main
from memascend.planner import Workload, model_spec
from memascend.planner.activations import Mixes, bytes_for_activations, choose
from memascend.planner.limits import Limits
from memascend.planner.machine import Calibrations, MachineSpec
from memascend.planner.options import Stack
from memascend.planner.plan_result import full_plan
from memascend.training.config import complete

SPEC = dataclasses.replace(model_spec("llama3.2-1b"), layers=6)
MACHINE = MachineSpec(
    name="round",
    gpus=1,
    gpu_flops_per_s=100e12,
    pcie_bytes_per_s=1e12,
    ssd_read_bytes_per_s=60e9,
    ssd_write_bytes_per_s=40e9,
    memory_bytes_per_s=100e9,
)
WORK = Workload(spec=SPEC, system="ssdtrain", batch=4, context=2048, dtype="bf16", stack=Stack(checkpointing="ssd"))
IDEAL = Calibrations(gpu_efficiency=1.0)
MIXES = Mixes(WORK, MACHINE, IDEAL)
ALL = [MIXES.simulate(o, r) for r in range(7) for o in range(7 - r)]


@pytest.mark.parametrize("limit", [0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0])
def test_chosen_mix_is_the_fastest_that_fits(limit):
    limit_bytes = limit * MIXES.simulate(0, 0).peak_bytes
    fitting = [mix for mix in ALL if mix.peak_bytes <= limit_bytes]
    found = choose(WORK, MACHINE, limit_bytes, IDEAL).fastest
    if not fitting:
        assert found is None
        return
    assert found.peak_bytes <= limit_bytes
    assert found.seconds == pytest.approx(min(mix.seconds for mix in fitting), rel=1e-9)


def test_ample_memory_keeps_everything_and_too_little_allows_no_mix():
    made = choose(WORK, MACHINE, 1e18, IDEAL)
    assert made.fastest == made.all_kept
    assert str(made.fastest) == "6 kept"
    assert made.fastest.written_bytes == 0
    assert choose(WORK, MACHINE, 1e6, IDEAL).fastest is None


def test_fast_drive_is_preferred_to_recomputation_and_slow_is_not():
    fast = dataclasses.replace(MACHINE, ssd_read_bytes_per_s=900e9, ssd_write_bytes_per_s=900e9)
    made = choose(WORK, fast, 0.5 * MIXES.simulate(0, 0).peak_bytes, IDEAL)
    assert (made.fastest.recomputed, made.fastest.seconds) == (0, pytest.approx(made.all_kept.seconds))
    slow = dataclasses.replace(MACHINE, ssd_read_bytes_per_s=1e9, ssd_write_bytes_per_s=1e9)
    assert choose(WORK, slow, 0.5 * MIXES.simulate(0, 0).peak_bytes, IDEAL).fastest.offloaded == 0


def test_activation_memory_is_what_weights_states_and_kernels_leave():
    made = full_plan(WORK, Limits(gpu_bytes=40 * 2**30), MACHINE)
    assert made.choice.room_bytes == bytes_for_activations(WORK, 40 * 2**30)
    other_bytes = 40 * 2**30 - made.choice.room_bytes
    assert other_bytes == pytest.approx(16 * SPEC.parameters + 1_300_000_000)
    assert full_plan(WORK, Limits(), MACHINE).choice is None  # the amount of memory is not given
    other = dataclasses.replace(WORK, system="in_memory")
    assert full_plan(other, Limits(gpu_bytes=40 * 2**30), MACHINE).choice is None


def test_unknown_activation_policy_is_refused():
    with pytest.raises(ValueError, match="invalid activation policy 'compress': expected keep, recompute, offload"):
        dataclasses.replace(WORK, activation_policies=("compress",))


def test_plan_command_recommends_a_mix_that_train_accepts(capsys):
    words = ["plan", "--model", "llama3.2-1b", "--batch", "4", "--context", "4096", "--system", "ssdtrain"]
    words += ["--checkpointing", "ssd", "--gpu-memory", "40", "--testbed", "lohan-4090"]
    main(words)
    out = capsys.readouterr().out
    assert "activations of 16 blocks, " in out
    assert "fastest that fits: " in out
    assert "all recomputed" in out
    mix = re.search(r"--checkpointing ssd --activations (\S+)", out).group(1)
    config = {"model": "llama3.2-1b", "data": ["text"], "checkpointing": "ssd", "activations": mix}
    assert len(complete(config).activation_policy().per_block(16, "")) == 16  # as the trainer reads it
    main([*words, "--json"])
    found = json.loads(capsys.readouterr().out)["activations"]
    assert found["fastest"]["peak_bytes"] <= found["room_bytes"]
    assert found["all_kept"]["seconds"] <= found["fastest"]["seconds"]
