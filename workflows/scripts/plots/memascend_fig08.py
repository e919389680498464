"""MemAscend Fig. 8: peak system memory of Qwen2.5-7B by component, with the theoretical minimum."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from workflows.scripts.plots import rows, style
from workflows.scripts.tidy import AS_PUBLISHED, MEMASCEND, MINIMUM

PARTS = {
    "gradient flat buffer": style.GREY,
    "optimizer-state and swap-out buffers": style.GREEN,
    "parameter buffer pool": style.SKY,
    "pinned memory overhead": style.ORANGE,
    "overflow check overhead": style.PURPLE,
    "process overhead": style.BLACK,
    "other host buffers": style.YELLOW,
    "not in the ledger": "#D9D9D9",
}
HEAD_INCHES = 0.8
SHOWN_GIB = 0.2  # thinner slices cannot be seen
SHORT = {AS_PUBLISHED: "ZeRO-Infinity\nas published", MEMASCEND: "MemAscend", MINIMUM: "theoretical\nminimum"}


def draw(table: pd.DataFrame) -> Figure:
    """A stack for each system and lane, the total on top."""
    figure, (axis,) = style.canvas(1, width=11.0, height=4.8)
    data = with_minimum(rows.comparable(table[table["model"] == "Qwen2.5-7B"]))
    position, ticks, middles = 0.0, [], []
    lanes = [lane for lane in style.LANE_ORDER if lane in set(data["lane"])]
    for lane in lanes:
        mine = data[(data["lane"] == lane) & data["metric"].isin([*PARTS, "peak system memory"])]
        start = position
        for series in (s for s in [*rows.series_of(mine)] if s in wanted(mine)):
            top, total = stack(axis, mine[mine["series"] == series], lane, position)
            above = f"\n({top - total:.1f} less than its ledger)" if top > total + SHOWN_GIB else ""
            ticks.append(
                (position, SHORT.get(series, series.removeprefix("ZeRO-Infinity (").rstrip(")").replace(" ", "\n")))
            )
            place = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center"}
            axis.annotate(f"{total:.1f}{above}", (position, max(top, total)), fontsize=8 if not above else 7, **place)
            position += 1
        middles.append(((start + position - 1) / 2, lane))
        position += 0.6
    axis.set_xticks([p for p, _ in ticks], [name for _, name in ticks], fontsize=7.5)
    for middle, lane in middles:
        axis.annotate(
            "measured × k²" if lane == "measured" else lane,
            (middle, 1.02),
            xycoords=("data", "axes fraction"),
            ha="center",
            fontsize=8.5,
            fontweight="bold",
        )
    axis.set_ylabel("peak system memory, Qwen2.5-7B (GiB)")
    axis.margins(y=0.1)
    axis.set_ylim(bottom=0)
    style.legend(
        figure,
        {name: fill for name, fill in PARTS.items() if name in set(data.loc[data["number"] > SHOWN_GIB, "metric"])},
        lanes,
        columns=4,
    )
    return figure


def wanted(table: pd.DataFrame) -> set[str]:
    """Series that have at least two components; others (a single factor, say) are no stack."""
    counts = table[table["metric"].isin(PARTS)].groupby("series")["metric"].nunique()
    return set(counts[counts >= 2].index)


def with_minimum(data: pd.DataFrame) -> pd.DataFrame:
    """The paper's minimum in its own lane: MemAscend's pool and the gradient buffer, both printed."""
    parts = data[
        (data["lane"] == "published")
        & (data["series"] == MEMASCEND)
        & data["metric"].isin(["parameter buffer pool", "gradient flat buffer"])
    ]
    return pd.concat([data, parts.assign(series=MINIMUM)])


def stack(axis, mine: pd.DataFrame, lane: str, position: float) -> tuple[float, float]:
    """Draw the components upon each other; their sum, and the total that the lane states (or the sum again)."""
    bottom = 0.0
    for metric, fill in PARTS.items():
        height = rows.value(mine, metric=metric)
        if height and height > SHOWN_GIB:
            axis.bar([position], [height], 0.72, bottom=[bottom], **style.surface(lane, fill))
            if height > 6:
                axis.text(
                    position,
                    bottom + height / 2,
                    f"{height:.1f}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85},
                )
            bottom += height
    stated = rows.value(mine, metric="peak system memory")
    return bottom, bottom if stated is None else stated
