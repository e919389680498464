"""A long procedure in stages: each has a log and a line that says what it found, and a later call continues.

A failed stage does not end the procedure: stages that need it are skipped, with the reason, and the others still run.
After each stage, `stages.json` in the output folder has the outcomes so far, so that a call after an interruption
continues with the first missing stage. A stage that was ok is repeated only if its command or the commit has changed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType, TracebackType

from workflows.run.provenance import atomically, digest_of

OK, FAILED, SKIPPED, STOPPED = "ok", "failed", "skipped", "stopped"
STATE, TABLE = "stages.json", "stages.md"
TERMINAL = re.compile(r"\x1b\[[0-9;]*m")
KILLED_AT = 3  # third Ctrl-C in one stage: the first two did not end it, so it is killed


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One command of the procedure, run in the current folder with `environment` added to the process's own.

    `needs` names earlier stages that must be ok. If `skip` is set, nothing runs, and `skip` is the reason. `finding` is
    a regular expression: the last line of the log that matches says what the stage found; without a match, the last
    line does. If an `optional` stage fails, this is reported but does not count as a failure of the procedure.
    """

    name: str
    command: Sequence[str]
    needs: Sequence[str] = ()
    skip: str = ""
    finding: str = r"\S"
    environment: dict[str, str] = field(default_factory=dict)
    optional: bool = False

    def key(self, commit: str) -> str:
        """Return a digest of the command, its environment and the commit; if it changes, the stage is repeated."""
        return digest_of([list(self.command), self.environment, commit])[:16]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a stage. `found` is a line of its log, or the reason why it was skipped."""

    name: str
    status: str
    found: str
    seconds: float = 0.0
    log: str = ""
    exit_status: int | None = None
    key: str = ""
    optional: bool = False
    blocked: bool = False  # skipped because a stage that it needs was not ok


def run_stages(
    stages: Sequence[Stage], folder: Path, commit: str, *, again: bool = False, say: Callable[[str], None] = print
) -> list[Outcome]:
    """Run the stages in order, reporting after each what it found. `again` also repeats those that an earlier call
    completed.

    Raises ValueError if a name occurs twice or a stage needs one that does not come before it. After Ctrl-C, raises
    KeyboardInterrupt once the outcome of the running stage is saved, whenever the signal arrived.
    """
    check(stages)
    with _CtrlC() as interrupt:
        return _run_stages(stages, folder, commit, again, say, interrupt)


def _run_stages(
    stages: Sequence[Stage], folder: Path, commit: str, again: bool, say: Callable[[str], None], interrupt: _CtrlC
) -> list[Outcome]:
    """Run the stages as `run_stages` does; raise KeyboardInterrupt after the stage in which Ctrl-C arrived."""
    folder.mkdir(parents=True, exist_ok=True)
    before = {} if again else {outcome.name: outcome for outcome in read(folder)}
    done: dict[str, Outcome] = {}
    for number, stage in enumerate(stages, 1):
        key, log = stage.key(commit), folder / f"{number:02}-{stage.name}.log"
        missing = [name for name in stage.needs if done[name].status != OK]
        earlier = before.get(stage.name)
        if stage.skip or missing:
            reason = stage.skip or f"it needs {', '.join(missing)}"
            outcome = Outcome(
                name=stage.name, status=SKIPPED, found=reason, optional=stage.optional, blocked=not stage.skip
            )
        elif earlier and earlier.status == OK and earlier.key == key and Path(earlier.log).exists():
            outcome = earlier
        else:
            say(f"[{number}/{len(stages)}] {stage.name} ... (log: {log})")
            outcome = _run(stage, log, key, interrupt)
        done[stage.name] = outcome
        write(folder, list(done.values()))
        say(f"[{number}/{len(stages)}] {line(outcome)}{', completed by an earlier call' if outcome is earlier else ''}")
        if interrupt.times:
            raise KeyboardInterrupt
    return list(done.values())


class _CtrlC:
    """Count SIGINT while stages run and pass it on to the stage, without raising anything in this process.

    KeyboardInterrupt could otherwise arrive between the start of a program and the wait for it, or while its outcome is
    written, and the stage would be missing from the state. Programs that are started still end on SIGINT, since a
    signal with a handler in this process has the default action in them. A process that ignores SIGINT (a job of nohup)
    goes on ignoring it. Outside the main thread, where Python delivers no signals, nothing is changed.
    """

    def __init__(self) -> None:
        self.times = 0
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _CtrlC:
        self.before = signal.getsignal(signal.SIGINT)
        self.ours = (
            threading.current_thread() is threading.main_thread()
            and self.before is not signal.SIG_IGN
            and self.before is not None  # None: a program that embeds Python installed the handler
        )
        if self.ours:
            signal.signal(signal.SIGINT, self._came)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.ours:
            signal.signal(signal.SIGINT, self.before)
        if self.times and error is None:  # the last outcome has been written
            raise KeyboardInterrupt

    def _came(self, number: int, frame: FrameType | None) -> None:
        """Count the signal and pass it on to the stage that runs."""
        self.times += 1
        if self.process is not None:
            self._tell(self.process)

    def _tell(self, process: subprocess.Popen[bytes]) -> None:
        """Signal the stage. The terminal does so too; this covers a signal that was sent to this process alone."""
        process.send_signal(signal.SIGKILL if self.times >= KILLED_AT else signal.SIGINT)

    def wait(self, process: subprocess.Popen[bytes]) -> tuple[int, bool]:
        """Wait for the process to end by itself; return (exit status, whether Ctrl-C arrived while it ran)."""
        self.process = process
        if self.times:  # the signal arrived while the process was being started
            self._tell(process)
        status = process.wait()
        self.process = None
        return status, self.times > 0


def check(stages: Sequence[Stage]) -> None:
    """Raise ValueError if a name occurs twice or a stage needs one that does not come before it."""
    seen: set[str] = set()
    for stage in stages:
        if stage.name in seen:
            raise ValueError(f"two stages are called {stage.name}: the state of one would be the other's")
        if later := set(stage.needs) - seen:
            raise ValueError(f"stage {stage.name} needs {', '.join(sorted(later))}, which does not come before it")
        seen.add(stage.name)


def _run(stage: Stage, log: Path, key: str, interrupt: _CtrlC) -> Outcome:
    """Run a stage with its output in `log`; return its outcome, also for a program that cannot be started."""
    began, stopped = time.monotonic(), False
    with log.open("w") as output:
        output.write(f"$ {' '.join(stage.command)}\n")
        output.flush()
        try:
            process = subprocess.Popen(
                list(stage.command),
                env=os.environ | stage.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            output.write(f"{stage.command[0]}: {error.strerror}\n")
            status = 127
        else:
            status, stopped = interrupt.wait(process)
    what = STOPPED if stopped else OK if status == 0 else FAILED
    return Outcome(
        name=stage.name,
        status=what,
        found=finding(log, stage.finding),
        seconds=round(time.monotonic() - began, 1),
        log=str(log),
        exit_status=status,
        key=key,
        optional=stage.optional,
    )


def finding(log: Path, pattern: str) -> str:
    """Return the last line of a log that matches, otherwise its last line, without colour codes."""
    lines = [TERMINAL.sub("", text).strip() for text in log.read_text(errors="replace").splitlines()[1:]]
    lines = [text for text in lines if text]
    matching = [text for text in lines if re.search(pattern, text)]
    return ((matching or lines or ["nothing was printed"])[-1]).strip("= ")[:300]


def line(outcome: Outcome) -> str:
    """Return an outcome as one line."""
    seconds = f", {outcome.seconds:.0f} s" if outcome.log else ""
    status = f"{outcome.status} (exit status {outcome.exit_status})" if outcome.exit_status else outcome.status
    return f"{outcome.name}: {status}{seconds}: {outcome.found}"


def failed(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the names of stages that failed, were stopped, or were skipped because one that they need was not ok."""
    return [
        outcome.name
        for outcome in outcomes
        if not outcome.optional and (outcome.blocked or outcome.status in (FAILED, STOPPED))
    ]


