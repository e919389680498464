"""Draw one exhibit: SVG for the web, PDF for print, PNG, the data as CSV, and the caption.

The picture is what figures.yaml of its paper specifies: `size` in inches, `columns` of panels (and their `widths`), the
`panels`, each with a `kind` and what its renderer reads (workflows/panels), `optional` ones only where their metric has
rows, `legend: false` where there is none. Reads the exhibit's tidy table alone (and, for the line under the axes, when
and where its runs were made), so that drawing again gives the same files.
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workflows import registry, tidy
from workflows.panels import bars, graph, heatmap, lines, style, table, text, timeline
from workflows.panels import data as panel_data

KINDS = {
    "bars": bars.draw,
    "stacked": bars.stacked,
    "lines": lines.draw,
    "timeline": timeline.draw,
    "table": table.draw,
    "graph": graph.draw,
    "heatmap": heatmap.draw,
    "text": text.draw,
}
AXIS = ("title", "xlabel", "ylabel", "xlim", "ylim")


def draw(spec: dict[str, Any], rows: pd.DataFrame, foot: str) -> Figure:
    """Return the finished figure of a specification and its tidy rows."""
    data = panel_data.prepared(rows, spec)
    drawn_ones = [p for p in spec["panels"] if not p.get("optional") or p["metric"] in set(data["metric"])]
    panels = [{"_whole": data, **panel} for panel in drawn_ones]
    columns = spec.get("columns", len(panels))
    count = -(-len(panels) // columns)
    size = tuple(spec.get("size", (9.0, 4.2)))
    if "columns" in spec:  # rows of panels left empty by optional ones are removed
        size = (size[0], size[1] * count / -(-len(spec["panels"]) // columns))
    if panels[0]["kind"] == "table":
        panels[0] = table.unfolded(data, panels[0])
        panels[0]["_body"] = table.cells(data, panels[0])
        size = (size[0], sum(table.height(panels[0]["_body"], panels[0])) + 0.6)
    figure, axes = style.canvas(columns, count, size, spec.get("widths"))
    drawn = []
    for axis, panel in zip(axes, panels, strict=False):
        if panel["kind"] not in KINDS:
            raise ValueError(
                f"figures.yaml: no kind of panel is called '{panel['kind']}': use one of {', '.join(KINDS)}"
            )
        drawn.append(KINDS[panel["kind"]](axis, data, panel))
        settle(axis, panel)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    style.finish(figure, foot, head(figure, spec, panels, drawn))
    return figure


def settle(axis: Axes, panel: dict[str, Any]) -> None:
    """Apply the titles, labels and limits of the specification."""
    given = {name: panel[name] for name in AXIS if name in panel}
    if "title" in given:
        values = [panel_data.first(panel["_whole"], where) for where in panel.get("title_values", [])]
        words = given.pop("title")
        axis.set_title(panel["title_else"] if None in values else words.format(*values), fontsize=9)
    for name in ("xlim", "ylim"):
        if name in given:
            given[name] = tuple(given[name])
    axis.set(**given)
    if "xticks" in panel:
        axis.set_xticks(list(panel["xticks"]), [str(words) for words in panel["xticks"].values()])
        axis.xaxis.set_minor_formatter("")


def head(
    figure: Figure, spec: dict[str, Any], panels: list[dict[str, Any]], drawn: list[list[tuple[str, str]]]
) -> float:
    """Draw the legend above the axes, series in one row and lanes in the next, and return its height in inches."""
    if spec.get("legend") is False or not any(drawn):
        return spec.get("head", 0.15)
    series: dict[str, Any] = {}
    lanes: dict[str, Any] = {}
    for panel, mine in zip(panels, drawn, strict=True):
        if panel["kind"] == "lines":
            names, places = lines.handles(mine, panel | {"lane_labels": spec.get("lane_labels", {})})
            series, lanes = names | series, lanes | {lane: places[lane] for lane in places if lane not in lanes}
        else:
            words = spec.get("labels", {})
            colours = {**panel.get("parts", {}), **panel.get("colours", {})}
            for name, lane in mine:
                lanes.setdefault(lane, style.lane_patch(lane))
                if panel.get("unnamed"):
                    continue
                series.setdefault(name, style.colour_patch(style.colour(name, colours), words.get(name, name)))
    order = [*spec.get("parts_order", []), *panel_data.ordered(series, panel_data.SERIES)]
    shown = [series[name] for name in dict.fromkeys(order) if name in series]
    more = lines.extra_handles(panels)
    placed = sorted(lanes, key=lambda lane: style.LANES.index(lane) if lane in style.LANES else 9)
    return style.legend(figure, [[*shown, *more], [lanes[lane] for lane in placed]], spec.get("legend_columns", 4))


def provenance(rows: pd.DataFrame, runs: pd.DataFrame) -> dict[str, str]:
    """Return lane -> origin of its numbers; for the measured lane twins, host, commit and date of the records."""
    out = {}
    rows = rows[~rows["metric"].str.startswith(tidy.NO_RESULT)]
    reference = tidy.is_reference(rows)
    for lane in (lane for lane in tidy.LANES if lane in set(rows["lane"])):
        mine = rows[(rows["lane"] == lane) & ~reference]
        if mine.empty:
            continue
        out[lane] = ", ".join(places(sorted({t for t in mine["testbed"] if t and not t.endswith("/twins")})))
        if lane == "measured":
            if "key" not in runs:
                raise tidy.TableError(
                    "the table has measured rows: name the list of their runs (--runs-out, or --runs)"
                )
            keys = {key for source in mine["source"] for key in source.split()}
            out[lane] += measured_when(runs[runs["key"].isin(keys)])
    named = sorted({found[1] for name in rows.loc[reference, "series"] if (found := tidy.OF_REFERENCE.search(name))})
    return out | ({"reference": "; ".join(named)} if named else {})


def places(testbeds: list[str]) -> list[str]:
    """Return testbeds as readers know them: the paper's configurations, the twins of a host, a machine."""
    configurations = [t.removeprefix("paper-") for t in testbeds if t.startswith("paper-")]
    twins: dict[str, list[str]] = {}
    for testbed in (t for t in testbeds if "/" in t):
        host, twin = testbed.split("/", 1)
        twins.setdefault(host, []).append(
            re.sub(r"-k(\d+)(?:-r(\d+))?$", r" k=\1 ranks=\2", twin).removesuffix(" ranks=")
        )
    out = ["the paper's text" + (f" (configuration {', '.join(configurations)})" if configurations else "")]
    out = out if any(t.startswith("paper") for t in testbeds) else []
    out += [f"twins on {host} ({'; '.join(names)})" for host, names in twins.items()]
    return out + [t for t in testbeds if "/" not in t and not t.startswith("paper") and t not in twins]


