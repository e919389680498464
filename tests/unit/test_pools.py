"""Buffer pools: against a simple model, under threads, and the closed form of MemAscend Fig. 11."""

import itertools
import re
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from memascend.memory.ledger import Ledger
from memascend.memory.pinned import CountingAllocator, PageAlignedPinnedAllocator, PowerOfTwoPinnedAllocator
from memascend.memory.pools import (
    AdaptiveBufferPool,
    MonolithicBufferPool,
    OnDemandBuffers,
    PoolClass,
    PoolTimeoutError,
    adaptive_pool_classes,
)

HALF = torch.float16


def real():
    return PageAlignedPinnedAllocator(lock=False)


def adaptive(*classes: tuple[int, int], dtype=HALF, allocator=None, **options):
    named = [PoolClass(f"c{numel}", numel, count) for numel, count in classes]
    return AdaptiveBufferPool(named, dtype, allocator or real(), **options)


def byte_range(tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


# ------------------------------------------------------------------------------------------------ sizing


def test_classes_hold_the_most_of_each_size_in_any_block():
    classes = adaptive_pool_classes([[10, 20, 20], [10, 10, 20]], [], blocks_in_flight=1)
    assert {c.numel: c.count for c in classes} == {10: 2, 20: 2}


def test_blocks_in_flight_multiply_classes_but_not_outside_tensors():
    classes = adaptive_pool_classes([[10, 20]], [100, 100, 50], blocks_in_flight=3)
    assert [(c.numel, c.count) for c in classes] == [(100, 2), (50, 1), (20, 3), (10, 3)]


def test_counts_of_a_size_inside_and_outside_add_up():
    classes = adaptive_pool_classes([[10]], [10], blocks_in_flight=2)
    assert [(c.numel, c.count) for c in classes] == [(10, 3)]
    assert len({c.name for c in classes}) == len(classes)


@given(st.lists(st.lists(st.integers(1, 9), max_size=8), max_size=5), st.lists(st.integers(1, 9)), st.integers(1, 4))
def test_classes_suffice_for_any_run_of_blocks_in_flight(blocks, outside, in_flight):
    counts = Counter({c.numel: c.count for c in adaptive_pool_classes(blocks, outside, in_flight)})
    for start in range(len(blocks)):
        needed = Counter(outside)
        for block in blocks[start : start + in_flight]:
            needed.update(block)
        assert all(counts[numel] >= count for numel, count in needed.items())


# Hidden, intermediate, KV width, vocabulary of the Hugging Face configurations; pools in GiB from Fig. 8 (7B) and
# section III-A (32B, whose figures the paper prints there), MemAscend.
@pytest.mark.parametrize(
    ("hidden", "intermediate", "kv", "vocab", "monolithic_gib", "adaptive_gib"),
    [(3584, 18944, 512, 152064, 9.14, 2.46), (5120, 27648, 1024, 152064, 13.05, 3.81)],
)
def test_pools_of_real_models_equal_the_closed_form(hidden, intermediate, kv, vocab, monolithic_gib, adaptive_gib):
    embedding, query, key = vocab * hidden, hidden * hidden, kv * hidden
    feed_forward = intermediate * hidden
    block = [query, key, key, query, feed_forward, feed_forward, feed_forward]
    counting = CountingAllocator("page_aligned")
    small = AdaptiveBufferPool(adaptive_pool_classes([block] * 3, [embedding, embedding]), HALF, counting)
    assert small.total_bytes == 2 * (2 * embedding + 3 * feed_forward + 2 * key + 2 * query)
    large = MonolithicBufferPool(embedding, 9, HALF, counting, separate=True)
    assert large.total_bytes == 2 * 9 * embedding
    assert round(small.total_bytes / 2**30, 2) == pytest.approx(adaptive_gib, abs=0.005)
    assert round(large.total_bytes / 2**30, 2) == pytest.approx(monolithic_gib, abs=0.005)


def test_separate_buffers_are_rounded_up_individually():
    totals = {}
    for separate in (True, False):
        ledger = Ledger()
        pool = MonolithicBufferPool(9 << 10, 9, HALF, CountingAllocator("power_of_two", ledger), separate)
        totals[separate] = sum(e.reserved_bytes for e in ledger.live())
        assert len(ledger.live()) == (9 if separate else 1)
        assert {e.owner for e in ledger.live()} == {"parameter_pool"}
        assert pool.total_bytes == 9 * (18 << 10)
    assert totals == {True: 9 * (32 << 10), False: 256 << 10}


def test_adaptive_pool_is_one_allocation_freed_after_the_last_lease():
    ledger = Ledger()
    pool = adaptive((100, 2), (10, 3), allocator=PageAlignedPinnedAllocator(ledger, lock=False))
    (entry,) = ledger.live()
    assert entry.requested_bytes == pool.total_bytes == 2 * 512 + 3 * 512
    lease = pool.lease("k", 100)
    del pool
    assert len(ledger.live()) == 1
    del lease
    assert ledger.live() == []


# ------------------------------------------------------------------------------------------------ leases


def test_lease_provides_the_exact_tensor_and_its_aligned_slot():
    pool = adaptive((1000, 1), alignment_bytes=1024)
    lease = pool.lease("k", 1000, slot_numel=1024)
    assert (lease.tensor.shape, lease.slot_tensor.shape, lease.class_name) == ((1000,), (1024,), "c1000")
    assert lease.tensor.data_ptr() == lease.slot_tensor.data_ptr()
    assert lease.tensor.dtype == HALF
    pool.release("k")
    assert pool.lease("k", 1000).slot_tensor.numel() == 1024


@pytest.mark.parametrize("alignment", [512, 1024, 4096])
def test_slots_are_aligned_and_do_not_overlap(alignment):
    pool = adaptive((999, 3), (77, 5), (1, 2), alignment_bytes=alignment)
    leases = [pool.lease((numel, i), numel) for numel, count in ((999, 3), (77, 5), (1, 2)) for i in range(count)]
    ranges = sorted(byte_range(lease.slot_tensor) for lease in leases)
    assert all(begin % alignment == 0 for begin, _ in ranges)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))
    assert pool.free_count() == 0


