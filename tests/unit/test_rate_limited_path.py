"""An SSD of known speed: requests served in turn, by priority, with their data; and the predicted step."""

import errno
import threading

import pytest
import torch
from torch import nn

from memascend.bench.predicted import predicted_steps
from memascend.bench.rate_limit import Limiter, RateLimitedTier, RateLimiter, rate_limited
from memascend.engine import state_store
from memascend.engine.options import EngineOptions
from memascend.engine.runtime import StreamingEngine
from memascend.planner import model_spec
from memascend.storage.completion import Promise
from memascend.storage.engine_tiers import DirectTier
from memascend.storage.errors import StorageError

SPEC = model_spec("llama3.2-1b").twin(16)
MEMORY = {"method": "memory", "context": 64, "forward_s": [0.2, 0.1, 0.3], "backward_s": [0.6, 0.6, 0.6]}


def test_requests_are_served_by_priority_then_in_order():
    server, order, started, come = RateLimiter(1e6), [], threading.Event(), threading.Event()
    begun = [server.serve(1000, lambda: (started.set(), come.wait()))]
    started.wait(10)  # until the others have arrived
    for name, priority in (("first", 0), ("second", 0), ("urgent", 5)):
        promise = server.serve(1000, priority=priority)
        promise.add_done_callback(lambda _, name=name: order.append(name))
        begun.append(promise)
    come.set()
    for promise in begun:
        promise.wait(10)
    server.close()
    begun[-1].then(lambda _: None).wait(10)  # the callbacks have run
    assert order == ["urgent", "first", "second"]


@pytest.mark.parametrize("late", [False, True])
def test_late_share_counts_bytes_when_the_drive_finishes_first(tmp_path, late):
    class Manual(Limiter):
        served = Promise("a turn")

        def serve(self, nbytes, ended, *, write, priority):
            return self.served

    path, drive = DirectTier.in_file(tmp_path, "x"), Manual()
    moving = Promise("a write")
    path.write = lambda *_, **__: moving
    tier = RateLimitedTier(path, drive)
    written = tier.write("a", torch.empty(1024))
    go_on = threading.Event()
    first, second = (drive.served, moving) if late else (moving, drive.served)
    busy = Promise("another's callback")
    busy.add_done_callback(lambda _: go_on.wait(10))
    busy.set_result()  # callbacks run when both have ended
    assert not written.done()
    first.set_result()
    assert not written.done()
    second.set_result()
    go_on.set()
    written.wait(10)
    tier.close()
    assert drive.late_share == late


def test_served_seconds_are_bytes_divided_by_the_rate(tmp_path):
    with rate_limited(1e6) as server:
        tier = state_store.DirectTier.in_file(tmp_path, "x")
        out, back = torch.arange(1024, dtype=torch.float32), torch.empty(1024)
        tier.write("a", out).wait(10)
        tier.read("a", back).wait(10)
        moved = tier.transferred
        tier.close()
    assert torch.equal(out, back)
    assert moved.reading_s == moved.bytes_read / server.rate > 0
    assert moved.writing_s == moved.bytes_written / server.rate > 0


def test_failed_transfer_also_fails_on_a_paced_path(tmp_path, monkeypatch):
    broken = Promise("a read")
    broken.set_error(StorageError("read", "drive", 0, 4096, 0, errno.EIO, "broken"))
    with rate_limited(1e9):
        tier = state_store.DirectTier.in_file(tmp_path, "x")
        monkeypatch.setattr(DirectTier, "read", lambda *_, **__: broken)
        with pytest.raises(StorageError, match="broken"):
            tier.read("a", torch.empty(4)).wait(10)
        tier.close()


def test_engine_trains_identically_on_a_paced_path(tmp_path):
    def trained(folder):
        torch.manual_seed(0)
        ours = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        groups = [{"params": list(ours.parameters()), "lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0}]
        engine = StreamingEngine.start(ours, folder, groups, EngineOptions(), blocks=list(ours))
        for _ in range(2):
            ours(torch.ones(2, 32)).sum().backward()
            engine.finish_step()
        found = {name: values.clone() for name, values in engine.read_weights()}
        kind = type(engine.state_store._tier)
        engine.close(destroy=True)
        return kind, found

    with rate_limited(1e9):
        kind, there = trained(tmp_path / "paced")
    assert kind is RateLimitedTier
    kind, here = trained(tmp_path / "free")
    assert kind is not RateLimitedTier
    assert all(torch.equal(there[name], here[name]) for name in here)


def test_predicted_step_follows_from_memory_step_updates_and_path():
    found = {row["method"]: row for row in predicted_steps(MEMORY, 1e9, spec=SPEC, dtype="bf16", path_rate=5e9)}
    assert list(found) == ["optimized", "naive", "none"]
    for row in found.values():
        phases = sum(row.get(f"{name}_s", 0.0) for name in ("forward", "backward", "optimizer"))
        assert row["seconds"] == pytest.approx(phases)
        assert row["seconds"] >= 0.8  # the medians of both passes
    assert "optimizer_s" not in found["naive"]
    assert found["none"]["seconds"] > found["optimized"]["seconds"]
    assert found["optimized"]["seconds"] == pytest.approx(0.8, rel=0.1)  # the rest overlaps
    slow = {row["method"]: row for row in predicted_steps(MEMORY, 1e9, spec=SPEC, dtype="bf16", path_rate=1e7)}
    assert slow["optimized"]["bottleneck"] == "SSD"
    assert slow["optimized"]["seconds"] > 4 * found["optimized"]["seconds"]
    assert list(predicted_steps(MEMORY | {"method": "naive"}, 1e9, spec=SPEC, dtype="bf16", path_rate=5e9)) == []
