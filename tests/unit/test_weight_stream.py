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
    """Storage in memory. A transfer ends when submitted or, with `manual`, when the test ends it, in any order."""

    def __init__(self, manual=False):
        self.kept, self.manual, self.log, self.in_flight = {}, manual, [], {}
        self._transfer = Transfer
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
        transfer = self._transfer(act)
        self.log.append((kind, key))
        self.in_flight[kind, key] = transfer
        if not self.manual:
            transfer.end(failure)
        return transfer

    def end(self, kind, key, failure=None):
        self.in_flight[kind, key].end(failure)


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
    made = FakeStorage(manual=True)
    made.fill("a", "b", "c", "d")
    return made


def value(tensor):
    assert bool((tensor == tensor[0]).all())
    return tensor[0].item()


def counted(stream, **expected):
    found = stream.statistics()
    return {name: getattr(found, name) for name in expected} == expected


# ------------------------------------------------------------------------------------------ fetch and release


def test_fetch_returns_contents_and_release_frees_the_slot(storage):
    stream = stream_of(storage)
    first, second = stream.fetch(["a", "b"])
    assert (value(first), value(second)) == (1, 2)
    assert stream.free_count() == 0
    stream.release("a")
    assert ("a" in stream, "b" in stream, stream.free_count()) == (False, True, 1)


def test_release_without_a_matching_fetch_is_refused(storage):
    stream = stream_of(storage)
    stream.prefetch(["b"])
    stream.fetch(["a"])
    stream.release("a")
    for key in ("a", "b", "c"):
        with pytest.raises(ValueError, match=f"'{key}' is released, but is not in use"):
            stream.release(key)
    with pytest.raises(ValueError, match="copied, but is not in use"):
        stream.copied("a")


def test_two_users_share_a_buffer_until_both_release_it(storage):
    stream = stream_of(storage)
    (one,), (other,) = stream.fetch(["a"]), stream.fetch(["a"])
    assert one.data_ptr() == other.data_ptr()
    stream.release("a")
    assert "a" in stream
    stream.release("a")
    assert "a" not in stream
    assert storage.log == [("read", "a")]


def test_key_named_twice_in_a_fetch_is_fetched_once(storage):
    stream = stream_of(storage)
    assert len(stream.fetch(["a", "a"])) == 1
    stream.release("a")
    assert stream.free_count() == 2


def test_unknown_tensor_is_refused_and_takes_no_slot(storage):
    stream = stream_of(storage)
    for call in (stream.fetch, stream.prefetch, stream.read_ahead):
        with pytest.raises(KeyError):
            call(["nobody"])
    with pytest.raises(ValueError, match="0 elements"):
        stream.register("empty", 0)
    with pytest.raises(ValueError, match="needs a pool"):
        WeightStream(storage)
    assert stream.free_count() == 2


def test_fetch_starts_all_reads_before_waiting_for_any(slow):
    stream = stream_of(slow)
    with thread_of(stream.fetch, ["a", "b"]) as fetching:
        until(lambda: len(slow.log) == 2)
        slow.end("read", "b")  # out of order
        assert not fetching.ended()
        slow.end("read", "a")
    assert [value(tensor) for tensor in fetching.result] == [1, 2]


def test_fetch_without_free_slot_names_holders_and_changes_nothing(storage):
    stream = stream_of(storage, wait_s=0.01)
    stream.fetch(["a"])
    with pytest.raises(PoolTimeoutError, match=r"'a' \(512 bytes"):
        stream.fetch(["b", "c"])
    assert ("a" in stream, "b" in stream, stream.free_count()) == (True, False, 1)


@pytest.mark.parametrize("how", ["release", "copied", "drop"])
def test_fetch_waits_until_a_slot_is_returned(storage, how):
    stream = stream_of(storage, slots=1, wait_s=20)
    stream.fetch(["a"])
    with thread_of(stream.fetch, ["b"]) as fetching:
        time.sleep(0.02)
        assert not fetching.ended()
        getattr(stream, how)("a")
    assert value(fetching.result[0]) == 2


def test_fetch_with_full_pool_gets_extra_buffer_and_warns_once(storage):
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


def test_tensor_larger_than_every_class_gets_an_extra_buffer(storage):
    storage.fill("huge", numel=4 * NUMEL)
    allocator = PageAlignedPinnedAllocator(lock=False)
    stream = stream_of(storage, extra=OnDemandBuffers(HALF, allocator, name="extra"), warn=lambda line: None)
    stream.register("huge", 4 * NUMEL)
    (found,) = stream.fetch(["huge"])
    assert found.numel() == 4 * NUMEL
    assert stream.free_count() == 2


def test_fallback_to_a_larger_class_warns_once_and_is_counted(storage):
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


