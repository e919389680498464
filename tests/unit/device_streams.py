"""Streams of a simulated device, which log the calls that a real one would get."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


class Event:
    """An event; `number` is the line of the log at which it was recorded."""

    def __init__(self, stream: Stream) -> None:
        self.log, self.number, self.reached = stream.log, len(stream.log), threading.Event()
        if stream.open:
            self.reached.set()

    def query(self) -> bool:
        return self.reached.is_set()

    def synchronize(self) -> None:
        self.log.append(("synchronize", self.number))


class Stream:
    """A stream of which no event is reached until it is `open`."""

    def __init__(self, name: str, log: list[tuple]) -> None:
        self.name, self.log, self.open, self.events = name, log, True, []

    def record_event(self) -> Event:
        self.log.append(("record", self.name))
        self.events.append(Event(self))
        return self.events[-1]

    def wait_event(self, event: Event) -> None:
        self.log.append(("wait", self.name, event.number))

    def reach(self) -> None:
        self.open = True
        for event in self.events:
            event.reached.set()


class Streams:
    """Replaces `DeviceStreams`, with one stream for computation and one for copies."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device, self.log = device, []
        self.side, self._current = Stream("side", self.log), Stream("compute", self.log)

    def current(self) -> Stream:
        return self._current

    @contextlib.contextmanager
    def on_side(self) -> Iterator[None]:
        self.log.append(("copy", "side"))
        yield

    def empty_like(self, host: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(host.size(), host.stride(), dtype=host.dtype)

    def keep_for(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.log.append(("keep", stream.name))
