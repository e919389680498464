"""The swapper hands no buffer on that is still being read into, and reads nothing ahead that is gathered already."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytestmark = pytest.mark.deepspeed

NUMEL = 1024


@pytest.fixture
def swapper(tmp_path, monkeypatch):
    """Our swapper over files of its own, with a pool of one buffer."""

    from memascend.integrations.deepspeed.aio import AioModule, IoCounters
    from memascend.integrations.deepspeed.derived import DerivedSettings
    from memascend.integrations.deepspeed.param_swapper import pooled_swapper_class
    from memascend.memory.pinned import PageAlignedPinnedAllocator
    from memascend.memory.pools import AdaptiveBufferPool, adaptive_pool_classes

    # It asks for the rank, and there is no process group here.
    monkeypatch.setattr("deepspeed.runtime.swap_tensor.partitioned_param_swapper.print_rank_0", lambda *_, **__: None)
    allocator = PageAlignedPinnedAllocator()
    derived = DerivedSettings({})
    made = object.__new__(pooled_swapper_class("adaptive", allocator, 1, None, derived))
    handle = AioModule(allocator, IoCounters(), derived.io).aio_handle()
    made.aio_read_handle, made.dtype, made.swap_element_size = handle, torch.float16, 2
    made.numel_alignment, made.invalid_buffer = 256, torch.empty(1, dtype=torch.float16)
    made.param_id_to_buffer_id, made.param_id_to_swap_buffer = {}, {}
    made.param_id_to_numel = dict.fromkeys(range(3), NUMEL)
    made.available_params, made.available_numel, made.available_buffer_ids = set(), 0, []
    made.pending_reads, made.inflight_params, made.inflight_swap_in_buffers, made.inflight_numel = 0, [], [], 0
    made._swapped_in, made._beside_pool, made._staging = {}, set(), None
    made.denied_prefetches = made.evicted_prefetches = made.released_gathered = made.buffers_beside_pool = 0
    made.pool = AdaptiveBufferPool(adaptive_pool_classes([[NUMEL]], [], 1), torch.float16, allocator)
    made._get_swap_paths = lambda params, must_exist=False: [str(tmp_path / f"{p.ds_id}.swp") for p in params]
    for number in range(3):
        torch.full((NUMEL,), float(number), dtype=torch.float16).numpy().tofile(tmp_path / f"{number}.swp")
    return made


def parameter(number: int, gathered: str = "NOT_AVAILABLE"):
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

    partition = torch.empty(0, dtype=torch.float16)
    partition.status, partition.ds_numel = PartitionedParamStatus.NOT_AVAILABLE, NUMEL
    return SimpleNamespace(ds_id=number, ds_tensor=partition, ds_status=SimpleNamespace(name=gathered))


def test_a_buffer_is_released_only_after_its_read_has_ended(swapper):
    first, second = parameter(0), parameter(1)
    swapper.swap_in([first], async_op=True)
    assert swapper.pending_reads == 1
    swapper.remove_partition_and_release_buffers([first])
    assert swapper.pending_reads == 0  # the pool's only buffer is nobody's now
    swapper.swap_in([second], async_op=False)
    assert torch.equal(second.ds_tensor, torch.full((NUMEL,), 1.0, dtype=torch.float16))
    assert first.ds_tensor.numel() == 1


def test_a_gathered_parameter_is_not_read_ahead(swapper):
    swapper.swap_in([parameter(0, gathered="AVAILABLE")], async_op=True)
    assert swapper.pending_reads == 0
    assert swapper.available_swap_in_buffers() == 1


def test_a_read_that_must_not_fail_gets_a_buffer_beside_a_pool_that_is_being_gathered(swapper):
    first, second = parameter(0), parameter(1)
    swapper.swap_in([first], async_op=False)
    first.ds_status.name = "INFLIGHT"
    swapper.swap_in([second], async_op=False)
    assert torch.equal(first.ds_tensor, torch.zeros(NUMEL, dtype=torch.float16))
    assert torch.equal(second.ds_tensor, torch.ones(NUMEL, dtype=torch.float16))
    assert swapper.buffers_beside_pool == 1
    swapper.remove_partition_and_release_buffers([second])
    swapper.remove_partition_and_release_buffers([first])
    assert swapper.available_swap_in_buffers() == 1


def test_what_was_read_ahead_is_given_back_before_a_step(swapper):
    first = parameter(0)
    swapper.swap_in([first], async_op=True)
    swapper.release_read_ahead()
    assert swapper.available_swap_in_buffers() == 1
    assert first.ds_tensor.status.name == "NOT_AVAILABLE"


def test_the_next_block_is_read_into_what_the_device_has_a_copy_of(swapper):
    first, second = parameter(0), parameter(1)
    swapper.swap_in([first], async_op=False)
    first.ds_status.name = "AVAILABLE"
    swapper.swap_in([second], async_op=True)
    assert swapper.released_gathered == 1
    # DeepSpeed's prefetcher goes on to see that the first is there; its data are on the device alone.
    assert (first.ds_tensor.status.name, first.ds_tensor.numel()) == ("AVAILABLE", 1)
    swapper.remove_partition_and_release_buffers([first])  # as when its module has run
    assert first.ds_tensor.status.name == "NOT_AVAILABLE"
    swapper.synchronize_reads()
    assert torch.equal(second.ds_tensor, torch.ones(NUMEL, dtype=torch.float16))
    swapper.remove_partition_and_release_buffers([second])
    assert (swapper.available_swap_in_buffers(), swapper.available_params, swapper.available_numel) == (1, set(), 0)


def test_a_gather_under_way_keeps_its_buffer_from_a_prefetch(swapper):
    first, second = parameter(0), parameter(1)
    swapper.swap_in([first], async_op=False)
    first.ds_status.name = "INFLIGHT"
    swapper.swap_in([second], async_op=True)
    assert (swapper.denied_prefetches, swapper.released_gathered, swapper.pending_reads) == (1, 0, 0)
    assert torch.equal(first.ds_tensor, torch.zeros(NUMEL, dtype=torch.float16))


def test_a_device_that_orders_its_own_copies_keeps_gathered_buffers(swapper, monkeypatch):
    device = SimpleNamespace(resolves_data_dependency=lambda: True, is_synchronized_device=lambda: False)
    monkeypatch.setattr("memascend.integrations.deepspeed.param_swapper.get_accelerator", lambda: device)
    first = parameter(0)
    swapper.swap_in([first], async_op=False)
    first.ds_status.name = "AVAILABLE"
    swapper.swap_in([parameter(1)], async_op=True)
    assert (swapper.denied_prefetches, swapper.released_gathered) == (1, 0)


def test_what_was_read_ahead_of_another_size_stays(swapper):
    from memascend.memory.pinned import PageAlignedPinnedAllocator
    from memascend.memory.pools import AdaptiveBufferPool, adaptive_pool_classes

    small = NUMEL // 2
    classes = adaptive_pool_classes([[NUMEL, small]], [], 1)
    swapper.pool = AdaptiveBufferPool(classes, torch.float16, PageAlignedPinnedAllocator())
    swapper.param_id_to_numel[1] = small
    first, other, third = parameter(0), parameter(1), parameter(2)
    swapper.swap_in([first, other], async_op=True)
    swapper.swap_in([third], async_op=False)  # must not fail: of the two read ahead, only the first's buffer would do
    assert (swapper.evicted_prefetches, first.ds_tensor.status.name) == (1, "NOT_AVAILABLE")
    assert torch.equal(other.ds_tensor, torch.ones(small, dtype=torch.float16))
    assert torch.equal(third.ds_tensor, torch.full((NUMEL,), 2.0, dtype=torch.float16))
