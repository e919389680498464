"""A tier for device tensors: transfers go through page-locked host memory on a separate stream, ordered by events.

A write copies the tensor to a host slot after the current work of the caller's stream; when the copy's event is
reached, the slot is written to the tier. A read is the same in reverse. No thread blocks: the dispatcher polls events
and starts the next steps. `most_bytes` limits the slots: transfers beyond it are queued, reads before writes, and a
tensor to be written stays on the device until then.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from memascend.activation.transfer import DeviceStreams
from memascend.memory.pinned import Allocator, PageAlignedPinnedAllocator
from memascend.storage.byte_views import flat_bytes
from memascend.storage.completion import Completion, Promise, when
from memascend.storage.tier import Tier, Transferred

OWNER = "activation_staging"
_MOST_BYTES = 1 << 30


class StagedTier:
    """The part of the tier protocol that an activation cache uses, for device tensors. Owns `tier`. Thread-safe.

    A write completes when the bytes are on the tier, a read when they are on the device, visible to any stream. Errors
    are those of the tier. The tensor of a transfer must not be changed or freed before it has ended. `streams` creates
    the streams of a device, and is replaced in tests.
    """

    def __init__(
        self,
        tier: Tier,
        allocator: Allocator | None = None,
        *,
        most_bytes: int = _MOST_BYTES,
        streams: Callable[[torch.device], Any] = DeviceStreams,
    ) -> None:
        self._tier, self._most_bytes = tier, most_bytes
        self._allocator = allocator or PageAlignedPinnedAllocator()
        self._make_streams = streams
        self._streams: dict[torch.device, Any] = {}
        self._lock = threading.Lock()
        self._used_bytes = self._idle_bytes = self._queued_bytes = 0
        self._idle: dict[int, list[torch.Tensor]] = defaultdict(list)  # slots by size
        self._queues: tuple[deque[tuple[int, Promise]], ...] = (deque(), deque())  # reads, writes

    def write(self, key: str, tensor: torch.Tensor) -> Completion:
        """Write the contiguous device `tensor` under `key`, as the current stream's queued work leaves it."""
        streams = self._streams_of(tensor.device)
        computed = streams.current().record_event()
        with self._lock:
            self._queued_bytes += tensor.nbytes

        def copied(slot: torch.Tensor) -> Completion:
            streams.side.wait_event(computed)
            with streams.on_side():
                slot.copy_(flat_bytes(tensor), non_blocking=True)
            reached = streams.side.record_event()
            return when(reached.query, f"copy of '{key}' to host memory").then(lambda _: self._tier.write(key, slot))

        def end(_: Completion) -> None:
            with self._lock:
                self._queued_bytes -= tensor.nbytes

        written = self._staged(tensor.nbytes, copied, which=1)
        written.add_done_callback(end)
        return written

    def read(self, key: str, tensor: torch.Tensor) -> Completion:
        """Fill the contiguous device `tensor`, after the current stream's queued work, which may use its memory."""
        streams = self._streams_of(tensor.device)
        freed = streams.current().record_event()

        def come(slot: torch.Tensor) -> Completion:
            return self._tier.read(key, slot).then(lambda _: copied(slot))

        def copied(slot: torch.Tensor) -> Completion:
            streams.side.wait_event(freed)
            with streams.on_side():
                flat_bytes(tensor).copy_(slot, non_blocking=True)
            return when(streams.side.record_event().query, f"copy of '{key}' to {tensor.device}")

        return self._staged(tensor.nbytes, come, which=0)

    def erase(self, key: str) -> bool:
        """Erase a tensor, after its transfers have ended."""
        return self._tier.erase(key)

    def wait(self, timeout_s: float | None = None) -> None:
        self._tier.wait(timeout_s)

    @property
    def free_bytes(self) -> int:
        """Bytes available on the tier, without those of writes that are still queued here."""
        return self._tier.free_bytes - self._queued_bytes

    @property
    def transferred(self) -> Transferred:
        return self._tier.transferred

    def close(self) -> None:
        """Close the tier and free the slots, after all transfers have ended."""
        self._tier.close()
        with self._lock:
            self._idle.clear()
            self._idle_bytes = 0

    # -- slots ---------------------------------------------------------------------------------------------------------

    def _streams_of(self, device: torch.device) -> Any:
        """Return the streams of a device, created on first use."""
        with self._lock:
            if device not in self._streams:
                self._streams[device] = self._make_streams(device)
            return self._streams[device]

    def _staged(self, nbytes: int, function: Callable[[torch.Tensor], Completion], *, which: int) -> Completion:
        """Call `function` with a slot once one is available; the slot is freed when its completion ends, in any way."""
        space, slots = Promise(f"room for {nbytes} bytes of staging"), []

        def begin(_: Any) -> Completion:
            slots.append(self._take(nbytes))
            return function(slots[0])

        done = space.then(begin)
        done.add_done_callback(lambda _: self._give(nbytes, slots))
        with self._lock:
            self._queues[which].append((nbytes, space))
        self._serve()
        return done

    def _serve(self) -> None:
        """Start queued transfers in order, as far as there is space for slots; always at least one."""
        while True:
            with self._lock:
                queue = next((queue for queue in self._queues if queue), None)
                if queue is None or (self._used_bytes and self._used_bytes + queue[0][0] > self._most_bytes):
                    return
                nbytes, space = queue.popleft()
                self._used_bytes += nbytes
            space.set_result(None)

    def _take(self, nbytes: int) -> torch.Tensor:
        """Return an idle slot of `nbytes`, or a new one from the allocator."""
        with self._lock:
            if self._idle[nbytes]:
                self._idle_bytes -= nbytes
                return self._idle[nbytes].pop()
        return self._allocator.allocate(nbytes, torch.uint8, name="activation staging", owner=OWNER)

    def _give(self, nbytes: int, slots: list[torch.Tensor]) -> None:
        """Return a slot; free idle slots of other sizes if the limit is exceeded."""
        with self._lock:
            self._used_bytes -= nbytes
            if slots:
                self._idle[nbytes].append(slots.pop())
                self._idle_bytes += nbytes
            for size, idle in self._idle.items():
                while size != nbytes and idle and self._used_bytes + self._idle_bytes > self._most_bytes:
                    idle.pop()
                    self._idle_bytes -= size
        self._serve()
