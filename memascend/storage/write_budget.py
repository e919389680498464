"""Write budgets of drives: a limit in total or per day, counted next to the swap files, across runs and processes.

An optimizer on an SSD writes 12 bytes per parameter and step; consumer drives are rated for some hundred terabytes.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from memascend.memory.budget import parse_bytes
from memascend.storage.atomic_write import write_atomically

__all__ = ["FILE", "WriteBudget", "WriteBudgetExceeded", "count_written", "written"]

FILE = "memascend-written.json"  # in the folder of the path
_DAYS_KEPT = 8
_WARN_AT = 0.8
_TERABYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*TB\s*", re.IGNORECASE)


class WriteBudgetExceeded(RuntimeError):
    """A path has been written more than its budget, and the budget says that training stops then."""


@dataclass(frozen=True, kw_only=True)
class WriteBudget:
    """A limit for each path: `limit_bytes` in total or per UTC day; `stops` ends training there, else it only warns."""

    limit_bytes: int
    a_day: bool
    stops: bool = False

    @classmethod
    def parse(cls, text: str, *, stops: bool = False, key: str = "write_budget") -> WriteBudget:
        """Parse a budget such as `300TB` or `0.5TB/day`. Raises ValueError, in one line, for anything else."""
        amount, slash, unit = text.partition("/") if isinstance(text, str) else ("", "", "")
        if slash and unit.strip() != "day":
            raise ValueError(f"{key}: {text!r} is not a write budget: use 300TB (in total) or 0.5TB/day")
        terabytes = _TERABYTES.fullmatch(amount)
        try:
            limit = int(float(terabytes[1]) * 1e12) if terabytes else parse_bytes(amount, key)
        except ValueError:
            raise ValueError(f"{key}: {text!r} is not a write budget: use 300TB (in total) or 0.5TB/day") from None
        return cls(limit_bytes=max(1, limit), a_day=bool(slash), stops=stops)

    def used(self, path: str, today: str | None = None) -> int:
        """Return the bytes of the budget that have been written to the folder `path`, in total or today."""
        counted = written(path)
        return counted["days"].get(today or _today(), 0) if self.a_day else counted["total"]

    def problem(self, path: str, used: int) -> tuple[bool, str] | None:
        """Return (whether the budget is exceeded, a one-line message) from 80 % of the budget on, else None."""
        if used < _WARN_AT * self.limit_bytes:
            return None
        when = "today" if self.a_day else "in all"
        line = (
            f"{path} was written {used / 1e12:.3f} TB {when}, {used / self.limit_bytes:.0%} of its write budget of "
            f"{self.limit_bytes / 1e12:g} TB{'/day' if self.a_day else ''}"
        )
        return used >= self.limit_bytes, line


class Counted(TypedDict):
    """Bytes written to a drive: in total, and by UTC date."""

    total: int
    days: dict[str, int]


def written(path: str) -> Counted:
    """Return the count in the folder `path`; zero if it has none yet.

    Raises ValueError for a count that cannot be read: without it, the remaining budget of the drive is unknown.
    """
    file = Path(path, FILE)
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return {"total": 0, "days": {}}
    except OSError as error:
        raise _unreadable(file, error.strerror or str(error)) from None
    try:
        return _valid(json.loads(os.pread(fd, 1 << 16, 0)))
    except ValueError:
        raise _unreadable(file, "it is no count") from None
    finally:
        os.close(fd)


def _unreadable(file: Path, why: str) -> ValueError:
    """Return the error for a file whose count cannot be read."""
    return ValueError(
        f"what was written to the drive is counted in {file}, which cannot be read ({why}): put the file back from a "
        "copy, or remove it to begin at 0"
    )


def count_written(path: str, nbytes: int, today: str | None = None) -> None:
    """Add `nbytes` to the count in the folder `path`, under a lock, since several processes may write there.

    Raises OSError, and ValueError for a count that cannot be read.
    """
    if nbytes <= 0 or not os.path.isdir(path):
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # NFS cannot lock a folder
            fcntl.flock(fd, fcntl.LOCK_EX)
        counted = written(path)
        day = today or _today()
        counted["total"] += nbytes
        counted["days"][day] = counted["days"].get(day, 0) + nbytes
        counted["days"] = dict(sorted(counted["days"].items())[-_DAYS_KEPT:])
        write_atomically(Path(path, FILE), json.dumps(counted))
    finally:
        os.close(fd)


def _valid(counted: object) -> Counted:
    """Return a count that was read, or raise ValueError if it is none."""
    if not isinstance(counted, dict):
        raise ValueError("no count")
    total, days = counted.get("total", 0), counted.get("days", {})
    if not isinstance(total, int) or not isinstance(days, dict) or not all(isinstance(n, int) for n in days.values()):
        raise ValueError("no count")
    return {"total": total, "days": days}


def _today() -> str:
    """Return the current UTC date in ISO format."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


class WriteMeter:
    """Counts what this process writes to each path, and compares it with a budget."""

    def __init__(self, budget: WriteBudget, paths: Iterable[str] = ()) -> None:
        """Create a meter for a budget. Raises ValueError if a count in one of `paths` cannot be read."""
        for path in paths:
            if os.path.isdir(path):  # a device has no count file
                written(path)
        self._budget = budget
        self._seen: dict[str, int] = {}
        self._warned: set[tuple[str, bool]] = set()
        self._exceeded: str | None = None

    def count(self, bytes_written: Iterable[tuple[str, int]]) -> list[str]:
        """Count `bytes_written`, pairs of (path, bytes since the start), and return warnings to log.

        There is one warning per path when it comes close to its budget, and one when it exceeds it.
        """
        lines = []
        for path, total in bytes_written:
            count_written(path, total - self._seen.get(path, 0))
            self._seen[path] = total
            used = self._budget.used(path) if os.path.isdir(path) else total  # a device has no count file
            problem = self._budget.problem(path, used)
            if problem is None:
                continue
            over, line = problem
            if over and self._budget.stops:
                self._exceeded = f"{line}: training stops; raise write_budget, or name another path in tiers"
            if (path, over) not in self._warned:
                self._warned.add((path, over))
                lines.append(line)
        return lines

    def require_within(self) -> None:
        """Raise WriteBudgetExceeded if :meth:`count` has seen a path over a budget that stops training."""
        if self._exceeded is not None:
            raise WriteBudgetExceeded(self._exceeded)
