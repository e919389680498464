"""Keep this machine's records as a committed reference: results/reference/<host>/, compact, what each run took, and the
claims that all of the folder's records decide (claims.csv).

A compact record has what rows are derived from, except for curves over time: its ledger has only the buffers live at
the peak, summed by owner, and the sampled trace is left out. Name the host with MEMASCEND_HOST when measuring.

usage: python -m workflows.derive.reference --records results/raw/*.json [--times-only]

With --times-only, only the seconds of the runs are kept; this is allowed for a busy machine or a changed tree.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from workflows import registry, tidy
from workflows.derive import claims, table
from workflows.records import load

LEFT_OUT = ("config", "denied_prefetches", "evicted_prefetches", "released_gathered", "io", "_path")
SUMMED = ("requested_bytes", "reserved_bytes", "touched_bytes")


def compact(record: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a record that rows are derived from, with only the names of paths; the key stays the same."""
    out = {name: value for name, value in record.items() if name not in LEFT_OUT}
    if "options" in out:
        out["options"] = {name: without_folder(value) for name, value in record["options"].items()}
    if isinstance(asked := record.get("points_requested"), dict) and "options" in asked:
        out["points_requested"] = {**asked, "options": without_folder(asked["options"])}
    if "ledger" in out:
        out["ledger"] = at_peak(record["ledger"])
    for point in out.get("points", []) if record["kind"] == "training" else ():
        point.pop("ledger", None)
    return out


def without_folder(value: Any) -> Any:
    """Return the name of an absolute path, also in a list, and any other value unchanged."""
    if isinstance(value, list):
        return [without_folder(each) for each in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def at_peak(ledger: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one entry per owner, role and allocator for the buffers that are live at the peak."""
    groups = defaultdict(list)
    for entry in ledger:
        if entry.get("at_peak", False):
            groups[entry["owner"], entry["role"], entry["allocator"]].append(entry)
    sums = []
    for same in groups.values():
        whole = {name: sum(entry[name] or 0 for entry in same) for name in SUMMED}
        sums.append({**same[0], **whole, "name": f"{same[0]['owner']} ({len(same)})", "address": None, "died_s": None})
    return sums


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=Path, nargs="+", required=True, help="run records (JSON)")
    parser.add_argument("--out-dir", type=Path, default=registry.ROOT / "results/reference")
    parser.add_argument("--times-only", action="store_true", help="keep only the seconds of the runs (times.json)")
    args = parser.parse_args(argv)
    hosts = set()
    try:
        for record in load(args.records):
            host = record["host"]["name"]
            if host == "local":
                raise tidy.TableError(f"{record['_path']}: the machine has no name; measure with MEMASCEND_HOST set")
            if record["dirty"] and not args.times_only:
                raise tidy.TableError(f"{record['_path']}: measured from a changed tree; commit, and run again")
            if record["kind"] != "testbed" and not args.times_only:
                text = json.dumps(compact(record), separators=(",", ":")) + "\n"
                out = args.out_dir / host / f"{record['run_id']}.json"
                tidy.atomically(out, lambda path, text=text: path.write_text(text))
            note_time(args.out_dir / host / "times.json", record)
            if not args.times_only:
                hosts.add(args.out_dir / host)
        for folder in hosts:
            claims.write(decided_by(folder), folder / "claims.csv")
    except (tidy.TableError, OSError) as error:
        tidy.fail(error)


def decided_by(folder: Path) -> list[claims.Verdict]:
    """Return the verdict of every claim whose measured lane the committed records of one machine decide."""
    paths = [path for path in sorted(folder.glob("*.json")) if "key" in json.loads(path.read_text())]
    records, verdicts, rows = load(paths), [], {}
    for claim in claims.of_built(registry.claims(), registry.exhibits()):
        exhibit = claim["exhibit_id"]
        if exhibit not in rows:
            mine = [record for record in records if exhibit in record.get("exhibits", [exhibit])]
            found = table.measured_rows(table.paper_of(exhibit), mine)
            named = found["testbed"].str.replace(r"^[^/]+", folder.name, regex=True)
            rows[exhibit] = found.assign(testbed=named)[found["exhibit_id"] == exhibit]
        verdicts.append(claims.decide(claim, "measured", rows[exhibit]))
    return [verdict for verdict in verdicts if verdict.verdict in registry.DECIDED]


def note_time(path: Path, record: dict[str, Any]) -> None:
    """Note the seconds of a run, for the times that `snakemake exhibits` prints before anything has run."""
    times = json.loads(path.read_text()) if path.exists() else {}
    times[record["run_id"]] = round(record.get("wall_s", 0.0), 1)
    tidy.atomically(path, lambda place: place.write_text(json.dumps(dict(sorted(times.items())), indent=1) + "\n"))


if __name__ == "__main__":
    main()
