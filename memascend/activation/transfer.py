"""Copies between a device and host slots on a stream of their own, ordered by events.

The device's module (`torch.cuda`, `torch.xpu`, …) comes from the tensor's device; no index is assumed. On the CPU the
copies are plain ones. The host side must be page-locked for the copies to overlap with computing.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memascend.activation.store import Slot


@dataclass
class Arrival:
    """A device tensor that is being filled; `event` (None for a plain copy) is reached when it is there."""

    tensor: torch.Tensor
    event: Any = None


class Transfer(Protocol):
    """Moves tensors of one device. `offload` may return before the copy is done; `finish` makes an arrival usable."""

    prefetches: bool

    def offload(self, source: torch.Tensor, target: torch.Tensor, slot: Slot) -> None: ...

    def fetch(self, source: torch.Tensor, slot: Slot) -> Arrival: ...

    def finish(self, arrival: Arrival) -> torch.Tensor: ...


class PlainTransfer:
    """The CPU: no streams, nothing to overlap."""

    prefetches = False

    def offload(self, source: torch.Tensor, target: torch.Tensor, slot: Slot) -> None:
        target.copy_(source)

    def fetch(self, source: torch.Tensor, slot: Slot) -> Arrival:
        return Arrival(torch.empty_like(source).copy_(source))

    def finish(self, arrival: Arrival) -> torch.Tensor:
        return arrival.tensor


def has_streams(kind: str) -> bool:
    """Whether torch sees a device of this type, and its copies can run beside what it computes."""
    module = getattr(torch, kind, None)
    return module is not None and hasattr(module, "Stream") and module.is_available()


class DeviceStreams:
    """What `StreamTransfer` needs of a device: the seam that tests replace."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        self.side = self._module.Stream(device=device)

    def current(self) -> Any:
        return self._module.current_stream(self.device)

    def on_side(self) -> Any:
        """Context in which copies and allocations belong to the side stream."""
        return self._module.stream(self.side)

    def empty_like(self, host: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=self.device)

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """The caching allocator must not hand out the tensor's memory again before `stream` has come this far."""
        tensor.record_stream(stream)


class StreamTransfer:
    """Copies on the side stream of one device.

    One stream for both directions: a slot that is freed and used again is then written only after its last read.
    """

    prefetches = True

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams

    def offload(self, source: torch.Tensor, target: torch.Tensor, slot: Slot) -> None:
        streams = self._streams
        streams.side.wait_event(streams.current().record_event())  # the source has been computed
        self._wait_for_other_devices(slot)
        with streams.on_side():
            target.copy_(source, non_blocking=True)
        streams.keep_for(source, streams.side)
        slot.pending[streams.device] = streams.side.record_event()

    def fetch(self, source: torch.Tensor, slot: Slot) -> Arrival:
        streams = self._streams
        self._wait_for_other_devices(slot)
        with streams.on_side():
            tensor = streams.empty_like(source)
            tensor.copy_(source, non_blocking=True)
        slot.pending[streams.device] = event = streams.side.record_event()
        return Arrival(tensor, event)

    def finish(self, arrival: Arrival) -> torch.Tensor:
        current = self._streams.current()
        current.wait_event(arrival.event)
        self._streams.keep_for(arrival.tensor, current)
        return arrival.tensor

    def _wait_for_other_devices(self, slot: Slot) -> None:
        for device, event in list(slot.pending.items()):
            if device != self._streams.device:
                self._streams.side.wait_event(event)


_transfers: dict[torch.device, Transfer] = {}
_lock = threading.Lock()


def transfer_for(device: torch.device) -> Transfer:
    """The transfer of `device`, made on first use and kept for the process."""
    with _lock:
        if device not in _transfers:
            plain = device.type == "cpu"
            _transfers[device] = PlainTransfer() if plain else StreamTransfer(DeviceStreams(device))
        return _transfers[device]
