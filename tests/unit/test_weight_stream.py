"""Tensors that pass through a few host buffers: read ahead, evicted, released, whatever the storage does."""

import random
import threading
import time

import pytest
import torch

from memascend.engine import StreamOptions, StreamStatistics, Use, WeightStream
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.memory.pools import AdaptiveBufferPool, OnDemandBuffers, PoolClass, PoolTimeoutError

NUMEL, BYTES = 256, 512
HALF = torch.float16


class Transfer:
    def __init__(self, act):
        self._act, self._ended, self._failure, self._callbacks = act, threading.Event(), None, []

    def end(self, failure=None):
        self._failure = failure
        if failure is None:
            self._act()
        self._act = None  # it refers to the buffer
        self._ended.set()
        for function in self._callbacks:
            function(self)

    def add_done_callback(self, function):
        function(self) if self.done() else self._callbacks.append(function)

    def done(self):
        return self._ended.is_set()

    def wait(self):
        assert self._ended.wait(20)
        if self._failure is not None:
            raise self._failure


class FakeStorage:
    """Storage in memory. A transfer ends when submitted or, with `by_hand`, when the test ends it, in any order."""

    def __init__(self, by_hand=False):
        self.kept, self.by_hand, self.log, self.under_way = {}, by_hand, [], {}
        self.refuse = self.fail_reads = self.fail_writes = None

    def fill(self, *keys, numel=NUMEL):
        self.kept |= {key: torch.full((numel,), float(place + 1), dtype=HALF) for place, key in enumerate(keys)}

    def read(self, key, tensor, *, priority=0):
        return self._start("read", key, lambda: tensor[: self.kept[key].numel()].copy_(self.kept[key]), self.fail_reads)

    def write(self, key, tensor, *, priority=0):
        return self._start("write", key, lambda: self.kept.update({key: tensor.clone()}), self.fail_writes)

    def _start(self, kind, key, act, failure):
        if self.refuse is not None:
            raise self.refuse
        transfer = Transfer(act)
        self.log.append((kind, key))
        self.under_way[kind, key] = transfer
        if not self.by_hand:
            transfer.end(failure)
        return transfer

    def end(self, kind, key, failure=None):
        self.under_way[kind, key].end(failure)


class FakeEvent:
    def __init__(self):
        self.passed, self.waited = False, False

    def query(self):
        return self.passed

    def synchronize(self):
        self.passed = self.waited = True


def pool_of(*classes):
    named = [PoolClass(f"c{numel}", numel, count) for numel, count in classes]
    return AdaptiveBufferPool(named, HALF, PageAlignedPinnedAllocator(lock=False))


def stream_of(storage, slots=2, sizes=None, **options):
    options.setdefault("wait_s", 0.0)
    options.setdefault("pool", pool_of((NUMEL, slots)))
    buffers = {name: options.pop(name) for name in ("pool", "staging", "extra") if name in options}
    stream = WeightStream(storage, **buffers, options=StreamOptions(**options))
    for key, numel in (sizes or dict.fromkeys(storage.kept, NUMEL)).items():
        stream.register(key, numel)
    return stream


@pytest.fixture
def storage():
    made = FakeStorage()
    made.fill("a", "b", "c", "d")
    return made


@pytest.fixture
def slow():
    made = FakeStorage(by_hand=True)
    made.fill("a", "b", "c", "d")
    return made


def value(tensor):
    assert bool((tensor == tensor[0]).all())
    return tensor[0].item()


def counted(stream, **expected):
    found = stream.statistics()
    return {name: getattr(found, name) for name in expected} == expected


# ------------------------------------------------------------------------------------------ fetch and release


def test_a_fetch_gives_the_contents_and_a_release_the_slot(storage):
    stream = stream_of(storage)
    first, second = stream.fetch(["a", "b"])
    assert (value(first), value(second)) == (1, 2)
    assert stream.free_count() == 0
    stream.release("a")
    assert ("a" in stream, "b" in stream, stream.free_count()) == (False, True, 1)


