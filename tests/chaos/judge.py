"""Runs a seed from its draw to its verdict: undisturbed, disturbed,
continued as a user would, and compared bit by bit."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hardware.memory_limit import MemoryGroup
from tests.chaos import power
from tests.chaos.befall import CODES, Befallen
from tests.chaos.draws import STEPS, Draw
from tests.chaos.loops import LOOPS, Loop
from tests.chaos.sandbox import Phase, forked, left_processes, small_file_system
from tests.chaos.verdicts import EQUAL, NAMED, NOT_RUN, REFUSED

_HEARD_S = 6.0  # the limit is one second on an otherwise idle machine
LIMIT_S = 120.0  # per process, which takes some seconds on an idle machine
_MEMORY_BYTES = 48 << 20
SMALL_BYTES = 192 << 20
_SHARED_MEMORY = Path("/dev/shm")
_NAMED_TYPES = (
    "StorageError",
    "ActivationError",
    "InterruptedUpdate",
    "NotThisModel",
    "RuntimeError",
    "ValueError",
    "MemoryError",
    "OSError",
)
_TELLS_THE_FIX = re.compile(
    r"check the device|free space|choose another|name another|do not fit|has not that much free|remove it and|"
    r"go on from|continue from|do it again|resume|open it again|open the store again|call optimizer|"
    r"write all of it again|close the|free memory|raise the limit"
)


@dataclass
class Outcome:
    verdict: str
    why: str = ""
    struck: bool = True
    told: list[str] = field(default_factory=list)
    resumed_from: list[int] = field(default_factory=list)
    left_bytes: int = 0  # swap files after the end
    output: str = field(default="", repr=False)  # output of a failed process; not recorded


@dataclass
class Undisturbed:
    """What a training does without a fault: the digest of its states after each step, its losses, and what it uses."""

    digests: dict[int, str]
    losses: dict[int, Any]
    calls: dict[str, int]
    seconds: float
    bytes_on_disk: int
    final: str
    lines: int = 0
    refused: str = ""


_ON_DEEPSPEED = ("drop-in", "stock")


def loop_of(target: str) -> type[Loop]:
    if target not in _ON_DEEPSPEED:
        return LOOPS[target]
    from tests.chaos.deepspeed_loop import DropInLoop, StockLoop

    return DropInLoop if target == "drop-in" else StockLoop


class UndisturbedFailed(RuntimeError):
    """The training fails even without a fault."""


class Judge:
    """Runs seeds and gives their verdicts.

    `isolated`: whether mounts and control groups are available. Undisturbed runs are kept for seeds with the same
    training.
    """

    def __init__(self, work: Path, *, isolated: bool, known_processes: set[int]) -> None:
        self._work, self._isolated, self._known = work, isolated, known_processes
        self._undisturbed: dict[str, Undisturbed] = {}

    def run(self, draw: Draw) -> Outcome:
        needs_root = draw.fault in ("full file system", "memory limit")
        if needs_root and not self._isolated:
            return Outcome(NOT_RUN, "needs root")
        folder = self._work / f"seed-{draw.seed}"
        try:
            known = self.undisturbed(draw, lines=draw.fault == "Ctrl-C" and draw.target != "stock")
            if known.refused:
                return Outcome(REFUSED, known.refused, struck=False)
            folder.mkdir(parents=True)
            if draw.fault == "full file system":
                with small_file_system(folder, SMALL_BYTES):
                    return self._disturbed(draw, known, folder)
            return self._disturbed(draw, known, folder)
        except UndisturbedFailed as failed:
            return Outcome("crash without a line", f"with no fault at all: {failed}", struck=False)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def control(self) -> Outcome:
        """Stop DeepSpeed without our library after two steps, with no fault, and resume it."""
        training = {"paths": 1, "accumulate": 1, "clip": 0.0}
        draw = Draw(-1, "stock", training, "kill", 0.0, {"after_steps": 2})
        folder, log = self._fresh("control"), self._work / "log-control"
        phases = [self._phase(draw, folder, log, until=2), self._phase(draw, folder, log)]
        outcome = self._verdict(draw, self.undisturbed(draw, lines=False), phases, struck=False)
        shutil.rmtree(folder)
        return outcome

    # -- undisturbed ---------------------------------------------------------------------------------------------------

    def undisturbed(self, draw: Draw, *, lines: bool) -> Undisturbed:
        key = str((draw.target, sorted(draw.training.items(), key=str)))
        if key not in self._undisturbed:
            self._undisturbed[key] = self._watched(draw)
        known = self._undisturbed[key]
        if lines and not known.lines and not known.refused:
            known.lines = self._count_lines(draw)
        return known

    def _watched(self, draw: Draw) -> Undisturbed:
        folder = self._fresh("undisturbed")

        def program(say: Callable[..., None]) -> None:
            befallen = Befallen()
            loop_of(draw.target)(draw.training, folder, say, lambda: False, calls=befallen.calls).run()

        phase = forked(program, folder / "log", limit_s=LIMIT_S)
        shutil.rmtree(folder)
        done, counted, closed = phase.last("done"), phase.last("counted"), phase.last("closed")
        if done is None or counted is None or phase.status != 0:
            said = (closed or {}).get("error") or phase.output[-400:]
            if said.startswith(("NotStreamable", "ValueError")) and "\n" not in said:
                return Undisturbed({}, {}, {}, 0.0, 0, "", refused=said)
            raise UndisturbedFailed(said)
        if draw.target not in _ON_DEEPSPEED and (closed["descriptors"] or closed["threads"]):
            raise UndisturbedFailed(f"it leaves {closed['threads']} threads and descriptors: {closed['descriptors']}")
        return Undisturbed(
            digests={event["step"]: event["digest"] for event in phase.all_of("digest")},
            losses={event["step"]: event["loss"] for event in phase.all_of("step")},
            calls=counted["calls"],
            seconds=max(0.05, phase.seconds - counted["looking_s"]),
            bytes_on_disk=done["bytes_on_disk"],
            final=done["digest"],
        )

    def _count_lines(self, draw: Draw) -> int:
        folder = self._fresh("lines")

        def program(say: Callable[..., None]) -> None:
            befallen = Befallen()
            befallen.interrupted_at_line(None)
            loop_of(draw.target)(draw.training, folder, say, lambda: False).run()
            say("lines", lines=befallen.lines)

        phase = forked(program, folder / "log", limit_s=LIMIT_S)
        shutil.rmtree(folder)
        return phase.last("lines")["lines"]

    def _fresh(self, name: str) -> Path:
        folder = self._work / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    # -- disturbed -----------------------------------------------------------------------------------------------------

    def _disturbed(self, draw: Draw, known: Undisturbed, folder: Path) -> Outcome:
        training, log = folder / "run", self._work / f"log-{draw.seed}"
        training.mkdir()
        phases = []
        try:
            before = draw.how["after_steps"]
            if before:
                phases.append(self._phase(draw, training, log, until=before))
            times = draw.how.get("times", 1) if draw.fault == "kill" else 1
            for number in range(times):
                phases.append(self._struck(draw, known, training, log, number, from_step=before))
                if phases[-1].last("done"):
                    break
            struck = phases[-1].last("done") is None or bool(phases[-1].all_of("error"))
            if draw.fault == "power cut":
                struck = self._cut_power(draw, training, phases)
            for _ in range(2):
                if phases[-1].last("done") is None or draw.fault == "power cut":
                    self._everything_well_again(draw, folder)
                    phases.append(self._phase(draw, training, log))
                if phases[-1].status is None or phases[-1].last("done"):
                    break
            return self._verdict(draw, known, phases, struck)
        finally:
            log.unlink(missing_ok=True)

    def _phase(self, draw: Draw, training: Path, log: Path, *, until: int = STEPS) -> Phase:
        """Run a process without a fault."""

        def program(say: Callable[..., None]) -> None:
            if draw.fault == "clock jump":  # the clock is right again, or wrong by as much in the other direction
                Befallen().clock_jumps_after(0.0, -draw.how["seconds"], training)
            loop_of(draw.target)(draw.training, training, say, lambda: False, until=until).run()

        return forked(program, log, limit_s=LIMIT_S)

    def _struck(
        self, draw: Draw, known: Undisturbed, training: Path, log: Path, number: int, *, from_step: int
    ) -> Phase:
        share = 1.0 - 0.8 * from_step / STEPS  # the share of the whole run that is still to come
        at = (draw.at + 0.37 * number) % 1.0 * share
        moment, how = at * known.seconds, draw.how
        ballast = training.parent / "ballast"

        def call(op: str) -> int:
            return int(at * known.calls[op])

        tried = 0

        def better() -> bool:
            nonlocal tried
            tried += 1
            ballast.unlink(missing_ok=True)
            befallen.layer.clear()
            return how.get("then") == "again" and tried == 1

        def program(say: Callable[..., None]) -> None:
            nonlocal befallen
            befallen = Befallen(states_alone=draw.fault in ("power cut", "torn write"))
            log_of_writes = training.parent / "writes"

            def say_so(at: str, **what: Any) -> None:
                logged = log_of_writes.stat().st_size if log_of_writes.exists() else 0
                say(at, logged=logged, **what)

            loop = loop_of(draw.target)(draw.training, training, say_so, better)
            match draw.fault:
                case "kill" if how["where"] != "moment":
                    befallen.killed_at(how["where"], call(how["where"]))
                case "torn write":
                    befallen.cut_at(call("write"), how["sectors"])
                case "power cut":
                    befallen.log = log_of_writes
                case "SIGTERM" if how["handled"]:
                    signal.signal(signal.SIGTERM, lambda *_: raise_exit())
                case "Ctrl-C" if draw.target != "stock":
                    befallen.interrupted_at_line(max(1, int(at * known.lines)))
                case "ENOSPC" | "EIO":
                    befallen.transfers_fail(how["op"], call(how["op"]), how["times"], CODES[draw.fault])
                case "full file system":
                    free = int(at * 1.1 * known.bytes_on_disk)
                    fill(ballast, free)
                case "a path that hangs":
                    op = how["op"]
                    after = call(op) if op != "any" else int(at * sum(known.calls.values()))
                    befallen.transfers_hang(op, after, how["times"], how["seconds"])
                    if how.get("interrupted"):
                        befallen.interrupted_after(known.seconds + 1.0, say)
                case "memory limit":
                    befallen.memory_eaten_after(moment)
                case "clock jump":
                    befallen.clock_jumps_after(moment * 0.7, how["seconds"], training)
            loop.run()

        befallen: Any = None
        sent = {
            "kill": signal.SIGKILL if how.get("where") == "moment" else None,
            "SIGTERM": signal.SIGTERM,
            "clock jump": signal.SIGKILL if how.get("killed") else None,
            "power cut": signal.SIGKILL,
            "Ctrl-C": signal.SIGINT if draw.target == "stock" else None,
        }.get(draw.fault)
        group = MemoryGroup(_MEMORY_BYTES) if draw.fault == "memory limit" else None
        try:
            return forked(program, log, limit_s=LIMIT_S, signal_after=(sent, moment) if sent else None, group=group)
        finally:
            if group is not None:
                group.remove()

    def _everything_well_again(self, draw: Draw, folder: Path) -> None:
        (folder / "ballast").unlink(missing_ok=True)

    def _cut_power(self, draw: Draw, training: Path, phases: list[Phase]) -> bool:
        """Leave the states as a power cut at a random place of the log does,
        and forget the steps that were reported after it."""
        log, states, chance = training.parent / "writes", training / "session" / "states", draw.rng
        if not log.exists():
            return False
        written, before = log.read_bytes(), log.with_suffix(".before").read_bytes()
        place = chance.randint(0, len(written))
        said = phases[-1]
        said.events = [each for each in said.events if each.get("logged", 0) <= place and each["at"] != "done"]
        if not states.exists():  # the run had ended, and had removed them
            states.parent.mkdir(mode=0o700, exist_ok=True)
        left = {states: power.after_a_cut(before, written[:place], draw.how["keep"], chance)}
        for path in states.parent.iterdir():
            if path != states and draw.how["control"] == "kept":
                left[path] = path.read_bytes()
            # The others too: the kernel may still be taking down the killed process's rings, and its locks.
            path.unlink()
        for path, contents in left.items():
            path.touch(mode=0o600)
            path.write_bytes(contents)
        return True

    # -- the verdict ---------------------------------------------------------------------------------------------------

    def _verdict(self, draw: Draw, known: Undisturbed, phases: list[Phase], struck: bool) -> Outcome:
        errors = [event["error"] for phase in phases for event in phase.events if event.get("error")]
        outcome = Outcome(EQUAL, struck=struck, told=list(dict.fromkeys(errors)))
        outcome.resumed_from = [event["step"] for phase in phases for event in phase.all_of("resumed")]
        if left := phases[-1].last("left"):
            outcome.left_bytes = left["bytes"]
        for kind, look in (
            ("hang", _hangs),
            ("crash without a line", _crashes),
            ("lost steps", _loses_steps),
            ("silent continuation", _goes_on_from_older_states),
            ("wrong bits", _has_wrong_bits),
            ("leak", _leaks),
        ):
            if why := look(draw, known, phases):
                outcome.verdict, outcome.why = kind, why
                outcome.output = "\n".join(
                    f"--- process {number}: status {phase.status}, {phase.events}\n{phase.output}"
                    for number, phase in enumerate(phases)
                )
                break
        else:
            if why := left_behind(self._known, isolated=self._isolated):
                outcome.verdict, outcome.why = "leak", why
            elif any(not error.startswith(("KeyboardInterrupt", "SystemExit")) for error in outcome.told):
                outcome.verdict = NAMED
        return outcome


def left_behind(known: set[int], *, isolated: bool) -> str:
    """Return what is left outside the training's own folder after its end, or ''."""
    deadline = time.monotonic() + 5
    while (left := left_processes(known) if isolated else []) and time.monotonic() < deadline:
        time.sleep(0.02)
    if left:
        return f"processes: {left}"
    shared = sorted(path.name for path in _SHARED_MEMORY.iterdir()) if isolated else []
    for name in shared:
        (_SHARED_MEMORY / name).unlink(missing_ok=True)
    # DeepSpeed's own buffers may stay, and so may the lock file of a drive
    # (a few bytes), which all users of the drive share.
    if ours := [name for name in shared if not name.startswith(("deepspeed_", "memascend-path-"))]:
        return f"shared memory: {ours}"
    return ""


