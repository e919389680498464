"""The machine that measures, probed, as a run record of kind ``testbed``."""

from __future__ import annotations

import argparse
from pathlib import Path

from hardware.probe import probe
from workflows import staleness, tidy
from workflows.run import provenance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    try:
        record = provenance.record_header(args.run_id, "testbed", staleness.digest("workflows.run.probe"))
        record |= {"testbed": probe()}
        record["wall_s"] = provenance.wall_s()
        record["key"] = provenance.record_key(record)
        tidy.check(record, "record.schema.json", args.run_id)
        provenance.write_json_atomically(args.out, record)
    except (OSError, ValueError) as error:
        tidy.fail(error)


if __name__ == "__main__":
    main()
