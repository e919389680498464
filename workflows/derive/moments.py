"""Draw a run of `workflows.run.moments`: held-out loss by format of the states, and differences from fp32 by seed.

usage: python -m workflows.derive.moments results/reference/HOST/moments-10m.json --out docs/img/moments-10m.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from workflows.panels import style

_COLOURS = {"fp32": style.INK, "bf16": style.PALETTE["blue"], "int8": style.PALETTE["vermilion"]}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    draw(json.loads(args.record.read_text()), args.out)
    return 0


def draw(record: dict[str, Any], target: Path) -> None:
    """Draw the two panels of a record of `workflows.run.moments` into the file `target`."""
    figure, (losses, differences) = style.canvas(2, 1, (10.0, 3.6), [1.15, 1.0])
    curves = _curves(record)
    for states, by_seed in curves.items():
        _draw_band(losses, record, states, by_seed, f"{states} states")
    for states, by_seed in curves.items():
        seeds = [seed for seed in by_seed if seed in curves.get("fp32", {})]
        if states != "fp32" and seeds:
            paired = {seed: by_seed[seed] - curves["fp32"][seed] for seed in seeds}
            _draw_band(differences, record, states, paired, f"{states} less fp32")
    differences.axhline(0, color=style.INK, linewidth=0.8)
    losses.set_title("Held-out loss (cross-entropy per token)", loc="left")
    differences.set_title("Difference from fp32 states with the same seed", loc="left")
    for axis in (losses, differences):
        axis.set_xlabel("step")
        if axis.lines:
            axis.legend(frameon=False, fontsize=8)
    asked, host, runs = record["points_requested"], record["host"], record["points"]
    footer = (
        f"{runs[0]['parameters'] / 1e6:.1f} million parameters, {asked['steps']:,} steps of "
        f"{asked['batch'] * asked['context']} tokens of Python's standard library. Lines: means of "
        f"{len(asked['seeds'])} seeds; bands: from the lowest to the highest seed. Measured on {host['cpu']}, "
        f"{host['cores']} cores, {record['started_at'][:10]}."
    )
    style.finish(figure, footer, 0.1)
    figure.savefig(target, metadata={"Date": None})


def _curves(record: dict[str, Any]) -> dict[str, dict[int, np.ndarray]]:
    """Return the evaluated losses of each run, by format and seed."""
    found: dict[str, dict[int, np.ndarray]] = {}
    for run in record["points"]:
        found.setdefault(run["states"], {})[run["seed"]] = np.array(run["evaluated"])
    return found


def _draw_band(axis: Axes, record: dict[str, Any], states: str, by_seed: dict[int, np.ndarray], label: str) -> None:
    """Draw the mean over seeds as a line, in the band between the lowest and the highest seed."""
    steps, values = record["points"][0]["evaluated_after"], np.array(list(by_seed.values()))
    colour = _COLOURS[states]
    axis.plot(steps, values.mean(axis=0), color=colour, label=label, linewidth=1.4)
    axis.fill_between(steps, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0)


if __name__ == "__main__":
    raise SystemExit(main())