def raise_exit() -> None:
    raise SystemExit(143)


def fill(ballast: Path, free_bytes: int) -> None:
    """Fill the file system except for so many bytes."""
    volume = os.statvfs(ballast.parent)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, volume.f_bavail * volume.f_frsize - max(free_bytes, 1 << 16)))


def _hangs(draw: Draw, known: Undisturbed, phases: list[Phase]) -> str:
    for number, phase in enumerate(phases):
        if phase.status is None:
            last = phase.events[-1]["at"] if phase.events else "nothing"
            return f"process {number} had not ended after {phase.seconds:.0f} s; the last that it said: {last}"
        pressed = phase.last("pressed")
        heard = next((each for each in phase.all_of("error") if each["error"].startswith("KeyboardInterrupt")), None)
        if pressed and heard and heard["clock"] - pressed["clock"] > _HEARD_S:
            return f"Ctrl-C was heard {heard['clock'] - pressed['clock']:.1f} s after it was pressed"
    return ""


def _crashes(draw: Draw, known: Undisturbed, phases: list[Phase]) -> str:
    killed = draw.fault in ("kill", "torn write", "power cut", "memory limit") or draw.how.get("killed")
    for phase in phases:
        if phase.status in (0, 143) or (phase.status == -signal.SIGKILL and killed):
            continue
        if phase.status == -signal.SIGTERM and draw.fault == "SIGTERM":
            continue
        last = phase.output.strip().splitlines()[-1:] or ["no word"]
        if phase.status == 130 and (draw.fault == "Ctrl-C" or draw.how.get("interrupted")):
            continue
        closed = phase.last("closed")
        error = (closed or {}).get("error") or ""
        if phase.status != 1 or not error:
            return f"status {phase.status}: {last[0][:300]}"
    if phases[-1].last("done") is None:
        return f"it never came to its end: {' '.join(phases[-1].output.strip().splitlines()[-1:])[:300]}"
    for phase in phases:
        for event in phase.events:
            if (error := event.get("error")) and (problem := unclear(error)):
                return f"{problem}: {error[:300]}"
    return ""


