"""SSDTrain's step: what is written to the drive and when, and the peak of memory, each calculated manually."""

import dataclasses

import pytest

from memascend.baselines.ssdtrain.schedule import KEEP, OFFLOAD, RECOMPUTE, SAVED, backward, forward, regions_of
from memascend.planner import Workload, model_spec
from memascend.planner.gpu_memory import activation_writes, block_bytes_per_token, logits_bytes
from memascend.planner.limits import Limits
from memascend.planner.machine import Calibrations, MachineSpec
from memascend.planner.options import Stack
from memascend.planner.plan_result import full_plan
from memascend.planner.step import Step, step_of
from memascend.planner.step_time import resources_for, step_time
from memascend.simulator import simulate

SPEC = model_spec("llama3.2-1b")
CHECKPOINTING = {"keep": "none", "recompute": "plain"}
MACHINE = MachineSpec(
    name="round",
    gpu_flops_per_s=100e12,
    pcie_bytes_per_s=1e12,
    ssd_read_bytes_per_s=400e9,
    ssd_write_bytes_per_s=400e9,
    memory_bytes_per_s=100e9,
)
SLOW = dataclasses.replace(MACHINE, ssd_read_bytes_per_s=60e9, ssd_write_bytes_per_s=30e9)
IDEAL = Calibrations(gpu_efficiency=1.0)
TOKENS = 4 * 2048
BLOCK = TOKENS * block_bytes_per_token(SPEC, 2048, flash=True, fused=False)
LOSS = logits_bytes(SPEC, TOKENS, chunked=True)
INPUT = 2 * TOKENS * SPEC.hidden


def work(arm="ssdtrain", **changes):
    stack = Stack(checkpointing=CHECKPOINTING.get(arm, "ssd"))
    size = {"batch": 4, "context": 2048, "dtype": "bf16"} | changes
    return Workload(spec=SPEC, system="ssdtrain", arm=arm, stack=stack, **size)


def made(arm="ssdtrain", machine=MACHINE, **changes):
    return step_time(work(arm, **changes), machine, calibrations=IDEAL)


def peak(arm="ssdtrain", machine=MACHINE, **changes):
    return made(arm, machine, **changes).simulated.peak(SAVED)


def spans(simulated):
    return {event.name: (event.begin_s, event.end_s) for event in simulated.events}


def test_step_writes_as_many_bytes_as_the_plan_counts():
    assert step_of(work()).volume().activation_bytes == activation_writes(work()) == (SPEC.layers - 1) * BLOCK
    published = step_of(work("as_published")).volume()
    assert published.activation_bytes == published.total_write_bytes == SPEC.layers * BLOCK
    for arm in CHECKPOINTING:
        assert step_of(work(arm)).volume().total_bytes == 0


def test_wear_counts_activations_once():
    for machine in (None, MACHINE, dataclasses.replace(SLOW, ssd_write_bytes_per_s=1e9)):
        wear = full_plan(work(), Limits(), machine).wear
        assert wear.bytes_per_step == wear.activation_bytes == activation_writes(work())
        if machine:  # the time that hides the writes follows from the products, however slow this drive is
            products = (
                3 * sum(piece.flops for piece in step_of(work()).pieces) / (100e12 * Calibrations().gpu_efficiency)
            )
            assert wear.activation_bytes_per_s == pytest.approx(activation_writes(work()) / (products / 2))
    elsewhere = Workload(spec=SPEC, batch=4, context=2048, stack=Stack(checkpointing="ssd"))  # the drop-in's own step
    wear = full_plan(elsewhere, Limits()).wear
    assert wear.bytes_per_step - wear.activation_bytes == step_of(elsewhere).volume().total_write_bytes
    assert wear.untimed_bytes == wear.activation_bytes > 0


def test_fast_drive_is_free_and_recomputing_costs_one_forward_pass():
    kept, again = made("keep").seconds, made("recompute").seconds
    assert made().seconds == pytest.approx(kept)
    assert made("as_published").seconds == pytest.approx(kept)
    head = 2 * TOKENS * SPEC.vocab * SPEC.hidden / 100e12
    assert again - kept == pytest.approx((kept - 3 * head) / 3)


def test_peak_memory_matches_manual_calculation():
    assert peak("keep") == pytest.approx(SPEC.layers * BLOCK + LOSS)
    assert peak("recompute") == pytest.approx(SPEC.layers * INPUT + max(BLOCK, LOSS))
    assert peak() == pytest.approx(BLOCK + LOSS)
    assert peak("as_published") == pytest.approx(BLOCK / 4 + LOSS)
    shared = Workload(spec=SPEC, system="ssdtrain", arm="keep", stack=Stack(checkpointing="none", megatron_gpus=2))
    saved = sum(region.saved for region in regions_of(step_of(shared)))
    assert saved == pytest.approx(SPEC.layers * 4096 * (2 * 10 + 24) * SPEC.hidden)


