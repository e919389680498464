"""`memascend compare A B`: two steps phase by phase, or two sets of results with their spread and verdicts.

A step is a trace, from `plan --trace` or `train --trace`. A set of results is a record or a folder of them (JSON whose
`points` hold repeats), a table of claims (CSV with a column `verdict`), or an artifact's zip, which holds both. No
torch here.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import statistics
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from memascend.simulator.side_by_side import StepOf, as_text, rows, step_of_trace
from memascend.simulator.step_picture import draw
from memascend.simulator.trace import read_trace


def add_compare(commands: Any) -> None:
    """Registers `compare` with the argparse subparsers `commands`."""
    parser = commands.add_parser(
        "compare",
        help="compare two steps phase by phase (simulated and measured, for example), or two sets of results",
        description="Compare two traces (from plan --trace and train --trace) phase by phase; or two records, folders "
        "of records, tables of claims or artifacts (the zips of snakemake artifact): medians and quartiles of what "
        "was timed, and every claim whose verdict differs.",
    )
    parser.add_argument(
        "a", type=Path, metavar="A", help="a trace, a record, a folder of records, a table of claims, or an artifact"
    )
    parser.add_argument("b", type=Path, metavar="B", help="another of the same kind, to compare it with")
    parser.add_argument("--all", action="store_true", help="list the claims with the same verdict too")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw both steps: .svg, .png or .pdf")
    parser.add_argument("--force", action="store_true", help="overwrite the file of --picture")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> tuple[str, int]:
    a, b = load(options.a), load(options.b)
    if type(a) is not type(b):
        raise ValueError(f"{options.a} is {_kind(a)} and {options.b} is {_kind(b)}: compare two of the same kind")
    if options.picture and not isinstance(a, StepOf):
        raise ValueError("--picture draws two steps: name two traces, of plan --trace or train --trace")
    if isinstance(a, StepOf) and isinstance(b, StepOf):
        if options.picture:
            draw([read_trace(options.a), read_trace(options.b)], options.picture, force=options.force)
        return (json.dumps(rows(a, b), indent=1) if options.json else as_text(a, b)), 0
    assert isinstance(a, Results)
    assert isinstance(b, Results)
    for path, results in ((options.a, a), (options.b, b)):
        if results.twice:
            many = f"{len(results.twice)} measurements (such as {results.twice[0]!r})"
            print(f"note: {path}: {many} in more than one record; the last record's are compared", file=sys.stderr)
    found = list(compared(a, b))
    if not found:
        raise ValueError(f"{options.a} and {options.b} have no measurement in common")
    if options.json:
        return json.dumps(found, indent=1), 0
    listed = [each for each in found if options.all or "ratio" in each or each["verdict"] == "other verdict"]
    head = [f"A: {options.a}", f"B: {options.b}", ""]
    return "\n".join([*head, *map(_line, listed), *([""] if listed else []), _summary(found, a, b)]), 0


@dataclass(frozen=True, kw_only=True)
class Results:
    """Repeats of each measurement by its name, and the verdict and value of each claim."""

    repeats: dict[str, list[float]]
    claims: dict[str, tuple[str, str]]
    twice: tuple[str, ...] = ()  # measurements that more than one record holds; the last one's repeats are kept


def load(path: Path) -> StepOf | Results:
    """What lies at `path`. ValueError, in one line, where it is nothing that can be compared."""
    if path.is_dir() and (path / "metrics.jsonl").is_file():
        raise ValueError(
            f"{path} is a training run: compare takes traces (of train --trace), records, tables of claims or artifacts"
        )
    if path.is_dir():
        return _together(
            path, [_results(file) for file in sorted([*path.rglob("*.json"), *path.rglob("*claims*.csv")])]
        )
    if not path.is_file():
        raise ValueError(
            f"there is no {path}: name a trace, a record, a folder of records, a table of claims, or an artifact"
        )
    if path.suffix.lower() == ".zip":
        return _together(path, list(_of_artifact(path)))
    if path.suffix == ".json" and "traceEvents" in _json(path):
        return step_of_trace(*read_trace(path))
    found = _results(path)
    if not found.repeats and not found.claims:
        raise ValueError(f"{path} holds no trace, no repeats of a measurement and no claims")
    return found


def _together(path: Path, found: list[Results]) -> Results:
    if not any(each.repeats or each.claims for each in found):
        raise ValueError(f"{path} holds no records with repeats and no table of claims")
    counts = Counter(name for each in found for name in each.repeats)
    return Results(
        twice=tuple(sorted(name for name, count in counts.items() if count > 1)),
        repeats={name: values for each in found for name, values in each.repeats.items()},
        claims={name: verdict for each in found for name, verdict in each.claims.items()},
    )


def _of_artifact(path: Path) -> Iterator[Results]:
    """The records and claims of a zip that `snakemake artifact` has made."""
    try:
        with zipfile.ZipFile(path) as file:
            for name in sorted(map(PurePosixPath, file.namelist())):
                inside = name.parts[1:]
                if inside == ("tables", "claims.csv") or (inside[:1] == ("records",) and name.suffix == ".json"):
                    yield _results_of(Path(name), file.read(str(name)).decode("utf-8"))
    except (zipfile.BadZipFile, zlib.error, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path} as an artifact: {error}; copy or download it again") from None
    except (RuntimeError, NotImplementedError, KeyError) as error:  # encrypted, compressed in another way, odd names
        raise ValueError(f"{path} is not an artifact that this program reads: {error}") from None


def _kind(loaded: StepOf | Results) -> str:
    return "a step" if isinstance(loaded, StepOf) else "a set of results"


def _json(path: Path) -> dict[str, Any]:
    return _parsed(path, _text(path))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        loaded = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    return loaded if isinstance(loaded, dict) else {}


def _results(path: Path) -> Results:
    return _results_of(path, _text(path)) if path.suffix in (".csv", ".json") else Results(repeats={}, claims={})


def _results_of(path: Path, text: str) -> Results:
    """Of a file called `path` that holds `text`."""
    if path.suffix == ".csv":
        try:
            lines = list(csv.DictReader(io.StringIO(text)))
        except csv.Error as error:
            raise ValueError(f"cannot read {path}: {error}") from None
        if not lines or not {"claim_id", "lane", "verdict", "value"} <= lines[0].keys():
            return Results(repeats={}, claims={})
        return Results(
            repeats={},
            claims={f"{line['claim_id']} ({line['lane']})": (line["verdict"], line["value"]) for line in lines},
        )
    record = _parsed(path, text)
    points = record.get("points")
    called = record.get("run_id") or record.get("benchmark") or path.stem
    repeats = dict(_repeats(str(called), points)) if isinstance(points, list) else {}
    return Results(repeats=repeats, claims={})


def _repeats(called: str, points: list[Any]) -> Iterator[tuple[str, list[float]]]:
    """Lists of seconds, named by the point's other keys."""
    for point in points:
        if isinstance(point, dict):
            plain = [str(value) for value in point.values() if isinstance(value, str | int)]
            for key, values in point.items():
                timed = key == "seconds" or key.endswith("_s")
                if timed and isinstance(values, list) and values and all(isinstance(v, int | float) for v in values):
                    yield " ".join([f"{called}:", *plain, "" if key == "seconds" else key]).rstrip(), values


