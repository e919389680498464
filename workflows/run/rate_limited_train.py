"""`memascend train` on drives of known speed (`memascend.bench.rate_limit`); not for people.

usage: python -m workflows.run.rate_limited_train RATES ARGUMENT ...

RATES is JSON, folder -> bytes per second read and written; each direction has its own. Without folders no path is
slowed. ARGUMENTs are those of `memascend train`.
"""

from __future__ import annotations

import json
import os
import sys

from memascend.training import children

_RATES = "MEMASCEND_RATE_LIMITS"


def main() -> int:
    """In the process of a rank, which `start` begins with a job alone, slow its paths and train."""
    if len(sys.argv) == 2:
        from memascend.bench.rate_limit import limit_process
        from memascend.training import worker

        if rates := json.loads(os.environ[_RATES]):
            limit_process({folder: [*each, True] for folder, each in rates.items()}, os.environ["MASTER_PORT"])
        return worker.main()
    from memascend import cli

    os.environ[_RATES] = sys.argv[1]
    children.WORKER = "workflows.run.rate_limited_train"
    return cli.main(["train", *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
