"""A ledger of all host buffers: owner, requested, reserved and touched bytes, and lifetime of each.

In a run, entries come from allocation events and close when the memory is freed. A plan writes the same entries from
allocators that only count. Times are in seconds of the monotonic clock, as returned by `time.monotonic()`.
"""

from __future__ import annotations

import dataclasses
import re
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from memascend.memory.budget import HostBudget

HOST = "host"
DEVICE = "device"
ROLES = (HOST, DEVICE)
MEASURES = ("requested_bytes", "reserved_bytes", "touched_bytes")

_PAGE_BYTES = 4096
_PAGEMAP_PRESENT = 1 << 63


@dataclass(frozen=True)
class LedgerEntry:
    """One buffer. `reserved_bytes` >= `requested_bytes`; `touched_bytes` is what became resident.

    `address` is None and `locked` is False for a buffer that was only counted; `died_s` is None while it is alive.
    `nodes` are the NUMA nodes of its pages (in a plan: the intended ones); None if none were requested.
    """

    name: str
    owner: str
    role: str
    allocator: str
    requested_bytes: int
    reserved_bytes: int
    touched_bytes: int
    address: int | None
    locked: bool
    born_s: float
    died_s: float | None = None
    nodes: tuple[int, ...] | None = None

    def alive_at(self, instant_s: float) -> bool:
        """Return whether the buffer is alive at this instant; at that of its death it no longer is."""
        return self.born_s <= instant_s and (self.died_s is None or instant_s < self.died_s)


@dataclass(frozen=True)
class Peak:
    """The instant at which the buffers of one role were largest: `bytes_` of the chosen measure."""

    instant_s: float
    bytes_: int
    entries: tuple[LedgerEntry, ...]


@dataclass(frozen=True)
class AddressCheck:
    """The kernel's view of an entry: whether all of it is mapped, whether all is locked, and its bytes resident now."""

    entry: LedgerEntry
    mapped: bool
    locked: bool
    resident_bytes: int

    @property
    def agrees(self) -> bool:
        """Whether the range is mapped, is locked if the entry says so, and has at least the touched bytes resident."""
        return (
            self.mapped and self.resident_bytes >= self.entry.touched_bytes and (self.locked or not self.entry.locked)
        )


_MOST_DEAD = 10_000  # limit of closed entries, besides those of the peaks


