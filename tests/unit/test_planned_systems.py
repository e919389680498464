"""Colossal-AI and FlashNeuron, which LoHan compares with: what they store and move; neither can be trained."""

import pytest

from memascend import systems
from memascend.planner import Workload, model_spec, plan
from memascend.planner.gpu_memory import gpu_memory
from memascend.planner.host_budget import _leanest_system
from memascend.planner.options import Stack
from memascend.planner.plan_result import _others
from memascend.planner.step import io_volume

SPEC = model_spec("llama3.1-8b")


def test_colossal_ai_keeps_weights_in_memory_and_streams_moments():
    """6 bytes per parameter in host memory, and the moments of two tensors; 8 bytes read and 8 written per step."""
    work = Workload(spec=SPEC, system="colossal_ai", dtype="bf16", stack=Stack(checkpointing="plain"))
    largest = max(tensor.numel for tensor in SPEC.tensors())
    made = plan(work, process_overhead=False)
    assert made.host_bytes == pytest.approx(6 * SPEC.parameters + 2 * 8 * largest, rel=1e-3)
    moved = io_volume(work)
    assert moved.total_read_bytes == moved.total_write_bytes == moved.stored_bytes == 8 * SPEC.parameters
    assert set(moved.read_bytes) == {"forward", "backward", "optimizer"}
    assert moved.read_bytes["forward"] == moved.read_bytes["backward"] == 0


def test_flashneuron_keeps_states_and_two_activation_blocks_on_the_gpu():
    work = Workload(spec=SPEC, system="flashneuron", dtype="bf16", stack=Stack(checkpointing="ssd"))
    parts = gpu_memory(work).components()
    assert parts["model states"] == 16 * SPEC.parameters
    assert "activations of 2 blocks" in parts


def test_systems_that_cannot_train_are_not_suggested():
    planned_alone = {name for name in systems.names() if not systems.arrangement(name).runs}
    assert planned_alone == {"all_in_gpu", "colossal_ai", "flashneuron"}
    work = Workload(spec=SPEC, system="zero_infinity", dtype="bf16")
    assert planned_alone.isdisjoint(made.work.system for made in _others(work))
    assert _leanest_system(work).settings["system"] not in planned_alone
