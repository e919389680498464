"""Pinned memory: exact sizes, real locking, one free after the last view, and the seam to CUDA."""

import gc
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
    CountingAllocator,
    PageAlignedPinnedAllocator,
    PowerOfTwoPinnedAllocator,
    is_pinned,
)

ALLOCATORS = [PageAlignedPinnedAllocator, PowerOfTwoPinnedAllocator]


def locked_bytes() -> int:
    """Locked memory of this process by the kernel's account."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmLck:"))


def allocate(allocator, numel=1000, dtype=torch.float32):
    return allocator.allocate(numel, dtype, name="buffer", owner="test")


def live_addresses() -> set[int]:
    return {block["address"] for block in _C.pinned_live()}


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("make", ALLOCATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_tensor_has_exactly_the_elements_asked_for(make, dtype):
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
def test_power_of_two_reserves_the_smallest_power_from_a_page_up(requested):
    reserved = PowerOfTwoPinnedAllocator().reserved_bytes(requested)
    assert reserved & (reserved - 1) == 0
    assert reserved >= max(requested, 4096)
    assert reserved == 4096 or reserved // 2 < requested


@pytest.mark.parametrize(("make", "reserved"), [(ALLOCATORS[0], 5 << 20), (ALLOCATORS[1], 8 << 20)])
def test_all_reserved_pages_are_locked_by_the_kernels_account(make, reserved):
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


def test_without_locking_pages_are_touched_and_the_entry_says_so():
    ledger = Ledger()
    tensor = allocate(PageAlignedPinnedAllocator(ledger, lock=False), 1 << 20, torch.uint8)
    (check,) = verify_by_address(ledger.live())
    assert not check.entry.locked
    assert not check.locked
    assert check.resident_bytes == 1 << 20
    assert is_pinned(tensor)


def test_freed_once_after_the_last_view_and_the_ledger_closes_then():
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


def test_entries_of_two_ledgers_close_in_their_own():
    first, second = Ledger(), Ledger()
    one = allocate(PageAlignedPinnedAllocator(first, lock=False))
    two = allocate(PageAlignedPinnedAllocator(second, lock=False))
    del one
    assert (len(first.live()), len(second.live())) == (0, 1)
    del two
    assert (len(first.live()), len(second.live())) == (0, 0)


def test_ledger_entry_states_the_allocation():
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


def test_is_pinned_goes_by_address():
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
def test_nothing_or_less_is_refused(make, numel):
    with pytest.raises(ValueError, match="ask for at least one"):
        allocate(make(), numel)


def test_reserved_bytes_of_nothing_is_refused():
    for allocator in (PageAlignedPinnedAllocator(), PowerOfTwoPinnedAllocator()):
        with pytest.raises(ValueError, match="at least one byte"):
            allocator.reserved_bytes(0)


@pytest.mark.parametrize("make", ALLOCATORS)
@pytest.mark.parametrize("numel", [2**45, 2**62, 2**70])
def test_more_than_the_ram_is_refused_by_name(make, numel):
    with pytest.raises(MemoryError, match=r"'buffer'.*more than the \d+ MiB of RAM: use"):
        allocate(make(), numel, torch.float32)


def test_over_the_memlock_limit_is_an_error_or_an_unlocked_buffer():
    # In a child that has given up root, where the limit binds.
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


def test_options_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="needs lock=True"):
        PageAlignedPinnedAllocator(lock=False, require_lock=True)
    with pytest.raises(ValueError, match="unknown allocator policy 'exact'"):
        CountingAllocator("exact")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device"):
            PageAlignedPinnedAllocator(register_cuda=True)


@pytest.mark.parametrize("make", ALLOCATORS)
def test_counting_allocator_books_what_the_real_one_does(make):
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


def test_threads_allocate_and_free():
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
    """Stands for the CUDA runtime: records calls, and fails when told."""

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
    """First addresses of all pages' mappings, by page, of this process."""
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


def test_cuda_registers_the_whole_block_once_and_unregisters_before_the_free(driver):
    tensor = allocate(PageAlignedPinnedAllocator(lock=False), 5000, torch.uint8)
    address = tensor.data_ptr()
    assert driver.calls == [("register", address, 8192)]
    view = tensor[1:]
    del tensor
    assert len(driver.calls) == 1
    del view
    assert driver.calls[1:] == [("unregister", address)]
    assert address not in live_addresses()


def test_cuda_refusal_is_an_error_and_leaks_nothing(driver):
    driver.register_code = 2
    before = live_addresses()
    with pytest.raises(RuntimeError, match=r"cudaHostRegister .* failed with code 2: raise"):
        allocate(PageAlignedPinnedAllocator(lock=False))
    gc.collect()
    assert live_addresses() == before
    assert [call[0] for call in driver.calls] == ["register"]


def test_cuda_seam_refuses_what_it_does_not_know(driver):
    cuda.register(0x1000, 4096)
    with pytest.raises(ValueError, match="registered with CUDA already"):
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
def test_tensors_alive_at_interpreter_exit_do_no_harm(prefix):
    done = run_python(prefix + "torch.kept_for_ever = [tensor]\nloop = [tensor]; loop.append(loop); print('end')")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "end", "")


def test_frees_on_a_thread_without_python():
    """The last reference may die in C++ (autograd's threads): graph holds the buffer, backward drops it."""
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
    held = [allocate(allocator, size, torch.uint8) for size in sizes]
    for value, tensor in enumerate(held):
        tensor.fill_(value)
    order = list(range(len(held)))
    random.shuffle(order)
    for index in order:
        assert bool((held[index] == index).all())
        held[index] = None
