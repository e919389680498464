"""Pinned memory: exact sizes, real locking, one free after the last view, and the interface to CUDA."""

import gc
import re
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memascend import _C
from memascend.memory import cuda
from memascend.memory.ledger import Ledger, verify_by_address
from memascend.memory.pinned import (
    HUGE_PAGE_BYTES,
    CountingAllocator,
    PageAlignedPinnedAllocator,
    PowerOfTwoPinnedAllocator,
    is_pinned,
)
from tests import forked

ALLOCATORS = [PageAlignedPinnedAllocator, PowerOfTwoPinnedAllocator]


def locked_bytes() -> int:
    """Return the bytes that the kernel counts as locked by this process."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmLck:"))


def allocate(allocator, numel=1000, dtype=torch.float32):
    return allocator.allocate(numel, dtype, name="buffer", owner="test")


def live_addresses() -> set[int]:
    return {block["address"] for block in _C.pinned_live()}


def run_python(code: str, *, to_its_exit: bool = False) -> subprocess.CompletedProcess:
    """Run code in a fork, which ends before the interpreter is finalised, or in a process that is finalised too."""
    if not to_its_exit:
        return forked.run([sys.executable, "-c", code], timeout=100)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("make", ALLOCATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_tensor_has_exactly_the_requested_elements(make, dtype):
    tensor = allocate(make(lock=False), 1001, dtype)
    assert tensor.shape == (1001,)
    assert tensor.dtype == dtype
    assert tensor.data_ptr() % 4096 == 0
    assert tensor.untyped_storage().nbytes() == 1001 * dtype.itemsize
    tensor.fill_(3)
    assert bool((tensor == 3).all())


@given(st.integers(1, 2**40))
def test_page_aligned_reserves_less_than_a_page_over_the_request(requested):
    reserved = PageAlignedPinnedAllocator().reserved_bytes(requested)
    assert requested <= reserved <= requested + 4095
    assert reserved % 4096 == 0


@given(st.integers(1, 2**40))
def test_power_of_two_allocator_reserves_smallest_power_from_one_page(requested):
    reserved = PowerOfTwoPinnedAllocator().reserved_bytes(requested)
    assert reserved & (reserved - 1) == 0
    assert reserved >= max(requested, 4096)
    assert reserved == 4096 or reserved // 2 < requested


@pytest.mark.parametrize(("make", "reserved"), [(ALLOCATORS[0], 5 << 20), (ALLOCATORS[1], 8 << 20)])
def test_kernel_counts_all_reserved_pages_as_locked(make, reserved):
    gc.collect()  # objects of other tests would otherwise be freed in between
    before = locked_bytes()
    ledger = Ledger()
    tensor = allocate(make(ledger), 5 << 20, torch.uint8)
    (entry,) = ledger.live()
    if not entry.locked:
        pytest.skip("the limit on locked memory (ulimit -l) is too small here")
    assert locked_bytes() - before == entry.reserved_bytes == reserved
    (check,) = verify_by_address([entry])
    assert check.agrees
    assert check.locked
    assert check.resident_bytes == reserved
    del tensor
    assert locked_bytes() == before


def test_unlocked_pages_are_touched_and_recorded_as_unlocked():
    ledger = Ledger()
    tensor = allocate(PageAlignedPinnedAllocator(ledger, lock=False), 1 << 20, torch.uint8)
    (check,) = verify_by_address(ledger.live())
    assert not check.entry.locked
    assert not check.locked
    assert check.resident_bytes == 1 << 20
    assert is_pinned(tensor)


def test_memory_is_freed_and_ledger_closed_after_the_last_view():
    ledger = Ledger()
    tensor = allocate(PageAlignedPinnedAllocator(ledger, lock=False))
    address = tensor.data_ptr()
    view = tensor[10:20].view(2, 5)
    del tensor
    gc.collect()
    assert address in live_addresses()
    assert len(ledger.live()) == 1
    del view
    gc.collect()
    assert address not in live_addresses()
    (entry,) = ledger.entries()
    assert entry.died_s is not None
    assert entry.died_s >= entry.born_s


def test_entries_close_in_the_ledger_that_opened_them():
    first, second = Ledger(), Ledger()
    one = allocate(PageAlignedPinnedAllocator(first, lock=False))
    two = allocate(PageAlignedPinnedAllocator(second, lock=False))
    del one
    assert (len(first.live()), len(second.live())) == (0, 1)
    del two
    assert (len(first.live()), len(second.live())) == (0, 0)


def test_ledger_entry_describes_the_allocation():
    ledger = Ledger()
    tensor = PowerOfTwoPinnedAllocator(ledger, lock=False).allocate(
        3000, torch.float16, name="pool-0", owner="parameter_pool", role="device"
    )
    (entry,) = ledger.entries()
    assert (entry.name, entry.owner, entry.role, entry.allocator) == (
        "pool-0",
        "parameter_pool",
        "device",
        "power_of_two",
    )
    assert (entry.requested_bytes, entry.reserved_bytes, entry.touched_bytes) == (6000, 8192, 8192)
    assert entry.address == tensor.data_ptr()


def test_is_pinned_decides_by_address():
    tensor = allocate(PageAlignedPinnedAllocator(lock=False))
    assert is_pinned(tensor)
    assert is_pinned(tensor[999:])
    assert is_pinned(tensor.view(torch.uint8)[-1:])
    assert is_pinned(tensor.detach().view(10, 100).t())
    assert not is_pinned(tensor[:0])
    assert not is_pinned(tensor.clone())
    assert not is_pinned(torch.empty(10, device="meta"))
    assert not is_pinned(torch.zeros(3).to_sparse())


@pytest.mark.parametrize("make", [*ALLOCATORS, lambda: CountingAllocator("page_aligned")])
@pytest.mark.parametrize("numel", [0, -7])
def test_allocating_zero_or_negative_elements_is_refused(make, numel):
    with pytest.raises(ValueError, match="ask for at least one"):
        allocate(make(), numel)


def test_reserved_bytes_of_zero_bytes_are_refused():
    for allocator in (PageAlignedPinnedAllocator(), PowerOfTwoPinnedAllocator()):
        with pytest.raises(ValueError, match="at least one byte"):
            allocator.reserved_bytes(0)


@pytest.mark.parametrize("make", ALLOCATORS)
@pytest.mark.parametrize("numel", [2**45, 2**62, 2**70])
def test_allocation_beyond_ram_is_refused_by_buffer_name(make, numel):
    with pytest.raises(MemoryError, match=r"'buffer'.*more than the \d+ MiB of RAM: use"):
        allocate(make(), numel, torch.float32)


def test_exceeding_memlock_limit_raises_or_leaves_the_buffer_unlocked():
    # In a child that has given up root, for which the limit applies.
    done = run_python("""
