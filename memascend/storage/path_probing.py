"""Periodic measurement of paths without groups, so that a path that was slow once is not excluded for ever.

The rates of a path with groups are observed during its work. A path that was too slow for any group moves nothing, so
nobody would notice that it has recovered, that its first measurement was disturbed, or that a failed or full path
works again. So it is measured as at the start (`path_rates.measure`): 16 MiB, or less on a slow path, are written,
read and compared in the background, and training waits for none of it. This happens after two, four, eight … passes,
up to `_MOST_PASSES`: a path that was out for n passes is back within 2n. A path that returns and soon drops out again
waits longer than before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from memascend.storage.completion import Completion
from memascend.storage.path_rates import measure
from memascend.storage.placement import Rates
from memascend.storage.storage_path import StoragePath, nothing_ends

__all__ = ["PathProber"]

log = logging.getLogger("memascend")

_MOST_PASSES = 64  # maximum between two measurements of a path


@dataclass
class _Idle:
    """The passes for which a path was idle, and the state of its measurement."""

    passes: int = 0
    wait: int = 2  # in the first pass its former groups are still read from it
    in_use: int = 0  # passes since it was last idle
    measuring: threading.Thread | None = None
    blocked: bool = False  # the thread waits for a hanging transfer, or for the path's lock


class PathProber:
    """Measures a tier's idle paths. `pass_over` runs under the tier's lock; `measured` runs in another thread."""

    def __init__(self, measured: Callable[[StoragePath, Rates], None], hang_s: float) -> None:
        """Create a prober. `hang_s`: the time in seconds after which an unfinished transfer is given up."""
        self._measured, self._hang_s = measured, hang_s
        self._idle: dict[StoragePath, _Idle] = {}
        self._stopped = threading.Event()

    def pass_over(self, idle: Mapping[StoragePath, int]) -> None:
        """Count a pass in which the `idle` paths had no group or were out; each maps to the bytes that must be free."""
        for path, state in list(self._idle.items()):
            state.in_use = 0 if path in idle else state.in_use + 1
            if state.in_use >= state.wait and not self.measuring(path):
                del self._idle[path]
        for path, needed_bytes in idle.items():
            state = self._idle.setdefault(path, _Idle())
            state.passes += 1
            if state.passes >= state.wait and not self.measuring(path):
                state.passes, state.wait, state.blocked = 0, min(2 * state.wait, _MOST_PASSES), False
                state.measuring = threading.Thread(target=self._measure, args=(path, needed_bytes, state))
                state.measuring.name, state.measuring.daemon = f"memascend-measure-{path.name}", True
                state.measuring.start()

    def measuring(self, path: StoragePath) -> bool:
        """Return whether a measurement runs on `path`, or a transfer that it gave up is still in flight."""
        state = self._idle.get(path)
        return state is not None and state.measuring is not None and state.measuring.is_alive()

    def wait(self, timeout_s: float) -> None:
        """Wait for the measurements in progress."""
        deadline = time.monotonic() + timeout_s
        for state in list(self._idle.values()):
            if state.measuring is not None:
                state.measuring.join(max(0.0, deadline - time.monotonic()))

    def stop(self) -> None:
        """Start no more measurements; called before the paths are closed and the interpreter may exit.

        Running measurements begin no further transfers. This waits for them, for up to `hang_s`, unless they are
        blocked by a hanging transfer or wait for another process's turn.
        """
        self._stopped.set()
        deadline = time.monotonic() + self._hang_s
        for state in list(self._idle.values()):
            while state.measuring is not None and state.measuring.is_alive() and not state.blocked:
                if time.monotonic() > deadline:
                    return
                state.measuring.join(0.01)

    def _measure(self, path: StoragePath, needed_bytes: int, state: _Idle) -> None:
        """The thread's target: measure a path, report its rates, and wait for transfers that were given up."""
        probed = _Probed(path, self._hang_s, self._stopped)
        try:
            if path.free_bytes < needed_bytes:
                return
            if (rates := self._measured_alone(path, probed, state)) is not None:
                self._measured(path, rates)
        except (OSError, RuntimeError) as error:  # continue without a new measurement; the tier may have been closed
            log.debug("memascend: path %s: %s", path.name, error)
        state.blocked = True
        while any(not each.is_set() for each in probed.in_flight):
            time.sleep(0.1)

    def _measured_alone(self, path: StoragePath, probed: _Probed, state: _Idle) -> Rates | None:
        """Return the rates measured in this process's turn on the path, or None if there are none."""
        turn = threading.Event()
        path.lock.enter(turn.set)
        state.blocked = True
        turn.wait()
        state.blocked = False
        try:
            return None if self._stopped.is_set() else measure(probed)
        finally:
            path.lock.leave()


class _Probed:
    """A path's tier with waits limited to `hang_s`.

    The waits happen in Python: a daemon thread inside the engine's code aborts the interpreter when that exits.
    """

    def __init__(self, path: StoragePath, hang_s: float, stopped: threading.Event) -> None:
        self._path, self._hang_s, self._stopped = path, hang_s, stopped
        self.in_flight: list[threading.Event] = []

    @property
    def free_bytes(self) -> int:
        return self._path.tier.free_bytes

    @property
    def paths(self) -> list[str]:
        return [self._path.name]

    def write(self, key: str, tensor: torch.Tensor) -> _Begun:
        return self._begun(self._path.tier.write, key, tensor)

    def read(self, key: str, tensor: torch.Tensor) -> _Begun:
        return self._begun(self._path.tier.read, key, tensor)

    def erase(self, key: str) -> bool:
        return self._path.tier.erase(key)

    def _begun(self, transfer: Callable[[str, torch.Tensor], Completion], key: str, tensor: torch.Tensor) -> _Begun:
        """Begin a transfer, and keep its end in `in_flight`. Raises RuntimeError once measurements are stopped."""
        if self._stopped.is_set():
            raise RuntimeError("the tier is closed")
        begun = _Begun(transfer(key, tensor), self._path, self._hang_s, self._stopped)
        self.in_flight.append(begun.ended)
        return begun


class _Begun:
    """A transfer whose `wait` raises StorageError after `hang_s` seconds, or when measurements are stopped."""

    def __init__(self, transfer: Completion, path: StoragePath, hang_s: float, stopped: threading.Event) -> None:
        self._path, self._hang_s, self._stopped = path, hang_s, stopped
        self._error: BaseException | None = None
        self.ended = threading.Event()
        transfer.add_done_callback(self._end)

    def _end(self, transfer: Completion) -> None:
        self._error = transfer.error()  # retrieved at once, since of several failures only the first is raised
        self.ended.set()

    def wait(self) -> None:
        deadline = time.monotonic() + self._hang_s
        while not self.ended.wait(0.05):
            if self._stopped.is_set() or time.monotonic() > deadline:
                raise nothing_ends(self._path, self._hang_s)
        if self._error is not None:
            raise self._error
