"""Comparison of two steps, phase by phase: a simulated and a measured one, or two of the same kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memascend.simulator.recorder import MAIN
from memascend.simulator.trace import Event, busy_s, phase_spans

_SETTINGS = ("model", "twin", "system", "arm", "dtype", "ranks", "batch", "context", "accumulate")


@dataclass(frozen=True, kw_only=True)
class StepOf:
    """Summary of a traced step. By phase and resource: `busy_s`, seconds occupied, and `amounts`, the work served."""

    label: str
    lane: str
    settings: dict[str, Any]
    seconds: float
    phase_s: dict[str, float]
    busy_s: dict[str, dict[str, float]]
    amounts: dict[str, dict[str, float]]


def step_of_trace(events: Sequence[Event], facts: dict[str, Any]) -> StepOf:
    """Summarise a trace by rank 0, which stands for all ranks. Raises ValueError if the trace has no events of rank 0.

    A measured phase is the time that the training thread spent in it, since transfers may continue after it; a
    simulated phase lasts from the beginning of its first event to the end of its last.
    """
    mine = [event for event in events if event.rank == 0]
    if not mine:
        raise ValueError("the trace has no events of rank 0")
    busy, amounts = busy_s(mine), dict[str, dict[str, float]]()
    for event in mine:
        by_resource = amounts.setdefault(event.phase, {})
        by_resource[event.resource] = by_resource.get(event.resource, 0.0) + event.amount
    spans = phase_spans(mine)
    phase_s = {
        phase: busy[phase].get(MAIN, 0.0) if any(MAIN in each for each in busy.values()) else end - begin
        for phase, (begin, end) in spans.items()
    }
    return StepOf(
        label=f"{facts.get('system', '?')} ({facts.get('arm', '?')}) on {facts['source']}",
        lane=str(facts["lane"]),
        settings={name: facts[name] for name in _SETTINGS if name in facts},
        seconds=max(event.end_s for event in mine) - min(event.begin_s for event in mine),
        phase_s=phase_s,
        busy_s=busy,
        amounts=amounts,
    )


def rows(a: StepOf, b: StepOf) -> list[dict[str, Any]]:
    """Return one row per phase, each followed by one per resource, and last the step. Missing seconds are None."""
    out = []
    for phase in [*a.phase_s, *(name for name in b.phase_s if name not in a.phase_s)]:
        out.append(_row(phase, "", a.phase_s.get(phase), b.phase_s.get(phase)))
        mine, theirs = a.busy_s.get(phase, {}), b.busy_s.get(phase, {})
        for resource in sorted({*mine, *theirs} - {MAIN}):
            row = _row(phase, resource, mine.get(resource), theirs.get(resource))
            row |= {f"{side}_amount": step.amounts.get(phase, {}).get(resource) for side, step in (("a", a), ("b", b))}
            out.append(row)
    return [*out, _row("step", "", a.seconds, b.seconds)]


def _row(phase: str, resource: str, a: float | None, b: float | None) -> dict[str, Any]:
    return {"phase": phase, "resource": resource, "a_s": a, "b_s": b, "ratio": b / a if a and b is not None else None}


def as_text(a: StepOf, b: StepOf) -> str:
    """Return a table of both steps, after a line that names differing settings: such steps are not the same work."""
    lines = [f"A: {a.label}, {a.lane}", f"B: {b.label}, {b.lane}"]
    differing = [
        f"{name} {a.settings.get(name)} against {b.settings.get(name)}"
        for name in _SETTINGS
        if name not in ("system", "arm") and a.settings.get(name) != b.settings.get(name)
    ]
    if differing:
        lines.append(f"not the same work: {', '.join(differing)}")
    lines += ["", f"{'':<26}{'A s':>10}{'B s':>10}{'B / A':>8}{'A GB':>10}{'B GB':>10}"]
    for row in rows(a, b):
        name = f"  {row['resource']}" if row["resource"] else row["phase"]
        cells = f"{_seconds(row['a_s'])}{_seconds(row['b_s'])}"
        cells += f"{row['ratio']:>8.2f}" if row["ratio"] is not None else f"{'':>8}"
        if "." in row["resource"]:  # links and paths serve bytes
            cells += "".join(f"{(row[f'{side}_amount'] or 0) / 1e9:>10.3f}" for side in ("a", "b"))
        lines.append(f"{name:<26}{cells}".rstrip())
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return f"{'-':>10}" if value is None else f"{value:>10.4g}"