def test_exhausted_class_denies_leases_and_counts_denials():
    pool = adaptive((100, 1), (1000, 1))
    assert pool.lease("a", 100) is not None
    assert pool.lease("b", 100) is None
    assert (pool.denials, pool.fallbacks) == (1, 0)
    assert pool.free_count(100) == 0
    assert pool.free_count(1000) == pool.free_count() == 1


def test_pool_knows_which_sizes_share_a_class():
    pool = adaptive((100, 1), (1000, 1))
    assert pool.share_a_class(100, 100)
    assert pool.share_a_class(500, 1000)  # 500 has no class of its own
    assert not pool.share_a_class(100, 1000)
    assert MonolithicBufferPool(1000, 2, HALF, real(), separate=False).share_a_class(100, 1000)
    with pytest.raises(ValueError, match="fits no class"):
        pool.share_a_class(100, 2000)


def test_borrow_takes_a_larger_slot_and_counts_a_fallback():
    pool = adaptive((100, 1), (1000, 1), (500, 1))
    pool.lease("a", 100)
    lease = pool.lease("b", 100, borrow=True)
    assert (lease.class_name, lease.tensor.numel()) == ("c500", 100)
    assert pool.fallbacks == 1
    pool.release("b")
    assert pool.free_count(500) == 1


def test_size_without_a_class_uses_the_nearest_larger_one():
    pool = adaptive((100, 1), (1000, 1), (500, 1))
    assert pool.lease("a", 101 * 3).class_name == "c500"
    assert pool.fallbacks == 1
    assert pool.lease("b", 400) is None  # the nearest larger class is used up, and `borrow` was not given
    assert pool.fallbacks == 1


def test_aligned_length_beyond_the_class_uses_a_larger_one():
    pool = adaptive((256, 1), (1000, 1))
    assert pool.lease("a", 256, slot_numel=512).class_name == "c1000"
    assert pool.fallbacks == 1


def test_monolithic_pool_serves_all_sizes_without_fallbacks():
    for separate in (True, False):
        pool = MonolithicBufferPool(1000, 2, HALF, real(), separate)
        assert pool.lease("a", 3).class_name == "monolithic"
        assert pool.lease("b", 1000).tensor.numel() == 1000
        assert pool.lease("c", 5) is None
        assert (pool.fallbacks, pool.denials, pool.free_count(7)) == (0, 1, 0)


def test_too_large_tensor_is_refused_with_advice():
    pool = adaptive((100, 1))
    with pytest.raises(ValueError, match="5000 elements fits no class, the largest holds 256: size the pool"):
        pool.lease("a", 5000)