def unclear(error: str) -> str:
    """Return what is wrong with an error as the user reads it, or '' if it
    is one line of a known kind that tells the fix."""
    kind, _, text = error.partition(": ")
    if kind in ("KeyboardInterrupt", "SystemExit"):
        return ""
    if kind not in _NAMED_TYPES:
        return f"a {kind}"
    if "\n" in text or not text:
        return "not one line"
    return "" if _TELLS_THE_FIX.search(text) else "without a fix"


def _loses_steps(draw: Draw, known: Undisturbed, phases: list[Phase]) -> str:
    """Return what was lost if completed states were given up, even if that was reported."""
    return _walk(draw, phases, said=True)


def _goes_on_from_older_states(draw: Draw, known: Undisturbed, phases: list[Phase]) -> str:
    return _walk(draw, phases, said=False)


def _walk(draw: Draw, phases: list[Phase], *, said: bool) -> str:
    reached = 0
    partial = draw.training.get("states") == "one version, torn"
    for phase in phases:
        reported = any(event["at"] == "told" for event in phase.events)
        for event in phase.events:
            if event["at"] == "resumed":
                least = reached - reached % 2 if reported and partial else reached
                if event["step"] < least and reported == said:
                    return f"{reached} steps were completed, and it went on from {event['step']}"
            elif event["at"] == ("saved" if draw.target in _ON_DEEPSPEED else "step"):
                reached = event["step"]
    return ""


