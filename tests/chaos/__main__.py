"""The chaos certificate: seeded faults in everything that trains, and the outcome of each.

python -m tests.chaos --seeds 0:1000 --minutes 60 --out results/chaos/epyc-genoa-2core.json
python -m tests.chaos.page          docs/chaos.md from the records

A run continues where its record ends: a seed that is already in the record is not run again.
"""

from __future__ import annotations

import os

# Set before torch is imported: in a fork of a process whose OpenMP has
# started threads, OpenMP would wait for them forever.
os.environ["OMP_NUM_THREADS"] = "1"

from tests.chaos.program import main

if __name__ == "__main__":
    raise SystemExit(main())
