"""`memascend train` as a user runs it: a process with its own ranks, ended from outside, and resumed."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from hardware.memory_limit import MemoryGroup
from memascend.training.progress import read_metrics
from tests import forked
from tests.chaos.draws import Draw
from tests.chaos.judge import SMALL_BYTES, Outcome, fill, left_behind
from tests.chaos.sandbox import small_file_system
from tests.chaos.verdicts import EQUAL, NAMED, NOT_RUN
from tests.train_runs import MODEL, command, environment, text_folder

STEPS, LIMIT_S = 6, 400.0
WORK = ["--context", "32", "--steps", str(STEPS), "--accumulate", "2", "--save-every", "2", "--eval-sequences", "0"]
SYSTEMS = {
    "memascend": ["--system", "memascend"],
    "memascend, two paths": ["--system", "memascend", "--tiers", "{a}", "{b}"],
    "lohan": ["--system", "lohan"],
    "lohan, one version": ["--system", "lohan", "--state-versions", "one"],
    "mlp_offload": ["--system", "mlp_offload", "--tiers", "{a}", "{b}"],
    "ssdtrain": ["--system", "ssdtrain"],
    "cxl": ["--system", "cxl"],
    "zero_infinity": ["--system", "zero_infinity"],
    "zero_offload": ["--system", "zero_offload"],
    "in_memory": ["--system", "in_memory"],
}
_MEMORY_BYTES = 160 << 20  # in addition to what it shares with the process that it is forked from


class Commands:
    """Runs the seeds of the target `train`."""

    def __init__(self, work: Path, *, isolated: bool, known_processes: set[int]) -> None:
        self._work, self._isolated, self._known = work, isolated, known_processes
        self._undisturbed: dict[str, tuple[dict[int, float], str, float, int]] = {}
        self._text: Path | None = None

    def run(self, draw: Draw) -> Outcome:
        if draw.fault in ("full file system", "memory limit") and not self._isolated:
            return Outcome(NOT_RUN, "needs root", struck=False)
        if self._text is None:
            self._text = text_folder(self._work)
        folder = self._work / f"seed-{draw.seed}"
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            folder.mkdir()
            known = self._whole(draw)
            if draw.fault == "full file system":
                stack.enter_context(small_file_system(folder, SMALL_BYTES))
            return self._disturbed(draw, folder, *known)

    def _options(self, draw: Draw, folder: Path) -> list[str]:
        words = []
        for word in SYSTEMS[draw.training["system"]]:
            path = folder / word.strip("{}")
            if word.startswith("{"):
                path.mkdir(exist_ok=True)
            words.append(str(path) if word.startswith("{") else word)
        text = ["--data", str(self._text), "--files", "*.py", "--clip", str(draw.training["clip"])]
        return [*MODEL, *text, *WORK, *words]

    def _whole(self, draw: Draw) -> tuple[dict[int, float], str, float, int]:
        key = str(sorted(draw.training.items()))
        if key not in self._undisturbed:
            folder = self._work / "undisturbed"
            folder.mkdir()
            begun = time.monotonic()
            done = forked.run(command(folder / "run", *self._options(draw, folder)), timeout=LIMIT_S, env=environment())
            if done.returncode != 0:
                raise RuntimeError(f"the undisturbed run of {draw.training} failed: {done.stdout[-500:]}{done.stderr}")
            reached = reached_by(folder / "run")
            size = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
            self._undisturbed[key] = (*reached, time.monotonic() - begun, size)
            shutil.rmtree(folder)
        return self._undisturbed[key]

    def _disturbed(
        self, draw: Draw, folder: Path, losses: dict[int, float], weights: str, seconds: float, size: int
    ) -> Outcome:
        output, said, errors, status = folder / "run", "", [], None
        ballast, log = folder / "ballast", self._work / f"log-{draw.seed}"
        moment = draw.at * seconds
        if draw.fault == "full file system":
            fill(ballast, int(draw.at * 1.1 * size))
        options = self._options(draw, folder)
        sent = {"kill": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "Ctrl-C": signal.SIGINT}.get(draw.fault)
        for attempt in range(6):
            with (
                log.open("w+") as file,
                memory_group(attempt == 0 and draw.fault == "memory limit") as group,
            ):
                words = ["--resume"] if (output / "config.yaml").exists() else options
                program = forked.Popen(
                    command(output, *words), stdout=file, stderr=subprocess.STDOUT, env=environment()
                )
                if group is not None:
                    group.take_in(program.pid)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = program.wait(moment if sent and attempt == 0 else LIMIT_S)
                if program.poll() is None and sent and attempt == 0:
                    program.send_signal(sent)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        program.wait(LIMIT_S)
                status = program.poll()
                program.kill()
                program.wait()
            said = log.read_text(errors="replace")
            log.unlink()
            ballast.unlink(missing_ok=True)
            if status is None:
                return Outcome("hang", f"attempt {attempt} had not ended after {LIMIT_S:.0f} s", output=said)
            if status == 0:
                break
            if "is in use by" in said:  # ranks of a killed run, which are still exiting
                time.sleep(0.5)
                continue
            if "Traceback (most recent call last)" in said and draw.fault not in ("kill", "memory limit"):
                return Outcome("crash without a line", " ".join(said.strip().splitlines()[-1:]), output=said)
            if status > 0 and status not in (130, 143):
                errors.append(said.strip().splitlines()[-1] if said.strip() else "nothing")
        if status != 0:
            last = " ".join(said.strip().splitlines()[-1:])
            return Outcome("crash without a line", f"it never came to its end: {last}", told=errors, output=said)
        found = reached_by(output)
        if found != (losses, weights):
            return Outcome("wrong bits", f"losses {found[0]} for {losses}", told=errors, output=said)
        outcome = Outcome(NAMED if errors else EQUAL, struck=attempt > 0, told=errors)
        left = [name for name in ("swap", "memascend-states-*", "*/memascend-*") if list(output.glob(name))]
        left += [str(path.name) for name in "ab" for path in (folder / name).glob("*")]
        if why := (f"files: {left}" if left else left_behind(self._known, isolated=self._isolated)):
            return Outcome("leak", why, told=errors, output=said)
        return outcome


@contextlib.contextmanager
def memory_group(wanted: bool) -> Iterator[MemoryGroup | None]:
    if not wanted:
        yield None
        return
    group = MemoryGroup(_MEMORY_BYTES)
    try:
        yield group
    finally:
        group.remove()


def reached_by(output: Path) -> tuple[dict[int, float], str]:
    """Return the losses of all steps, and a digest of the weights in the last checkpoint."""
    rows = [row for row in read_metrics(output / "metrics.jsonl") if row["kind"] == "step"]
    digest = hashlib.sha256()
    for path in sorted((output / "checkpoints" / f"step-{STEPS:08d}").rglob("*.safetensors")):
        if "state" not in path.parts:
            digest.update(path.read_bytes())
    return {row["step"]: row["loss"] for row in rows}, digest.hexdigest()
