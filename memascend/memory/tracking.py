"""Separates host memory from what a GPU would hold, on a machine without a GPU.

`install()` replaces PyTorch's CPU allocator by ours. It logs every block of at least TRACKED_FROM_BYTES. While the role
is "device", it serves such blocks from shared anonymous mappings, so the kernel counts them in RssShmem, and everything
else in RssAnon. Up to 32 MiB of freed device blocks are kept for reuse until the role changes, as in a GPU's caching
allocator; they are resident then, but not in our counts. Call it early: existing blocks stay where they are (and are
freed by the allocator that made them). Unlike other tensors, these mappings are shared with forked children.
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
    """Serve all later CPU tensors of this process with our allocator. Installing twice has no effect.

    Without `events` nothing is logged, only totals and peaks are kept, which suits runs of any length.
    """
    _C.tracking_allocator_install(events)


def uninstall() -> None:
    """Restore PyTorch's allocator; our blocks stay valid and are freed by our allocator."""
    _C.tracking_allocator_uninstall()


def installed() -> bool:
    """Return whether our allocator serves new CPU tensors of this process."""
    return _C.tracking_allocator_installed()


def set_role(role: str) -> None:
    """Set the role of later blocks in all threads (autograd runs backward in its own). Raises ValueError."""
    _C.tracking_allocator_set_role(role)


def current_role() -> str:
    """Return the role of blocks that are allocated now, "host" or "device"."""
    return _C.tracking_allocator_role()


@contextlib.contextmanager
def role(name: str) -> Iterator[None]:
    """Context manager that sets the role inside its block, and restores the previous one after it."""
    before = current_role()
    set_role(name)
    try:
        yield
    finally:
        set_role(before)


def events() -> list[Event]:
    """Return all events since the last call, in chronological order."""
    return [Event(*item) for item in _C.tracking_allocator_events()]


def live_bytes() -> dict[str, int]:
    """Return the bytes alive now, by role."""
    totals = _C.tracking_allocator_totals()
    return {name: totals[f"{name}_live_bytes"] for name in ROLES}


def peak_bytes() -> dict[str, int]:
    """Return the most bytes alive at one instant since `reset_peaks`, by role."""
    totals = _C.tracking_allocator_totals()
    return {name: totals[f"{name}_peak_bytes"] for name in ROLES}


def reset_peaks() -> None:
    """Restart the peaks of all roles from the bytes alive now."""
    _C.tracking_allocator_reset_peaks()


def dropped_events() -> int:
    """Return how many events were dropped because the log was not drained (4 million are kept)."""
    return _C.tracking_allocator_totals()["dropped_events"]
