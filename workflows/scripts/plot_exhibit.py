"""Draw one exhibit: SVG for the web, PDF for print, PNG, the data as CSV, and the caption.

Reads the exhibit's tidy table alone (and, for the line under the axes, when and where its runs were made), so that
drawing again gives the same files.
"""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from workflows.scripts import tidy

PAPER_NAMES = {
    "memascend": "MemAscend",
    "lohan": "LoHan",
    "mlpoffload": "MLP-Offload",
    "cxl": "CXL-aware allocation",
    "ssdtrain": "SSDTrain",
}


def provenance(table: pd.DataFrame, runs: pd.DataFrame) -> dict[str, str]:
    """Lane -> where its numbers come from; for measured: twins, host, commit and date of the records."""
    out = {}
    for lane in (lane for lane in tidy.LANES if lane in set(table["lane"])):
        mine = table[table["lane"] == lane]
        out[lane] = ", ".join(places(sorted({t for t in mine["testbed"] if t and not t.endswith("/twins")})))
        if lane == "measured":
            keys = {key for source in mine["source"] for key in source.split()}
            out[lane] += measured_when(runs[runs["key"].isin(keys)])
    return out


def places(testbeds: list[str]) -> list[str]:
    """Testbeds as a reader wants them: the paper's configurations, the twins of a host, a machine."""
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
    """Machine, commit and date of the records, not of the drawing."""
    if runs.empty:
        return ""
    commits = sorted(
        {
            commit[:8] + (" (changed)" if dirty == "true" else "")
            for commit, dirty in zip(runs["commit"], runs["dirty"], strict=True)
        }
    )
    days = sorted({when[:10] for when in runs["started_at"]})
    machines = sorted({f"{cpu}, {cores} cores" for cpu, cores in zip(runs["cpu"], runs["cores"], strict=True)})
    return f"; {' and '.join(machines)}; commit {', '.join(commits)}; {' to '.join(dict.fromkeys((days[0], days[-1])))}"


def footer(origins: dict[str, str]) -> str:
    """The line under the axes."""
    return "   |   ".join(f"{lane}: {origin}" for lane, origin in origins.items())


def not_measured(table: pd.DataFrame) -> list[str]:
    """Models that another lane shows and no run of this profile measured."""
    single = table[table["model"].isin(tidy.DISPLAY.values())]
    measured = set(single.loc[single["lane"] == "measured", "model"])
    return sorted(set(single["model"]) - measured)


def caption(entry: dict[str, Any], prose: str, table: pd.DataFrame, origins: dict[str, str]) -> str:
    """The caption as Markdown."""
    lines = [f"**{PAPER_NAMES[entry['paper']]}, {entry['number']}. {entry['title']}.** {' '.join(prose.split())}", ""]
    lines += [f"- {lane}: {origin}" for lane, origin in origins.items()]
    constants = table[table["metric"] == "calibration"]
    lines += [f"- calibrated constant {c.x_value} = {c.value}: {c.source}" for c in constants.itertuples()]
    missing = not_measured(table)
    if "measured" in entry["lanes"] and "measured" not in origins:
        lines.append("- not measured in this profile")
    elif missing and "measured" in entry["lanes"]:
        lines.append(f"- not measured in this profile: {', '.join(missing)}")
    return "\n".join(lines) + "\n"


def draw(exhibit: str, table: pd.DataFrame, foot: str) -> Any:
    """The finished figure of an exhibit."""
    from workflows.scripts.plots import style

    module = importlib.import_module(f"workflows.scripts.plots.{exhibit.replace('-', '_')}")
    figure = module.draw(table)
    style.finish(figure, foot, getattr(module, "HEAD_INCHES", 0.5))
    return figure


def save(figure: Any, stem: Path) -> None:
    """SVG, PDF and PNG without a date in them: the same table gives the same bytes."""
    tidy.atomically(stem.with_suffix(".svg"), lambda path: figure.savefig(path, metadata={"Date": None}))
    tidy.atomically(stem.with_suffix(".pdf"), lambda path: figure.savefig(path, metadata={"CreationDate": None}))
    tidy.atomically(stem.with_suffix(".png"), lambda path: figure.savefig(path, dpi=160))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exhibit", required=True, help="id, such as memascend-fig11")
    parser.add_argument("--table", type=Path, required=True, help="the exhibit's tidy table")
    parser.add_argument("--runs", type=Path, required=True, help="one line a run, from derive_measured")
    parser.add_argument("--registry", type=Path, required=True, help="workflows/config/exhibits.yaml")
    parser.add_argument("--caption", type=Path, required=True, help="the caption's prose (Markdown)")
    parser.add_argument("--out-dir", type=Path, required=True)
    args = parser.parse_args()
    try:
        entry = next(
            (e for e in yaml.safe_load(args.registry.read_text())["exhibits"] if e["id"] == args.exhibit), None
        )
        if entry is None or entry["status"] != "built":
            raise tidy.TableError(f"{args.exhibit}: not an exhibit that is built; snakemake exhibits lists them")
        table = tidy.read_table(args.table)
        runs = pd.read_csv(args.runs, dtype=str, keep_default_na=False)
        origins = provenance(table, runs)
        figure = draw(args.exhibit, table, footer(origins))
        stem = args.out_dir / args.exhibit
        save(figure, stem)
        tidy.write_table(table, args.out_dir / f"{args.exhibit}.csv")
        text = caption(entry, args.caption.read_text(), table, origins)
        tidy.atomically(args.out_dir / f"{args.exhibit}.md", lambda path: path.write_text(text))
    except (tidy.TableError, OSError, yaml.YAMLError) as error:
        tidy.fail(error)


if __name__ == "__main__":
    main()