def read(folder: Path) -> list[Outcome]:
    """Return the outcomes of an earlier call; empty if there was none or its file is not readable as such."""
    try:
        return [Outcome(**each) for each in json.loads((folder / STATE).read_text())["stages"]]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def write(folder: Path, outcomes: Sequence[Outcome]) -> None:
    """Write stages.json and stages.md, each atomically."""
    made = {"schema_version": 1, "stages": [asdict(each) for each in outcomes]}
    atomically(folder / STATE, lambda path: path.write_text(json.dumps(made, indent=1) + "\n"))
    atomically(folder / TABLE, lambda path: path.write_text(table(outcomes)))


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a Markdown table."""
    lines = ["| stage | outcome | seconds | what it found | log |", "|---|---|---|---|---|"]
    for each in outcomes:
        found = each.found.replace("|", r"\|")
        name = f"`{Path(each.log).name}`" if each.log else ""
        lines.append(f"| {each.name} | {each.status} | {each.seconds:.0f} | {found} | {name} |")
    return "\n".join(lines) + "\n"


def exit_status(outcomes: Sequence[Outcome]) -> int:
    """Return 0 if no stage failed (see `failed`), 1 otherwise; failures are named on standard error."""
    bad = failed(outcomes)
    if bad:
        print(f"not ok: {', '.join(bad)}; the same command tries them again", file=sys.stderr)
    return 1 if bad else 0
