"""`memascend train` on drives of known speed (`memascend.bench.rate_limit`); started by other programs only.

usage: python -m workflows.run.rate_limited_train RATES ARGUMENT ...

RATES is JSON, folder -> [bytes read per second, bytes written per second]; the directions do not share a rate. An empty
object slows no path. ARGUMENTs are those of `memascend train`.
"""

from __future__ import annotations

import json
import os
import sys

from memascend.training import children

_RATES = "MEMASCEND_RATE_LIMITS"


def main() -> int:
    """Start the training; in a rank's process, which `start` calls with only a job, limit its paths and train."""
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
