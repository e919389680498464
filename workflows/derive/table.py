"""One exhibit's tidy table, every row with its lane and origin, and its picture; or a whole paper's modelled lane.

Rows are the paper's text (results/published), what its folder models (workflows/papers/<paper>/rows) and measures from
run records, and, where they are finer or ours are missing, committed records of other machines, as series of their own.
"""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path
from typing import Any

import pandas as pd

from memascend.suggestions import did_you_mean
from workflows import registry, tidy
from workflows.cases import FAILED, of_record
from workflows.derive import figure
from workflows.records import RUN_COLUMNS, apart, load, run_summary


def paper_of(exhibit: str) -> str:
    """Return the id of an exhibit's paper."""
    return exhibit.rpartition("-")[0]


def rows_of(paper: str) -> Any:
    """Return the module that computes a paper's rows."""
    return importlib.import_module(f"workflows.papers.{paper}.rows")


def published_rows(folder: Path, exhibit: str) -> pd.DataFrame:
    """Return the rows quoted from the paper; their testbed is the paper's configuration where the text names one."""
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise tidy.TableError(f"{folder}: no published numbers (*.csv) here; check published_dir in the configuration")
    mine = [path for path in paths if path.stem.replace("_", "") == paper_of(exhibit)]
    tables = [pd.read_csv(path, dtype=str, keep_default_na=False) for path in mine]
    rows = pd.concat([table[table["exhibit_id"] == exhibit] for table in tables], ignore_index=True)
    named = rows["x_name"].eq("config")
    rows["testbed"] = ("paper-" + rows["x_value"]).where(named, "paper")
    rows["source"] = rows["quote"]
    return rows.reindex(columns=tidy.COLUMNS, fill_value="")


def measured_rows(paper: str, records: list[dict[str, Any]], exhibit: str | None = None) -> pd.DataFrame:
    """Return every row that the paper's folder derives from these records, and one per exhibit of a run without a
    result.

    `exhibit` names the exhibit that the records belong to, whatever they say themselves.
    """
    module = rows_of(paper)
    rows = list(module.measured(records)) if hasattr(module, "measured") else []
    missing = [record for record in records if record["kind"] != "training" and record["status"] != "ok"]
    for record in missing:
        metric, text = f"{tidy.NO_RESULT}{record['run_id']}", FAILED[record["status"]]
        drawn = record.get("exhibits", []) if exhibit is None else [exhibit]
        rows += [of_record(record, each, metric, text, "text") for each in drawn]
    return pd.DataFrame([dict.fromkeys(tidy.COLUMNS, "") | row for row in rows], columns=tidy.COLUMNS).astype(str)


