"""The account of every host buffer: who holds it, how much was asked for, reserved and really touched, and when.

In a run, entries come from allocation events and close when the memory is given back. A plan writes the same entries
from allocators that only count. Times are seconds of the monotonic clock, the one of `time.monotonic()`.
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

    `address` is None and `locked` False for a buffer that was only counted; `died_s` is None while it lives. `nodes`
    are the NUMA nodes that hold its pages, or in a plan should; None where none were requested.
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
        return self.born_s <= instant_s and (self.died_s is None or instant_s < self.died_s)


@dataclass(frozen=True)
class Peak:
    """The instant at which the buffers of one role took most: `bytes_` of the measure asked for."""

    instant_s: float
    bytes_: int
    entries: tuple[LedgerEntry, ...]


@dataclass(frozen=True)
class AddressCheck:
    """What the kernel says about one entry: whole range mapped, all of it locked, bytes resident now."""

    entry: LedgerEntry
    mapped: bool
    locked: bool
    resident_bytes: int

    @property
    def agrees(self) -> bool:
        """The range exists, is locked if the entry says so, and at least the touched bytes are resident."""
        return (
            self.mapped and self.resident_bytes >= self.entry.touched_bytes and (self.locked or not self.entry.locked)
        )


_MOST_DEAD = 10_000  # closed entries beyond those of the peaks


class Ledger:
    """Thread-safe list of entries.

    A source of events (`attach`) is asked to report before every question, so that answers include frees that happened
    on other threads or in C++ since the last one. Of what is gone it forgets, now and then, what was in no peak. With
    a `budget`, an entry of the host's beyond it is refused.
    """

    def __init__(self, budget: HostBudget | None = None) -> None:
        self.budget = budget
        self._in_use: dict[str, int] = {}  # reserved bytes of live entries of the host's, by owner
        self._lock = threading.Lock()
        self._entries: dict[int, LedgerEntry] = {}
        self._next_id = 1
        self._dead, self._most_dead = 0, _MOST_DEAD  # closed entries
        self._sources: list[Callable[[], None]] = []

    def attach(self, source: Callable[[], None]) -> None:
        """Have `source()` called before each question; it calls `close` for what has gone. Attaching twice is once."""
        with self._lock:
            if source not in self._sources:
                self._sources.append(source)

    # More than eight parameters: the fields of an entry, of which a caller names those that it knows.
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
        """Book a buffer and return the number to close it by.

        `reserved_bytes` defaults to the request, `touched_bytes` to what is reserved, `born_s` to now.
        An allocator books first, takes the memory, and completes the entry (`amend`) or takes it back (`withdraw`).
        Raises ValueError for an unknown role or bytes that cannot be (negative, reserved under requested), and
        HostBudgetExceeded, with nothing booked, for a buffer of the host's that the budget has no room for.
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
            self._sync()  # what has been freed meanwhile is room
        with self._lock:
            self._count(entry, 1)
            entry_id = self._next_id
            self._next_id += 1
            self._entries[entry_id] = entry
        return entry_id

    def amend(self, entry_id: int, **changes: Any) -> None:
        """Fill in what is known once the memory is there: address, locked, born_s, nodes. ValueError if closed."""
        with self._lock:
            self._entries[entry_id] = dataclasses.replace(self._open(entry_id), **changes)

    def withdraw(self, entry_id: int) -> None:
        """Remove an entry whose memory could not be had. Raises ValueError if it is closed."""
        with self._lock:
            self._count(self._open(entry_id), -1)
            del self._entries[entry_id]

    def close(self, entry_id: int, died_s: float | None = None) -> None:
        """Note that the buffer is gone. Raises ValueError for an unknown or closed entry."""
        died = time.monotonic_ns() / 1e9 if died_s is None else died_s
        with self._lock:
            entry = self._open(entry_id)
            self._count(entry, -1)
            self._entries[entry_id] = dataclasses.replace(entry, died_s=max(died, entry.born_s))
            self._dead += 1
            if self._dead >= self._most_dead:
                self._forget()

    def _forget(self) -> None:
        """Of the dead, all that no peak is made of; every peak stays what it was. The caller holds the lock."""
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
        """Reserved bytes of what the host holds now, by owner: what a budget is set against."""
        self._sync()
        with self._lock:
            return {owner: size for owner, size in self._in_use.items() if size}

    def _open(self, entry_id: int) -> LedgerEntry:
        """The entry, which must be alive. The caller holds the lock."""
        entry = self._entries.get(entry_id)
        if entry is None:
            raise ValueError(f"ledger has no entry {entry_id}: close what record() returned")
        if entry.died_s is not None:
            raise ValueError(f"ledger entry {entry_id} ({entry.name}) is already closed")
        return entry

    def _count(self, entry: LedgerEntry, sign: int) -> None:
        """Add an entry to what is in use (1), within the budget, or take it out (-1). The caller holds the lock."""
        if entry.role != HOST or entry.died_s is not None:
            return
        if sign > 0 and self.budget is not None:
            self.budget.check(entry.name, entry.owner, entry.reserved_bytes, self._in_use)
        self._in_use[entry.owner] = self._in_use.get(entry.owner, 0) + sign * entry.reserved_bytes

    def entries(self) -> list[LedgerEntry]:
        """In the order of their booking: all that live, and of the closed ones the newest and those of each peak."""
        self._sync()
        with self._lock:
            return list(self._entries.values())

    def live(self, role: str | None = None) -> list[LedgerEntry]:
        """Entries that have not died, of one role or of all."""
        return [e for e in self.entries() if e.died_s is None and role in (None, e.role)]

    def peak(self, role: str = HOST, measure: str = "touched_bytes") -> Peak:
        """When the entries of `role` took most, by `measure` (one of MEASURES), and which ones they were."""
        if measure not in MEASURES:
            raise ValueError(f"unknown measure {measure!r}: use one of {', '.join(MEASURES)}")
        chosen = [e for e in self.entries() if e.role == role]
        instant, best = _peak(chosen, measure)
        return Peak(instant, best, tuple(e for e in chosen if e.alive_at(instant)) if best else ())

    def peak_bytes(self, role: str = HOST, measure: str = "touched_bytes") -> int:
        """Most bytes of `role` alive at one instant."""
        return self.peak(role, measure).bytes_

    def to_json(self, origin_s: float = 0.0) -> list[dict[str, object]]:
        """Entries as plain dicts, times relative to `origin_s`."""
        return [
            dataclasses.asdict(e)
            | {"born_s": e.born_s - origin_s, "died_s": None if e.died_s is None else e.died_s - origin_s}
            for e in self.entries()
        ]

    def _sync(self) -> None:
        with self._lock:
            sources = list(self._sources)
        for source in sources:
            source()


