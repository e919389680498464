"""The swapper reuses no buffer that is still being read into, and does not read ahead what is already gathered."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytestmark = pytest.mark.deepspeed

NUMEL = 1024


@pytest.fixture
def swapper(tmp_path):
    """Make our swapper over temporary files, with a pool of one buffer."""

    from memascend.integrations.deepspeed.aio import AioModule, IoCounters
    from memascend.integrations.deepspeed.param_swapper import pooled_swapper_class
    from memascend.memory.pinned import PageAlignedPinnedAllocator
    from memascend.memory.pools import AdaptiveBufferPool, adaptive_pool_classes
    from memascend.planner.derived_sizes import io_settings

    allocator = PageAlignedPinnedAllocator()
    made = object.__new__(pooled_swapper_class("adaptive", allocator, 1, None))
    module = AioModule(allocator, IoCounters(), io_settings({}, None))
    made.aio_read_handle, made.aio_write_handle = module.aio_handle(), module.aio_handle()
    made.dtype, made.swap_element_size, made.numel_alignment = torch.float16, 2, 256
    made.invalid_buffer, made.swap_out_params = torch.empty(1, dtype=torch.float16), []
    made.param_id_to_numel = dict.fromkeys(range(3), NUMEL)
    made.id_to_path = {number: str(tmp_path / f"{number}.swp") for number in range(3)}
    made._start_stream()
    made.stream.use_pool(AdaptiveBufferPool(adaptive_pool_classes([[NUMEL]], [], 1), torch.float16, allocator))
    for number in range(3):
        made.stream.register(number, NUMEL)
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
    assert first.ds_tensor.status.name == "INFLIGHT"
    swapper.remove_partition_and_release_buffers([first])
    assert swapper.available_swap_in_buffers() == 0  # the pool's only buffer is being read into
    swapper.swap_in([second], async_op=False)
    assert swapper.buffers_beside_pool == 0
    assert torch.equal(second.ds_tensor, torch.full((NUMEL,), 1.0, dtype=torch.float16))
    assert first.ds_tensor.numel() == 1


def test_a_gathered_parameter_is_not_read_ahead(swapper):
    swapper.swap_in([parameter(0, gathered="AVAILABLE")], async_op=True)
    assert swapper.stream.statistics().read_ahead == 0
    assert swapper.available_swap_in_buffers() == 1


def test_mandatory_read_gets_an_extra_buffer_during_a_gather(swapper):
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


def test_buffers_read_ahead_are_released_before_a_step(swapper):
    first = parameter(0)
    swapper.swap_in([first], async_op=True)
    swapper.synchronize_reads()
    swapper.release_read_ahead()
    assert swapper.available_swap_in_buffers() == 1
    assert first.ds_tensor.status.name == "NOT_AVAILABLE"


def test_prefetch_reuses_a_buffer_the_device_has_copied(swapper):
    first, second = parameter(0), parameter(1)
    swapper.swap_in([first], async_op=False)
    first.ds_status.name = "AVAILABLE"
    swapper.swap_in([second], async_op=True)
    assert swapper.released_gathered == 1
    # DeepSpeed's prefetcher still sees the first as available; its data are on the device alone.
    assert (first.ds_tensor.status.name, first.ds_tensor.numel()) == ("AVAILABLE", 1)
    swapper.remove_partition_and_release_buffers([first])  # as when its module has run
    assert first.ds_tensor.status.name == "NOT_AVAILABLE"
    swapper.synchronize_reads()
    assert torch.equal(second.ds_tensor, torch.ones(NUMEL, dtype=torch.float16))
    swapper.remove_partition_and_release_buffers([second])
    assert swapper.available_swap_in_buffers() == 1


def test_a_gather_in_progress_keeps_its_buffer_from_a_prefetch(swapper):
    first, second = parameter(0), parameter(1)
    swapper.swap_in([first], async_op=False)
    first.ds_status.name = "INFLIGHT"
    swapper.swap_in([second], async_op=True)
    assert (swapper.denied_prefetches, swapper.released_gathered) == (1, 0)
    assert swapper.stream.statistics().read_ahead == 0
    assert torch.equal(first.ds_tensor, torch.zeros(NUMEL, dtype=torch.float16))


class FakeDevice:
    """A device that works asynchronously: an event passes when the test says so."""

    def __init__(self):
        self.events = []

    def is_synchronized_device(self):
        return False

    def current_stream(self):
        return "the stream of the copy"

    def Event(self):
        event = SimpleNamespace(passed=False, stream=None)
        event.query = lambda: event.passed
        event.record = lambda stream: setattr(event, "stream", stream)
        event.synchronize = lambda: setattr(event, "passed", True)
        self.events.append(event)
        return event


@pytest.fixture
def device(monkeypatch):
    made = FakeDevice()
    for module in ("param_swapper", "gathers"):
        monkeypatch.setattr(f"memascend.integrations.deepspeed.{module}.get_accelerator", lambda: made)
    return made


@pytest.fixture
def gathers(monkeypatch):
    """Make DeepSpeed's gather handles as a changed release might have
    them: they do not wait for the copies. Ours watch."""
    from deepspeed.runtime.zero import partition_parameters

    from memascend.integrations.deepspeed.gathers import watch_gathers

    def start_and_return(self, params):
        for param in params if isinstance(params, list) else [params]:
            param.ds_status.name = "AVAILABLE"

    for name in ("NoGatherHandle", "NoGatherCoalescedHandle"):
        monkeypatch.setattr(getattr(partition_parameters, name), "__init__", start_and_return)
    undo = watch_gathers()
    yield partition_parameters
    undo()
    assert partition_parameters.NoGatherHandle.__init__ is start_and_return


@pytest.mark.parametrize("coalesced", [False, True])
def test_copy_keeps_its_buffer_until_its_event_has_passed(swapper, device, gathers, coalesced):
    first, second = parameter(0), parameter(1)
    first.nvme_swapper = swapper
    swapper.swap_in([first], async_op=False)
    gathers.NoGatherCoalescedHandle([first]) if coalesced else gathers.NoGatherHandle(first)
    assert [event.stream for event in device.events] == ["the stream of the copy"]
    swapper.swap_in([second], async_op=True)
    assert (swapper.denied_prefetches, swapper.released_gathered) == (1, 0)
    assert torch.equal(first.ds_tensor, torch.zeros(NUMEL, dtype=torch.float16))
    device.events[0].passed = True
    swapper.swap_in([second], async_op=True)
    assert swapper.released_gathered == 1


def test_mandatory_read_waits_for_the_event_of_its_buffer(swapper, device, gathers):
    first, second = parameter(0), parameter(1)
    first.nvme_swapper = swapper
    swapper.swap_in([first], async_op=False)
    gathers.NoGatherHandle(first)
    swapper.swap_in([second], async_op=False)
    assert device.events[0].passed
    assert (swapper.released_gathered, swapper.buffers_beside_pool) == (1, 0)


def test_one_of_several_ranks_waits_for_the_event_rather_than_skip_a_prefetch(swapper, device, gathers, monkeypatch):
    from memascend.integrations.deepspeed import param_swapper

    pool, ranks = swapper.pool, SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda: 2)
    monkeypatch.setattr(param_swapper, "dist", ranks)
    swapper._start_stream()
    swapper.stream.use_pool(pool)
    first, second, third = (parameter(number) for number in range(3))
    for param in (first, second, third):
        swapper.stream.register(param.ds_id, NUMEL)
        param.nvme_swapper = swapper
    swapper.swap_in([first], async_op=False)
    gathers.NoGatherHandle(first)
    swapper.swap_in([second], async_op=True)
    assert (device.events[0].passed, second.ds_tensor.status.name) == (True, "INFLIGHT")
    swapper.synchronize_reads()
    gathers.NoGatherHandle(second)
    swapper.remove_partition_and_release_buffers([second])
    assert (swapper.available_swap_in_buffers(), device.events[1].passed) == (1, False)
    swapper.swap_in([third], async_op=True)
    assert (device.events[1].passed, third.ds_tensor.status.name) == (True, "INFLIGHT")
    assert swapper.buffers_beside_pool == 0


def test_gather_without_an_event_keeps_its_buffer(swapper, device):
    first, second = parameter(0), parameter(1)
    swapper.swap_in([first], async_op=False)
    first.ds_status.name = "AVAILABLE"  # no event tells when the device has its copy
    swapper.swap_in([second], async_op=True)
    assert (swapper.denied_prefetches, swapper.released_gathered) == (1, 0)
    swapper.swap_in([second], async_op=False)
    assert (swapper.released_gathered, swapper.buffers_beside_pool) == (0, 1)
    assert torch.equal(first.ds_tensor, torch.zeros(NUMEL, dtype=torch.float16))


def test_parameters_of_one_gather_keep_their_own_buffers(swapper):
    from deepspeed.runtime.zero import partition_parameters

    from memascend.integrations.deepspeed.gathers import watch_gathers

    first, second = parameter(0), parameter(1)
    first.nvme_swapper = second.nvme_swapper = swapper
    first.ds_tensor.final_location = second.ds_tensor.final_location = "nvme"
    first.ds_status = second.ds_status = partition_parameters.ZeroParamStatus.NOT_AVAILABLE
    swapper.swap_in([first], async_op=False)  # as read-ahead does
    undo = watch_gathers()
    try:
        partition_parameters.Init._ensure_availability_of_partitioned_params(None, [first, second])
    finally:
        undo()
    assert (swapper.evicted_prefetches, swapper.buffers_beside_pool) == (0, 1)
    for number, found in enumerate((first, second)):
        assert torch.equal(found.ds_tensor, torch.full((NUMEL,), float(number), dtype=torch.float16))


def test_parameter_gathered_for_modification_keeps_its_buffer(swapper):
    first, second = parameter(0), parameter(1)
    swapper.swap_in([first], async_op=False)
    first.ds_status.name = "AVAILABLE"
    first._ds_z3_gathered_param_context_depth = 1
    swapper.swap_in([second], async_op=True)
    swapper.swap_in([second], async_op=False)
    assert swapper.released_gathered == 0
    first.ds_tensor.fill_(7)
    swapper._swap_out([first], async_op=False)
    del first._ds_z3_gathered_param_context_depth
    first.ds_status.name = "NOT_AVAILABLE"
    swapper.swap_in([first], async_op=False)
    assert torch.equal(first.ds_tensor, torch.full((NUMEL,), 7.0, dtype=torch.float16))


def test_without_a_pool_staging_buffers_grow_on_demand(swapper):
    from memascend.memory.ledger import Ledger
    from memascend.memory.pinned import PageAlignedPinnedAllocator

    ledger = Ledger()
    swapper._allocator = PageAlignedPinnedAllocator(ledger)
    swapper._start_stream()
    three = [parameter(number) for number in range(3)]
    for param in three:  # as zero.Init partitions them, one by one
        swapper.get_buffer(param, NUMEL).fill_(param.ds_id + 10)
        swapper._swap_out([param], async_op=False)
    assert len(ledger.entries()) == 1
    swapper.swap_in(three, async_op=False)  # as an initialisation gathers all parameters of a module
    assert [param.ds_tensor[0].item() for param in three] == [10, 11, 12]
    assert len([entry for entry in ledger.entries() if entry.died_s is None]) == 3
    swapper.remove_partition_and_release_buffers(three)
    assert len([entry for entry in ledger.entries() if entry.died_s is None]) == 1


def test_pool_fallback_is_reported_once_with_shape_and_waste(swapper, caplog):
    small = parameter(1)
    small.ds_shape = (NUMEL // 8, 2)
    swapper.get_buffer(small, NUMEL // 4).fill_(3)
    swapper._swap_out([small], async_op=False)
    for _ in range(2):
        swapper.swap_in([small], async_op=False)
        swapper.remove_partition_and_release_buffers([small])
    (line,) = [record.getMessage() for record in caplog.records if "no class of its own" in record.getMessage()]
    assert "parameter 1 of shape (128, 2)" in line
    assert f"numel-{NUMEL}" in line
    assert f"{(NUMEL - NUMEL // 4) * 2} bytes" in line
    assert swapper.pool_fallbacks == 3
    assert swapper.pool_fallback_wasted_bytes == (NUMEL - NUMEL // 4) * 2


def test_only_rank_0_logs(swapper, caplog, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    swapper._start_stream()
    swapper.stream._options.warn("memascend: a line")
    assert caplog.records == []


def test_refused_or_lost_transfer_raises_a_runtime_error():
    from memascend.integrations.deepspeed.handle_storage import HandleStorage

    handle = SimpleNamespace(async_pread=lambda *_: 0, async_pwrite=lambda *_: -1, wait=lambda: 0)
    storage = HandleStorage(handle, handle, str)
    with pytest.raises(RuntimeError, match="refused"):
        storage.write("w", torch.zeros(1))
    read = storage.read("w", torch.zeros(1))
    assert not read.done()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="1 transfers were submitted, but 0 completed"):
            read.wait()
    assert read.done()


def test_mandatory_read_evicts_only_prefetches_of_sufficient_size(swapper):
    from memascend.memory.pinned import PageAlignedPinnedAllocator
    from memascend.memory.pools import AdaptiveBufferPool, adaptive_pool_classes

    small = NUMEL // 2
    classes = adaptive_pool_classes([[NUMEL, small]], [], 1)
    swapper.stream.use_pool(AdaptiveBufferPool(classes, torch.float16, PageAlignedPinnedAllocator()))
    swapper.stream.register(1, small)
    first, other, third = parameter(0), parameter(1), parameter(2)
    swapper.swap_in([first, other], async_op=True)
    # must not fail: of the two that were read ahead, only the first one's buffer is large enough
    swapper.swap_in([third], async_op=False)
    assert (swapper.evicted_prefetches, first.ds_tensor.status.name) == (1, "NOT_AVAILABLE")
    assert torch.equal(other.ds_tensor, torch.ones(small, dtype=torch.float16))
    assert torch.equal(third.ds_tensor, torch.full((NUMEL,), 2.0, dtype=torch.float16))


@pytest.mark.parametrize(("kind", "alignment"), [("adaptive", 512), ("adaptive", 4096), ("monolithic", 4096)])
def test_slots_are_aligned_as_the_device_demands(swapper, monkeypatch, kind, alignment):
    from memascend.integrations.deepspeed import param_swapper

    embedding, weight = 40_000, 600  # neither is a multiple of 2048 elements
    monkeypatch.setattr(param_swapper, "swapped_numels_by_block", lambda *_: ([[weight, weight]], [embedding]))
    swapper._start_stream()
    swapper._pool_kind, swapper.aligned_bytes, swapper.numel_alignment = kind, alignment, alignment // 2
    swapper.adopt_module(torch.nn.Module())
    for key, numel in enumerate((embedding, weight, weight)):
        swapper.stream.register(key, numel)
        assert swapper.stream.put(key).data_ptr() % alignment == 0
    if kind == "adaptive":
        assert swapper.pool.total_bytes == sum(
            -(-2 * numel // alignment) * alignment for numel in (embedding, weight, weight)
        )
