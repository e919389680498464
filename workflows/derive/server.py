"""A process that has imported what tables and pictures need, and forks one child per requested program.

The imports take longer than a picture. Snakemake starts this process and names its socket in MEMASCEND_DRAW_SERVER;
`draw_client` sends a program of workflows.derive to it, and runs the program itself if no server answers. The imports
wait for the first request.

usage: python -m workflows.derive.server SOCKET     python -IS workflows/derive/draw_client.py MODULE WORDS ...
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys

from memascend.training.processes import die_with_parent
from workflows.run.fork_server import Request, Server

PROGRAMS = ("table", "figure", "claims", "report")


def prepare() -> None:
    """Import and read everything that the programs need at their start or to draw."""
    import matplotlib.backends.backend_pdf
    import matplotlib.backends.backend_svg  # noqa: F401

    from workflows import registry, tidy
    from workflows.derive import table
    from workflows.panels import style

    for name in PROGRAMS:
        importlib.import_module(f"workflows.derive.{name}")
    for paper in registry.PAPERS:
        table.rows_of(paper)
        registry.read(registry.file_of(paper, "captions.yaml"))
    registry.exhibits()
    tidy.validator("record.schema.json")
    style.canvas(1, 1, (1.0, 1.0), None)


def run(request: Request) -> None:
    """Run one program with its arguments; its exit status becomes that of this process."""
    sys.argv = [request["module"], *request["words"]]
    try:
        importlib.import_module(f"workflows.derive.{request['module']}").main()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended.code if isinstance(ended.code, int) else int(bool(ended.code)))


def main() -> None:
    die_with_parent()
    with contextlib.suppress(KeyboardInterrupt):
        Server(sys.argv[1], prepare, run).serve()


if __name__ == "__main__":
    main()
