"""LoHan's step on the testbed of its Figure 1: traffic as the paper counts it, and the gain of overlapping.

The SSD rates of that figure are not printed; 21.8 and 18.4 GB/s solve its two SSD utilisations, so the figure's own
times are not tested here. ZeRO-Infinity's optimizer stage was not used for that: 79 % of 23 s on the SSD.
"""

import dataclasses

import pytest

from hardware.registry import load_testbed
from memascend.planner import Workload, model_spec
from memascend.planner.machine import Calibrations, machine_from_testbed
from memascend.planner.options import Stack
from memascend.planner.step import io_volume, step_of
from memascend.planner.step_time import step_time

SPEC = model_spec("qwen2.5-14b")  # the paper's 13B has no committed configuration: seconds are scaled to its 13e9
MACHINE = dataclasses.replace(
    machine_from_testbed(load_testbed("lohan-4090")), ssd_read_bytes_per_s=21.8e9, ssd_write_bytes_per_s=18.4e9
)
COSTS = dataclasses.replace(Calibrations(), gpu_efficiency=145.8 / 165.2, host_seconds_per_parameter=0.0)


def work(arm="optimized", system="lohan", batch=32):
    return Workload(spec=SPEC, system=system, arm=arm, dtype="bf16", batch=batch, context=1024)


def simulated(arm="optimized", **changes):
    return step_time(work(arm, **changes), MACHINE, calibrations=COSTS)


def test_the_ssd_reads_and_writes_what_section_ii_counts():
    """2P in forward; 14P read and 14P written in backward; and the inputs
    of blocks, which the engine stores on the SSD."""
    volume, p = step_of(work()).volume(), SPEC.parameters
    inputs = 2 * 32 * 1024 * SPEC.hidden * SPEC.layers
    assert volume.read_bytes["forward"] == pytest.approx(2 * p, rel=0.001)
    assert volume.write_bytes["forward"] == inputs
    assert volume.read_bytes["backward"] == pytest.approx(14 * p + inputs, rel=0.001)
    assert volume.write_bytes["backward"] == pytest.approx(14 * p, rel=0.001)


@pytest.mark.parametrize("arm", ["optimized", "none"])
@pytest.mark.parametrize(
    ("dtype", "states", "gradients", "a_parameter"),
    [
        ("bf16", "fp32", "fp32", 14),
        ("bf16", "bf16", "fp32", 6),
        ("bf16", "bf16", "bf16", 6),
        ("fp16", "fp32", "fp32", 14),
    ],
)
def test_ssd_holds_two_versions_and_waiting_gradients(arm, dtype, states, gradients, a_parameter):
    """Weights of the states' own type are their masters: Llama-3.1-8B with bf16 states takes 44.9 GiB, not 59.8."""
    types = {"dtype": dtype, "states": states, "gradients": gradients}
    planned = dataclasses.replace(work(arm), stack=Stack(checkpointing="plain"), **types)
    waiting = {"fp32": 4, "bf16": 2}[gradients] if arm == "none" else 0
    stored, expected = io_volume(planned).stored_bytes, (2 * a_parameter + waiting) * SPEC.parameters
    spare = 2**30 if waiting else 0  # their file grows in steps of at most this size
    assert expected <= stored <= 1.001 * expected + spare


