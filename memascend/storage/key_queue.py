"""Ordering of the transfers of one key."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from memascend.storage import completion as completions


@dataclass(eq=False)
class Turn:
    """A turn on a key. `exclusive`: it shares the key with no other turn; `begin`: called when the turn comes later;
    `begun`: whether it has come."""

    exclusive: bool
    begin: Callable[[], None]
    begun: bool


class KeyQueue:
    """Turns on keys, for engines that do not order requests: reads in parallel, everything else alone. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: dict[str, list[Turn]] = {}

    def enter(self, key: str, exclusive: bool, begin: Callable[[], None]) -> Turn:
        """Queue for `key`. If `begun` is true on return, the turn has come; else the dispatcher calls `begin` later."""
        with self._lock:
            before = self._turns.setdefault(key, [])
            turn = Turn(exclusive, begin, not before or not (exclusive or any(each.exclusive for each in before)))
            before.append(turn)
            return turn

    def leave(self, key: str, turn: Turn) -> None:
        """End a turn, and begin those that may begin now, in the dispatcher thread."""
        with self._lock:
            turns = self._turns[key]
            turns.remove(turn)
            if not turns:
                del self._turns[key]
            next_ones = []
            for number, each in enumerate(turns):
                if each.exclusive and number > 0:
                    break
                if not each.begun:
                    each.begun = True
                    next_ones.append(each)
                if each.exclusive:
                    break
        for each in next_ones:
            completions.call(each.begin)
