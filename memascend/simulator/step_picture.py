"""Drawing of traced steps, one below the other: one row per resource, one bar per event in the colour of its phase."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memascend.simulator.trace import Event

FORMATS = (".svg", ".png", ".pdf")
# Okabe and Ito's colours, which people with any colour vision can distinguish.
_COLOURS = {"forward": "#0072B2", "backward": "#D55E00", "overflow check": "#CC79A7", "optimizer": "#009E73"}
_OTHERS = ("#56B4E9", "#E69F00", "#F0E442", "#44546A")
_ORDER = ("main", "wait", "gpu", "pcie", "link", "cpu", "dram", "ssd")  # from top to bottom; other resources come last
_ROW_INCHES, _SHORTEST = 0.26, 1e-3  # shortest bar as a fraction of the step; shorter ones would be invisible


def draw(steps: Sequence[tuple[list[Event], dict[str, Any]]], path: Path, *, force: bool = False) -> None:
    """Draw rank 0 of traces (events and facts, as `read_trace` returns them) to `path`, each on its own time axis.

    Raises ValueError, in one line, for an unknown format, a file that exists (without `force`), or missing matplotlib.
    """
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"--picture {path}: end the name in {', '.join(FORMATS)}")
    if path.exists() and not force:
        raise ValueError(f"{path} exists: --force replaces it, or name another file")
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ValueError("--picture needs matplotlib: pip install matplotlib, then the same command again") from None
    mine = [([event for event in events if event.rank == 0], facts) for events, facts in steps]
    rows = [_rows(events) for events, _ in mine]
    phases = list(dict.fromkeys(event.phase for events, _ in mine for event in events))
    others = iter(_OTHERS * len(phases))
    colours = {phase: _COLOURS.get(phase) or next(others) for phase in phases}
    heights = [len(each) for each in rows]
    figure = Figure(figsize=(10, 1.6 * len(mine) + _ROW_INCHES * sum(heights)), layout="constrained")
    all_axes = figure.subplots(len(mine), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (events, facts), resources in zip(all_axes, mine, rows, strict=True):
        _draw_step(axes, events, resources, colours)
        arm = f"{facts.get('system', '?')} ({facts.get('arm', '?')})"
        axes.set_title(f"{arm} on {facts['source']}, {facts['lane']}", loc="left", fontsize=10)
    handles = [Patch(color=colour, label=phase) for phase, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _rows(events: list[Event]) -> list[str]:
    """Return the resources from top to bottom, in the order of `_ORDER`."""

    def place(resource: str) -> tuple[int, str]:
        kinds = [number for number, kind in enumerate(_ORDER) if resource.startswith(kind)]
        return (kinds[0] if kinds else len(_ORDER)), resource

    return sorted({event.resource for event in events}, key=place)


def _draw_step(axes: Any, events: list[Event], resources: list[str], colours: dict[str, str]) -> None:
    """Draw the events of one step, one row per resource, from its first event on."""
    begin = min(event.begin_s for event in events)
    seconds = max(event.end_s for event in events) - begin
    for row, resource in enumerate(resources):
        for phase, colour in colours.items():
            bars = [
                (event.begin_s - begin, max(event.seconds, _SHORTEST * seconds))
                for event in events
                if event.resource == resource and event.phase == phase
            ]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolor=colour, edgecolor="none", alpha=0.8)
    axes.set_yticks(range(len(resources)), resources, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, seconds)
    axes.set_xlabel("seconds", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
