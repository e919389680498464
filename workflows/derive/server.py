"""A process that has imported what tables and pictures are made with, and forks one for each that is asked for.

Imports take longer than a picture. Snakemake starts it and names its socket in MEMASCEND_DRAW_SERVER; `ask` sends a
program of workflows.derive there, and runs it itself where no server answers.

usage: python -m workflows.derive.server SOCKET     python -IS workflows/derive/ask.py MODULE WORDS ...
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from pathlib import Path

from workflows.run import child, children
from workflows.run.fork_server import Request, Server

SOCKET = "MEMASCEND_DRAW_SERVER"
PROGRAMS = ("table", "figure", "claims", "report")


def prepare() -> None:
    """Everything that the programs import when they start or draw."""
    import matplotlib.backends.backend_pdf
    import matplotlib.backends.backend_svg  # noqa: F401

    from workflows import registry
    from workflows.derive import table
    from workflows.panels import style

    for name in PROGRAMS:
        importlib.import_module(f"workflows.derive.{name}")
    for paper in registry.PAPERS:
        table.rows_of(paper)
    style.canvas(1, 1, (1.0, 1.0), None)


def run(request: Request) -> None:
    """One program with its words; what it prints is in the request's log."""
    gc.disable()  # it ends in seconds, with all its memory
    sys.argv = [request["module"], *request["words"]]
    try:
        importlib.import_module(f"workflows.derive.{request['module']}").main()
    except SystemExit as ended:
        if ended.code:
            print(ended.code, file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)
    sys.stdout.flush()


def main() -> None:
    child.die_with_parent()
    address = Path(sys.argv[1])
    with children.held(address.parent), contextlib.suppress(KeyboardInterrupt):
        Server(str(address), prepare, run).serve()


if __name__ == "__main__":
    main()
