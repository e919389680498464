"""The record of a run that left none: its time was up, it crashed, it was killed, or it refused. The rule of records
starts this then, and the other runs go on; claims that wanted the run get the verdict `no result`.

A run that a person ended (SIGINT, SIGTERM) leaves nothing. A failure is tried again by a call of Snakemake that asks
for it (`--config retry=1`); a time-out under the stated limit is a result, and is not.
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
TIMED_OUT, ENDED_BY_A_PERSON = 124, (130, 143)  # of `timeout`; of a shell, after the two signals
SMALL = 1 << 16  # bytes: no other record has to be read to know that it is none of these


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True, help="what the program said")
    parser.add_argument("--exit-status", type=int, required=True)
    args = parser.parse_args(argv)
    if args.exit_status in ENDED_BY_A_PERSON:
        return args.exit_status
    said = [line for line in args.log.read_text(errors="replace").splitlines() if line.strip()]
    fields = {"status": "timeout" if args.exit_status == TIMED_OUT else "failed", "exit_status": args.exit_status}
    if args.exit_status > 128 and args.exit_status - 128 in set(Signals):
        said.append(f"ended by {Signals(args.exit_status - 128).name}")
    fields["reason"] = said[-1][:300] if said else f"exit status {args.exit_status}, without a word"
    provenance.write_record(args.out, args.run_id, KIND, staleness.digest("workflows.run.no_result"), fields)
    print(f"{args.run_id}: {fields['status']}, no result; the run's exhibits are drawn without it")
    return 0


def reason(record: Path) -> str:
    """Why a run has no result; empty where it has one."""
    if not record.exists() or record.stat().st_size > SMALL:
        return ""
    said = json.loads(record.read_text())
    return f"{said['status']}: {said['reason']}" if said.get("kind") == KIND else ""


def forget_failures(raw: Path) -> None:
    """Remove the records of failures below `raw`, so that those runs are made again."""
    for path in failures(raw):
        path.unlink()


def failures(raw: Path) -> list[Path]:
    """Records of failures below `raw`."""
    return [path for path in sorted(raw.glob("*.json")) if reason(path).startswith("failed")]


if __name__ == "__main__":
    sys.exit(main())