def test_invalid_releases_and_leases_are_refused():
    pool, other = adaptive((100, 2)), adaptive((100, 2))
    lease = pool.lease("a", 100)
    with pytest.raises(ValueError, match="'a' holds a buffer already"):
        pool.lease("a", 100)
    with pytest.raises(ValueError, match="'b' holds no buffer"):
        pool.release("b")
    with pytest.raises(ValueError, match="holds no buffer"):
        other.release(lease)
    foreign = other.lease("a", 100)
    with pytest.raises(ValueError, match="stale or belongs to another pool"):
        pool.release(foreign)
    pool.release(lease)
    with pytest.raises(ValueError, match="returned already"):
        pool.release("a")
    again = pool.lease("a", 100)
    with pytest.raises(ValueError, match="stale"):
        pool.release(lease)
    assert pool.holders() == {"a": again}
    with pytest.raises(ValueError, match="needs no buffer"):
        pool.lease("z", 0)
    with pytest.raises(ValueError, match="less than the tensor's 100"):
        pool.lease("z", 100, slot_numel=99)


def test_invalid_pools_are_refused():
    with pytest.raises(ValueError, match="without classes"):
        AdaptiveBufferPool([], HALF, real())
    with pytest.raises(ValueError, match="several classes of 10 elements"):
        adaptive((10, 1), (10, 2))
    with pytest.raises(ValueError, match="both must be positive"):
        PoolClass("x", 10, 0)
    with pytest.raises(ValueError, match="use a multiple of the 4-byte item"):
        adaptive((10, 1), dtype=torch.float32, alignment_bytes=510)
    with pytest.raises(ValueError, match="blocks in flight: 0"):
        adaptive_pool_classes([[1]], [], 0)


class PoolMachine(RuleBasedStateMachine):
    """The pool against its simplest model: a multiset of free class sizes and a dict of lessees."""

    @initialize(sizes=st.dictionaries(st.sampled_from([5, 300, 301, 2000]), st.integers(1, 3), min_size=1))
    def build(self, sizes):
        self.pool = adaptive(*sizes.items())
        self.free = dict(sizes)
        self.leased = {}
        self.total = sum(sizes.values())

    @staticmethod
    def capacity(numel):
        return -(-numel // 256) * 256

    def home(self, numel):
        if numel in self.free:
            return numel
        fitting = [size for size in self.free if self.capacity(size) >= numel]
        return min(fitting, key=self.capacity, default=None)

    @rule(key=st.integers(0, 9), numel=st.sampled_from([1, 5, 257, 300, 301, 1500, 2000, 5000]), borrow=st.booleans())
    def lease(self, key, numel, borrow):
        if key in self.leased or self.home(numel) is None:
            with pytest.raises(ValueError, match="buffer pool"):
                self.pool.lease(key, numel, borrow=borrow)
            return
        # Two classes may share a capacity (300 and 301 both take 512): any of them is the nearest.
        own = self.capacity(self.home(numel))
        lease = self.pool.lease(key, numel, borrow=borrow)
        if lease is None:
            ours = [self.home(numel)] if numel in self.free else []
            if borrow:
                ours = [size for size in self.free if self.capacity(size) > own]
            assert all(self.free[size] == 0 for size in ours)
            return
        size = int(lease.class_name[1:])
        assert self.free[size] > 0
        assert self.capacity(size) == own or (borrow and self.capacity(size) > own)
        assert numel not in self.free or size == numel or borrow
        self.free[size] -= 1
        lease.tensor.fill_(key)
        self.leased[key] = (size, lease)

    @rule(key=st.integers(0, 9), by_lease=st.booleans())
    def release(self, key, by_lease):
        if key not in self.leased:
            with pytest.raises(ValueError, match="holds no buffer"):
                self.pool.release(key)
            return
        size, lease = self.leased.pop(key)
        assert bool((lease.tensor == key).all())  # no other lessee wrote into it
        self.pool.release(lease if by_lease else key)
        self.free[size] += 1

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "pool"):
            return
        assert self.pool.free_count() == sum(self.free.values()) == self.total - len(self.leased)
        assert set(self.pool.holders()) == set(self.leased)
        ranges = sorted(byte_range(lease.slot_tensor) for _, lease in self.leased.values())
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))


TestPoolAgainstModel = PoolMachine.TestCase
TestPoolAgainstModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# ------------------------------------------------------------------------------------------------ waiting


