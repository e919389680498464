"""Stacked bars of a plan: the host memory by component, for the planned system and for its alternatives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memascend.planner.footprint import GIB, Plan
from memascend.planner.plan_result import PlanResult

FORMATS = (".svg", ".png", ".pdf")
# Okabe and Ito's colours, which can be distinguished with any colour vision; in grey print the order identifies them.
_COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#999999",
    "#44546A",
    "#8C6D31",
)
_BAR_INCHES = 0.55


def draw(result: PlanResult, path: Path, *, force: bool = False) -> None:
    """Write the picture to `path`.

    Raises a one-line ValueError for an unknown format, a file that exists (unless `force`) or cannot be written, or if
    matplotlib is missing.
    """
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"--picture {path}: end the name in {', '.join(FORMATS)}")
    if path.exists() and not force:
        raise ValueError(f"{path} exists: --force replaces it, or name another file")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--picture needs matplotlib: pip install matplotlib, then the same command again") from None
    plans = [result.host, *(peer.plan for peer in result.others)]
    figure = Figure(figsize=(9, 2.2 + _BAR_INCHES * len(plans)), layout="constrained")
    axes = figure.add_subplot()
    _bars(axes, plans)
    _limit(axes, result)
    axes.set_xlabel("host memory at the peak of a step (GiB)")
    axes.set_title(_title(result), loc="left", fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise ValueError(f"cannot write the picture {path}: {error.strerror}; name a file in another folder") from None


def _bars(axes: Any, plans: list[Plan]) -> None:
    """Draw one horizontal bar per system, with one colour per component, the largest components first."""
    components = [plan.components() for plan in plans]
    names = sorted(
        {name for each in components for name in each}, key=lambda n: (-max(c.get(n, 0) for c in components), n)
    )
    starts = [0.0] * len(plans)
    for name, colour in zip(names, _COLOURS * 2, strict=False):
        widths = [each.get(name, 0) / GIB for each in components]
        if max(widths) < 0.001 * max(plan.host_bytes for plan in plans) / GIB:
            continue  # too thin to be seen
        axes.barh(range(len(plans)), widths, left=starts, color=colour, label=name, height=0.7, hatch="//", alpha=0.9,
                  edgecolor="white", linewidth=0.6)  # fmt: skip
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set_yticks(range(len(plans)), [plan.label for plan in plans])
    axes.invert_yaxis()
    for index, plan in enumerate(plans):
        end = plan.host_bytes / GIB
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.annotate(
            f"{end:.1f}", (end, index), (5, 0), textcoords="offset points", va="center", fontsize=9, bbox=behind
        )
    axes.set_xlim(0, 1.1 * max(plan.host_bytes for plan in plans) / GIB)


def _limit(axes: Any, result: PlanResult) -> None:
    """Draw the limit on host memory, if there is one, as a dashed line."""
    limit = next(need.limit_bytes for need in result.needs if need.name == "host memory")
    if limit is None:
        return
    axes.axvline(limit / GIB, color="black", linestyle="--", linewidth=1)
    axes.annotate(f"{limit / GIB:.5g} GiB", (limit / GIB, 1), xycoords=("data", "axes fraction"), ha="center",
                  va="bottom", fontsize=8)  # fmt: skip
    axes.set_xlim(0, max(axes.get_xlim()[1], 1.05 * limit / GIB))


def _title(result: PlanResult) -> str:
    work = result.work
    gpus = f"{work.ranks} GPU{'s' if work.ranks > 1 else ''}"
    return f"{work.spec.display}, {work.dtype}, {gpus}, batch {work.batch}, context {work.context} (modelled)\n"
