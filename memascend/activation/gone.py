"""Noticing the end of an object that autograd's graph holds."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any


class Gone(weakref.ref[Any]):
    """A reference to `thing` that puts itself into `where`, in whichever thread, when that is gone; `of` says whose.

    In place of a `__del__`: C++ lets go of such objects between the nodes of a backward pass, and Python handles Ctrl-C
    in the first function of its own that runs then. In a `__del__` KeyboardInterrupt is printed and forgotten;
    `deque.append` is no such function. Whoever holds the reference empties the deque.
    """

    __slots__ = ("of",)
    of: Any

    def __new__(cls, thing: Any, where: deque[Gone], of: Any) -> Gone:
        made = super().__new__(cls, thing, where.append)
        made.of = of
        return made

    def __init__(self, thing: Any, where: deque[Gone], of: Any) -> None:
        super().__init__(thing, where.append)  # type: ignore[call-arg]  # object's, for typeshed
