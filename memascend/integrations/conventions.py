"""Conventions of this package: the key in a configuration, the rank that logs, and the lines shown by default."""

from __future__ import annotations

import logging
import os
import sys

CONFIG_KEY = "memascend"  # the section in the DeepSpeed JSON


def is_logging_rank() -> bool:
    """Return whether this process logs on behalf of all ranks of its job (RANK is 0 or not set)."""
    return os.environ.get("RANK", "0") == "0"


def announce(line: str) -> None:
    """Show ``line`` on rank 0, on behalf of all ranks, whether or not the script has configured logging.

    The line is an INFO record of the logger "memascend". Most scripts leave the root logger at WARNING, and those of
    the Trainer configure other loggers only. Therefore only explicit settings hide it: the level of this logger,
    ``logging.disable``, or a handler's level. Without any handler it goes to stderr, as Python's warnings do.
    """
    log = logging.getLogger("memascend")
    if not is_logging_rank() or log.level > logging.INFO or log.manager.disable >= logging.INFO:
        return
    if log.hasHandlers():
        log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, line, (), None))
    else:
        print(line, file=sys.stderr, flush=True)