class Waiters:
    """Waiting requests, each in its own thread; `start` returns when the request is in the queue."""

    def __init__(self, pool):
        self.pool = pool
        self.threads = ThreadPoolExecutor(16)

    def start(self, key, numel, **options) -> Future:
        future = self.threads.submit(self.pool.acquire, key, numel, timeout_s=60, **options)
        while key not in self.pool.waiting() and not future.done():
            time.sleep(0.001)
        return future


def test_acquire_takes_a_free_slot_at_once():
    pool = adaptive((100, 1))
    lease = pool.acquire("a", 100, timeout_s=0)
    assert pool.holders() == {"a": lease}
    assert pool.denials == 0


def test_acquire_gets_the_slot_that_is_released():
    pool = adaptive((100, 1))
    first = pool.lease("a", 100)
    future = Waiters(pool).start("b", 100)
    assert not future.done()
    pool.release(first)
    second = future.result(60)
    assert second.tensor.data_ptr() == first.tensor.data_ptr()
    assert pool.holders() == {"b": second}
    assert (pool.waiting(), pool.denials, pool.free_count()) == ([], 0, 0)


def test_waiters_are_served_in_order_without_overtaking():
    pool = adaptive((100, 1))
    pool.lease("a", 100)
    waiters = Waiters(pool)
    futures = {key: waiters.start(key, 100) for key in "bcd"}
    assert pool.waiting() == ["b", "c", "d"]
    for holder, served in itertools.pairwise("abcd"):
        pool.release(holder)
        assert pool.lease("late", 100) is None
        assert futures[served].result(60).key == served
    assert pool.waiting() == []


def test_timeout_names_all_holders_and_how_long_they_held():
    pool = adaptive((100, 2), (1000, 1))
    pool.lease("first", 100)
    with ThreadPoolExecutor(1, thread_name_prefix="reader") as reader:
        reader.submit(pool.lease, ("layer", 3), 90).result()
    pool.lease("unrelated", 1000)
    with pytest.raises(PoolTimeoutError) as caught:
        pool.acquire("starved", 100, timeout_s=0.02)
    message = str(caught.value)
    assert "'starved' waited 0.02 s for a buffer of 200 bytes; all 2 that fit (c100) are held by" in message
    assert re.search(r"'first' \(200 bytes in c100, for 0\.0\d+ s, thread MainThread\)", message)
    assert re.search(r"\('layer', 3\) \(180 bytes in c100, for 0\.0\d+ s, thread reader_0\)", message)
    assert message.index("first") < message.index("layer")  # the oldest first
    assert "unrelated" not in message
    assert [lease.key for lease in caught.value.holders] == ["first", ("layer", 3)]
    assert isinstance(caught.value, TimeoutError)
    assert (pool.denials, pool.waiting()) == (1, [])
    pool.release("first")
    assert pool.lease("starved", 100) is not None  # its place in the queue is gone


def test_timeout_of_a_large_pool_counts_the_remaining_holders():
    pool = MonolithicBufferPool(10, 20, HALF, real(), separate=False)
    for key in range(20):
        pool.lease(key, 10)
    with pytest.raises(PoolTimeoutError, match="; and 12 more: release leases sooner") as caught:
        pool.acquire("x", 10, timeout_s=0)
    assert len(caught.value.holders) == 20


def test_borrowing_waiter_takes_a_larger_slot_that_returns_first():
    pool = adaptive((100, 1), (1000, 1))
    pool.lease("small", 100)
    pool.lease("large", 1000)
    waiters = Waiters(pool)
    patient, borrower = waiters.start("patient", 100), waiters.start("borrower", 100, borrow=True)
    pool.release("large")
    assert borrower.result(60).class_name == "c1000"
    assert pool.waiting() == ["patient"]
    pool.release("small")
    assert patient.result(60).class_name == "c100"


@pytest.mark.parametrize("handed_over", [False, True])
def test_interrupted_waiter_leaves_the_queue_and_returns_its_slot(monkeypatch, handed_over):
    pool = adaptive((100, 1))
    pool.lease("a", 100)

    def interrupt(event, timeout):
        if handed_over:
            pool.release("a")
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Event, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pool.acquire("b", 100, timeout_s=60)
    assert pool.waiting() == []
    assert set(pool.holders()) == (set() if handed_over else {"a"})
    assert pool.free_count() == handed_over


