"""One rank of one measured training run, in its own process. Started by `workflows.run.training`; not for people.

Reads a job file (JSON), trains under instruments (`memascend.integrations.deepspeed.measured`, or the bench of the
streaming engine) and writes a result file (JSON). The parent samples this process's memory meanwhile.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

from memascend.training.processes import die_with_parent


def import_everything() -> None:
    """What takes seconds and is the same for every run on DeepSpeed."""
    from memascend.integrations.deepspeed import measured

    measured.import_everything()


def hold_to(rate_limits: dict[str, list[float]]) -> None:
    """Transfers below each of these folders take as long as its rates say, in DeepNVMe's handle and our tier."""
    if not rate_limits:
        return
    from memascend.bench.rate_limit import RateLimitedHandle, RateLimitedTier, SharedRateLimiter
    from memascend.integrations.deepspeed import aio, swap_store

    run = os.environ["MASTER_PORT"]  # of all ranks of a training
    drives = {folder: SharedRateLimiter(f"{folder}.clock{run}", *rates) for folder, rates in rate_limits.items()}

    def around(path: str, tier: Any) -> Any:
        folder = next(each for each in drives if os.path.realpath(path).startswith(os.path.realpath(each) + "/"))
        return RateLimitedTier(tier, drives[folder])

    swap_store.open_paths = functools.partial(swap_store.open_paths, around=around)
    first = next(iter(drives.values()))

    def limited_handle(module: Any, *args: Any, **how: Any) -> Any:
        handle = RateLimitedHandle(module._stock.aio_handle(*args, **how), first)
        return aio.MeteredAioHandle(handle, module._ledger, module._counters)

    aio.MeteredAioModule.aio_handle = limited_handle


def train(job: dict[str, Any], result_file: str) -> None:
    """Run the job, write its result file, and leave this process."""
    die_with_parent()
    try:
        if "streamed" in job:
            from memascend.bench.engine import take_turns

            result = take_turns(job["streamed"], job["turn_fd"], job["done_fd"])
        else:
            from memascend.integrations.deepspeed.measured import MeasuredTraining

            hold_to(job["rate_limits"])
            result = MeasuredTraining(job).execute()
    except MemoryError as error:
        result = {"status": "oom", "reason": str(error)}
    temporary = Path(result_file + ".partial")
    temporary.write_text(json.dumps(result))
    os.replace(temporary, result_file)
    sys.stdout.flush()
    os._exit(0)  # the engine's teardown may touch swap files that the parent removes


def run_forked(request: dict[str, Any]) -> None:
    """A run in a fork of the fork server. The job's file has the descriptors of the process that wrote it."""
    train(json.loads(Path(request["job"]).read_text()) | request["descriptors"], request["result"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", required=True)
    parser.add_argument("--result", required=True)
    args = parser.parse_args()
    train(json.loads(Path(args.job).read_text()), args.result)


if __name__ == "__main__":
    main()
