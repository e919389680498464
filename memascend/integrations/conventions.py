"""What the modules of this package agree on: the key in a configuration, which rank logs, what is seen by default."""

from __future__ import annotations

import logging
import os
import sys

CONFIG_KEY = "memascend"  # the section in the DeepSpeed JSON


def is_logging_rank() -> bool:
    """Whether this process is the one of a job that logs what holds for all its ranks (RANK is 0 or not set)."""
    return os.environ.get("RANK", "0") == "0"


def announce(line: str) -> None:
    """Rank 0 shows ``line``, once for all ranks, whether or not the script has configured logging.

    It is an INFO record of the logger "memascend". Most scripts leave the root logger at WARNING, and the Trainer's own
    configure other loggers alone, so only what is said of this logger hides it: its level, ``logging.disable``, a
    handler's level. Where there is no handler at all it goes to stderr, as Python does with warnings.
    """
    log = logging.getLogger("memascend")
    if not is_logging_rank() or log.level > logging.INFO or log.manager.disable >= logging.INFO:
        return
    if log.hasHandlers():
        log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, line, (), None))
    else:
        print(line, file=sys.stderr, flush=True)