@pytest.mark.parametrize("versions", ["two", "one", "checkpoint"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_planned_tasks_move_what_the_engine_moves(states, clip, accumulation, versions):
    """The seconds thus belong to the bytes of a plan. The remaining difference: the last blocks are not read twice."""
    more = {"states": states, "clip": clip, "accumulation": accumulation, "state_versions": versions}
    planned = dataclasses.replace(work(batch=2), **more)
    tasks, engine = step_of(planned).volume(), io_volume(planned)
    assert tasks.total_write_bytes == pytest.approx(engine.total_write_bytes, rel=0.001)
    assert engine.total_read_bytes <= tasks.total_read_bytes <= 1.04 * engine.total_read_bytes


def test_optimizer_in_backward_is_faster_with_more_overlap():
    """Figure 7's order: optimized, naive, the optimizer afterwards (whose
    gradients are written and read in addition)."""
    seconds = {arm: simulated(arm).seconds for arm in ("optimized", "naive", "none")}
    assert seconds["optimized"] < seconds["naive"] < seconds["none"]
    phases = {phase.name: phase for phase in simulated().phases}
    assert set(phases) == {"forward", "backward"}
    slowest = max(phases["backward"].by_resource.values())
    assert slowest <= phases["backward"].seconds < 1.1 * slowest


def test_zero_infinitys_optimizer_spends_its_published_seconds_on_the_ssd():
    """Held out: 14P read and 14P written take 18.2 s (Fig. 1a: 79 % of 23 s); no constant here was solved from that.

    DeepSpeed's own optimizer moves the gradients too; LoHan's count of 14P leaves them out, and so does this test.
    """
    ssd = step_time(work("as_published", system="zero_infinity"), MACHINE, calibrations=COSTS)
    phase = next(phase for phase in ssd.phases if phase.name == "optimizer")
    gradients = 4 * SPEC.parameters / 21.8e9
    states = (phase.by_resource["SSD"] - gradients) * 13e9 / SPEC.parameters
    read_weights = 2 * 13e9 / 21.8e9  # LoHan counts this read of the weights here; DeepSpeed does it in backward
    assert states + read_weights == pytest.approx(0.79 * 23, rel=0.03)


def test_algorithm_1_saves_simulated_time_only_if_gpu_bound():
    """At batch 64 the GPU is the bottleneck: swapping part of the activations saves recomputation and time."""
    swapping, all_again = (simulated(arm, batch=64) for arm in ("as_published", "optimized"))
    written = [made.simulated.served_s["forward"]["ssd"] for made in (swapping, all_again)]
    products = [made.simulated.served_s["backward"]["gpu0"] for made in (swapping, all_again)]
    assert written[0] > written[1]
    assert products[0] < products[1]
    assert swapping.seconds < all_again.seconds
    assert simulated("as_published", batch=16).seconds == pytest.approx(
        simulated("optimized", batch=16).seconds, rel=1e-3
    )


# -- steps of a run: the engine cuts the embedding by rows -------------------------------------------------------------

TWIN = model_spec("llama3.2-1b").twin(4)  # tied; five slices


def run_of_the_engine(**others):
    said = {"spec": TWIN, "system": "lohan", "dtype": "bf16", "batch": 1, "context": 32, "device": "cpu"}
    return Workload(**said | others)


def moved(step, what):
    return sum(round(task.needs.get(what, 0)) for task in step.tasks)


def test_run_moves_the_traced_bytes_except_those_in_memory():
    """The numbers are from traces in results/reference/epyc-genoa-2core:
    1,147,224,064 bytes written, with 75,776 of padding."""
    step = step_of(run_of_the_engine())
    inputs = 16 * 32 * TWIN.hidden * 2
    assert moved(step, "ssd.write") - inputs == 1_147_224_064 - 75_776
    blocks_kept = 3 * 2 * sum(tensor.numel for tensor in TWIN.tensors() if tensor.block == 0 and tensor.is_matrix)
    not_looked_up = 2 * (32_064 - 7_552) * TWIN.hidden  # rows without a token of that batch
    assert moved(step, "ssd.read") - inputs - blocks_kept - not_looked_up == pytest.approx(1_320_030_000, rel=0.001)


def test_first_gradients_of_a_tied_matrix_are_written_to_ssd():
    step = step_of(run_of_the_engine())
    writes = [task for task in step.tasks if task.name.startswith("write first gradients of output")]
    assert sum(task.needs["ssd.write"] for task in writes) == 4 * 32_064 * TWIN.hidden
    assert len(writes) == 5
    untied = dataclasses.replace(TWIN, tied=False)
    assert not [t for t in step_of(run_of_the_engine(spec=untied)).tasks if "first gradients" in t.name]


def test_slicing_the_embedding_makes_a_step_faster():
    """Its states are 40 % of this twin's: as one piece they are read, updated and written in turn."""
    machine = dataclasses.replace(MACHINE, ssd_read_bytes_per_s=6e8, ssd_write_bytes_per_s=4.5e8)
    machine = dataclasses.replace(machine, described={"ssd_duplex": True})
    run, paper = (run_of_the_engine(device=device) for device in ("cpu", None))
    sliced, whole = (step_time(each, machine, calibrations=COSTS).seconds for each in (run, paper))
    assert sliced < whole


def test_the_seconds_of_the_output_are_divided_among_its_slices():
    costs = dataclasses.replace(COSTS, output_s={"forward": 2.0, "backward": 4.0})
    step = step_of(run_of_the_engine(), MACHINE, costs)
    rate = MACHINE.gpu_flops_per_s * costs.gpu_efficiency
    for phase, seconds in costs.output_s.items():
        products = [t.needs["gpu0"] for t in step.tasks if t.name.startswith(f"{phase}: output")]
        assert len(products) == 5
        assert sum(products) / rate == pytest.approx(seconds)


def test_paper_counts_do_not_slice_embedding_or_output():
    for each in (work(), run_of_the_engine(device=None)):
        assert not [task for task in step_of(each).tasks if "output 0" in task.name or "embedding 0" in task.name]