def _has_wrong_bits(draw: Draw, known: Undisturbed, phases: list[Phase]) -> str:
    for phase in phases:
        for event in phase.events:
            if event["at"] == "resumed" and event["digest"] != known.digests.get(event["step"]):
                return f"states after step {event['step']}, from which it goes on, are others"
            if event["at"] == "step" and event["loss"] != known.losses[event["step"]]:
                return f"loss of step {event['step']}: {event['loss']} for {known.losses[event['step']]}"
            if event["at"] == "done" and event["digest"] != known.final:
                return "states at the end are others"
    return ""


def _is_own(target: str, name: str) -> bool:
    if target in _ON_DEEPSPEED:
        # the swap files of stock DeepSpeed stay, and are counted
        return name.startswith("checkpoints/") or target == "stock"
    return name in ("session/states", "saved.pt")


def _leaks(draw: Draw, known: Undisturbed, phases: list[Phase]) -> str:
    for phase in phases:
        closed = phase.last("closed")
        # The end of an interrupted process frees what it did not give back;
        # the next process removes the files that it left.
        if closed is None or (phase is not phases[-1] and str(closed["error"]).startswith(("Keyboard", "System"))):
            continue
        if closed["descriptors"] and draw.target not in _ON_DEEPSPEED:  # gloo keeps its own open
            return f"descriptors: {closed['descriptors']}"
        if closed["threads"] and draw.target not in _ON_DEEPSPEED:
            return f"{closed['threads']} threads: {closed['names']}"
        if left := [name for name in closed["files"] if not _is_own(draw.target, name)]:
            return f"files: {left}"
    removed = phases[-1].last("removed")
    if removed and removed["files"] and draw.target != "stock":
        return f"files at the end: {removed['files']}"
    return ""
