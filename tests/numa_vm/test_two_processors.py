"""Kernels on two nodes with processors, in a separate guest: threads work near their data."""

import os
from pathlib import Path

import pytest
import torch

from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.memory.placement import weighted
from memascend.memory.topology import Topology
from memascend.ops.adamw import adamw_, chunk_counts, divided_work

pytestmark = pytest.mark.numa_vm

ELEMENTS = 2 << 20


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def tensors(placement):
    """Make parameter, gradient and moments with equal contents, with `placement` for all of them."""
    generator, allocator = torch.Generator().manual_seed(1), PageAlignedPinnedAllocator(lock=False)
    made = []
    for name in ("param", "grad", "exp_avg", "exp_avg_sq"):
        tensor = allocator.allocate(ELEMENTS, torch.float32, name=name, owner="test", placement=placement)
        made.append(tensor.copy_(torch.rand(ELEMENTS, generator=generator)))
    return made


def updated(param, grad, exp_avg, exp_avg_sq):
    adamw_(param, grad, exp_avg, exp_avg_sq, step=1, lr=1e-3)
    return param


def affinities():
    return {task.name: os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir()}


def test_adamw_runs_most_parts_on_the_nearest_processors(two_threads):
    """The tensors alternate between two cards, half a MiB on each, and each card is nearest to another processor."""
    topology = Topology.read()
    if len(topology.with_cpus) < 2 or len(topology.memory_only) < 2:
        pytest.skip("needs two nodes with processors and two without, such as the guest has")
    cards = [node.number for node in topology.memory_only[:2]]
    unplaced, before = updated(*tensors(None)), affinities()
    best = 0.0
    for _ in range(5):  # the host may delay one of the guest's processors, and the other then takes its chunks
        placed = tensors(weighted(dict.fromkeys(cards, 1)))
        counted = chunk_counts()
        assert torch.equal(updated(*placed), unplaced)
        near, elsewhere = (now - then for now, then in zip(chunk_counts(), counted))
        assert near + elsewhere == ELEMENTS // (512 * 32)
        best = max(best, near / (near + elsewhere))
    assert best > 0.75
    divided = divided_work(*chunk_counts(), topology)  # as a run reports it
    assert divided["nodes"] == [node.number for node in topology.with_cpus]
    assert divided["near"] + divided["elsewhere"] >= ELEMENTS // (512 * 32)
    assert divided["near"] > 0
    after = affinities()
    assert {task: after[task] for task in before if task in after} == {t: m for t, m in before.items() if t in after}
