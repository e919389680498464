"""The command line of `python -m tests.chaos`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.chaos.draws import DRAWN_AS, Draw, as_stock, draw

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description="Seeded faults, and what became of each."
    )
    parser.add_argument("--seeds", default="0:1000", help="first:end, or a list such as 3,17 (default 0:1000)")
    parser.add_argument("--minutes", type=float, default=60.0, help="no seed is begun after so long (default 60)")
    parser.add_argument("--out", type=Path, required=True, help="the record; gone on with where it is there")
    parser.add_argument("--targets", nargs="+", help="only these: engine, activations, drop-in, train")
    parser.add_argument("--stock", action="store_true", help="the schedule against DeepSpeed as it is")
    parser.add_argument("--verbose", action="store_true", help="a line a seed, and what failing processes said")
    options = parser.parse_args(arguments)
    from tests.chaos.sandbox import isolate

    return run(options, isolated=isolate())


def seeds_of(text: str) -> list[int]:
    if ":" in text:
        first, end = map(int, text.split(":"))
        return list(range(first, end))
    return [int(number) for number in text.split(",")]


def run(options: argparse.Namespace, *, isolated: bool) -> int:
    import torch  # noqa: F401  before any fork

    from tests.chaos import loops
    from tests.chaos.commands import Commands
    from tests.chaos.judge import Judge
    from tests.chaos.sandbox import left_processes
    from tests.chaos.verdicts import FAILURES

    record = opened(options.out)
    begun = time.monotonic()
    loops.import_what_trainings_import()
    if options.stock or not options.targets or "drop-in" in options.targets:
        from tests.chaos.deepspeed_loop import import_what_takes_long

        import_what_takes_long()
    programs = contextlib.ExitStack()
    if not options.stock and (not options.targets or "train" in options.targets):
        from tests import forked

        programs.enter_context(forked.serving())
    own = {int(name) for name in os.listdir("/proc") if name.isdigit()} if isolated else set()
    # not a TemporaryDirectory: a fork would remove it when it ends
    work = Path(tempfile.mkdtemp(prefix="memascend-chaos-"))
    try:
        commands = Commands(work, isolated=isolated, known_processes=own)
        judge = Judge(work, isolated=isolated, known_processes=own)
        assert not isolated or not left_processes(own)
        if options.stock and "control" not in record:
            record["control"] = asdict(judge.control())["verdict"]
        for seed in seeds_of(options.seeds):
            drawn = draw(seed, loops.SHAPES_DRAWN)
            drawn = as_stock(drawn) if options.stock else drawn
            if drawn is None:
                continue
            if str(seed) in record["seeds"] or (options.targets and drawn.target not in options.targets):
                continue
            if time.monotonic() - begun > 60 * options.minutes:
                break
            at = time.monotonic()
            outcome = (commands if drawn.target == "train" else judge).run(drawn)
            if outcome.output:
                logs = options.out.with_suffix(".logs")
                logs.mkdir(parents=True, exist_ok=True)
                (logs / f"{seed}.txt").write_text(outcome.output)
            seconds = time.monotonic() - at
            record["seeds"][str(seed)] = {**row(drawn, asdict(outcome), seconds), "commit": record["commits"][-1][:7]}
            save(options.out, record)
            if options.verbose or outcome.verdict in FAILURES:
                print(
                    seed, drawn.target, drawn.fault, outcome.verdict, outcome.why, drawn.training, drawn.how, flush=True
                )
    finally:
        programs.close()
        shutil.rmtree(work, ignore_errors=True)
    print(Counter(each["verdict"] for each in record["seeds"].values()))
    return 0


def row(drawn: Draw, outcome: dict[str, Any], seconds: float) -> dict[str, Any]:
    said = {
        name: value
        for name, value in outcome.items()
        if value not in ("", []) and (name, value) != ("left_bytes", 0) and name != "output"
    }
    return {
        "target": drawn.target,
        "training": drawn.training,
        "fault": drawn.fault,
        "at": round(drawn.at, 4),
        "how": drawn.how,
        **said,
        "seconds": round(seconds, 2),
    }


def opened(path: Path) -> dict[str, Any]:
    """Return the record at `path`, or a new one. ValueError for a record whose seeds were drawn by other rules."""
    from workflows.run.provenance import host
    from workflows.staleness import versions

    if path.exists():
        record = json.loads(path.read_text())
        if record["drawn_as"] != DRAWN_AS:
            raise ValueError(
                f"{path}: its seeds were drawn otherwise ({record['drawn_as']}, now {DRAWN_AS}): remove it"
            )
        record["commits"] = list(dict.fromkeys([*record["commits"], commit()]))
        return record
    return {
        "schema_version": 1,
        "drawn_as": DRAWN_AS,
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": host(),
        "versions": versions(),
        "commits": [commit()],  # of the runs that it was made from
        "seeds": {},
    }


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def save(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(main())
