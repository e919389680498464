"""Probe this machine, and write a run record of kind ``testbed``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hardware.probe import probe
from workflows import staleness
from workflows.run import provenance


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-id", required=True, metavar="ID")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="run record to write")
    args = parser.parse_args()
    code = staleness.digest("workflows.run.probe")
    provenance.write_record(args.out, args.run_id, "testbed", code, {"testbed": probe()})
    return 0


if __name__ == "__main__":
    sys.exit(provenance.program("probe", main))
