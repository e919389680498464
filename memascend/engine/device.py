"""The device that a streamed model computes on, and copies between its memory and the host's.

On the CPU, weights are used where they are. An accelerator gets copies of them, on a stream of their own that overlaps
computation: a unit's slot of device memory is filled once the computation that used it before is done, and computation
continues once the copy is complete. Gradients come back the same way. The host waits only for memory that is reused.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from memascend.activation.transfer import DeviceStreams, has_streams
from memascend.engine.buffers import weight_classes
from memascend.engine.layout import Layout

BLOCKS_ON_DEVICE = 2  # one computes, the next is being copied


def device_of(parameters: Iterable[nn.Parameter], asked: torch.device | str | None) -> torch.device:
    """Return the device to compute on: `asked`, or else the device of the parameters.

    Raises ValueError if the parameters are on several devices, or torch sees no such device with streams.
    """
    found = {parameter.device for parameter in parameters}
    if asked is None and len(found) > 1:
        raise ValueError(
            f"the model is on several devices ({_names(found)}): specify the one that computes (device=...)"
        )
    device = torch.device(asked) if asked is not None else next(iter(found), torch.device("cpu"))
    if device.type in ("cpu", "meta"):
        return torch.device(device.type)
    if not has_streams(device.type):
        raise ValueError(
            f"torch sees no {device.type} device with streams for copies: leave device out to compute on the CPU"
        )
    index = device.index if device.index is not None else torch.get_device_module(device).current_device()
    if index >= (count := torch.get_device_module(device).device_count()):
        raise ValueError(f"torch sees {count} {device.type} devices, and {device} was requested: use one from 0 on")
    return torch.device(device.type, index)


def _names(devices: Iterable[torch.device]) -> str:
    return ", ".join(sorted(map(str, devices)))


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work that was submitted to it."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


class Generators:
    """A snapshot of torch's random number generators: the CPU's, and that of the device if it is another one."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cpu, self._other = device, torch.get_rng_state(), None
        if device.type != "cpu":
            self._other = torch.get_device_module(device).get_rng_state(device)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Generators):
            return NotImplemented
        same = self._other is None or torch.equal(self._other, other._other)
        return same and torch.equal(self._cpu, other._cpu)

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self._cpu)
        if self._other is not None:
            torch.get_device_module(self._device).set_rng_state(self._other, self._device)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Return a context in which the generators begin from these states. On exit they are as before."""
        others = {"devices": []}
        if self._other is not None:
            others = {"devices": [self._device.index], "device_type": self._device.type}
        with torch.random.fork_rng(**others):
            self.restore()
            yield


class Copies:
    """Copies in order on a stream of their own. A copy in flight keeps neither side's memory alive."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._streams = device, DeviceStreams(device)

    def mark(self) -> Any:
        """Return an event for all work submitted to the current stream so far."""
        return self._streams.current().record_event()

    def to_device(self, host: torch.Tensor, target: torch.Tensor, after: Any) -> Any:
        """Fill `target` from `host` after the event `after`. Work submitted to the current stream later sees the
        result. Return an event after which `host` may be changed."""
        self._streams.side.wait_event(after)
        with self._streams.on_side():
            target.copy_(host, non_blocking=True)
        copied = self._streams.side.record_event()
        self._streams.current().wait_event(copied)
        return copied

    def to_host(self, source: torch.Tensor, host: torch.Tensor, after: Any) -> Any:
        """Fill `host` from `source` after the event `after`. Return an event after which `host` is complete."""
        self._streams.side.wait_event(after)
        with self._streams.on_side():
            host.copy_(source, non_blocking=True)
        return self._streams.side.record_event()


class DeviceWeights:
    """Device memory for units: as many slots of each size as `weight_classes` says, used in turn. Not thread-safe."""

    def __init__(self, layout: Layout, copies: Copies) -> None:
        self._copies, self._dtype = copies, layout.weights
        self._planned = Counter({each.numel: each.count for each in weight_classes(layout, BLOCKS_ON_DEVICE)})
        self._free: dict[int, deque[tuple[torch.Tensor, Any]]] = defaultdict(deque)
        self._in_use: dict[str, torch.Tensor] = {}

    def bring(self, key: str, host: torch.Tensor) -> Any:
        """Copy a unit's host slot into `tensor(key)`, for work that is submitted from here on. Return an event after
        which the host slot may be changed."""
        numel = host.numel()
        if self._planned[numel] > 0 or not self._free[numel]:
            self._planned[numel] -= 1
            target, after = torch.empty(numel, dtype=self._dtype, device=self._copies.device), self._copies.mark()
        else:
            target, after = self._free[numel].popleft()
        self._in_use[key] = target
        return self._copies.to_device(host, target, after)

    def tensor(self, key: str) -> torch.Tensor:
        """Return the flat device slot of a unit, between `bring` and `give_back`. Raises KeyError otherwise."""
        return self._in_use[key]

    def give_back(self, key: str) -> None:
        """Free a unit's slot. Work submitted to the current stream before still sees its contents."""
        if (copy := self._in_use.pop(key, None)) is not None:
            self._free[copy.numel()].append((copy, self._copies.mark()))


class GradientCopies:
    """Copies of gradients in host memory, one piece at a time: all pieces use the same `slot`."""

    def __init__(self, slot: torch.Tensor, copies: Copies) -> None:
        self._slot, self._copies = slot, copies

    def mark(self) -> Any:
        """Return an event for the gradients computed so far, before they are handed to another thread."""
        return self._copies.mark()

    def on_host(self, gradients: dict[Any, torch.Tensor], after: Any) -> dict[Any, torch.Tensor]:
        """Return a piece's flat gradients on the host: views of the slot, valid until the next call.

        Gradients that are on the host already are returned as they are. `after`: the event of `mark`.
        """
        found, place, copied = {}, 0, None
        for key, gradient in gradients.items():
            found[key] = gradient
            if gradient.device.type != "cpu":
                found[key] = self._slot[place : place + gradient.numel()]
                copied = self._copies.to_host(gradient, found[key], after)
                place += gradient.numel()
        if copied is not None:
            copied.synchronize()
        return found

    def in_turn(self, gradient: torch.Tensor, after: Any, multiple: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (begin, elements) of a flat gradient that may be larger than the slot. Each part but the last has a
        multiple of `multiple` elements, if so many fit into the slot."""
        each = self._slot.numel() // multiple * multiple or self._slot.numel()
        for begin in range(0, gradient.numel(), each):
            yield begin, self.on_host({None: gradient[begin : begin + each]}, after)[None]
