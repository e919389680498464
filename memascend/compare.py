"""`memascend compare A B`: compares two steps phase by phase, or two sets of results with their spread and verdicts.

A step is a trace, from `plan --trace` or `train --trace`. A set of results is a record or a folder of them (JSON whose
`points` hold repeats), a table of claims (CSV with a column `verdict`), or an artifact's zip, which holds both. Repeats
are compared by seconds, or by bytes per second if a bench runs for a stated time. This module does not import torch.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import math
import statistics
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from memascend.simulator.side_by_side import StepOf, as_text, rows, step_of_trace
from memascend.simulator.step_picture import draw
from memascend.simulator.trace import read_trace
from memascend.terminal import printable

LARGEST = 1e18  # seconds or bytes per second; larger values cannot be measurements
# Keys that describe how a record was made, not what it measured.
_MADE = frozenset(
    (
        "schema_version",
        "key",
        "run_id",
        "kind",
        "lane",
        "status",
        "wall_s",
        "code_digest",
        "commit",
        "dirty",
        "started_at",
    )
)
# Lists of rates in a point of `bench nvme`'s question `stream`, whose `seconds` are the preset duration of each repeat.
_STREAMED = {"engine": "", "fio": "fio"}
_LONGEST = 200  # characters quoted from the error that a damaged file causes
SUMS = "SHA256SUMS"  # file in an artifact with the digest and path of every other file
MANIFEST = "artifact.json"  # file in an artifact that names its version and profile


def add_compare(commands: Any) -> None:
    """Register `compare` with the argparse subparsers `commands`."""
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
            many = f"{len(results.twice)} measurements or claims (such as {results.twice[0]!r})"
            said = printable(f"{path}: {many} in more than one file; those of the last are compared")
            print(f"note: {said}", file=sys.stderr)
    for note in _other_settings(a, b):
        print(f"note: {printable(note)}", file=sys.stderr)
    found = list(compared(a, b))
    if not found:
        raise ValueError(f"{options.a} and {options.b} have no measurement in common")
    if options.json:
        return json.dumps(found, indent=1), 0
    listed = [each for each in found if options.all or "ratio" in each or each["verdict"] == "other verdict"]
    head = [f"A: {options.a}", f"B: {options.b}", ""]
    lines = [*head, *map(_line, listed), *([""] if listed else []), _summary(found, a, b)]
    return "\n".join(map(printable, lines)), 0


class Repeats(NamedTuple):
    """Repeats of one measurement: bytes per second if `rate` (more is faster), otherwise seconds."""

    values: list[float]
    rate: bool = False


@dataclass(frozen=True, kw_only=True)
class Results:
    """Repeats by the name of the measurement, and (verdict, value) by the name of the claim."""

    repeats: dict[str, Repeats]
    claims: dict[str, tuple[str, str]]
    twice: tuple[str, ...] = ()  # measurements and claims in more than one file; those of the last file are kept
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # of a bench, by the prefix of its measurements


def load(path: Path) -> StepOf | Results:
    """Load the step or the results at `path`. Raises a one-line ValueError if they cannot be compared."""
    if path.is_dir() and (path / "metrics.jsonl").is_file():
        raise ValueError(
            f"{path} is a training run: compare takes traces (of train --trace), records, tables of claims or artifacts"
        )
    if path.is_dir():
        return _together(
            path,
            [
                _results(file)
                for file in sorted([*path.rglob("*.json"), *path.rglob("*claims*.csv")])
                if file.is_file()  # reading a named pipe would block
            ],
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
    counts = Counter(name for each in found for name in (*each.repeats, *each.claims))
    return Results(
        twice=tuple(sorted(name for name, count in counts.items() if count > 1)),
        repeats={name: values for each in found for name, values in each.repeats.items()},
        claims={name: verdict for each in found for name, verdict in each.claims.items()},
        settings={called: settings for each in found for called, settings in each.settings.items()},
    )


def _of_artifact(path: Path) -> Iterator[Results]:
    """Yield the records and claims in a zip made by `snakemake artifact`, after checking it against SHA256SUMS."""
    try:
        with zipfile.ZipFile(path) as file:
            manifest = f"{_checked_root(path, file)}/{MANIFEST}"
            yield _made_as(path, _parsed(path / manifest, file.read(manifest).decode("utf-8")))
            for name in sorted(map(PurePosixPath, file.namelist())):
                inside = name.parts[1:]
                if inside == ("tables", "claims.csv") or (inside[:1] == ("records",) and name.suffix == ".json"):
                    yield _results_of(path / name, file.read(str(name)).decode("utf-8"))
    except (zipfile.BadZipFile, zlib.error, OSError, UnicodeDecodeError) as error:
        said = printable(str(error))[:_LONGEST]
        raise ValueError(f"cannot read {path} as an artifact: {said}; copy or download it again") from None
    except (RuntimeError, NotImplementedError, KeyError) as error:  # encryption, unknown compression, missing entry
        raise ValueError(f"{path} is not an artifact that this program reads: {error}") from None


def _made_as(path: Path, manifest: dict[str, Any]) -> Results:
    """Return an artifact's version and profile as settings, so that differences between two artifacts are noted."""
    made = {key: manifest.get(key) for key in ("version", "profile")}
    if not all(isinstance(value, str) for value in made.values()):
        raise ValueError(f"{path} is not an artifact: its {MANIFEST} names no version and no profile")
    return Results(repeats={}, claims={}, settings={MANIFEST: made})