import os, resource, torch
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator as Exact
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]))
if os.geteuid() == 0:
    os.setuid(65534)
ledger = Ledger()
tensor = Exact(ledger).allocate(1 << 20, torch.uint8, name="soft", owner="test")
assert [e.locked for e in ledger.live()] == [False]
try:
    Exact(ledger, require_lock=True).allocate(1 << 20, torch.uint8, name="hard", owner="test")
except MemoryError as error:
    print(error)
assert len(ledger.entries()) == 1
""")
    assert done.returncode == 0, done.stderr
    assert "'hard'" in done.stdout
    assert "ulimit -l" in done.stdout


def test_invalid_allocator_options_are_refused():
    with pytest.raises(ValueError, match="needs lock=True"):
        PageAlignedPinnedAllocator(lock=False, require_lock=True)
    with pytest.raises(ValueError, match="unknown pages 'huge': use one of small, transparent, reserved"):
        PageAlignedPinnedAllocator(pages="huge")
    with pytest.raises(ValueError, match="unknown allocator policy 'exact'"):
        CountingAllocator("exact")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device"):
            PageAlignedPinnedAllocator(register_cuda=True)


@pytest.mark.parametrize("make", ALLOCATORS)
def test_counting_allocator_records_the_same_as_the_real_one(make):
    real, counted = Ledger(), Ledger()
    real_allocator = make(real, lock=False)
    counting = CountingAllocator(real_allocator.name, counted)
    tensors = [allocate(a, 12345, torch.bfloat16) for a in (real_allocator, counting)]
    assert tensors[1].device.type == "meta"
    assert tensors[0].shape == tensors[1].shape
    fields = ("name", "owner", "role", "allocator", "requested_bytes", "reserved_bytes", "touched_bytes")
    assert [[getattr(e, f) for f in fields] for e in real.live()] == [
        [getattr(e, f) for f in fields] for e in counted.live()
    ]
    assert counted.live()[0].address is None


def test_concurrent_threads_allocate_and_free_without_leaks():
    ledger = Ledger()
    allocator = PageAlignedPinnedAllocator(ledger, lock=False)
    before = live_addresses()

    def work():
        for _ in range(50):
            allocate(allocator, 100).fill_(1)
            ledger.live()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert live_addresses() == before
    assert len(ledger.entries()) == 200
    assert ledger.live() == []


class FakeDriver:
    """Replaces the CUDA runtime: records calls, and fails on request."""

    def __init__(self, register_code=0):
        self.calls = []
        self.register_code = register_code

    def cudaHostRegister(self, address, length, flags):
        self.calls.append(("register", address, length))
        return self.register_code

    def cudaHostUnregister(self, address):
        assert address in mapped_starts(), "unregistered after it was unmapped"
        self.calls.append(("unregister", address))
        return 0


def mapped_starts() -> set[int]:
    """Return the addresses of the pages in this process's mappings of at most 64 MiB."""
    starts = set()
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if end - begin <= 64 << 20:
                starts.update(range(begin, end, 4096))
    return starts