def reference_rows(exhibit: str, records: list[dict[str, Any]], own: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of committed records where ours are coarser or missing, as series named by host and date."""
    parts = [own.iloc[:0]]
    hosts = dict.fromkeys(Path(record["_path"]).parent.name for record in records)
    for host in hosts:
        mine = [record for record in records if Path(record["_path"]).parent.name == host]
        rows = measured_rows(paper_of(exhibit), mine)
        rows = rows[(rows["exhibit_id"] == exhibit) & (rows["lane"] == "measured")].copy()
        finest: dict[tuple, int] = {}
        for what, k in kept_apart(own[own["lane"] == "measured"]):
            finest[what] = min(k, finest.get(what, k))
        finer = [finest.get(what, k + 1) > k for what, k in kept_apart(rows)]
        rows = rows[pd.Series(finer, rows.index, dtype=bool)].copy()
        when = {record["key"]: record["started_at"][:10] for record in mine}
        days = [max(when[key] for key in source.split()) for source in rows["source"]]
        rows["series"] = [f"{series} [{host}, {day}]" for series, day in zip(rows["series"], days, strict=True)]
        rows["testbed"] = rows["testbed"].str.replace(r"^[^/]+", host, regex=True)
        parts.append(rows)
    return pd.concat(parts, ignore_index=True)


def twin_k(testbed: str) -> int:
    """Return the factor k of a twin's testbed ``<host>/<model>-k<k>``; 1 for full size."""
    found = re.search(r"-k(\d+)(-r\d+)?$", testbed)
    return int(found[1]) if found else 1


def kept_apart(rows: pd.DataFrame) -> list[tuple[tuple, int]]:
    """Return (identity, the twin's factor) of each row. The identity is model, metric and x; a
    curve over time is one."""
    curve = rows["x_name"].isin(("time in ms", "step"))
    x = rows["x_value"].where(~curve, "")
    return [
        ((m, metric, at), twin_k(t))
        for m, metric, at, t in zip(rows["model"], rows["metric"], x, rows["testbed"], strict=True)
    ]


def assemble(exhibit: str, published: Path, modelled: pd.DataFrame, *measured: pd.DataFrame) -> pd.DataFrame:
    """Return the published rows, followed by those of each lane."""
    lanes = [part[part["exhibit_id"] == exhibit] for part in (modelled, *measured)]
    table = pd.concat([published_rows(published, exhibit), *lanes], ignore_index=True)
    if table.empty:
        raise tidy.TableError(f"{exhibit}: no lane has a row; check the id against the exhibits of its paper")
    return table


def make(
    exhibit: str,
    out: Path,
    *,
    published: Path,
    modelled: Path | None,
    records: list[Path],
    reference: list[Path],
    runs_out: Path | None = None,
    draw_in: Path | None = None,
) -> None:
    """Write an exhibit's table; with `runs_out` also its list of runs, with `draw_in` also its
    picture in that folder."""
    loaded = apart(load(records))
    lanes = [measured_rows(paper_of(exhibit), loaded, exhibit)]
    lanes.append(reference_rows(exhibit, load(reference), lanes[0]))
    planned = tidy.read_table(modelled) if modelled else lanes[0].iloc[:0]
    tidy.write_table(assemble(exhibit, published, planned, *lanes), out)
    if runs_out:
        tidy.write_table(map(run_summary, loaded), runs_out, RUN_COLUMNS)
    if draw_in:
        figure.make(exhibit, draw_in, out, runs_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exhibit", help="id, such as memascend-fig11")
    parser.add_argument("--modelled-lane-of", metavar="PAPER", help="write that paper's modelled lane, of all exhibits")
    parser.add_argument("--published", type=Path, help="folder of the facts quoted from the papers")
    parser.add_argument("--modelled", type=Path, help="tidy table of the paper's modelled lane")
    parser.add_argument("--records", type=Path, nargs="*", default=[], help="run records (JSON)")
    parser.add_argument("--reference", type=Path, nargs="*", default=[], help="committed records of named machines")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs-out", type=Path, help="one line per run: what it was, where and when")
    parser.add_argument("--draw-in", type=Path, help="folder of the picture, made in the same go")
    args = parser.parse_args()
    try:
        if args.modelled_lane_of:
            if args.modelled_lane_of not in registry.PAPERS:
                near = did_you_mean(args.modelled_lane_of, registry.PAPERS)
                papers = ", ".join(registry.PAPERS)
                raise ValueError(f"--modelled-lane-of: no paper {args.modelled_lane_of!r}{near}; the papers: {papers}")
            tidy.write_table(rows_of(args.modelled_lane_of).modelled(), args.out)
            return
        if not (args.exhibit and args.published):
            raise ValueError("--exhibit and --published are needed, or --modelled-lane-of")
        sources = {"published": args.published, "modelled": args.modelled}
        sources |= {"records": args.records, "reference": args.reference}
        make(args.exhibit, args.out, **sources, runs_out=args.runs_out, draw_in=args.draw_in)
    except (tidy.TableError, ValueError, OSError, KeyError) as error:
        tidy.fail(error)


if __name__ == "__main__":
    main()