def test_invalid_waiting_requests_are_refused():
    pool = adaptive((100, 1))
    pool.lease("a", 100)
    future = Waiters(pool).start("b", 100)
    with pytest.raises(ValueError, match="'b' is already waiting for a buffer in another thread"):
        pool.acquire("b", 100, timeout_s=1)
    with pytest.raises(ValueError, match="'b' is already waiting for a buffer in another thread"):
        pool.lease("b", 100)
    with pytest.raises(ValueError, match="'a' holds a buffer already"):
        pool.acquire("a", 100, timeout_s=1)
    for timeout in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"time-out of .* s: use zero to"):
            pool.acquire("c", 100, timeout_s=timeout)
    with pytest.raises(ValueError, match="fits no class"):
        pool.acquire("c", 5000, timeout_s=1)
    pool.release("a")
    future.result(60)


class QueueMachine(RuleBasedStateMachine):
    """The waiting pool against a model: free slots by class, leases, and one queue served from the front."""

    @initialize(sizes=st.dictionaries(st.sampled_from([5, 300, 2000]), st.integers(1, 2), min_size=1))
    def build(self, sizes):
        self.pool = adaptive(*sizes.items())
        self.waiters = Waiters(self.pool)
        self.free = dict(sizes)
        self.leased = {}
        self.queue = []  # (key, sizes that are large enough, future)

    @rule(key=st.integers(0, 9), numel=st.sampled_from([5, 300, 2000]), borrow=st.booleans(), wait=st.booleans())
    def request(self, key, numel, borrow, wait):
        fitting = sorted(size for size in self.free if size >= numel)[: None if borrow else 1]
        if key in self.leased or key in [waiting[0] for waiting in self.queue] or not fitting:
            return
        chosen = next((size for size in fitting if self.free[size]), None)
        if chosen is not None:
            lease = self.pool.acquire(key, numel, timeout_s=0, borrow=borrow)
            self.grant(key, chosen, lease)
        elif wait and len(self.queue) < 8:
            self.queue.append((key, fitting, self.waiters.start(key, numel, borrow=borrow)))
        else:
            assert self.pool.lease(key, numel, borrow=borrow) is None
            with pytest.raises(PoolTimeoutError) as caught:
                self.pool.acquire(key, numel, timeout_s=0, borrow=borrow)
            holders = {lease.key for lease in caught.value.holders}
            assert holders == {k for k, (size, _) in self.leased.items() if size in fitting}

    def grant(self, key, size, lease):
        assert int(lease.class_name[1:]) == size
        self.free[size] -= 1
        lease.tensor.fill_(key)
        self.leased[key] = (size, lease)

    @rule(data=st.data())
    def release(self, data):
        if not self.leased:
            return
        key = data.draw(st.sampled_from(sorted(self.leased)))
        size, lease = self.leased.pop(key)
        assert bool((lease.tensor == key).all())
        self.free[size] += 1
        self.pool.release(key)
        served = next((waiting for waiting in self.queue if size in waiting[1]), None)
        if served is not None:
            self.queue.remove(served)
            self.grant(served[0], size, served[2].result(60))

    @invariant()
    def agrees(self):
        if not hasattr(self, "pool"):
            return
        assert self.pool.waiting() == [key for key, _, _ in self.queue]
        assert set(self.pool.holders()) == set(self.leased)
        assert self.pool.free_count() == sum(self.free.values())
        assert not any(future.done() for _, _, future in self.queue)

    def teardown(self):
        for key in list(getattr(self, "leased", {})):
            self.pool.release(key)
        while getattr(self, "queue", None):
            for waiting in [each for each in self.queue if each[0] in self.pool.holders()]:
                waiting[2].result(60)
                self.pool.release(waiting[0])
                self.queue.remove(waiting)
        if hasattr(self, "waiters"):
            self.waiters.threads.shutdown()


TestWaitingPoolAgainstModel = QueueMachine.TestCase
TestWaitingPoolAgainstModel.settings = settings(max_examples=10, stateful_step_count=30, deadline=None)