def test_prefetch_takes_what_fits_and_leaves_the_rest(storage):
    stream = stream_of(storage)
    assert stream.prefetch(["a", "b", "c"]) == ["a", "b"]
    assert stream.prefetch(["a", "b"]) == []  # resident: neither read again nor denied
    assert counted(stream, read_ahead=2, denied=1)
    stream.fetch(["a"])
    assert counted(stream, hits=1, misses=0, bytes_read=2 * BYTES)


def test_prefetch_evicts_nothing_in_use_or_read_ahead(storage):
    stream = stream_of(storage)
    stream.fetch(["a"])
    stream.prefetch(["b"])
    assert stream.prefetch(["c"]) == []
    assert ("a" in stream, "b" in stream) == (True, True)


def test_fetch_evicts_the_latest_read_ahead_of_suitable_size(storage):
    storage.kept["small"] = torch.ones(64, dtype=HALF)
    sizes = dict.fromkeys("abcd", NUMEL) | {"small": 64}
    stream = stream_of(storage, sizes=sizes, pool=pool_of((NUMEL, 2), (64, 1)))
    stream.prefetch(["a", "b", "small"])
    stream.fetch(["c"])
    assert [key for key in ("a", "b", "small") if key in stream] == ["a", "small"]
    assert counted(stream, evicted=1)


def test_fetch_first_takes_buffers_already_copied_to_the_device(storage):
    stream = stream_of(storage)
    stream.fetch(["a"])
    stream.copied("a")
    stream.prefetch(["b"])
    stream.fetch(["c"])
    assert ("a" in stream, "b" in stream) == (False, True)
    assert counted(stream, taken=1, evicted=0)


def test_fetch_evicts_nothing_that_it_requests(storage):
    stream = stream_of(storage)
    stream.prefetch(["a", "b"])
    stream.fetch(["c", "a"])  # b, the other one that was read ahead, is evicted
    assert ("a" in stream, "b" in stream) == (True, False)


def test_evicted_read_ends_before_its_buffer_is_reused(slow):
    stream = stream_of(slow, slots=1)
    stream.prefetch(["a"])
    with thread_of(stream.fetch, ["b"]) as fetching:
        time.sleep(0.02)
        assert slow.log == [("read", "a")]
        slow.end("read", "a")
        until(lambda: len(slow.log) == 2)
        slow.end("read", "b")
    assert value(fetching.result[0]) == 2


def test_dropped_read_holds_its_slot_until_it_ends(slow):
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


def test_fetch_out_of_queue_order_is_not_read_twice(storage):
    stream = stream_of(storage, slots=1)
    stream.read_ahead(["a", "b", "c"])
    stream.fetch(["b"])  # evicts a, which was read ahead
    stream.release("b")
    assert storage.log == [("read", "a"), ("read", "b"), ("read", "c")]


def test_queue_continues_by_itself_when_a_transfer_ends(slow):
    stream = stream_of(slow, slots=1)
    stream.put("a")
    stream.write("a")
    stream.release("a")
    stream.read_ahead(["b"])
    assert slow.log == [("write", "a")]
    slow.end("write", "a")
    assert slow.log == [("write", "a"), ("read", "b")]


def test_queue_leaves_a_slot_to_the_waiting_fetch(slow):
    stream = stream_of(slow, slots=1, wait_s=20)
    stream.read_ahead(["a", "b"])
    with thread_of(stream.fetch, ["c"]) as fetching:
        until(lambda: "a" not in stream)
        slow.end("read", "a")  # its slot belongs to the fetch, not to b
        until(lambda: len(slow.log) == 2)
        slow.end("read", "c")
    assert slow.log == [("read", "a"), ("read", "c")]
    assert value(fetching.result[0]) == 3


def test_release_idle_frees_buffers_read_ahead(storage):
    stream = stream_of(storage)
    stream.fetch(["a"])
    stream.read_ahead(["b", "c"])
    assert stream.release_idle() == ["b"]
    stream.release("a")
    assert ("c" in stream, stream.free_count()) == (False, 2)


# ------------------------------------------------------------------------------------------ copies and events


def test_slot_is_reused_only_after_its_copy_event_has_passed(storage):
    stream, event = stream_of(storage, slots=1), FakeEvent()
    stream.fetch(["a"])
    stream.copied("a", event)
    assert stream.prefetch(["b"]) == []
    event.passed = True
    assert stream.prefetch(["b"]) == ["b"]
    assert not event.waited


def test_fetch_waits_for_the_copy_event(storage):
    stream, event = stream_of(storage, slots=1), FakeEvent()
    stream.fetch(["a"])
    stream.copied("a", event)
    stream.fetch(["b"])
    assert event.waited


def test_copied_tensor_is_fetched_again_without_a_read(storage):
    stream = stream_of(storage)
    stream.fetch(["a"])
    stream.copied("a", FakeEvent())
    assert value(stream.fetch(["a"])[0]) == 1
    assert storage.log == [("read", "a")]
    assert stream.prefetch(["b", "c"]) == ["b"]  # a is in use again


