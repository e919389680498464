"""Draw how far simulated phases and steps were from measured ones, from a record of workflows.run.validation.

usage: python -m workflows.derive.simulator results/reference/HOST/validation.json --draw-in FOLDER
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from workflows import tidy
from workflows.derive.figure import save
from workflows.panels import style
from workflows.run import no_result

STEM = "simulator"
MARKS = {"forward": ("^", "sky"), "backward": ("v", "orange"), "optimizer": ("s", "green"), "step": ("D", "black")}
WITHIN = 20  # percent; the shaded band


def draw(record: dict[str, Any]) -> Figure:
    """Draw each error by system on the left, and on the right the distribution of their sizes. For a run without a
    result, draw its reason."""
    if record["kind"] == no_result.KIND:
        return _without(record)
    figure, (errors, shares) = style.canvas(2, 1, (9.0, 4.2), [1.7, 1.0])
    runs = list(dict.fromkeys((row["system"], row["arm"]) for row in record["rows"]))
    _errors(errors, record["rows"], runs)
    for what, colour in (("phases", "blue"), ("steps", "black")):
        _share(shares, record, what, style.PALETTE[colour])
    shares.set(xlabel="error, %, either way", ylabel="share of all", xlim=(0, 60), ylim=(0, 1.01))
    shares.legend(loc="lower right", frameon=False, fontsize=7.5)
    handles = [
        Line2D([], [], linestyle="none", marker=mark, color=style.PALETTE[colour], markersize=5, label=phase)
        for phase, (mark, colour) in MARKS.items()
    ]
    host = record["host"]
    foot = (
        f"measured on {host['name']}, {host['cpu']}, {host['cores']} cores; model {record['model']}, {record['dtype']}"
    )
    style.finish(figure, foot, style.legend(figure, [handles]))
    return figure


def _without(record: dict[str, Any]) -> Figure:
    """Draw why the simulator was not validated."""
    figure, (axis,) = style.canvas(1, 1, (9.0, 2.0), None)
    axis.set_axis_off()
    words = textwrap.fill(f"The simulator was not validated here: {record['status']}: {record['reason']}", 110)
    axis.text(0.5, 0.5, words, ha="center", va="center", transform=axis.transAxes)
    style.finish(figure, f"{record['host']['name']}, {record['host']['cpu']}, {record['host']['cores']} cores", 0.1)
    return figure


def _errors(axis: Axes, rows: list[dict[str, Any]], runs: list[tuple[str, str]]) -> None:
    """Draw the errors of each system, a mark per phase."""
    axis.axvspan(-WITHIN, WITHIN, color=style.PALETTE["light"], alpha=0.5, linewidth=0)
    axis.axvline(0, color=style.FAINT, linewidth=0.8)
    for number, (phase, (mark, colour)) in enumerate(MARKS.items()):
        mine = [row for row in rows if row["phase"] == phase]
        xs = [row["error_percent"] for row in mine]
        ys = [runs.index((row["system"], row["arm"])) + 0.2 * (number - 1.5) for row in mine]
        axis.plot(xs, ys, linestyle="none", marker=mark, color=style.PALETTE[colour], markersize=4, alpha=0.8)
        words = [f"{row['simulated_s']:.3g} s simulated, {row['measured_s']:.3g} s measured" for row in mine]
        style.tell_points(axis, xs, ys, words)
    labels = [system if system == arm else f"{system} ({arm})" for system, arm in runs]
    axis.set_yticks(range(len(runs)), labels)
    axis.set(xlabel="simulated against measured seconds, %", ylim=(len(runs) - 0.4, -0.6))


def _share(axis: Axes, record: dict[str, Any], what: str, colour: str) -> None:
    """Draw the share of phases or steps (`what`) whose error is at most x."""
    sizes = sorted(abs(row["error_percent"]) for row in record["rows"] if (row["phase"] == "step") == (what == "steps"))
    spread = record[what]
    words = f"{len(sizes)} {what}: half within {spread['half_within_percent']:.0f} %,\nnine of ten within "
    words += f"{spread['nine_of_ten_within_percent']:.0f} %"
    axis.step(sizes, np.arange(1, len(sizes) + 1) / len(sizes), where="post", color=colour, label=words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path, help="record of workflows.run.validation")
    parser.add_argument(
        "--draw-in", type=Path, required=True, metavar="FOLDER", help="folder for simulator.svg, .pdf, .png"
    )
    args = parser.parse_args()
    try:
        record = json.loads(args.record.read_text(encoding="utf-8"))
        if not isinstance(record, dict) or record.get("kind") not in ("simulation-validation", no_result.KIND):
            raise ValueError(f"{args.record} is no record of workflows.run.validation")
        save(draw(record), args.draw_in / STEM)
    except (tidy.TableError, ValueError, OSError) as error:
        tidy.fail(error)


if __name__ == "__main__":
    main()
