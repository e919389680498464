"""A process that has imported everything that training runs import, and forks one child per requested run.

Torch, DeepSpeed and transformers take ten seconds to import: a third of a short run. Snakemake starts this process at
its start and names the socket in MEMASCEND_FORK_SERVER, which ``children.start`` connects to. The imports wait for the
first request, and no thread is started, so that a fork is complete. A forked run is killed when its requester or this
process ends.

usage: python -m workflows.run.fork_server SOCKET     (started by other programs only)
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

SOCKET = "MEMASCEND_FORK_SERVER"
_LENGTH = struct.Struct("!Q")
_CONNECTION_LOST = 255

# Keys: log (a path), environment, folder, fds (names in the job of the descriptors sent), and the keys of the run
# function.
Request = dict[str, Any]


class ForkedRun:
    """Handle of a forked run with the interface of Popen: ``pid``, ``returncode``, ``poll``, ``wait``.

    The run leads its own process group.
    """

    def __init__(self, address: str, request: Request, descriptors: tuple[int, ...]) -> None:
        """Send the request and its descriptors; raise OSError if no server answers."""
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX)
        try:
            self._connection.connect(address)
            payload = json.dumps(request).encode()
            socket.send_fds(self._connection, [_LENGTH.pack(len(payload))], descriptors)
            self._connection.sendall(payload)
            self._answers = self._connection.makefile("r")
            pid = self._answers.readline()
            if not pid:
                raise ConnectionError("the fork server ended")
        except OSError:
            self._connection.close()
            raise
        self.pid = int(pid)

    def poll(self) -> int | None:
        """Return the exit status, or None while the run goes on."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, negative for a signal, or 255 if the server has ended.

        Raises subprocess.TimeoutExpired.
        """
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("forked run", timeout or 0)
            self.returncode = int(self._answers.readline() or _CONNECTION_LOST)
            self._answers.close()
            self._connection.close()
        return self.returncode


class Server:
    """Serve each request by ``run(request)`` in a fork; ``prepare`` is called once, before the first fork."""

    def __init__(self, address: str, prepare: Callable[[], None], run: Callable[[Request], None]) -> None:
        self._prepare: Callable[[], None] | None = prepare
        self._run = run
        self._runs: dict[int, tuple[socket.socket, int]] = {}  # pid -> (connection to the requester, pidfd)
        self._ready = selectors.DefaultSelector()
        self._listening = socket.socket(socket.AF_UNIX)
        unannounced = f"{address}.{os.getpid()}"
        self._listening.bind(unannounced)
        self._listening.listen()
        os.rename(unannounced, address)  # once the address exists, a connection is accepted
        self._ready.register(self._listening, selectors.EVENT_READ)

    def serve(self) -> None:
        """Serve requests without end; in a fork, the process ends with the run."""
        while True:
            for key, _ in self._ready.select():
                if key.fileobj is self._listening:
                    connection, _ = self._listening.accept()
                    with contextlib.suppress(OSError, ValueError):
                        self._fork(connection)
                elif isinstance(key.fileobj, int):
                    self._collect(key.data)
                elif key.data in self._runs:  # the requester closed its connection
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(key.data, signal.SIGKILL)
                    self._ready.unregister(key.fileobj)

    def _fork(self, connection: socket.socket) -> None:
        """Receive a request and fork a process for it; the requester gets its pid."""
        header, descriptors, *_ = socket.recv_fds(connection, _LENGTH.size, 16)
        try:
            with connection.makefile("rb") as stream:
                request = json.loads(stream.read(_LENGTH.unpack(header)[0]))
            if self._prepare is not None:
                self._prepare()
                self._prepare = None
                gc.collect()
                gc.freeze()  # so that a collection in a fork leaves the shared pages untouched
            pid = os.fork()
            if pid == 0:
                self._become_the_run(request, descriptors, connection)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.setpgid(pid, pid)  # before anything can kill the group
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._runs[pid] = connection, os.pidfd_open(pid)
        for handle in self._runs[pid]:
            self._ready.register(handle, selectors.EVENT_READ, pid)
        connection.sendall(f"{pid}\n".encode())

    def _become_the_run(self, request: Request, descriptors: list[int], connection: socket.socket) -> None:
        """Do the requested run in the forked process, which then exits; it never returns."""
        try:
            with contextlib.suppress(PermissionError):
                os.setsid()
            self._ready.close()
            for descriptor in (connection, self._listening, *(asking for asking, _ in self._runs.values())):
                descriptor.close()
            for _, handle in self._runs.values():
                os.close(handle)
            os.chdir(request["folder"])
            os.environ.update(request["environment"])
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            request["descriptors"] = dict(zip(request["fds"], descriptors, strict=True))
            self._run(request)
            sys.stdout.flush()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _collect(self, pid: int) -> None:
        """Send the exit status of a run that has ended to its requester."""
        _, status = os.waitpid(pid, 0)
        connection, handle = self._runs.pop(pid)
        with contextlib.suppress(OSError):
            connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        for each in (connection, handle):
            with contextlib.suppress(KeyError):
                self._ready.unregister(each)
        connection.close()
        os.close(handle)


def main() -> int:
    from workflows.run import child, children

    child.die_with_parent()
    settings = children.environment(0, 1, 0, os.cpu_count() or 1)
    if settings != dict(os.environ):  # the C library and OpenMP read their settings at startup
        os.execve(sys.executable, [sys.executable, "-m", "workflows.run.fork_server", *sys.argv[1:]], settings)
    with contextlib.suppress(KeyboardInterrupt):
        Server(sys.argv[1], child.import_everything, child.run_forked).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
