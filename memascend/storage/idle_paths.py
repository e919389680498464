"""Paths that keep no group are measured again now and then: else one that was slow once would be left out for ever.

What keeps groups is observed at its work. A path that was too slow for any moves nothing, so that nobody would see that
it has recovered, or that only its first measurement was disturbed. So it is measured as at the start
(`path_rates.measure`): 16 MiB, less where it is slow, are written and read beside the training, which waits for none of
it. After two, four, eight … passes, up to `_MOST_PASSES`: a path that has been out for n passes is back within 2n.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memascend.storage.errors import StorageError
from memascend.storage.path import Path
from memascend.storage.path_rates import measure
from memascend.storage.placement import Rates

__all__ = ["IdlePaths"]

log = logging.getLogger("memascend")

_MOST_PASSES = 64  # between two measurements of a path


@dataclass
class _Idle:
    passes: int = 0
    wait: int = 2  # in the first one what it kept is still read there
    measuring: threading.Thread | None = None


class IdlePaths:
    """Of a tier's paths. `pass_over` is called with the tier's lock held, `measured` without it, in another thread."""

    def __init__(self, measured: Callable[[Path, Rates], None]) -> None:
        self._measured = measured
        self._idle: dict[Path, _Idle] = {}

    def pass_over(self, idle: Sequence[Path]) -> None:
        """A pass has ended in which these paths, which could be used, kept no group."""
        for path in [path for path in self._idle if path not in idle and not self.measuring(path)]:
            del self._idle[path]
        for path in idle:
            state = self._idle.setdefault(path, _Idle())
            state.passes += 1
            if state.passes >= state.wait and not self.measuring(path):
                state.passes, state.wait = 0, min(2 * state.wait, _MOST_PASSES)
                state.measuring = threading.Thread(target=self._measure, args=(path,), daemon=True)
                state.measuring.name = f"memascend-measure-{path.name}"
                state.measuring.start()

    def measuring(self, path: Path) -> bool:
        state = self._idle.get(path)
        return state is not None and state.measuring is not None and state.measuring.is_alive()

    def wait(self, timeout_s: float) -> None:
        """For what is measured now."""
        deadline = time.monotonic() + timeout_s
        for state in list(self._idle.values()):
            if state.measuring is not None:
                state.measuring.join(max(0.0, deadline - time.monotonic()))

    def _measure(self, path: Path) -> None:
        turn = threading.Event()
        path.gate.enter(turn.set)
        turn.wait()
        try:
            with contextlib.suppress(StorageError, RuntimeError):  # it goes on without; the tier was closed meanwhile
                if (rates := measure(path.tier)) is not None:
                    self._measured(path, rates)
        finally:
            path.gate.leave()
