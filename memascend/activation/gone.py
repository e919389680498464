"""Detection of the end of an object that autograd's graph holds."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any


class Gone(weakref.ref[Any]):
    """A weak reference to `thing` that appends itself to `where` when `thing` is gone, in any thread; `of` is its data.

    This replaces a `__del__`. C++ releases such objects between the nodes of a backward pass, and Python handles Ctrl-C
    in the first Python function that runs then. In a `__del__` KeyboardInterrupt would be printed and ignored;
    `deque.append` is a C function. Whoever keeps the reference drains the deque.
    """

    __slots__ = ("of",)
    of: Any

    def __new__(cls, thing: Any, where: deque[Gone], of: Any) -> Gone:
        made = super().__new__(cls, thing, where.append)
        made.of = of
        return made

    def __init__(self, thing: Any, where: deque[Gone], of: Any) -> None:
        super().__init__(thing, where.append)  # type: ignore[call-arg]  # object's, for typeshed
