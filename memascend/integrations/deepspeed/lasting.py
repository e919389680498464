"""Changes to DeepSpeed that a living engine still needs after ``disable``, and that go with the last such engine.

Most changes matter only while an engine is being built. A few are part of each of its steps or checkpoints: without
them a checkpoint would lack the swapped states, or a gathered parameter would lose its buffer to another one. These
apply by the type of the optimizer or the swapper, so other engines are not affected, or correct DeepSpeed on a CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

Undo = Callable[[], None]


class LastingChanges:
    """The changes made so far; they are undone, the last one first, once memascend is disabled and no user is left.

    A user is an optimizer or a swapper of ours. All changes are undone together, because several replace one method. To
    be used by the thread that calls `enable`; a user may be collected in any thread.
    """

    def __init__(self) -> None:
        self._made: dict[str, Undo] = {}
        self._users: dict[int, Any] = {}
        self._enabled = False

    def begin(self) -> None:
        """Keep the changes, with or without users, until :meth:`end`."""
        self._enabled = True

    def make(self, name: str, change: Callable[[], Undo]) -> None:
        """Make a change, unless the users of an earlier ``enable`` still have it. ``change`` returns what undoes it."""
        if name not in self._made:
            self._made[name] = change()

    def end(self) -> None:
        """Undo the changes as soon as there are no users."""
        self._enabled = False
        self._undo_if_unused()

    def add_user(self, user: Any) -> None:
        """Keep the changes until ``user`` is removed or collected."""
        finalizer = weakref.finalize(user, self._collected, id(user))
        finalizer.atexit = False
        self._users[id(user)] = finalizer

    def remove_user(self, user: Any) -> None:
        """Note that ``user`` no longer needs the changes. Idempotent."""
        finalizer = self._users.get(id(user))
        if finalizer is not None and finalizer.detach() is not None:
            self._collected(id(user))

    def _collected(self, key: int) -> None:
        self._users.pop(key, None)
        self._undo_if_unused()

    def _undo_if_unused(self) -> None:
        while self._made and not self._enabled and not self._users:
            _, undo = self._made.popitem()
            undo()


changes = LastingChanges()