class Ledger:
    """Thread-safe list of entries.

    Event sources (`attach`) are asked to report before every query, so that answers include frees that happened in
    other threads or in C++ in the meantime. Closed entries that are part of no peak are dropped now and then. With a
    `budget`, host entries beyond it are refused.
    """

    def __init__(self, budget: HostBudget | None = None) -> None:
        self.budget = budget
        self._in_use: dict[str, int] = {}  # reserved bytes of live host entries, by owner
        self._lock = threading.Lock()
        self._entries: dict[int, LedgerEntry] = {}
        self._next_id = 1
        self._dead, self._most_dead = 0, _MOST_DEAD  # number of closed entries
        self._sources: list[Callable[[], None]] = []

    def attach(self, source: Callable[[], None]) -> None:
        """Call `source()` before each query, so that it can `close` freed entries. Attaching twice has no effect."""
        with self._lock:
            if source not in self._sources:
                self._sources.append(source)

    # More than eight parameters: they are the fields of an entry, of which a caller passes those that it knows.
    def record(
        self,
        name: str,
        owner: str,
        requested_bytes: int,
        *,
        role: str = HOST,
        allocator: str = "pageable",
        reserved_bytes: int | None = None,
        touched_bytes: int | None = None,
        address: int | None = None,
        locked: bool = False,
        born_s: float | None = None,
        died_s: float | None = None,
        nodes: tuple[int, ...] | None = None,
    ) -> int:
        """Book a buffer and return its number for `close`.

        `reserved_bytes` defaults to the request, `touched_bytes` to what is reserved, `born_s` to now.
        An allocator books first, then allocates, and then completes the entry (`amend`) or removes it (`withdraw`).
        Raises ValueError for an unknown role or inconsistent sizes (negative, or less reserved than requested), and
        HostBudgetExceeded, with nothing booked, for a host buffer that exceeds the budget.
        """
        reserved = requested_bytes if reserved_bytes is None else reserved_bytes
        touched = reserved if touched_bytes is None else touched_bytes
        if role not in ROLES:
            raise ValueError(f"ledger entry {name!r}: unknown role {role!r}: use one of {', '.join(ROLES)}")
        if not 0 <= requested_bytes <= reserved or not 0 <= touched <= reserved:
            raise ValueError(
                f"ledger entry {name!r}: requested {requested_bytes}, reserved {reserved}, touched {touched} bytes: "
                "need 0 <= requested <= reserved and 0 <= touched <= reserved"
            )
        born = time.monotonic_ns() / 1e9 if born_s is None else born_s
        if died_s is not None and died_s < born:
            raise ValueError(f"ledger entry {name!r}: ends at {died_s} s, before its start at {born} s")
        entry = LedgerEntry(
            name, owner, role, allocator, requested_bytes, reserved, touched, address, locked, born, died_s, nodes
        )
        if self.budget is not None and entry.role == HOST:
            self._sync()  # what has been freed meanwhile is available again
        with self._lock:
            self._count(entry, 1)
            entry_id = self._next_id
            self._next_id += 1
            self._entries[entry_id] = entry
        return entry_id

    def amend(self, entry_id: int, **changes: Any) -> None:
        """Set fields known after the allocation: address, locked, born_s, nodes. Raises ValueError if closed."""
        with self._lock:
            self._entries[entry_id] = dataclasses.replace(self._open(entry_id), **changes)

    def withdraw(self, entry_id: int) -> None:
        """Remove an entry whose allocation failed. Raises ValueError if it is closed."""
        with self._lock:
            self._count(self._open(entry_id), -1)
            del self._entries[entry_id]

    def close(self, entry_id: int, died_s: float | None = None) -> None:
        """Record that the buffer was freed. Raises ValueError for an unknown or closed entry."""
        died = time.monotonic_ns() / 1e9 if died_s is None else died_s
        with self._lock:
            entry = self._open(entry_id)
            self._count(entry, -1)
            self._entries[entry_id] = dataclasses.replace(entry, died_s=max(died, entry.born_s))
            self._dead += 1
            if self._dead >= self._most_dead:
                self._forget()

    def _forget(self) -> None:
        """Drop closed entries that are part of no peak, so every peak stays the same. The caller holds the lock."""
        every = list(self._entries.values())
        instants = {
            (role, _peak([e for e in every if e.role == role], measure)[0])
            for role in {e.role for e in every}
            for measure in MEASURES
        }
        self._entries = {
            number: e
            for number, e in self._entries.items()
            if e.died_s is None or any(e.role == role and e.alive_at(instant) for role, instant in instants)
        }
        self._dead = sum(e.died_s is not None for e in self._entries.values())
        self._most_dead = self._dead + _MOST_DEAD

    def in_use(self) -> dict[str, int]:
        """Return the reserved bytes of live host entries by owner, which a budget limits."""
        self._sync()
        with self._lock:
            return {owner: size for owner, size in self._in_use.items() if size}

    def _open(self, entry_id: int) -> LedgerEntry:
        """Return the entry, which must be alive. The caller holds the lock."""
        entry = self._entries.get(entry_id)
        if entry is None:
            raise ValueError(f"ledger has no entry {entry_id}: close what record() returned")
        if entry.died_s is not None:
            raise ValueError(f"ledger entry {entry_id} ({entry.name}) is already closed")
        return entry

    def _count(self, entry: LedgerEntry, sign: int) -> None:
        """Add an entry to the bytes in use (1), within the budget, or subtract it (-1). The caller holds the lock."""
        if entry.role != HOST or entry.died_s is not None:
            return
        if sign > 0 and self.budget is not None:
            self.budget.check(entry.name, entry.owner, entry.reserved_bytes, self._in_use)
        self._in_use[entry.owner] = self._in_use.get(entry.owner, 0) + sign * entry.reserved_bytes

    def entries(self) -> list[LedgerEntry]:
        """Return entries in booking order: all live ones, and of the closed ones the newest and those of each peak."""
        self._sync()
        with self._lock:
            return list(self._entries.values())

    def live(self, role: str | None = None) -> list[LedgerEntry]:
        """Return the live entries of one role, or of all."""
        return [e for e in self.entries() if e.died_s is None and role in (None, e.role)]

    def peak(self, role: str = HOST, measure: str = "touched_bytes") -> Peak:
        """Return when the entries of `role` were largest by `measure` (one of MEASURES), and which ones they were."""
        if measure not in MEASURES:
            raise ValueError(f"unknown measure {measure!r}: use one of {', '.join(MEASURES)}")
        chosen = [e for e in self.entries() if e.role == role]
        instant, best = _peak(chosen, measure)
        return Peak(instant, best, tuple(e for e in chosen if e.alive_at(instant)) if best else ())

    def peak_bytes(self, role: str = HOST, measure: str = "touched_bytes") -> int:
        """Return the largest number of bytes of `role` alive at one instant."""
        return self.peak(role, measure).bytes_

    def to_json(self, origin_s: float = 0.0) -> list[dict[str, object]]:
        """Return the entries as plain dicts, with times relative to `origin_s`."""
        return [
            dataclasses.asdict(e)
            | {"born_s": e.born_s - origin_s, "died_s": None if e.died_s is None else e.died_s - origin_s}
            for e in self.entries()
        ]

    def _sync(self) -> None:
        """Let the event sources report frees. Called without the lock, since they close entries."""
        with self._lock:
            sources = list(self._sources)
        for source in sources:
            source()