def _checked_root(path: Path, artifact: zipfile.ZipFile) -> str:
    """Return the name of the artifact's only top-level folder, after checking every file against SHA256SUMS.

    Raises a ValueError that names a file which was changed, added or removed since the artifact was made, or an entry
    whose path leaves the artifact or holds control characters.
    """
    entries = {entry.filename: PurePosixPath(entry.filename) for entry in artifact.infolist() if not entry.is_dir()}
    for entry, inside in entries.items():
        if inside.is_absolute() or ".." in inside.parts:
            raise ValueError(f"{path} is not compared: its entry {entry} leads out of the artifact")
        if not entry.isprintable():
            raise ValueError(f"{path} is not compared: the name of its entry {entry} holds control characters")
    roots = {inside.parts[0] for inside in entries.values()}
    listed = f"{min(roots, default='')}/{SUMS}"
    if len(roots) != 1 or listed not in entries or len(entries) < sum(not e.is_dir() for e in artifact.infolist()):
        raise ValueError(f"{path} is not an artifact: it must hold one folder with {SUMS} and no file twice")
    lines = artifact.read(listed).decode("utf-8").splitlines()
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    found = {
        inside.relative_to(inside.parts[0]).as_posix(): hashlib.sha256(artifact.read(entry)).hexdigest()
        for entry, inside in entries.items()
        if entry != listed
    }
    if odd := sorted(name for name in sums.keys() | found.keys() if sums.get(name) != found.get(name)):
        how = (
            "is missing" if odd[0] not in found else "is not what its checksum says" if odd[0] in sums else "was added"
        )
        more = f", and {len(odd) - 1} more" if odd[1:] else ""
        raise ValueError(f"{path} is not compared: {odd[0]} {how}{more} ({SUMS}); copy or download the artifact again")
    return min(roots)


def _kind(loaded: StepOf | Results) -> str:
    return "a step" if isinstance(loaded, StepOf) else "a set of results"


def _json(path: Path) -> dict[str, Any]:
    return _parsed(path, _text(path))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors start a file with a byte order mark
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
    """Parse `text`, the content of the file `path`: a table of claims or a record."""
    if path.suffix == ".csv":
        try:
            lines = list(csv.DictReader(io.StringIO(text)))
        except csv.Error as error:
            raise ValueError(f"cannot read {path}: {error}") from None
        if not lines or not {"claim_id", "lane", "verdict", "value"} <= lines[0].keys():
            return Results(repeats={}, claims={})
        return Results(
            repeats={},
            claims={
                f"{line['claim_id']} ({line['lane']})": (line["verdict"] or "", line["value"] or "") for line in lines
            },
        )
    record = _parsed(path, text)
    points = record.get("points")
    if "run_id" in record:  # the run_id fixes the settings, except for those that a bench determines by itself
        bench = record if "benchmark" in record else {}
        conditions = bench.get("conditions") if isinstance(bench.get("conditions"), dict) else {}
        options = bench.get("options") if isinstance(bench.get("options"), dict) else {}
        found = {**{key: value for key, value in bench.items() if key not in _MADE}, **(conditions or {})}
        found |= {name: value for name, value in (options or {}).items() if name not in ("folder", "model")}
        called, settings = str(record["run_id"]), {k: v for k, v in found.items() if _is_plain(v)}
    else:
        settings = {key: value for key, value in record.items() if isinstance(value, str | int)}
        called = str(settings.pop("benchmark", path.stem))
        if settings.pop("registered", False):  # `bench nvme` with registered buffers is another measurement
            called += ", registered"
    try:
        repeats = dict(_repeats(called, points)) if isinstance(points, list) else {}
    except ValueError as error:
        raise ValueError(f"{path} is not compared: {error}") from None
    return Results(repeats=repeats, claims={}, settings={called: settings} if repeats else {})


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int) or (isinstance(value, list) and all(isinstance(v, str | int) for v in value))


