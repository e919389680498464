"""Properties that both engines have: how requests end, are reported, cancelled, counted and made to fail."""

import asyncio
import errno
import os
import select
import time

import pytest
import torch

from memascend import _C
from memascend.storage.direct_engine import DirectEngine, DirectEngineConfig
from memascend.storage.engine import RequestCancelled
from memascend.storage.errors import StorageError
from memascend.storage.file_engine import FileEngine

BLOCK = 1 << 14


class Files:
    """A file engine behind the calls that this test makes to both engines."""

    def __init__(self, folder, layer):
        self.folder, self.engine = folder, FileEngine(threads=1, block_bytes=BLOCK, faults=layer)

    def write(self, key, tensor):
        return self.engine.async_write(tensor, self.folder / key)

    def read(self, key, tensor):
        return self.engine.async_read(tensor, self.folder / key)


class Direct:
    def __init__(self, folder, layer):
        path = folder / "device"
        with path.open("wb") as file:
            file.truncate(8 << 20)
        _C.storage_format([str(path)], "tests", [], 4096, 0)
        config = DirectEngineConfig(control_folder=str(folder), volatile=True, block_bytes=BLOCK, depth=1)
        self.engine = DirectEngine([path], "tests", config, faults=layer)

    def write(self, key, tensor):
        return self.engine.write(key, tensor)

    def read(self, key, tensor):
        return self.engine.read(key, tensor)


@pytest.fixture
def layer():
    return _C.FaultLayer()


@pytest.fixture(params=[Files, Direct])
def at(request, tmp_path, layer):
    made = request.param(tmp_path, layer)
    with made.engine:
        yield made
        layer.clear()


def readable(fd, seconds=0.0):
    return bool(select.select([fd], [], [], seconds)[0])


def all_have_ended(engine):
    while engine.pending:
        time.sleep(0.001)


def test_completed_requests_can_be_taken_without_a_waiting_thread(at):
    fd = at.engine.completion_fd
    assert not os.get_blocking(fd)
    assert not readable(fd)
    assert at.engine.take_ended() == []
    numbers = [at.write(f"t{number}", torch.full((9000,), number)) for number in range(5)]
    taken = []
    while len(taken) < 5:
        assert readable(fd, 60)
        taken += at.engine.take_ended()
    assert sorted(request for request, _, _ in taken) == numbers
    assert all(not cancelled and failure is None for _, cancelled, failure in taken)
    assert not readable(fd)
    assert at.engine.wait() == 0
    with pytest.raises(ValueError, match="outcome has been reported: each is reported once"):
        at.engine.wait(numbers[0])


def test_an_event_loop_chains_requests(at):
    """A write, and after its end a read of it, ten times; the loop's thread never blocks in the engine."""

    async def chain() -> list[torch.Tensor]:
        loop, futures = asyncio.get_running_loop(), {}

        def report() -> None:
            for outcome in at.engine.take_ended():
                futures.pop(outcome.request).set_result(outcome)

        async def ended(request: int) -> None:
            futures[request] = loop.create_future()
            (await futures[request]).check()

        async def one(number: int) -> torch.Tensor:
            out = torch.zeros(5000)
            await ended(at.write(f"t{number}", torch.full((5000,), float(number))))
            await ended(at.read(f"t{number}", out))
            return out

        loop.add_reader(at.engine.completion_fd, report)
        try:
            return await asyncio.gather(*map(one, range(10)))
        finally:
            loop.remove_reader(at.engine.completion_fd)

    for number, out in enumerate(asyncio.run(chain())):
        assert bool((out == number).all())


def test_descriptor_signals_outcomes_from_before_it_was_requested(at):
    at.write("t", torch.ones(10))
    all_have_ended(at.engine)
    assert readable(at.engine.completion_fd)
    assert at.engine.wait() == 1
    assert not readable(at.engine.completion_fd)


def test_a_failed_request_is_an_outcome_with_its_error(at, layer):
    layer.add("write", times=1, error=errno.EIO)
    bad = at.write("bad", torch.ones(100))
    with pytest.raises(StorageError, match="check the device") as waited:
        at.engine.wait(bad)
    assert (waited.value.op, waited.value.errno) == ("write", errno.EIO)
    layer.add("write", times=1, error=errno.EIO)
    bad = at.write("bad", torch.ones(100))
    all_have_ended(at.engine)
    (outcome,) = at.engine.take_ended()
    assert (outcome.request, outcome.cancelled) == (bad, False)
    assert str(outcome.failure) == str(waited.value)
    with pytest.raises(StorageError):
        outcome.check()
    counted = at.engine.statistics
    assert (counted.requests, counted.failed) == (2, 2)


def test_cancelled_request_ends_early_and_reports_cancellation(at, layer):
    layer.add("write", times=1, delay_us=200_000)
    at.write("first", torch.ones(100))  # keeps the only worker busy
    request = at.write("second", torch.ones(1 << 18))
    assert at.engine.cancel(request)
    with pytest.raises(RequestCancelled):
        at.engine.wait(request)
    assert not at.engine.cancel(request)
    assert at.engine.wait() == 1
    counted = at.engine.statistics
    assert (counted.requests, counted.cancelled) == (2, 1)
    assert counted.bytes_written < 1 << 18
    assert at.write("second", torch.ones(1 << 18)) > request
    assert at.engine.wait() == 1


def test_wait_timeout_reports_no_outcome_and_waiting_again_works(at, layer):
    layer.add("write", times=1, delay_us=100_000)
    request = at.write("t", torch.ones(100))
    for named in (request, None):
        with pytest.raises(TimeoutError, match=r"1 requests have not completed after 0\.001 s"):
            at.engine.wait(named, timeout_s=0.001)
    assert at.engine.wait(request, timeout_s=60) == 1


def test_both_engines_count_the_same_statistics(at, layer):
    layer.add("write", times=3, error=errno.EINTR)
    layer.add("write", times=2, at_most=4096)
    tensor = torch.arange(5 * BLOCK, dtype=torch.int32)
    at.write("t", tensor)
    at.engine.wait()
    out = torch.zeros_like(tensor)
    at.read("t", out)
    at.engine.wait()
    assert torch.equal(out, tensor)
    counted = at.engine.statistics
    assert (counted.bytes_written, counted.bytes_read, counted.requests) == (tensor.nbytes, tensor.nbytes, 2)
    assert counted.repeated == 3
    assert counted.short_transfers == 2
    assert counted.commands >= 2 * tensor.nbytes // BLOCK + 5
    assert counted.max_queue_depth == counted.mean_queue_depth == 1
    assert sum(count for _, count in counted.read_latency_us + counted.write_latency_us) == counted.commands


@pytest.mark.parametrize("kind", [Files, Direct])
def test_thread_refused_by_the_system_raises_an_error(tmp_path, layer, kind):
    layer.add("thread", times=1, error=errno.EAGAIN)
    with pytest.raises(RuntimeError, match=r"refuses thread 1 of 1: .*raise the limit on threads"):
        kind(tmp_path, layer)