def measured_when(runs: pd.DataFrame) -> str:
    """Return machine, commit and date of the records, not of the drawing."""
    if runs.empty:
        return ""
    pairs = zip(runs["commit"], runs["dirty"], strict=True)
    commits = sorted({commit[:8] + (" (changed)" if dirty == "true" else "") for commit, dirty in pairs})
    days = sorted({when[:10] for when in runs["started_at"]})
    machines = sorted({f"{cpu}, {cores} cores" for cpu, cores in zip(runs["cpu"], runs["cores"], strict=True)})
    return f"; {' and '.join(machines)}; commit {', '.join(commits)}; {' to '.join(dict.fromkeys((days[0], days[-1])))}"


def footer(origins: dict[str, str]) -> str:
    """Return the line under the axes."""
    said = (f"{lane}: {origin}" for lane, origin in origins.items())
    return "   |   ".join(said) or "a drawing of structure: no numbers"


SIMULATED = ("memascend.planner.step_time", "memascend.simulator")  # sources of rows with simulated seconds


def not_measured(rows: pd.DataFrame) -> list[str]:
    """Return the models that another lane shows and that no run of this profile measured."""
    single = rows[rows["model"].isin(tidy.DISPLAY.values())]
    measured = set(single.loc[(single["lane"] == "measured") & ~tidy.is_reference(single), "model"])
    return sorted(set(single["model"]) - measured)