def test_waiting_threads_all_get_their_turn():
    pool = adaptive((64, 2), (640, 1), dtype=torch.int32)
    overwritten = []

    def work(mark):
        for step in range(200):
            lease = pool.acquire((mark, step), 64 if step % 3 else 640, timeout_s=60, borrow=step % 5 == 0)
            lease.tensor.fill_(mark)
            if not bool((lease.tensor == mark).all()):
                overwritten.append((mark, step))
            pool.release(lease)

    with ThreadPoolExecutor(6) as threads:
        for future in [threads.submit(work, mark) for mark in range(6)]:
            future.result()
    assert overwritten == []
    assert (pool.free_count(), pool.holders(), pool.waiting()) == (3, {}, [])


def test_threads_never_share_a_slot():
    pool = adaptive((64, 3), (640, 2), dtype=torch.int32)
    overwritten = []

    def work(mark):
        for step in range(300):
            numel = 64 if step % 2 else 640
            lease = pool.lease((mark, step), numel, borrow=step % 3 == 0)
            if lease is None:
                continue
            lease.tensor.fill_(mark)
            if not bool((lease.tensor == mark).all()):
                overwritten.append((mark, step))
            pool.release(lease)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overwritten == []
    assert pool.free_count() == 5
    assert pool.holders() == {}


def test_pool_on_a_counting_allocator_leases_without_using_memory():
    ledger = Ledger()
    pool = adaptive((1 << 40, 2), allocator=CountingAllocator("page_aligned", ledger))
    assert pool.lease("a", 1 << 40).tensor.device.type == "meta"
    assert ledger.peak_bytes() == pool.total_bytes == 2 << 41


def test_power_of_two_rounding_comes_from_the_allocator():
    ledger = Ledger()
    pool = adaptive((3000, 1), allocator=PowerOfTwoPinnedAllocator(ledger, lock=False))
    (entry,) = ledger.live()
    assert (pool.total_bytes, entry.requested_bytes, entry.reserved_bytes) == (6144, 6144, 8192)


# ------------------------------------------------------------------------------------------------ fallbacks, on demand


def test_fallbacks_are_reported_with_size_class_and_waste():
    pool = adaptive((256, 2), (1024, 1))
    assert pool.lease("own", 256).wasted_bytes == 0
    assert pool.lease("small", 100).wasted_bytes == 156 * 2
    pool.release("small")
    pool.lease("small again", 100)
    pool.lease("borrowed", 256, borrow=True)
    assert pool.fallbacks == 3
    report = [(f.numel, f.class_name, f.wasted_bytes, f.times) for f in pool.fallback_report()]
    assert report == [(256, "c1024", 768 * 2, 1), (100, "c256", 156 * 2, 2)]
    assert pool.largest_numel == 1024


def test_monolithic_pool_reports_no_fallbacks():
    pool = MonolithicBufferPool(1024, 2, HALF, real(), separate=True)
    assert pool.lease("small", 10).wasted_bytes == 0
    assert (pool.fallbacks, pool.fallback_report()) == (0, [])


def live(ledger):
    return [entry.requested_bytes for entry in ledger.entries() if entry.died_s is None]


def test_on_demand_buffers_are_made_when_needed_and_one_kept():
    ledger = Ledger()
    buffers = OnDemandBuffers(HALF, PageAlignedPinnedAllocator(ledger, lock=False), name="staging", keep=True)
    for numel in (100, 1000, 100):  # one after the other, so they need the memory of the largest
        lease = buffers.lease("w", numel)
        assert (lease.tensor.numel(), lease.slot_tensor.numel() % 256) == (numel, 0)
        buffers.release("w")
        del lease
    assert live(ledger) == [2048]
    together = [buffers.lease(key, 500) for key in "abc"]
    ranges = sorted(byte_range(lease.slot_tensor) for lease in together)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    assert len(live(ledger)) == 3
    for key in "abc":
        buffers.release(key)
    del together
    assert live(ledger) == [2048]
    buffers.forget()
    assert live(ledger) == []
    buffers.lease("z", 10)
    buffers.release("z")
    assert live(ledger) == []


def test_on_demand_buffers_refuse_the_same_requests_as_pools():
    buffers = OnDemandBuffers(HALF, real(), name="staging")
    buffers.lease("w", 10)
    for ask, message in (
        (lambda: buffers.lease("w", 10), "'w' holds a buffer already"),
        (lambda: buffers.release("v"), "'v' holds no buffer"),
        (lambda: buffers.lease("x", 0), "no buffer for 0 elements"),
        (lambda: buffers.lease("x", 10, 5), "10 elements in a slot of 5"),
    ):
        with pytest.raises(ValueError, match=message):
            ask()
