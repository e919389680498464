"""Events of a step, simulated or real, in one format: Chrome's trace JSON, which Perfetto opens.

Both lanes write `Event`; a file states its lane and where it was recorded. In the trace viewer each row is a resource
and each rank a group of rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = 1
LANES = ("modelled", "measured")
_MICROSECONDS = 1e6


@dataclass(frozen=True, kw_only=True)
class Event:
    """Work that occupied a resource from `begin_s` to `end_s` (seconds since the step began).

    `amount` is the work served: bytes on links and drives, floating-point operations on a GPU, 0 if unknown.
    """

    name: str
    phase: str
    resource: str
    begin_s: float
    end_s: float
    rank: int = 0
    amount: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


def write_trace(path: Path, events: Iterable[Event], *, lane: str, source: str, **facts: Any) -> None:
    """Write `events` to `path`, creating its folder.

    `lane` is modelled or measured, `source` the testbed or host; `facts` (system, arm, model ...) are stored with them.
    Raises ValueError for another lane.
    """
    if lane not in LANES:
        raise ValueError(f"unknown lane {lane!r} of a trace: use one of {', '.join(LANES)}")
    events = sorted(events, key=lambda event: (event.begin_s, event.end_s, event.resource, event.name))
    rows = {key: number for number, key in enumerate(sorted({(event.rank, event.resource) for event in events}), 1)}
    named = [_metadata("process_name", rank, 0, f"rank {rank}") for rank in sorted({event.rank for event in events})]
    named += [_metadata("thread_name", rank, row, resource) for (rank, resource), row in rows.items()]
    spans = [
        {
            "ph": "X",
            "name": event.name,
            "cat": event.phase,
            "pid": event.rank,
            "tid": rows[event.rank, event.resource],
            "ts": event.begin_s * _MICROSECONDS,
            "dur": event.seconds * _MICROSECONDS,
            "args": {"resource": event.resource, "amount": event.amount},
        }
        for event in events
    ]
    other = {"format": "memascend step trace", "version": VERSION, "lane": lane, "source": source, **facts}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": named + spans, "displayTimeUnit": "ms", "otherData": other}) + "\n")


def _metadata(what: str, rank: int, row: int, name: str) -> dict[str, Any]:
    """Return the event that names a process or thread in the viewer."""
    return {"ph": "M", "name": what, "pid": rank, "tid": row, "args": {"name": name}}


def read_trace(path: Path) -> tuple[list[Event], dict[str, Any]]:
    """Return (events by begin time, facts with `lane` and `source`). Raises ValueError if `path` is no trace."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the trace {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"the trace {path} is not JSON: {error}") from None
    facts = loaded.get("otherData") if isinstance(loaded, dict) else None
    if not isinstance(facts, dict) or facts.get("format") != "memascend step trace":
        raise ValueError(f"{path} is not a step trace; `memascend train --trace` and simulations write them")
    if facts.get("version") != VERSION:
        raise ValueError(f"{path}: step trace of version {facts.get('version')}, this release reads {VERSION}")
    events = [
        Event(
            name=span["name"],
            phase=span["cat"],
            resource=span["args"]["resource"],
            begin_s=span["ts"] / _MICROSECONDS,
            end_s=(span["ts"] + span["dur"]) / _MICROSECONDS,
            rank=span["pid"],
            amount=span["args"]["amount"],
        )
        for span in loaded["traceEvents"]
        if span.get("ph") == "X"
    ]
    return events, {key: value for key, value in facts.items() if key not in ("format", "version")}


def busy_s(events: Iterable[Event]) -> dict[str, dict[str, float]]:
    """Return the seconds each resource was occupied, by phase. Overlapping events of a resource and rank count once."""
    spans: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for event in events:
        spans.setdefault((event.phase, event.resource, event.rank), []).append((event.begin_s, event.end_s))
    out: dict[str, dict[str, float]] = {}
    for (phase, resource, _), each in spans.items():
        by_resource = out.setdefault(phase, {})
        by_resource[resource] = by_resource.get(resource, 0.0) + _covered(each)
    return out


def phase_spans(events: Iterable[Event]) -> dict[str, tuple[float, float]]:
    """Return the (first begin, last end) of each phase in seconds, in the order in which the phases begin."""
    spans: dict[str, tuple[float, float]] = {}
    for event in sorted(events, key=lambda event: event.begin_s):
        begin, end = spans.get(event.phase, (event.begin_s, event.end_s))
        spans[event.phase] = (min(begin, event.begin_s), max(end, event.end_s))
    return spans


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, until = 0.0, -float("inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