def caption(entry: dict[str, Any], prose: str, rows: pd.DataFrame, origins: dict[str, str]) -> str:
    """Return the caption as Markdown."""
    title = f"**{registry.PAPERS[entry['paper']]}, {entry['number']}. {entry['title']}.**"
    out = [f"{title} {' '.join(prose.split())}", ""]
    out += [f"- {lane}: {origin}" for lane, origin in origins.items()]
    constants = rows[rows["metric"] == "calibration"]
    for c in constants.itertuples():
        word = "assumed" if c.source.startswith("assumed") else "calibrated"
        out.append(f"- {word} constant {c.x_value} = {c.value}: {c.source}")
    if rows["source"].str.startswith(SIMULATED).any():
        out += [f"- {line}" for line in registry.validations()]
    without = rows[rows["metric"].str.startswith(tidy.NO_RESULT)]
    out += [f"- {metric}, {value}" for metric, value in zip(without["metric"], without["value"], strict=True)]
    missing = not_measured(rows)
    if "measured" in entry["lanes"] and "measured" not in origins:
        out.append("- not measured in this profile")
    elif missing and "measured" in entry["lanes"]:
        out.append(f"- not measured in this profile: {', '.join(missing)}")
    return "\n".join(out) + "\n"


def save(figure: Figure, stem: Path) -> None:
    """Write SVG, PDF and PNG without a date, so that the same table gives the same bytes."""
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg", metadata={"Date": None})
    tidy.atomically(stem.with_suffix(".svg"), lambda path: path.write_text(style.titled(drawing.getvalue())))
    tidy.atomically(stem.with_suffix(".pdf"), lambda path: figure.savefig(path, metadata={"CreationDate": None}))
    tidy.atomically(stem.with_suffix(".png"), lambda path: figure.savefig(path, dpi=160))
    plt.close(figure)


def entry_of(exhibit: str) -> dict[str, Any]:
    """Return the registry's entry of an exhibit that is built; raise TableError for any other."""
    found = next((e for e in registry.exhibits() if e["id"] == exhibit), None)
    if found is None or found["status"] != "built":
        raise tidy.TableError(f"{exhibit}: not an exhibit that is built; snakemake exhibits lists them")
    return found


def make(exhibit: str, folder: Path, table: Path | None = None, runs: Path | None = None) -> None:
    """Write every file of an exhibit's picture, from its tidy table and one line per run if it has rows."""
    entry = entry_of(exhibit)
    rows = tidy.read_table(table) if table else pd.DataFrame(columns=tidy.COLUMNS, dtype=str)
    origins = provenance(rows, pd.read_csv(runs, dtype=str, keep_default_na=False) if runs else pd.DataFrame())
    prose = registry.caption(exhibit)
    stem = folder / exhibit
    save(draw(registry.figures(entry["paper"])[exhibit], rows, footer(origins)), stem)
    tidy.write_table(rows, stem.with_suffix(".csv"))
    words = caption(entry, prose, rows, origins)
    tidy.atomically(stem.with_suffix(".md"), lambda path: path.write_text(words))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exhibit", required=True, help="id, such as memascend-fig11")
    parser.add_argument("--table", type=Path, help="the exhibit's tidy table; none for a drawing of structure")
    parser.add_argument("--runs", type=Path, help="one line per run, from workflows.derive.table")
    parser.add_argument("--draw-in", type=Path, required=True)
    args = parser.parse_args()
    try:
        make(args.exhibit, args.draw_in, args.table, args.runs)
    except (tidy.TableError, ValueError, OSError) as error:
        tidy.fail(error)


if __name__ == "__main__":
    main()