def _peak(entries: Sequence[LedgerEntry], measure: str) -> tuple[float, int]:
    """The instant, and the bytes."""
    changes = [(e.born_s, 1, getattr(e, measure)) for e in entries]
    changes += [(e.died_s, 0, -getattr(e, measure)) for e in entries if e.died_s is not None]
    level, best, instant = 0, 0, 0.0
    for when, _, change in sorted(changes):  # at one instant deaths (0) come before births (1)
        level += change
        if level > best:
            best, instant = level, when
    return instant, best


def verify_by_address(entries: Iterable[LedgerEntry]) -> list[AddressCheck]:
    """Set entries against the kernel's map of this process (/proc/self/smaps and pagemap).

    Entries without an address were only counted, and are left out. Dead entries are the caller's to leave out: their
    range may belong to somebody else by now.
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
    begin: int
    end: int
    locked: bool


_AREA_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


def _memory_areas() -> list[_Area]:
    """The process's mappings in address order; locked by the kernel's `lo` flag, or as reserved huge pages (`ht`)."""
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
    """Whether [begin, end) is mapped without a gap, and whether all of it is locked."""
    reached, locked = begin, True
    for area in areas:
        if area.begin <= reached < area.end:
            locked = locked and area.locked
            reached = area.end
        if reached >= end:
            return True, locked
    return False, False


def _resident_bytes(pagemap: BinaryIO, address: int, length: int) -> int:
    """Bytes of [address, address + length) on pages that are present, by the page table."""
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
