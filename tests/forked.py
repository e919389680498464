"""Programs of the tests, each in a fork of one process that has imported torch, DeepSpeed and transformers.

Their import takes as long as many of the tests' trainings. ``run`` and ``Popen`` take commands and arguments as those
of subprocess do: ``python [-W ignore] SCRIPT ...``, ``-c CODE`` or ``-m MODULE``. Tests about a process itself (its
start, its options, what the C library reads when it starts, an end without ``os._exit``) must use subprocess. The
server is started with the tests (conftest.py), does the imports at the first request, and serves all pytest processes;
without it the programs are started by subprocess.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from unittest import mock

from memascend.integrations.processor import remember_processor
from workflows.run import children
from workflows.run.fork_server import ForkedRun, Server

ADDRESS = "MEMASCEND_TEST_PROGRAMS"  # the server's socket
ROOT = Path(__file__).resolve().parents[1]
_PROGRESS = "MEMASCEND_PROGRESS_FD"  # a descriptor that `memascend train` hands to its first rank


# -- the client --------------------------------------------------------------------------------------------------------


class Forked:
    """What Popen is for a started program: ``pid``, ``returncode``, ``poll``, ``wait``, signals."""

    def __init__(
        self, command: Sequence[str], cwd: Path | str | None, env: Mapping[str, str], stdout: int, stderr: int
    ) -> None:
        environment = dict(env)
        sent = {"stdout": stdout, "stderr": stderr}
        if _PROGRESS in environment:
            sent[_PROGRESS] = int(environment.pop(_PROGRESS))
        request = {
            "program": list(command[1:]),
            "environment": environment,
            "folder": str(cwd or Path.cwd()),
            "log": os.devnull,
            "fds": list(sent),
        }
        self._run = ForkedRun(os.environ[ADDRESS], request, tuple(sent.values()))
        self.args, self.pid, self.poll, self.wait = command, self._run.pid, self._run.poll, self._run.wait

    @property
    def returncode(self) -> int | None:
        return self._run.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def Popen(
    command: Sequence[str],
    *,
    stdout: IO[Any],
    stderr: IO[Any] | int,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    **others: Any,
) -> Forked | subprocess.Popen[Any]:
    """Start a program whose output goes to files; its ``stdin`` and session are those of every forked program."""
    if ADDRESS not in os.environ or command[0] != sys.executable:
        return subprocess.Popen(command, cwd=cwd, env=env, stdout=stdout, stderr=stderr, **others)
    errors = stdout if stderr == subprocess.STDOUT else stderr
    return Forked(command, cwd, os.environ if env is None else env, stdout.fileno(), errors.fileno())


def run(
    command: Sequence[str],
    *,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return it with its output; after
    ``timeout`` seconds it is killed: TimeoutExpired."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        program = Popen(command, cwd=cwd, env=env, stdout=out, stderr=errors)
        try:
            status = program.wait(timeout)
        finally:
            program.kill()
            program.wait()
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(command, status, out.read(), errors.read())


def _run(command: Sequence[str], *, check: bool = False, **others: Any) -> subprocess.CompletedProcess[str]:
    done = run(command, **{name: others[name] for name in ("cwd", "env", "timeout") if name in others})
    if check:
        done.check_returncode()
    return done


# Replaces the module subprocess in a program that is to fork what it starts.
FORKING = types.SimpleNamespace(**vars(subprocess) | {"Popen": Popen, "run": _run})


# -- the server --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """Start a server, and make its address known to this process and those that it starts."""
    # a TemporaryDirectory would be removed by the first fork that exits
    folder = tempfile.mkdtemp(prefix="memascend-tests-")
    try:
        address = Path(folder) / "socket"
        settings = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.getenv("PYTHONPATH"))))}
        settings |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        settings |= children.settings("memory")  # a run whose memory is measured is forked too
        command = [sys.executable, "-m", "tests.forked", str(address)]
        with subprocess.Popen(command, cwd=ROOT, env=settings, stdin=subprocess.DEVNULL) as server:
            while not address.exists():
                if server.poll() is not None:
                    raise RuntimeError(f"the server of forked programs ended with {server.returncode}")
                time.sleep(0.01)
            with mock.patch.dict(os.environ, {ADDRESS: str(address)}):
                yield
            server.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


IMPORTED = (
    "accelerate",
    "deepspeed",
    "snakemake.cli",
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
)  # nothing of memascend except what torch loads: programs enable it themselves, or not at all


def import_what_takes_long() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder
    from transformers import AutoModelForCausalLM  # noqa: F401

    remember_processor()
    for builder in (AsyncIOBuilder, CPUAdamBuilder):
        builder().load(verbose=False)


def serve_program(request: dict[str, Any]) -> None:
    """Become the requested program in a fork; does not return."""
    descriptors, wanted = request["descriptors"], request["environment"]
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(descriptors[name], number)
        os.close(descriptors[name])
    if _PROGRESS in descriptors:
        wanted[_PROGRESS] = str(descriptors[_PROGRESS])
    wanted.pop("MEMASCEND_PARENT_PID", None)  # the server is the parent, and kills on behalf of the client
    for name in set(os.environ) - set(wanted):
        del os.environ[name]
    os.environ.update(wanted)
    status = 1
    try:
        _become(request["program"])
        status = 0
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _become(words: list[str]) -> None:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    while words[0] == "-W":
        warnings.simplefilter(words[1])  # type: ignore[arg-type]
        words = words[2:]
    if words[0] in ("-m", "-c"):
        option, program, *arguments = words
        sys.path[0] = os.getcwd()
    else:
        option, (program, *arguments) = "", words
        sys.path[0] = str(Path(program).resolve().parent)
    sys.argv = [option or program, *arguments]
    if option == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(main))
    elif option == "-m":
        if program == "memascend.cli":
            _fork_ranks()
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


def _fork_ranks() -> None:
    """Let `memascend train` fork its preparation and its ranks from this server, too."""
    from memascend.training import children, preparation

    children.subprocess = preparation.subprocess = FORKING


def main() -> None:
    from memascend.training.processes import die_with_parent

    die_with_parent()
    Server(sys.argv[1], import_what_takes_long, serve_program).serve()


if __name__ == "__main__":
    main()
