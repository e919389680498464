"""DeepSpeed's passes where the device is a CPU: what each read overlaps with, and when the thread waits for gradients.

The expected values are from real steps: bytes from traces of Llama3.2-1B's twin (k = 4) in
`results/reference/epyc-genoa-2core`, and the order in which hooks of DeepSpeed 0.19.8 submitted reads, logged in such a
run.
"""

from dataclasses import replace

import pytest

from memascend.baselines.protocol import on_cpu
from memascend.planner import model_spec
from memascend.planner.step import Step, step_of
from memascend.planner.workload import SwapSizes, Workload

TWIN = model_spec("llama3.2-1b").twin(4)
MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def work(system: str, **others) -> Workload:
    said = {"spec": TWIN, "system": system, "dtype": "bf16", "batch": 1, "context": 32, "device": "cpu"}
    return Workload(**said | others)


def served(step: Step, resource: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for task in step.tasks:
        if resource in task.needs:
            found[task.phase] = found.get(task.phase, 0) + round(task.needs[resource])
    return found


def read_during(step: Step, phase: str, block: int) -> list[str]:
    """Return, for each matrix of the block in the order of reads, the module that is computed while it is read."""
    products = {task.after[0]: task.name for task in step.tasks if "gpu0" in task.needs}
    reads = [task for task in step.tasks if task.phase == phase and f"read model.layers.{block}." in task.name]
    return [products.get(task.after[0], "").removeprefix(f"{phase}: ") for task in reads]


@pytest.mark.parametrize(
    ("system", "forward", "backward"),
    [("zero_infinity", 187_826_176, 146_341_888), ("memascend", 187_301_888, 146_866_176)],
)
def test_each_phase_reads_the_bytes_of_a_real_step(system, forward, backward):
    assert served(step_of(work(system)), "ssd.read") | {"optimizer": 0} == {
        "forward": forward,
        "backward": backward,
        "optimizer": 0,
    }


def test_uniform_buffer_read_overlaps_module_after_the_freeing_one():
    step = step_of(work("zero_infinity"))
    small = ["block 7: down_proj", "", "block 8: k_proj", "block 8: v_proj"]
    assert read_during(step, "forward", 9) == [
        *small,
        "block 8: o_proj",
        "",
        "",
    ]  # norm and activation have no products
    small = ["block 11: q_proj", "", "block 10: up_proj", ""]
    assert read_during(step, "backward", 9) == [*small, "", "block 10: v_proj", "block 10: k_proj"]


def test_adaptive_pool_read_overlaps_same_matrix_of_previous_block():
    step = step_of(work("memascend"))
    assert read_during(step, "forward", 9) == [f"block 8: {matrix}" for matrix in MATRICES]
    assert read_during(step, "backward", 9) == [f"block 10: {matrix}, again" for matrix in MATRICES]


@pytest.mark.parametrize(("buffers", "waits"), [(4, True), (5, False)])
def test_thread_waits_for_gradients_that_fill_all_swap_buffers(buffers, waits):
    step = step_of(work("memascend", sizes=SwapSizes(optimizer_buffers=buffers)))
    last = [task for task in step.tasks if "last gradients" in task.name]
    assert bool(last) == waits
    if waits:  # the embedding's gradients arrive when the blocks' fill the buffers
        assert {name for name in last[0].after if "write" in name} == {f"write gradients {n}" for n in (1, 2, 3, 4)}
    norms = 4 * sum(tensor.numel for tensor in TWIN.tensors() if not tensor.is_matrix)  # stay in memory
    embedding = 4 * next(iter(TWIN.tensors())).numel  # written when the optimizer begins
    assert served(step, "ssd.write")["backward"] - norms - embedding == 243_269_632  # as in a real step


def test_gradients_are_written_in_buckets():
    first = [task for task in step_of(work("zero_infinity")).tasks if task.name == "write gradients 1"]
    assert first[0].after == ("backward: block 7: down_proj",)  # 31 of 77 million elements are nine blocks and a part


def test_hooks_do_not_wait_with_gpu_mixture_or_zero_offload():
    on_gpu = [replace(work("zero_infinity"), device=device) for device in (None, "cuda")]
    mixture = replace(work("zero_infinity"), spec=model_spec("qwen3-30b-a3b").twin(8))
    for each in (*on_gpu, mixture, work("zero_offload")):
        assert not on_cpu.hooks_wait(Step(each)), each
        assert not [task for task in step_of(each).tasks if "hook" in task.name]


@pytest.mark.parametrize("changes", [{"ranks": 2}, {"accumulation": 3}, {"blocks_in_flight": 2}])
@pytest.mark.parametrize("system", ["zero_infinity", "memascend"])
def test_every_weight_is_read_in_every_configuration(system, changes):
    one = sum(served(step_of(work(system)), "ssd.read")[phase] for phase in ("forward", "backward"))
    step = step_of(work(system, **changes))
    read = served(step, "ssd.read")
    assert read["forward"] + read["backward"] == one * changes.get("accumulation", 1)


def test_last_bucket_is_written_late_if_weights_stay_on_device():
    """In a traced step of zero3, as here, four fifths of the gradients
    were submitted when the embedding's had arrived."""
    on_cpu_, on_gpu = (step_of(work("mlp_offload", arm="zero3", device=device)) for device in ("cpu", "cuda"))
    totals = [served(step, "ssd.write")["backward"] for step in (on_cpu_, on_gpu)]
    assert totals[0] == pytest.approx(totals[1], abs=10)
    writes = [task for task in on_cpu_.tasks if task.phase == "backward" and "ssd.write" in task.needs]
    late = sum(task.needs["ssd.write"] for task in writes if "gradients of embedding" in task.after[0])
    assert late / totals[0] == pytest.approx(0.8, abs=0.1)
    assert not [task for task in on_gpu.tasks if task.name == "write gradients 1"]