def compared(a: Results, b: Results) -> Iterator[dict[str, Any]]:
    """What both have. Repeats decide by their quartiles: where they overlap, neither is faster."""
    for name in a.repeats:
        if name in b.repeats:
            mine, theirs = _quartiles(a.repeats[name]), _quartiles(b.repeats[name])
            apart = theirs[0] > mine[2] or theirs[2] < mine[0]
            slower = theirs[1] > mine[1]
            verdict = "within the spread" if not apart else "B is slower" if slower else "B is faster"
            yield {"name": name, "a_s": mine, "b_s": theirs, "ratio": _ratio(theirs[1], mine[1]), "verdict": verdict}
    for name in a.claims:
        if name in b.claims:
            before, after = a.claims[name], b.claims[name]
            verdict = "equal" if before == after else "other value" if before[0] == after[0] else "other verdict"
            yield {"name": name, "a": before, "b": after, "verdict": verdict}


def _ratio(b: float, a: float) -> float | None:
    return b / a if a else None


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    """(low, median, high); of one value three times itself, of two and three the extremes."""
    if len(values) < 4:
        return min(values), statistics.median(values), max(values)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def _line(found: dict[str, Any]) -> str:
    if "ratio" in found:
        a, b = (f"{m:.4g} [{low:.4g}, {high:.4g}]" for low, m, high in (found["a_s"], found["b_s"]))
        ratio = "" if found["ratio"] is None else f", B / A {found['ratio']:.3f}"
        return f"{found['name']}: A {a} s, B {b} s{ratio}: {found['verdict']}"
    (before, was), (after, now) = found["a"], found["b"]
    if found["verdict"] == "equal":
        return f"{found['name']}: {after}, {now or 'no value'}"
    return f"{found['name']}: A {before} ({was or 'no value'}), B {after} ({now or 'no value'})"


def _summary(found: list[dict[str, Any]], a: Results, b: Results) -> str:
    counts: dict[str, int] = {}
    for each in found:
        counts[each["verdict"]] = counts.get(each["verdict"], 0) + 1
    alone = [len(set(x.repeats) - set(y.repeats)) + len(set(x.claims) - set(y.claims)) for x, y in ((a, b), (b, a))]
    text = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items(), key=lambda item: -item[1]))
    return f"{len(found)} in common: {text}; only in A {alone[0]}, only in B {alone[1]}"