def _peak(entries: Sequence[LedgerEntry], measure: str) -> tuple[float, int]:
    """Return the instant of the peak, and its bytes."""
    changes = [(e.born_s, 1, getattr(e, measure)) for e in entries]
    changes += [(e.died_s, 0, -getattr(e, measure)) for e in entries if e.died_s is not None]
    level, best, instant = 0, 0, 0.0
    for when, _, change in sorted(changes):  # at the same instant, deaths (0) sort before births (1)
        level += change
        if level > best:
            best, instant = level, when
    return instant, best


def verify_by_address(entries: Iterable[LedgerEntry]) -> list[AddressCheck]:
    """Compare entries with the kernel's view of this process (/proc/self/smaps and pagemap).

    Entries without an address were only counted, and are skipped. Callers must exclude dead entries, whose range may
    have been reused.
    """
    areas = _memory_areas()
    checks = []
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for entry in entries:
            if entry.address is None:
                continue
            mapped, locked = _cover(areas, entry.address, entry.address + entry.reserved_bytes)
            resident = _resident_bytes(pagemap, entry.address, entry.reserved_bytes) if mapped else 0
            checks.append(AddressCheck(entry, mapped, locked, resident))
    return checks


@dataclass(frozen=True)
class _Area:
    """A mapping of this process, from address `begin` to before `end`."""

    begin: int
    end: int
    locked: bool


_AREA_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


def _memory_areas() -> list[_Area]:
    """Return the mappings in address order; locked means the kernel's `lo` flag, or reserved huge pages (`ht`)."""
    areas = []
    begin = end = 0
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            if match := _AREA_LINE.match(line):
                begin, end = int(match[1], 16), int(match[2], 16)
            elif line.startswith("VmFlags:"):
                areas.append(_Area(begin, end, not {"lo", "ht"}.isdisjoint(line.split()[1:])))
    return areas


def _cover(areas: Sequence[_Area], begin: int, end: int) -> tuple[bool, bool]:
    """Return whether [begin, end) is mapped without a gap, and whether all of it is locked."""
    reached, locked = begin, True
    for area in areas:
        if area.begin <= reached < area.end:
            locked = locked and area.locked
            reached = area.end
        if reached >= end:
            return True, locked
    return False, False


def _resident_bytes(pagemap: BinaryIO, address: int, length: int) -> int:
    """Return the bytes of [address, address + length) on pages that are present in the page table."""
    first, last = address // _PAGE_BYTES, (address + length - 1) // _PAGE_BYTES
    pagemap.seek(first * 8)
    raw = b""
    wanted = (last - first + 1) * 8
    while len(raw) < wanted and (chunk := pagemap.read(wanted - len(raw))):
        raw += chunk
    present = 0
    for index, (word,) in enumerate(struct.iter_unpack("<Q", raw)):
        if word & _PAGEMAP_PRESENT:
            page = (first + index) * _PAGE_BYTES
            present += min(address + length, page + _PAGE_BYTES) - max(address, page)
    return present
