"""Copies between a device and host slots on a separate stream, ordered by events.

The device module (`torch.cuda`, `torch.xpu`, …) follows from the tensor's device; no index is assumed. On the CPU, the
copies are synchronous. The host side must be page-locked for copies to overlap with computation.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memascend.activation.store import Slot


@dataclass
class Arrival:
    """A device tensor that is being filled; `event` (None for a plain copy) is reached when the copy is complete."""

    tensor: torch.Tensor
    event: Any = None


class Transfer(Protocol):
    """Moves tensors of one device. `offload` may return before its copy is done; `finish` makes an arrival usable."""

    prefetches: bool

    def offload(self, source: torch.Tensor, target: torch.Tensor, slot: Slot) -> None: ...

    def fetch(self, source: torch.Tensor, slot: Slot) -> Arrival: ...

    def finish(self, arrival: Arrival) -> torch.Tensor: ...


class PlainTransfer:
    """Transfers on the CPU: no streams, no overlap."""

    prefetches = False

    def offload(self, source: torch.Tensor, target: torch.Tensor, slot: Slot) -> None:
        target.copy_(source)

    def fetch(self, source: torch.Tensor, slot: Slot) -> Arrival:
        return Arrival(torch.empty_like(source).copy_(source))

    def finish(self, arrival: Arrival) -> torch.Tensor:
        return arrival.tensor


def has_streams(kind: str) -> bool:
    """Return whether torch has a device of this type whose copies can overlap with computation."""
    module = getattr(torch, kind, None)
    return module is not None and hasattr(module, "Stream") and module.is_available()


class DeviceStreams:
    """The device operations that `StreamTransfer` needs; tests replace them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        self.side = self._module.Stream(device=device)

    def current(self) -> Any:
        return self._module.current_stream(self.device)

    def on_side(self) -> Any:
        """Return a context in which copies and allocations belong to the side stream."""
        return self._module.stream(self.side)

    def empty_like(self, host: torch.Tensor) -> torch.Tensor:
        """Return new device memory with the size, strides and dtype of `host`."""
        return torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=self.device)

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the caching allocator from reusing the tensor's memory before `stream` has completed its queued work."""
        tensor.record_stream(stream)


class StreamTransfer:
    """Transfers on the side stream of one device.

    Both directions share one stream, so a slot that is freed and reused is only written after its last read.
    """

    prefetches = True

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams

    def offload(self, source: torch.Tensor, target: torch.Tensor, slot: Slot) -> None:
        """Start copying `source` to the slot, after the current stream's queued work; `source` may be dropped."""
        streams = self._streams
        streams.side.wait_event(streams.current().record_event())  # after the source has been computed
        self._wait_for_other_devices(slot)
        with streams.on_side():
            target.copy_(source, non_blocking=True)
        streams.keep_for(source, streams.side)
        slot.pending[streams.device] = streams.side.record_event()

    def fetch(self, source: torch.Tensor, slot: Slot) -> Arrival:
        """Start copying `source`, in the slot, to new device memory."""
        streams = self._streams
        self._wait_for_other_devices(slot)
        with streams.on_side():
            tensor = streams.empty_like(source)
            tensor.copy_(source, non_blocking=True)
        slot.pending[streams.device] = event = streams.side.record_event()
        return Arrival(tensor, event)

    def finish(self, arrival: Arrival) -> torch.Tensor:
        """Return the device tensor, valid for work submitted to the current stream from here on. Does not block."""
        current = self._streams.current()
        current.wait_event(arrival.event)
        self._streams.keep_for(arrival.tensor, current)
        return arrival.tensor

    def _wait_for_other_devices(self, slot: Slot) -> None:
        """Let the side stream wait for copies between the slot's reservation and other devices."""
        for device, event in list(slot.pending.items()):
            if device != self._streams.device:
                self._streams.side.wait_event(event)


_transfers: dict[torch.device, Transfer] = {}
_lock = threading.Lock()


def transfer_for(device: torch.device) -> Transfer:
    """Return the transfer of `device`, created on first use and kept for the lifetime of the process."""
    with _lock:
        if device not in _transfers:
            plain = device.type == "cpu"
            _transfers[device] = PlainTransfer() if plain else StreamTransfer(DeviceStreams(device))
        return _transfers[device]