def test_dropped_buffer_waits_for_all_its_copies(storage):
    stream, first, second = stream_of(storage, slots=1), FakeEvent(), FakeEvent()
    for event in (first, second):
        stream.fetch(["a"])
        stream.copied("a", event)
    stream.drop("a")
    second.passed = True
    assert stream.free_count() == 0
    first.passed = True
    assert stream.free_count() == 1


def test_buffer_copied_while_in_use_returns_after_the_copy(storage):
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


def test_await_copies_waits_for_the_copies_of_a_buffer(storage):
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


def test_buffer_being_written_is_not_reused(slow):
    stream = stream_of(slow, slots=1)
    stream.put("a").fill_(9)
    stream.write("a")
    stream.release("a")
    assert stream.prefetch(["b"]) == []
    slow.end("write", "a")
    assert stream.prefetch(["b"]) == ["b"]


def test_failed_write_is_raised_by_flush_next_fetch_and_close(storage):
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


def test_put_waits_for_the_copy_of_the_buffer(storage):
    stream, event = stream_of(storage), FakeEvent()
    stream.fetch(["a"])
    stream.copied("a", event)
    stream.put("a")
    assert event.waited


# ------------------------------------------------------------------------------------------ failures


def test_failed_read_is_raised_frees_its_slot_and_is_retried(storage):
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


def test_staging_buffers_serve_until_there_is_a_pool(storage):
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


def test_owner_decides_which_tensors_may_be_evicted(storage):
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


class LateTransfer(Transfer):
    """A transfer that ends only when it is waited for."""

    def wait(self):
        if not self.done():
            self.end()
        super().wait()


class Rank:
    """A rank of a training, whose transfers and copies end early, or `late`: not before they are waited for."""

    def __init__(self, *, late, in_program_order):
        storage = FakeStorage(manual=late)
        storage._transfer = LateTransfer if late else Transfer
        storage.fill(*"abcdefg")
        self.late, self.uses, self.lost = late, {}, []
        extra = OnDemandBuffers(HALF, PageAlignedPinnedAllocator(lock=False), name="extra")
        quiet = {"warn": lambda line: None}
        self.stream = stream_of(storage, 3, owner=self, extra=extra, in_program_order=in_program_order, **quiet)

    def use_of(self, key):
        return self.uses.get(key, Use.IDLE)

    def dropped(self, key, use):
        self.lost.append((key, use, self.uses.pop(key, None)))

    def do(self, what, key, others):
        """Do one operation of a training, as far as it applies, and return all that was decided."""
        started, stream = None, self.stream
        if what == "prefetch":
            started = stream.prefetch(others)
        elif what == "fetch":
            self.uses[key] = Use.NEEDED
            assert value(stream.fetch([key])[0]) == 1 + "abcdefg".index(key)
        elif what == "gather" and self.uses.get(key) is Use.NEEDED:
            event = FakeEvent()
            event.passed = not self.late
            stream.copied(key, event)
            self.uses[key] = Use.COPIED
        elif what == "drop":
            stream.drop(key)
            self.uses.pop(key, None)
        return what, key, started, stream.free_count(), [each in stream for each in "abcdefg"], list(self.lost)


def decisions(**rank):
    random_source, rank = random.Random(0), Rank(**rank)
    kinds = ("prefetch", "fetch", "gather", "gather", "drop")
    return [
        rank.do(random_source.choice(kinds), random_source.choice("abcdefg"), random_source.sample("abcdefg", 3))
        for _ in range(400)
    ]


def test_ranks_with_faster_and_slower_devices_decide_alike():
    """DeepSpeed gathers what was read ahead: if that differed, so would the collectives of the ranks."""
    early = decisions(late=False, in_program_order=True)
    assert early == decisions(late=True, in_program_order=True)
    assert early != decisions(late=True, in_program_order=False)
    assert any(started for _, _, started, *_ in early)
    assert {use for *_, lost in early for _, use, _ in lost} == {Use.COPIED, Use.IDLE}


def test_prefetch_in_program_order_waits_for_the_copy_of_its_buffer(storage):
    event, late = FakeEvent(), FakeEvent()
    stream = stream_of(storage, 2, in_program_order=True)
    stream.fetch(["a", "b"])
    stream.copied("a", event)
    assert (stream.prefetch(["c", "d"]), event.waited) == (["c"], True)
    stream.copying("b", late)
    stream.release("b")
    assert (stream.free_count(), late.waited) == (1, False)
    assert (stream.prefetch(["d"]), late.waited) == (["d"], True)
    assert [value(tensor) for tensor in stream.fetch(["c", "d"])] == [3, 4]


def test_closing_frees_all_slots(storage):
    stream = stream_of(storage)
    stream.fetch(["a"])
    stream.read_ahead(["b", "c"])
    stream.close()
    assert stream.free_count() == 2
    assert stream.statistics() == StreamStatistics(misses=1, read_ahead=1, bytes_read=2 * BYTES)


def test_many_threads_share_few_slots_and_see_latest_contents(storage):
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
