"""Processes that have imported what tables and pictures are made with, one a core, and make those that are asked for.

Imports take longer than a picture, and so does a fork of all that is imported. Snakemake starts this program and names
its socket in MEMASCEND_DRAW_SERVER; `ask` sends a program of workflows.derive there, and runs it itself where nobody
serves. Nothing is imported before the first request.

usage: python -m workflows.derive.server SOCKET     python -IS workflows/derive/ask.py MODULE WORDS ...
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import select
import socket
import sys
import traceback
from typing import Any

from workflows.run import child

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
    gc.collect()
    gc.freeze()
    gc.disable()  # after some requests instead


def serve(address: str, workers: int) -> None:
    """For ever; a worker that is killed is replaced."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{address}.new")
    listening.listen(128)
    os.rename(f"{address}.new", address)  # who finds the address can connect
    select.select([listening], [], [])
    prepare()
    alive = 0
    while True:
        while alive < workers:
            if os.fork() == 0:
                child.die_with_parent()
                work(listening)
            alive += 1
        os.wait()
        alive -= 1


def work(listening: socket.socket) -> None:
    """One request after the other; the answer is the exit status."""
    for number in itertools.count(1):
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):  # who asked may have gone
            with connection.makefile("rb") as stream:
                request = json.loads(stream.read(int.from_bytes(stream.read(8), "big")))
            connection.sendall(b"%d\n" % run(request))
        if number % 10 == 0:
            gc.collect()


def run(request: dict[str, Any]) -> int:
    """One program with its words; what it prints is in the request's log. A modelled lane keeps every step that it
    plays, so it has a process of its own, and its memory ends with it."""
    if "--modelled-lane-of" not in request["words"]:
        return program(request)
    pid = os.fork()
    if pid == 0:
        os._exit(program(request))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def program(request: dict[str, Any]) -> int:
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(request["folder"])
    sys.argv = [request["module"], *request["words"]]
    code = 1
    try:
        importlib.import_module(f"workflows.derive.{request['module']}").main()
        code = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main() -> None:
    child.die_with_parent()
    with contextlib.suppress(KeyboardInterrupt):
        serve(sys.argv[1], len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    main()