def test_a_second_release_and_one_without_a_fetch_are_refused(storage):
    stream = stream_of(storage)
    stream.prefetch(["b"])
    stream.fetch(["a"])
    stream.release("a")
    for key in ("a", "b", "c"):
        with pytest.raises(ValueError, match=f"'{key}' is released, but is not in use"):
            stream.release(key)
    with pytest.raises(ValueError, match="copied, but is not in use"):
        stream.copied("a")


def test_two_users_of_a_tensor_share_its_buffer_until_the_second_releases_it(storage):
    stream = stream_of(storage)
    (one,), (other,) = stream.fetch(["a"]), stream.fetch(["a"])
    assert one.data_ptr() == other.data_ptr()
    stream.release("a")
    assert "a" in stream
    stream.release("a")
    assert "a" not in stream
    assert storage.log == [("read", "a")]


def test_what_is_named_twice_in_a_fetch_is_fetched_once(storage):
    stream = stream_of(storage)
    assert len(stream.fetch(["a", "a"])) == 1
    stream.release("a")
    assert stream.free_count() == 2


def test_an_unknown_tensor_is_refused_and_takes_nothing(storage):
    stream = stream_of(storage)
    for call in (stream.fetch, stream.prefetch, stream.read_ahead):
        with pytest.raises(KeyError):
            call(["nobody"])
    with pytest.raises(ValueError, match="0 elements"):
        stream.register("empty", 0)
    with pytest.raises(ValueError, match="needs a pool"):
        WeightStream(storage)
    assert stream.free_count() == 2


def test_reads_of_a_fetch_are_all_under_way_before_the_first_is_waited_for(slow):
    stream = stream_of(slow)
    with thread_of(stream.fetch, ["a", "b"]) as fetching:
        until(lambda: len(slow.log) == 2)
        slow.end("read", "b")  # out of order
        assert not fetching.ended()
        slow.end("read", "a")
    assert [value(tensor) for tensor in fetching.result] == [1, 2]


def test_a_fetch_that_finds_no_slot_in_time_names_who_holds_them_and_leaves_all_as_it_was(storage):
    stream = stream_of(storage, wait_s=0.01)
    stream.fetch(["a"])
    with pytest.raises(PoolTimeoutError, match=r"'a' \(512 bytes"):
        stream.fetch(["b", "c"])
    assert ("a" in stream, "b" in stream, stream.free_count()) == (True, False, 1)


@pytest.mark.parametrize("how", ["release", "copied", "drop"])
def test_a_fetch_waits_for_a_slot_to_come_back(storage, how):
    stream = stream_of(storage, slots=1, wait_s=20)
    stream.fetch(["a"])
    with thread_of(stream.fetch, ["b"]) as fetching:
        time.sleep(0.02)
        assert not fetching.ended()
        getattr(stream, how)("a")
    assert value(fetching.result[0]) == 2


def test_beside_a_pool_that_is_in_use_a_fetch_gets_a_buffer_of_its_own_and_says_so_once(storage):
    ledger, lines = Ledger(), []
    allocator = PageAlignedPinnedAllocator(ledger, lock=False)
    stream = stream_of(
        storage, slots=1, extra=OnDemandBuffers(HALF, allocator, name="extra"), warn=lines.append, describe=str.upper
    )
    assert [value(tensor) for tensor in stream.fetch(["a", "b", "c"])] == [1, 2, 3]
    assert counted(stream, extra_buffers=2)
    assert len(lines) == 1
    assert "B (256 elements)" in lines[0]
    for key in ("a", "b", "c"):
        stream.release(key)
    assert [entry for entry in ledger.entries() if entry.died_s is None] == []


