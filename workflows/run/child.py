"""One rank of one measured training run, in its own process. Started by `workflows.run.training`; not for people.

Reads a job file (JSON), trains under instruments (`memascend.integrations.deepspeed.measured`, or the bench of the
streaming engine) and writes a result file (JSON). The parent samples this process's memory meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from memascend.training.processes import die_with_parent


def import_everything() -> None:
    """Import the modules that take seconds and are the same for every run on DeepSpeed."""
    from memascend.integrations.deepspeed import measured

    measured.import_everything()


def train(job: dict[str, Any], result_file: str) -> None:
    """Run the job, write its result file and exit this process."""
    die_with_parent()
    try:
        if "streamed" in job:
            from memascend.bench.engine import take_turns

            result = take_turns(job["streamed"], job["turn_fd"], job["done_fd"])
        else:
            from memascend.integrations.deepspeed.measured import MeasuredTraining

            if job["rate_limits"]:
                from memascend.bench.rate_limit import limit_process

                limit_process(job["rate_limits"], os.environ["MASTER_PORT"])
            result = MeasuredTraining(job).execute()
    except MemoryError as error:
        result = {"status": "oom", "reason": str(error)}
    temporary = Path(result_file + ".partial")
    temporary.write_text(json.dumps(result))
    os.replace(temporary, result_file)
    sys.stdout.flush()
    os._exit(0)  # the engine's teardown may touch swap files that the parent removes


def run_forked(request: dict[str, Any]) -> None:
    """Run a request in a fork of the fork server, with the descriptors that the server received for the job."""
    train(json.loads(Path(request["job"]).read_text()) | request["descriptors"], request["result"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", required=True)
    parser.add_argument("--result", required=True)
    args = parser.parse_args()
    train(json.loads(Path(args.job).read_text()), args.result)


if __name__ == "__main__":
    main()
