"""A chaos certificate: seeded faults on everything that trains, and what became of each.

python -m tests.chaos --seeds 0:1000 --minutes 60 --out results/chaos/epyc-genoa-2core.json
python -m tests.chaos.page          docs/chaos.md from the records

Goes on where a record ends: a seed that is in it is not run again.
"""

from __future__ import annotations

import os

# Before torch is imported: forks of a process whose OpenMP has threads would wait for them for ever.
os.environ["OMP_NUM_THREADS"] = "1"

from tests.chaos.program import main

if __name__ == "__main__":
    raise SystemExit(main())
