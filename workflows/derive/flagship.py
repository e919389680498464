"""Draw a run of `workflows.run.flagship`: host memory, loss, and seconds of a step beside what bounds them.

usage: python -m workflows.derive.flagship results/reference/HOST/flagship-llama3.1-8b.json --out docs/img/flagship.svg
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from workflows import registry
from workflows.panels import style

_GIB = 1 << 30
_PUBLISHED = {"zero-infinity": "ZeRO-Infinity", "memascend": "MemAscend"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    draw(json.loads(args.record.read_text()), args.out)
    return 0


def draw(record: dict[str, Any], target: Path) -> None:
    """Draw the three panels of a record of `workflows.run.flagship` into the file `target`."""
    figure, (memory, loss, seconds) = style.canvas(3, 1, (11.0, 3.4), [1.0, 1.35, 1.0])
    draw_memory(memory, record)
    draw_loss(loss, record)
    draw_seconds(seconds, record)
    asked, host = record["points_requested"], record["host"]
    billions = record["summary"]["parameters"] / 1e9
    footer = (
        f"{asked['model']}, {billions:.2f} billion parameters, all trained, {asked['states']} states, "
        f"{asked['context']} tokens per step, initialised weights. Measured on {host['cpu']}, {host['cores']} cores, "
        f"{record['started_at'][:10]}. The "
        "products were timed before and after the training, fio after it. Published peaks: MemAscend, Fig. 15."
    )
    style.finish(figure, footer, 0.1)
    figure.savefig(target, metadata={"Date": None})


def published_gib(model: str) -> dict[str, float]:
    """Return the published peaks of that model by system, from the claims of MemAscend's Fig. 15;
    empty if it has none."""
    quoted = {claim["id"]: claim.get("expected") for claim in registry.claims()}
    ids = {f"memascend-fig15-{model}-{system}": label for system, label in _PUBLISHED.items()}
    return {label: quoted[name] for name, label in ids.items() if name in quoted}


def draw_memory(axis: Axes, record: dict[str, Any]) -> None:
    """Draw the host peak of the run next to the published peaks of the same model."""
    ours = record["summary"]["host_peak_bytes"] / _GIB
    published = published_gib(record["points_requested"]["model"])
    bars = [*((name, value, "published") for name, value in published.items()), ("this run", ours, "measured")]
    for at, (name, value, lane) in enumerate(bars):
        fill = style.colour(name, {"this run": "blue"})
        bar = axis.bar([at], [value], 0.62, **style.surface(lane, fill))
        axis.bar_label(bar, [f"{value:.2f}"], padding=3, fontsize=8)
    axis.set_xticks(range(len(bars)), [f"{name}\n({lane})" for name, _, lane in bars])
    axis.set_ylabel("GiB")
    axis.set_title("Host memory at its peak", loc="left")


def draw_loss(axis: Axes, record: dict[str, Any]) -> None:
    """Draw the losses by step, the evaluations, and the instants of the kills."""
    steps, evaluations = record["points"]["steps"], record["points"]["evaluations"]
    axis.plot([s["step"] for s in steps], [s["loss"] for s in steps], color=style.PALETTE["blue"], linewidth=1.4)
    first = steps[0]["step"], steps[0]["loss"]
    axis.annotate("training", first, xytext=(48, 8), textcoords="offset points", color=style.PALETTE["blue"])
    evaluated = [(e["step"], e["loss"]) for e in evaluations]
    axis.plot(*zip(*evaluated, strict=True), "o", color=style.PALETTE["vermilion"], markersize=5)
    axis.annotate(
        "held-out text", evaluated[0], xytext=(7, 4), textcoords="offset points", color=style.PALETTE["vermilion"]
    )
    kills = [call["after_step"] + call["share_of_a_step"] for call in record["points"]["calls"] if call["killed"]]
    for number, at in enumerate(kills):
        axis.axvline(at + 1, color=style.INK, linewidth=1.0, linestyle=(0, (2, 2)))
        if number == len(kills) - 1:
            axis.text(at + 1.3, axis.get_ylim()[0], "kill -9, and resumed", fontsize=8, va="bottom")
    axis.set_xlabel("step")
    axis.set_title("Loss (cross-entropy a token)", loc="left")


def draw_seconds(axis: Axes, record: dict[str, Any]) -> None:
    """Draw the median step, with quartiles, next to its two lower bounds."""
    summary = record["summary"]
    steps = [step["seconds"] for step in record["points"]["steps"][1:] if step["seconds"] is not None]
    rows = {
        "a step\n(median)": (summary["step_s"], "blue"),
        "its bytes at\nfio's rate": (summary["drive_bound_s"], "grey"),
        "its products\nalone": (summary["compute_bound_s"], "grey"),
    }
    for at, (value, fill) in enumerate(rows.values()):
        bar = axis.bar([at], [value], 0.62, **style.surface("measured", style.PALETTE[fill]))
        axis.bar_label(bar, [f"{value:.0f}"], padding=3, fontsize=8)
    low, _, high = statistics.quantiles(steps, n=4, method="inclusive")
    axis.vlines(0.36, low, high, color=style.INK, linewidth=1.4)
    axis.set_xticks(range(len(rows)), list(rows))
    axis.set_ylabel("seconds")
    axis.set_title("A step, and what bounds it", loc="left")


if __name__ == "__main__":
    raise SystemExit(main())