@pytest.fixture
def driver(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(cuda, "available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return fake


def test_cuda_registers_whole_blocks_once_and_unregisters_before_freeing(driver):
    tensor = allocate(PageAlignedPinnedAllocator(lock=False), 5000, torch.uint8)
    address = tensor.data_ptr()
    assert driver.calls == [("register", address, 8192)]
    view = tensor[1:]
    del tensor
    assert len(driver.calls) == 1
    del view
    assert driver.calls[1:] == [("unregister", address)]
    assert address not in live_addresses()


def test_failed_cuda_registration_raises_and_leaks_nothing(driver):
    driver.register_code = 2
    before = live_addresses()
    with pytest.raises(RuntimeError, match=r"cudaHostRegister .* failed with code 2: raise"):
        allocate(PageAlignedPinnedAllocator(lock=False))
    gc.collect()
    assert live_addresses() == before
    assert [call[0] for call in driver.calls] == ["register"]


def test_cuda_refuses_double_registration_and_unknown_unregistration(driver):
    cuda.register(0x1000, 4096)
    with pytest.raises(ValueError, match="already registered with CUDA"):
        cuda.register(0x1000, 4096)
    with pytest.raises(ValueError, match="not registered"):
        cuda.unregister(0x2000)
    cuda._registered.clear()


FAKE_CUDA = """
import os, torch
from memascend.memory import cuda
from memascend.memory.pinned import PageAlignedPinnedAllocator as Exact
calls = []
class Driver:
    def cudaHostRegister(self, *a): return 0
    def cudaHostUnregister(self, a): calls.append(a); return 0
cuda.available = lambda: True
torch.cuda.cudart = lambda: Driver()
tensor = Exact(lock=False).allocate(100, torch.uint8, name="x", owner="test")
"""


def test_forked_child_frees_without_touching_the_parents_registration():
    done = run_python(
        FAKE_CUDA
        + """
child = os.fork()
if child == 0:
    del tensor
    os._exit(len(calls))
assert os.waitpid(child, 0)[1] == 0, "the child unregistered"
del tensor
assert len(calls) == 1
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("prefix", [FAKE_CUDA, FAKE_CUDA.replace("cuda.available = lambda: True", "")])
def test_tensors_alive_at_interpreter_exit_cause_no_errors(prefix):
    done = run_python(
        prefix + "torch.kept_for_ever = [tensor]\nloop = [tensor]; loop.append(loop); print('end')", to_its_exit=True
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "end", "")


def test_forked_child_that_ends_normally_leaves_the_parents_memory_alone():
    """The child's interpreter is finalised with an inherited tensor, and frees another one before."""
    done = run_python(
        """
import os, threading, torch
from memascend import _C
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator as Exact
ledger = Ledger()
kept, dropped = (Exact(ledger).allocate(3000, torch.uint8, name=n, owner="test").fill_(7) for n in ("kept", "dropped"))
address = dropped.data_ptr()
child = os.fork()
if child == 0:
    kept.fill_(1)  # copied on write
    del dropped
    assert not _C.pinned_contains(address, 1)
    raise SystemExit(0)
assert os.waitpid(child, 0)[1] == 0
assert bool((kept == 7).all()) and bool((dropped == 7).all())
assert len(ledger.live()) == len(_C.pinned_live()) == 2
del kept, dropped
assert ledger.live() == _C.pinned_live() == []
""",
        to_its_exit=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_fork_while_other_threads_allocate_leaves_no_lock_held():
    done = run_python("""
import os, signal, threading, torch
from memascend.memory.pinned import PageAlignedPinnedAllocator as Exact
def allocate():
    return Exact(lock=False).allocate(100, torch.uint8, name="x", owner="test")
stop = threading.Event()
def work():
    while not stop.is_set():
        allocate()
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(40):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a lock that is shut for ever ends the child by this signal
        tensor = allocate().fill_(1)
        del tensor
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the child could not allocate"
stop.set()
""")
    assert done.returncode == 0, done.stderr


def test_memory_freed_before_exit_is_unregistered_from_cuda_once():
    """The driver is called once for what is freed before the end, and never while the interpreter is finalised."""
    done = run_python(
        FAKE_CUDA
        + """
import atexit, sys
late = Exact(lock=False).allocate(100, torch.uint8, name="late", owner="test")
torch.kept_for_ever = [late]
first, views = tensor.data_ptr(), [tensor[i:] for i in range(5)]
del tensor
atexit.register(lambda: sys.stdout.write(repr(calls == [first])))
del views
""",
        to_its_exit=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True", "")


@pytest.mark.parametrize("make", ALLOCATORS)
def test_transparent_huge_pages_reserve_no_extra_memory(make):
    numel = (5 << 20) + 123
    ledger = Ledger()
    tensor = allocate(make(ledger, pages="transparent", lock=False), numel, torch.uint8)
    (entry,) = ledger.live()
    assert tensor.data_ptr() % HUGE_PAGE_BYTES == 0
    assert entry.reserved_bytes == make().reserved_bytes(numel)
    (check,) = verify_by_address([entry])
    assert check.agrees
    if "never" in huge_pages_setting():
        pytest.skip("transparent huge pages are switched off here")
    assert huge_page_bytes(tensor.data_ptr()) >= 2 * HUGE_PAGE_BYTES


def huge_pages_setting() -> str:
    """Return the word in brackets: always, madvise or never."""
    with open("/sys/kernel/mm/transparent_hugepage/enabled") as setting:
        return re.search(r"\[(\w+)\]", setting.read())[1]


def huge_page_bytes(address: int) -> int:
    """Return the kernel's count of bytes on transparent huge pages in the mapping that contains `address`."""
    inside = False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(match[1], 16) <= address < int(match[2], 16)
            elif inside and line.startswith("AnonHugePages:"):
                return int(line.split()[1]) * 1024
    raise AssertionError(f"{address:#x} is not mapped")


def test_reserved_huge_pages_round_sizes_and_refuse_when_unavailable():
    allocator = PageAlignedPinnedAllocator(pages="reserved")
    assert allocator.reserved_bytes(1) == HUGE_PAGE_BYTES
    assert PowerOfTwoPinnedAllocator(pages="reserved").reserved_bytes(3 * HUGE_PAGE_BYTES) == 4 * HUGE_PAGE_BYTES
    with open("/proc/meminfo") as meminfo:
        free = next(int(line.split()[1]) for line in meminfo if line.startswith("HugePages_Free:"))
    if free == 0:
        with pytest.raises(MemoryError, match=r"'buffer': cannot map 2 MiB .*\(0 of \d+ pages .*vm.nr_hugepages"):
            allocate(allocator)
        return
    ledger = Ledger()
    tensor = allocate(PageAlignedPinnedAllocator(ledger, pages="reserved", require_lock=True), 5000)
    (entry,) = ledger.live()
    assert (entry.reserved_bytes, entry.locked, tensor.data_ptr() % HUGE_PAGE_BYTES) == (HUGE_PAGE_BYTES, True, 0)
    assert verify_by_address([entry])[0].agrees


def test_autograd_graph_keeps_the_buffer_until_backward_frees_it():
    """C++ may drop the last reference (autograd's threads): the graph keeps the buffer, and backward frees it."""
    ledger = Ledger()
    buffer = allocate(PageAlignedPinnedAllocator(ledger, lock=False), 100)
    buffer.fill_(2.0)
    weight = torch.ones(100, requires_grad=True)
    loss = (weight * buffer).sum()
    del buffer
    assert len(ledger.live()) == 1
    loss.backward()
    assert ledger.live() == []
    assert bool((weight.grad == 2).all())


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 50_000), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_blocks_never_overlap(sizes, random):
    allocator = PageAlignedPinnedAllocator(lock=False)
    tensors = [allocate(allocator, size, torch.uint8) for size in sizes]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    order = list(range(len(tensors)))
    random.shuffle(order)
    for index in order:
        assert bool((tensors[index] == index).all())
        tensors[index] = None
