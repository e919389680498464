"""Write the record of a run that left none: it timed out, crashed, was killed or refused to start. The rule of records
calls this, so that the other runs continue; claims that need the run get the verdict `no result`.

A run that the user stopped (SIGINT, SIGTERM) leaves no record. Snakemake repeats a failed run if asked to
(`--config retry=1`); a time-out under the stated limit counts as a result and is not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from signal import Signals

from workflows import staleness
from workflows.run import provenance

KIND = "no-result"
TIMED_OUT, ENDED_BY_A_PERSON = 124, (130, 143)  # exit status of `timeout`; of a shell after SIGINT and SIGTERM
SMALL = 1 << 16  # bytes; larger records are of other kinds and need not be read


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-id", required=True, metavar="ID")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="run record to write")
    parser.add_argument("--log", type=Path, required=True, metavar="FILE", help="output of the program")
    parser.add_argument("--exit-status", type=int, required=True, metavar="N", help="exit status of the program")
    args = parser.parse_args(argv)
    if args.exit_status in ENDED_BY_A_PERSON:
        return args.exit_status
    said = [line for line in args.log.read_text(errors="replace").splitlines() if line.strip()]
    fields = {"status": "timeout" if args.exit_status == TIMED_OUT else "failed", "exit_status": args.exit_status}
    if args.exit_status > 128 and args.exit_status - 128 in set(Signals):
        said.append(f"ended by {Signals(args.exit_status - 128).name}")
    fields["reason"] = said[-1][:300] if said else f"exit status {args.exit_status}, no output"
    args.out.with_suffix(".trace.csv").unlink(missing_ok=True)  # of an earlier result
    provenance.write_record(args.out, args.run_id, KIND, staleness.digest("workflows.run.no_result"), fields)
    print(f"{args.run_id}: {fields['status']}, no result; the run's exhibits are drawn without it")
    return 0


def reason(record: Path) -> str:
    """Return why a run has no result; empty if it has one."""
    if not record.exists() or record.stat().st_size > SMALL:
        return ""
    said = json.loads(record.read_text())
    return f"{said['status']}: {said['reason']}" if said.get("kind") == KIND else ""


def forget_failures(raw: Path) -> None:
    """Remove the records of failures in `raw`, so that those runs are repeated."""
    for path in failures(raw):
        path.unlink()


def failures(raw: Path) -> list[Path]:
    """Return the records of failures in `raw`."""
    return [path for path in sorted(raw.glob("*.json")) if reason(path).startswith("failed")]


if __name__ == "__main__":
    sys.exit(main())
