"""Timelines of an exhibit, from rows of its CSV with x_name "begin (s)", as traces to download and to view."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from memascend.simulator import trace
from workflows import tidy
from workflows.derive.site.against import script_safe
from workflows.panels.timeline import BEGIN


@dataclass(frozen=True)
class Timeline:
    """One lane of an exhibit: its events in the order of the rows, and the testbeds that they come from."""

    lane: str
    source: str
    model: str
    events: list[trace.Event]

    def write(self, path: Path, exhibit: str) -> None:
        """Write the trace that Perfetto opens."""
        trace.write_trace(path, self.events, lane=self.lane, source=self.source, exhibit=exhibit, model=self.model)


def timelines_of(rows: list[dict[str, str]]) -> list[Timeline]:
    """Return the timelines in an exhibit's table, one per lane; empty if no row belongs to one."""
    found = [row for row in rows if row["x_name"] == BEGIN and row["lane"] in trace.LANES]
    lanes: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in found:
        if tidy.numeric(row["value"]) is not None:
            lanes[row["lane"]].append(row)
    return [
        Timeline(lane, named(lanes[lane], "testbed"), named(lanes[lane], "model"), [*map(event, lanes[lane])])
        for lane in trace.LANES
        if lanes[lane]
    ]


def named(rows: list[dict[str, str]], column: str) -> str:
    """Return the distinct values of a column that are not empty, in order."""
    return ", ".join(dict.fromkeys(row[column] for row in rows if row[column]))


def event(row: dict[str, str]) -> trace.Event:
    """Return the event of a row: the metric, from x for as long as its value, on the resource of its series."""
    begin = float(row["x_value"])
    end = begin + float(row["value"])
    return trace.Event(name=row["metric"], phase=row["metric"], resource=row["series"], begin_s=begin, end_s=end)


def embedded(timelines: list[Timeline]) -> Markup:
    """Return timelines as JSON for a script element, since a page opened from disk cannot fetch the files."""
    said: list[dict[str, Any]] = []
    for each in timelines:
        events = [
            {"name": e.name, "resource": e.resource, "begin": e.begin_s, "seconds": e.seconds} for e in each.events
        ]
        said.append({"lane": each.lane, "source": each.source, "events": events})
    return script_safe(json.dumps(said, ensure_ascii=False, separators=(",", ":")))