def test_loads_come_in_reverse_order_of_stores_one_piece_ahead():
    simulated = made().simulated
    stores, loads = ([e.name for e in simulated.events if e.resource == f"ssd.{way}"] for way in ("write", "read"))
    assert len(stores) == len(loads) == 4 * (SPEC.layers - 1)
    assert [name.removeprefix("load ") for name in loads] == [name.removeprefix("store ") for name in stores[::-1]]
    at = spans(simulated)
    for name in loads:
        assert at[name][1] <= at[name.replace("load", "backward")][0]
        assert at[name][0] >= at[name.replace("load", "backward")][0] - 2 * (at["forward 0: block 0.0"][1] * 2)


def test_unwritten_pieces_of_slow_drive_are_forwarded_instead_of_read():
    regions = regions_of(step_of(work(), SLOW, IDEAL))
    late = {region.piece.name for region in regions if region.forwarded}
    offloaded = [region.piece.name for region in regions if region.policy == OFFLOAD]
    assert late
    assert late == set(offloaded[-len(late) :])  # the last ones: first in, first out
    volume = step_of(work(), SLOW, IDEAL).volume()
    assert volume.total_read_bytes == pytest.approx(volume.total_write_bytes - len(late) * BLOCK / 4)
    assert peak() < peak(machine=SLOW) < peak("keep")


def test_insufficient_drive_determines_the_step_time():
    slower = dataclasses.replace(MACHINE, ssd_read_bytes_per_s=20e9, ssd_write_bytes_per_s=20e9)
    busy = step_of(work(), slower, IDEAL).volume().total_bytes / 20e9
    assert made("keep").seconds < busy <= made(machine=slower).seconds < 1.25 * busy


def test_hybrid_writes_what_the_drive_absorbs_without_costing_time():
    seconds = sum(piece.flops for piece in step_of(work()).pieces) / 100e12
    written = step_of(work("hybrid"), SLOW, IDEAL).volume().activation_bytes
    assert 0.8 * 30e9 * seconds < written <= 0.9 * 30e9 * seconds
    assert made("hybrid", SLOW).seconds == pytest.approx(made("keep", SLOW).seconds, rel=0.02)
    assert peak("hybrid", SLOW) < peak("keep", SLOW)
    assert step_of(work("hybrid"), MACHINE, IDEAL).volume() == step_of(work(), MACHINE, IDEAL).volume()


@pytest.mark.parametrize("accumulation", [2, 5])
def test_micro_batches_multiply_bytes_and_time_but_not_memory(accumulation):
    one, several = made(), made(accumulation=accumulation)
    assert several.seconds == pytest.approx(accumulation * one.seconds)
    assert several.simulated.peak(SAVED) == pytest.approx(one.simulated.peak(SAVED))
    whole = step_of(work(accumulation=accumulation)).volume().activation_bytes
    assert whole == pytest.approx(accumulation * activation_writes(work()))


def test_every_block_can_have_its_own_policy():
    step = Step(work(), MACHINE, IDEAL)
    policies = [OFFLOAD] * 6 + [RECOMPUTE] * 6 + [KEEP] * 4
    regions = regions_of(step, policies)
    backward(step, regions, after=forward(step, regions))
    simulated = simulate(step.tasks, resources_for(step))
    assert step.activation_bytes == pytest.approx(6 * BLOCK)
    assert simulated.peak(SAVED) == pytest.approx(6 * INPUT + 4 * BLOCK + LOSS)
    assert sum(1 for event in simulated.events if event.name.startswith("recompute")) == 0  # it only takes memory
    kept, again = made("keep").seconds, made("recompute").seconds
    assert simulated.seconds == pytest.approx(kept + 6 / 16 * (again - kept))
    with pytest.raises(ValueError, match="2 policies for 16 blocks"):
        regions_of(step, [KEEP, KEEP])


@pytest.mark.parametrize("arm", ["ssdtrain", "hybrid", "as_published", "keep", "recompute"])
def test_all_memory_is_released(arm):
    for machine in (MACHINE, SLOW):
        levels = made(arm, machine).simulated.levels
        assert [changes[-1][1] for changes in levels.values()] == pytest.approx([0.0] * len(levels), abs=1.0)