def test_a_tensor_larger_than_every_class_lies_beside_the_pool(storage):
    storage.fill("huge", numel=4 * NUMEL)
    allocator = PageAlignedPinnedAllocator(lock=False)
    stream = stream_of(storage, extra=OnDemandBuffers(HALF, allocator, name="extra"), warn=lambda line: None)
    stream.register("huge", 4 * NUMEL)
    (found,) = stream.fetch(["huge"])
    assert found.numel() == 4 * NUMEL
    assert stream.free_count() == 2


def test_a_larger_class_is_said_once_for_a_size_and_counted(storage):
    lines = []
    storage.kept["small"] = torch.ones(NUMEL // 2, dtype=HALF)
    stream = stream_of(storage, warn=lines.append)
    stream.register("small", NUMEL // 2)
    for _ in range(2):
        stream.fetch(["small"])
        stream.release("small")
    assert len(lines) == 1
    assert f"'small' ({NUMEL // 2} elements)" in lines[0]
    assert f"is in c{NUMEL} and wastes {BYTES // 2} bytes" in lines[0]
    assert counted(stream, fallbacks=2, fallback_wasted_bytes=BYTES // 2)


# ------------------------------------------------------------------------------------------ ahead of need


def test_prefetch_takes_what_there_is_room_for_and_leaves_the_rest(storage):
    stream = stream_of(storage)
    assert stream.prefetch(["a", "b", "c"]) == ["a", "b"]
    assert stream.prefetch(["a", "b"]) == []  # resident: neither read again nor denied
    assert counted(stream, read_ahead=2, denied=1)
    stream.fetch(["a"])
    assert counted(stream, hits=1, misses=0, bytes_read=2 * BYTES)


def test_prefetch_takes_nothing_that_is_used_or_read_ahead(storage):
    stream = stream_of(storage)
    stream.fetch(["a"])
    stream.prefetch(["b"])
    assert stream.prefetch(["c"]) == []
    assert ("a" in stream, "b" in stream) == (True, True)


def test_a_fetch_takes_the_latest_of_what_was_read_ahead_and_never_what_would_not_help(storage):
    storage.kept["small"] = torch.ones(64, dtype=HALF)
    sizes = dict.fromkeys("abcd", NUMEL) | {"small": 64}
    stream = stream_of(storage, sizes=sizes, pool=pool_of((NUMEL, 2), (64, 1)))
    stream.prefetch(["a", "b", "small"])
    stream.fetch(["c"])
    assert [key for key in ("a", "b", "small") if key in stream] == ["a", "small"]
    assert counted(stream, evicted=1)


def test_a_fetch_prefers_what_the_device_has_a_copy_of(storage):
    stream = stream_of(storage)
    stream.fetch(["a"])
    stream.copied("a")
    stream.prefetch(["b"])
    stream.fetch(["c"])
    assert ("a" in stream, "b" in stream) == (False, True)
    assert counted(stream, taken=1, evicted=0)


def test_what_a_fetch_asks_for_is_not_evicted_for_it(storage):
    stream = stream_of(storage)
    stream.prefetch(["a", "b"])
    stream.fetch(["c", "a"])  # b, the other one that was read ahead, is evicted
    assert ("a" in stream, "b" in stream) == (True, False)


def test_an_evicted_read_ends_before_its_buffer_is_read_into_again(slow):
    stream = stream_of(slow, slots=1)
    stream.prefetch(["a"])
    with thread_of(stream.fetch, ["b"]) as fetching:
        time.sleep(0.02)
        assert slow.log == [("read", "a")]
        slow.end("read", "a")
        until(lambda: len(slow.log) == 2)
        slow.end("read", "b")
    assert value(fetching.result[0]) == 2


def test_a_dropped_read_holds_its_slot_until_it_has_ended(slow):
    stream = stream_of(slow, slots=1)
    stream.prefetch(["a"])
    assert stream.drop("a")
    assert not stream.drop("a")
    assert (stream.free_count(), stream.prefetch(["b"])) == (0, [])
    slow.end("read", "a", OSError("of contents that nobody wants"))
    assert (stream.free_count(), stream.prefetch(["b"])) == (1, ["b"])


def test_the_queue_is_read_in_order_as_slots_come_back(storage):
    stream = stream_of(storage)
    stream.read_ahead(["a", "b", "c", "d"])
    assert storage.log == [("read", "a"), ("read", "b")]
    for key in ("a", "b", "c", "d"):
        assert value(stream.fetch([key])[0]) == "abcd".index(key) + 1
        stream.release(key)
    assert storage.log == [("read", key) for key in "abcd"]
    assert counted(stream, hits=4, misses=0, evicted=0)


def test_the_queue_keeps_to_its_budget(storage):
    stream = stream_of(storage, slots=4, read_ahead_bytes=2 * BYTES)
    stream.read_ahead(["a", "b", "c", "d"])
    assert stream.free_count() == 2
    stream.fetch(["a"])  # in use, so no longer ahead
    assert ("c" in stream, "d" in stream) == (True, False)


def test_a_tensor_that_is_visited_again_stays_in_memory(storage):
    stream = stream_of(storage)
    stream.read_ahead(["a", "b", "b", "a"])  # forward and backward over two blocks
    for key in ("a", "b", "b", "a"):
        stream.fetch([key])
        stream.release(key)
    assert storage.log == [("read", "a"), ("read", "b")]
    assert stream.free_count() == 2


def test_a_visit_out_of_the_queue_s_turn_is_not_read_twice(storage):
    stream = stream_of(storage, slots=1)
    stream.read_ahead(["a", "b", "c"])
    stream.fetch(["b"])  # evicts a, which was read ahead
    stream.release("b")
    assert storage.log == [("read", "a"), ("read", "b"), ("read", "c")]


def test_the_queue_goes_on_when_a_transfer_ends_without_anybody_asking(slow):
    stream = stream_of(slow, slots=1)
    stream.put("a")
    stream.write("a")
    stream.release("a")
    stream.read_ahead(["b"])
    assert slow.log == [("write", "a")]
    slow.end("write", "a")
    assert slow.log == [("write", "a"), ("read", "b")]


def test_the_queue_does_not_take_what_a_fetch_is_waiting_for(slow):
    stream = stream_of(slow, slots=1, wait_s=20)
    stream.read_ahead(["a", "b"])
    with thread_of(stream.fetch, ["c"]) as fetching:
        until(lambda: "a" not in stream)
        slow.end("read", "a")  # its slot belongs to the fetch, not to b
        until(lambda: len(slow.log) == 2)
        slow.end("read", "c")
    assert slow.log == [("read", "a"), ("read", "c")]
    assert value(fetching.result[0]) == 3


def test_what_nobody_works_with_is_given_back_at_once(storage):
    stream = stream_of(storage)
    stream.fetch(["a"])
    stream.read_ahead(["b", "c"])
    assert stream.release_idle() == ["b"]
    stream.release("a")
    assert ("c" in stream, stream.free_count()) == (False, 2)


# ------------------------------------------------------------------------------------------ copies and events


def test_a_slot_is_taken_only_when_the_event_of_its_copy_has_passed(storage):
    stream, event = stream_of(storage, slots=1), FakeEvent()
    stream.fetch(["a"])
    stream.copied("a", event)
    assert stream.prefetch(["b"]) == []
    event.passed = True
    assert stream.prefetch(["b"]) == ["b"]
    assert not event.waited


def test_a_fetch_waits_for_the_event(storage):
    stream, event = stream_of(storage, slots=1), FakeEvent()
    stream.fetch(["a"])
    stream.copied("a", event)
    stream.fetch(["b"])
    assert event.waited


def test_a_copied_tensor_is_still_there_for_a_fetch(storage):
    stream = stream_of(storage)
    stream.fetch(["a"])
    stream.copied("a", FakeEvent())
    assert value(stream.fetch(["a"])[0]) == 1
    assert storage.log == [("read", "a")]
    assert stream.prefetch(["b", "c"]) == ["b"]  # a is in use again


def test_a_released_buffer_waits_for_every_copy_of_it(storage):
    stream, first, second = stream_of(storage, slots=1), FakeEvent(), FakeEvent()
    for event in (first, second):
        stream.fetch(["a"])
        stream.copied("a", event)
    stream.drop("a")
    second.passed = True
    assert stream.free_count() == 0
    first.passed = True
    assert stream.free_count() == 1


def test_a_buffer_that_is_copied_while_it_is_used_goes_back_only_when_the_copy_has_ended(storage):
    stream, event = stream_of(storage, slots=1), FakeEvent()
    stream.fetch(["a"])
    stream.copying("a", event)
    stream.release("a")
    assert ("a" in stream, stream.free_count()) == (False, 0)
    assert stream.prefetch(["b"]) == []
    event.passed = True
    assert stream.prefetch(["b"]) == ["b"]
    with pytest.raises(ValueError, match="'a' is copied, but is not in use"):
        stream.copying("a", event)


def test_whoever_changes_a_buffer_can_wait_for_its_copies(storage):
    stream, event = stream_of(storage), FakeEvent()
    stream.fetch(["a"])
    stream.copying("a", event)
    stream.await_copies("a")
    assert event.waited
    stream.release("a")


# ------------------------------------------------------------------------------------------ writes


def test_new_contents_are_written_and_read_again(storage):
    stream = stream_of(storage)
    stream.put("a").fill_(9)
    stream.write("a").wait()
    stream.release("a")
    assert value(stream.fetch(["a"])[0]) == 9
    assert counted(stream, bytes_written=BYTES, misses=1)


def test_a_read_waits_for_the_write_before_it(slow):
    stream = stream_of(slow)
    stream.put("a").fill_(9)
    stream.write("a")
    stream.release("a")  # does not wait
    assert stream.prefetch(["a"]) == []
    with thread_of(stream.fetch, ["a"]) as fetching:
        time.sleep(0.02)
        assert slow.log == [("write", "a")]
        slow.end("write", "a")
        until(lambda: len(slow.log) == 2)
        slow.end("read", "a")
    assert value(fetching.result[0]) == 9


def test_a_buffer_that_is_being_written_is_nobody_else_s(slow):
    stream = stream_of(slow, slots=1)
    stream.put("a").fill_(9)
    stream.write("a")
    stream.release("a")
    assert stream.prefetch(["b"]) == []
    slow.end("write", "a")
    assert stream.prefetch(["b"]) == ["b"]


def test_a_failed_write_is_raised_by_flush_and_by_the_next_fetch_of_the_tensor(storage):
    stream = stream_of(storage)
    for ask in (stream.flush, lambda: stream.fetch(["a"]), stream.close):
        storage.fail_writes = OSError("disk full")
        stream.put("a")
        stream.write("a")
        stream.release("a")
        storage.fail_writes = None
        with pytest.raises(OSError, match="disk full"):
            ask()
        assert stream.free_count() == 2
        stream.flush()  # once


def test_put_waits_for_what_still_works_on_the_buffer(storage):
    stream, event = stream_of(storage), FakeEvent()
    stream.fetch(["a"])
    stream.copied("a", event)
    stream.put("a")
    assert event.waited


# ------------------------------------------------------------------------------------------ failures


def test_a_failed_read_is_raised_gives_the_slot_back_and_is_tried_again(storage):
    stream = stream_of(storage)
    storage.fail_reads = OSError("bad sector")
    stream.prefetch(["a"])  # reports nothing yet
    with pytest.raises(OSError, match="bad sector"):
        stream.fetch(["b", "a"])
    assert (stream.free_count(), "a" in stream) == (2, False)
    storage.fail_reads = None
    assert value(stream.fetch(["a"])[0]) == 1


def test_a_read_that_cannot_be_submitted_takes_no_slot(storage):
    stream = stream_of(storage)
    stream.fetch(["a"])
    storage.refuse = OSError("no device")
    for ask in (stream.prefetch, stream.fetch):
        with pytest.raises(OSError, match="no device"):
            ask(["b"])
    stream.read_ahead(["c"])
    stream.release("a")  # the read from the queue fails here, and its fetch reports it
    with pytest.raises(OSError, match="no device"):
        stream.fetch(["c"])
    storage.refuse = None
    assert value(stream.fetch(["c"])[0]) == 3
    assert stream.free_count() == 1


# ------------------------------------------------------------------------------------------ the rest


def test_until_there_is_a_pool_staging_buffers_serve(storage):
    ledger = Ledger()
    staging = OnDemandBuffers(HALF, PageAlignedPinnedAllocator(ledger, lock=False), name="staging", keep=True)
    stream = stream_of(storage, pool=None, staging=staging)
    assert [value(tensor) for tensor in stream.fetch(["a", "b", "c"])] == [1, 2, 3]
    stream.release("a")
    stream.use_pool(pool_of((NUMEL, 1)))
    stream.fetch(["d"])
    stream.release("b")
    stream.release("c")
    assert [entry for entry in ledger.entries() if entry.died_s is None] == []
    assert stream.free_count() == 0


def test_an_owner_says_what_its_tensors_are_used_for(storage):
    uses, lost = dict.fromkeys("abcd", Use.NEEDED), []

    class Account:
        use_of = uses.get

        def dropped(self, key, use):
            lost.append((key, use))

    stream = stream_of(storage, owner=Account())
    stream.fetch(["a", "b"])
    with pytest.raises(PoolTimeoutError):
        stream.fetch(["c"])
    uses["a"] = Use.IDLE
    assert stream.prefetch(["c"]) == []
    stream.fetch(["c"])
    uses["b"] = Use.COPIED
    assert stream.prefetch(["d"]) == ["d"]
    assert lost == [("a", Use.IDLE), ("b", Use.COPIED)]
    assert stream.drop("c")


def test_closing_gives_everything_back(storage):
    stream = stream_of(storage)
    stream.fetch(["a"])
    stream.read_ahead(["b", "c"])
    stream.close()
    assert stream.free_count() == 2
    assert stream.statistics() == StreamStatistics(misses=1, read_ahead=1, bytes_read=2 * BYTES)


def test_many_threads_share_a_few_slots_and_see_the_latest_contents(storage):
    """Each thread fetches, checks and sometimes rewrites; a tensor's contents say how often it was rewritten."""
    keys = [f"t{number}" for number in range(6)]
    storage.kept = {key: torch.zeros(NUMEL, dtype=HALF) for key in keys}
    stream = stream_of(storage, slots=3, wait_s=20)
    locks, written = {key: threading.Lock() for key in keys}, dict.fromkeys(keys, 0)
    failures = []

    def work(seed):
        draw = random.Random(seed)
        try:
            for _ in range(150):
                key = draw.choice(keys)
                if draw.random() < 0.3:
                    stream.prefetch(draw.sample(keys, 2))
                with locks[key]:
                    (tensor,) = stream.fetch([key])
                    assert value(tensor) == written[key]
                    if draw.random() < 0.3:
                        written[key] += 1
                        tensor.fill_(written[key])
                        stream.write(key)
                        stream.release(key)
                    else:
                        stream.copied(key) if draw.random() < 0.5 else stream.release(key)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    stream.close()
    assert stream.free_count() == 3
    assert {key: value(tensor) for key, tensor in storage.kept.items()} == written


class thread_of:
    """Calls a function in a thread; leaving the block waits for it."""

    def __init__(self, function, *arguments):
        self.result = None
        self._thread = threading.Thread(target=lambda: setattr(self, "result", function(*arguments)))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._thread.join(20)
        assert self.ended()

    def ended(self):
        return not self._thread.is_alive()


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