def _repeats(called: str, points: list[Any]) -> Iterator[tuple[str, Repeats]]:
    """Yield the lists of seconds or rates in `points`, each named by the other keys of its point.

    Raises ValueError for values that cannot be a time or a rate.
    """
    for point in points:
        if isinstance(point, dict):
            plain = [str(value) for value in point.values() if isinstance(value, str | int)]
            streamed = point.get("question") == "stream"
            timed = _STREAMED if streamed else {key: _named(key) for key in point if _named(key) is not None}
            for key, name in timed.items():
                values = point.get(key)
                if isinstance(values, list) and values and all(isinstance(v, int | float) for v in values):
                    if odd := [v for v in values if isinstance(v, bool) or not 0 <= v <= LARGEST]:
                        raise ValueError(f"{called}: {key} holds {str(odd[0])[:20]}, which no time or rate can be")
                    yield " ".join([f"{called}:", *plain, name or ""]).rstrip(), Repeats(values, rate=streamed)


def _named(key: str) -> str | None:
    """Return the suffix that this key adds to the name of a measurement, or None if the key holds no seconds."""
    return "" if key == "seconds" else key if key.endswith("_s") and not key.endswith("_per_s") else None


def compared(a: Results, b: Results) -> Iterator[dict[str, Any]]:
    """Yield a row for each measurement and claim that both results have.

    Repeats are compared by their quartiles: if the interquartile ranges overlap, neither side is faster. A single value
    on either side has no spread, so it decides nothing.
    """
    for name in a.repeats:
        if name in b.repeats:
            rate = a.repeats[name].rate
            mine, theirs = _quartiles(a.repeats[name].values), _quartiles(b.repeats[name].values)
            apart = theirs[0] > mine[2] or theirs[2] < mine[0]
            slower = theirs[1] < mine[1] if rate else theirs[1] > mine[1]
            faster = "B is slower" if slower else "B is faster"
            single = 1 in (len(a.repeats[name].values), len(b.repeats[name].values))
            verdict = "a single value" if single else faster if apart else "within the spread"
            unit = "bytes_per_s" if rate else "s"
            both = {f"a_{unit}": mine, f"b_{unit}": theirs}
            yield {"name": name, **both, "ratio": _ratio(theirs[1], mine[1]), "verdict": verdict}
    for name in a.claims:
        if name in b.claims:
            before, after = a.claims[name], b.claims[name]
            verdict = "equal" if before == after else "other value" if before[0] == after[0] else "other verdict"
            yield {"name": name, "a": before, "b": after, "verdict": verdict}


def _other_settings(a: Results, b: Results) -> Iterator[str]:
    """Yield a sentence for each setting of a bench that differs between A and B."""
    for called in sorted(a.settings.keys() & b.settings.keys()):
        mine, theirs = a.settings[called], b.settings[called]
        for key in sorted(mine.keys() & theirs.keys()):
            if mine[key] != theirs[key]:
                yield f"{called}: {key} is {mine[key]} in A and {theirs[key]} in B"


def _ratio(b: float, a: float) -> float | None:
    return b / a if a and b / a < math.inf else None


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return (low, median, high): the quartiles, or the extremes if there are fewer than four values."""
    if len(values) < 4:
        return min(values), statistics.median(values), max(values)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def _line(found: dict[str, Any]) -> str:
    if "ratio" in found:
        unit, key, scale = ("s", "s", 1.0) if "a_s" in found else ("GB/s", "bytes_per_s", 1e-9)
        sides = [[scale * value for value in found[f"{side}_{key}"]] for side in "ab"]
        a, b = (f"{m:.4g} [{low:.4g}, {high:.4g}] {unit}" for low, m, high in sides)
        ratio = "" if found["ratio"] is None else f", B / A {found['ratio']:.3f}"
        return f"{found['name']}: A {a}, B {b}{ratio}: {found['verdict']}"
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
