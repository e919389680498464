"""Tells host memory from what a GPU would hold, on a machine without one.

`install()` puts our allocator in the place of PyTorch's CPU allocator. It logs every block of at least
TRACKED_FROM_BYTES, and while the role is "device" serves such blocks from shared anonymous mappings: the kernel then
counts them in RssShmem, and everything else in RssAnon. Up to 32 MiB of freed device blocks wait for the next of
their size until the role changes, as in a GPU's caching allocator: resident then, and in no count of ours. Call it
early: blocks that exist already stay where they are (and are freed by the allocator that made them). Such mappings
are shared with forked children, unlike other tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from memascend import _C
from memascend.memory.ledger import ROLES

TRACKED_FROM_BYTES: int = _C.TRACKED_FROM_BYTES


class Event(NamedTuple):
    """One allocation or free. `kind` is "alloc" or "free"; `t_ns` is on the clock of `time.monotonic_ns()`."""

    kind: str
    id: int
    address: int
    bytes_: int
    role: str
    t_ns: int


def install(*, events: bool = True) -> None:
    """Serve all further CPU tensors of this process. Installing twice is once.

    Without `events` nothing is logged: totals and peaks alone, for a run of any length.
    """
    _C.tracking_allocator_install(events)


def uninstall() -> None:
    """Put PyTorch's own allocator back; blocks of ours stay valid and are freed by us."""
    _C.tracking_allocator_uninstall()


def installed() -> bool:
    return _C.tracking_allocator_installed()


def set_role(role: str) -> None:
    """Role of all further blocks, of every thread (autograd runs backward on its own). Raises ValueError."""
    _C.tracking_allocator_set_role(role)


def current_role() -> str:
    return _C.tracking_allocator_role()


@contextlib.contextmanager
def role(name: str) -> Iterator[None]:
    """`with role("device"):` the role inside, the former one after."""
    before = current_role()
    set_role(name)
    try:
        yield
    finally:
        set_role(before)


def events() -> list[Event]:
    """All events since the last call, in the order in which they happened."""
    return [Event(*item) for item in _C.tracking_allocator_events()]


def live_bytes() -> dict[str, int]:
    """Bytes alive now, by role."""
    totals = _C.tracking_allocator_totals()
    return {name: totals[f"{name}_live_bytes"] for name in ROLES}


def peak_bytes() -> dict[str, int]:
    """Most bytes alive at one instant since `reset_peaks`, by role."""
    totals = _C.tracking_allocator_totals()
    return {name: totals[f"{name}_peak_bytes"] for name in ROLES}


def reset_peaks() -> None:
    _C.tracking_allocator_reset_peaks()


def dropped_events() -> int:
    """Events that were not logged because nobody drained the log (4 million are kept)."""
    return _C.tracking_allocator_totals()["dropped_events"]
