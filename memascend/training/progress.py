"""Progress of a run while it trains: one readable line per step, and one JSON object per step for programs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from memascend.training.config import TrainConfig
from memascend.training.schedule import change_note

GIB, MIB = 1 << 30, 1 << 20
SHORT_CONTEXT = 512  # tokens per sequence up to which the first step on a CPU does not take long
LONG_S = 10.0  # seconds of an evaluation from which a log announces how long it takes
_HEADER_EVERY = 25  # lines, so that the column names stay on the screen


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step. Bytes and tokens are summed over all ranks; memory is the sum of the ranks' peaks."""

    step: int  # from 1
    loss: float  # mean of its batches
    learning_rate: float
    grad_norm: float | None  # before clipping; None if the step was skipped for overflow
    loss_scale: float | None
    skipped: bool
    tokens: int
    seconds: float
    host_peak_bytes: int  # the kernel's high-water mark of resident memory since the start
    device_peak_bytes: int
    read_bytes: int
    written_bytes: int
    remark: str | None = None  # from the backend

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks together."""
        return self.tokens / self.seconds


def byte_count(size: float) -> str:
    """Return a size in bytes as text, in the largest unit of GiB, MiB, KiB and B of which it has at least one."""
    for limit, unit in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if size >= limit:
            return f"{size / limit:.{0 if size >= 100 * limit else 1}f} {unit}"
    return f"{size:.0f} B" if size else "0"


def duration(seconds: float) -> str:
    """Return seconds as "2 d 03 h" from one day on, otherwise as "1:02:03"."""
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours:02d} h"
    return f"{hours}:{minutes:02d}:{whole % 60:02d}"


_COLUMNS = (
    ("step", 13), ("loss", 9), ("lr", 9), ("grad norm", 10), ("tokens/s", 9), ("s/step", 8), ("host peak", 10),
    ("read/step", 10), ("write/step", 11), ("left", 10),
)  # fmt: skip


def header(with_device: bool) -> str:
    """Return the column names of the progress lines."""
    columns = "".join(f"{name:>{width}}" for name, width in _COLUMNS)
    return f"{columns}{'GPU peak':>10}" if with_device else columns


def line(record: StepRecord, steps: int, seconds_left: float) -> str:
    """Return the progress line of a step, of `steps` in all."""
    cells = (
        f"{record.step}/{steps}",
        f"{record.loss:.4f}",
        f"{record.learning_rate:.2e}",
        "overflow" if record.grad_norm is None else f"{record.grad_norm:.3g}",
        f"{record.tokens_per_s:,.0f}" if record.tokens_per_s >= 10 else f"{record.tokens_per_s:.2f}",
        f"{record.seconds:.2f}",
        byte_count(record.host_peak_bytes),
        byte_count(record.read_bytes),
        byte_count(record.written_bytes),
        duration(seconds_left),
    )
    text = "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS))
    text += f"{byte_count(record.device_peak_bytes):>10}" if record.device_peak_bytes else ""
    return f"{text}  {record.remark}" if record.remark else text


def first_step_note(config: TrainConfig, context: int) -> str | None:
    """Return a note for runs on a CPU: how long the first step is, and how to shorten it. None if it is short."""
    if context <= SHORT_CONTEXT:
        return None
    sequences = config.batch * config.accumulate * config.ranks
    return (
        f"note: no GPU: the first line appears after a whole step of {sequences * context:,} tokens (batch "
        f"{config.batch} x accumulate {config.accumulate} x ranks {config.ranks} x context {context}); with "
        f"--context {SHORT_CONTEXT} it is {sequences * SHORT_CONTEXT:,}"
    )


def start_notes(config: TrainConfig, job: dict[str, Any], step: int, products: str, *, on_cpu: bool) -> Iterator[str]:
    """Yield the notes of a rank that continues after `step`. `products`: how it computes matrix products."""
    wait = first_step_note(config, job["prepared"]["context"])
    if wait and step == 0 and on_cpu:
        yield wait
    if step == 0 and products == "fp32" and config.dtype == "bf16":
        yield "note: products of bf16 matrices are computed in fp32 on this CPU (--matmul)"
    rates: dict[str, Any] = {"peak": config.peak_learning_rate, "warmup": config.warmup, "schedule": config.schedule}
    if changed := change_note(step, config.steps or 0, job.get("steps_before"), **rates):
        yield changed


class Progress:
    """Writer of progress lines to `out` and of records to the file `metrics`.

    On a terminal the newest step is always shown in a line that is overwritten. Otherwise the output consists of plain
    lines without control characters.
    """

    def __init__(
        self,
        out: TextIO,
        metrics: Path,
        *,
        terminal: bool,
        steps: int,
        log_every: int,
        eval_every: int = 0,
        eval_batches: float = 0.0,
    ) -> None:
        """Open `metrics` for appending.

        `eval_every`: steps between evaluations (0: only one, at the end). `eval_batches`: batches per evaluation
        divided by batches per step.
        """
        self._out, self._terminal, self._steps, self._every = out, terminal, steps, log_every
        self._metrics = metrics.open("a", encoding="utf-8")
        self._lines = 0
        self._recent: list[float] = []
        self._eval_every, self._eval_batches = eval_every, eval_batches
        self._evaluation_s: float | None = None  # duration of the newest evaluation
        self._duration_shown = False  # whether the log already says how long the current evaluation takes
        self._passing = False

    def say(self, text: str) -> None:
        """Write a line, in place of a temporary one."""
        self._clear()
        self._emit(f"{text}\n")

    def step(self, record: StepRecord) -> None:
        """Record a step in the metrics and show its line, or on a terminal at least a temporary one."""
        self._write({"kind": "step", **asdict(record)})
        self._recent = [*self._recent[-19:], record.seconds]
        text = line(record, self._steps, self._seconds_left(record.step))
        if record.step % self._every == 0 or record.step == self._steps or not self._lines:
            if self._lines % _HEADER_EVERY == 0:
                self.say(header(record.device_peak_bytes > 0))
            self._lines += 1
            self.say(text)
        elif self._terminal:
            self._emit(f"\r{text}\x1b[K")
            self._passing = True

    def _seconds_left(self, step: int) -> float:
        """Return the seconds that the remaining steps and evaluations take at the recent pace.

        Before the first evaluation, a batch of it counts as a third of a training batch, whose backward pass takes
        twice as long as its forward pass.
        """
        pace, every, last = sum(self._recent) / len(self._recent), self._eval_every, self._steps
        evaluations = 1 + ((last - 1) // every - (step - 1) // every if every else 0) if self._eval_batches else 0
        each = self._eval_batches * pace / 3 if self._evaluation_s is None else self._evaluation_s
        return (last - step) * pace + evaluations * each

    def evaluating(self, done: int, sequences: int, seconds: float) -> None:
        """Show the progress of an evaluation: always on a terminal; in a log only once, if it takes long."""
        left = seconds / done * (sequences - done)
        if self._terminal:
            self.passing(f"evaluating: {done} of {sequences} sequences, {duration(left)} left")
        elif not self._duration_shown and seconds + left > LONG_S:
            self._duration_shown = True
            self.say(f"evaluating {sequences} sequences, about {duration(seconds + left)}")

    def passing(self, text: str) -> None:
        """Show a temporary message on a terminal, until the next line; does nothing elsewhere."""
        if self._terminal:
            self._emit(f"\r{text}\x1b[K")
            self._passing = True

    def evaluation(self, step: int, loss: float, sequences: int, seconds: float) -> None:
        """Record and show the result of an evaluation after `step`."""
        self._evaluation_s, self._duration_shown = seconds, False
        self._write({"kind": "eval", "step": step, "loss": loss, "sequences": sequences, "seconds": seconds})
        self.say(f"{step:>6}  evaluation: loss {loss:.4f} over {sequences} sequences, {seconds:.1f} s")

    def close(self) -> None:
        """Remove a temporary line and close the metrics."""
        self._clear()
        self._metrics.close()

    def _clear(self) -> None:
        if self._passing:
            self._emit("\r\x1b[K")
            self._passing = False

    def _emit(self, text: str) -> None:
        """Write to the user. A terminal or pipe that has gone away is no reason to stop training."""
        with contextlib.suppress(OSError, ValueError):
            self._out.write(text)
            self._out.flush()

    def saved(self, step: int, seconds: float, written_bytes: int, shared_bytes: int, stood_still_s: float) -> None:
        """Record a checkpoint in the metrics.

        `shared_bytes` were not written, because the checkpoint shares these blocks with the swap files.
        `stood_still_s`: the part of `seconds` for which training waited.
        """
        row = {"kind": "checkpoint", "step": step, "seconds": seconds, "stood_still_s": stood_still_s}
        self._write(row | {"written_bytes": written_bytes, "shared_bytes": shared_bytes})

    def _write(self, row: dict[str, Any]) -> None:
        """Append a row to the metrics. Raises ValueError, with advice, if it cannot be written."""
        try:
            self._metrics.write(json.dumps(row) + "\n")
            self._metrics.flush()
        except OSError as error:
            raise ValueError(
                f"cannot write {self._metrics.name}: {error.strerror}; free some space, and continue with --resume"
            ) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all complete rows of a metrics file, or none if it does not exist.

    A last line that a kill truncated is skipped, and so are rows whose `seconds` are neither null nor a finite number.
    Raises ValueError for a file that is not text.
    """
    rows = []
    try:
        texts = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}): remove it; the losses that it had are lost") from error
    for text in texts:
        try:
            row = json.loads(text)
        except ValueError:
            continue
        known = isinstance(row, dict) and isinstance(row.get("kind"), str) and type(row.get("step")) is int
        if known and _is_duration(row.get("seconds")):
            rows.append(row)
    return rows


def _is_duration(seconds: Any) -> bool:
    return seconds is None or (isinstance(seconds, int | float) and 0 <= seconds < math.inf)


def rewind_metrics(path: Path, step: int) -> int:
    """Drop the rows after `step`, which will be trained again; return how many steps were dropped."""
    rows = read_metrics(path)
    kept = [row for row in rows if row["step"] <= step]
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    os.replace(temporary, path)
    return int(sum(row["kind"] == "step" for row in rows) - sum(row["kind"] == "step" for row in kept))


def add_cut_off_step(
    path: Path, step: int, *, tokens: int, loss: float, learning_rate: float, loss_scale: float | None
) -> None:
    """Add the row of a step whose update a kill interrupted and that was completed afterwards, unless it has one.

    Values that only the killed process knew are None: seconds, bytes transferred, peaks, and the gradient norm.
    """
    if any(row["kind"] == "step" and row["step"] == step for row in read_metrics(path)):
        return
    unknown = ("grad_norm", "seconds", "host_peak_bytes", "device_peak_bytes", "read_bytes", "written_bytes")
    known = {"step": step, "loss": loss, "learning_rate": learning_rate, "loss_scale": loss_scale, "tokens": tokens}
    row = {"kind": "step", **known, "skipped": False, **dict.fromkeys(unknown), "remark": "completed after a kill"}
    with path.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")


def nothing_to_do(what: str, step: int, steps: int) -> str:
    """Return the line for a run whose checkpoint or states (`what`, with its verb) are at its last step, or past it."""
    if step > steps:
        return f"nothing to do: {what} at step {step}, past step {steps}; raise --steps above {step} to train further"
    return f"nothing to do: {what} at step {step} of {steps}; raise --steps to train further"


def progress_output() -> TextIO:
    """Return the stream for progress lines: the parent's standard output, since libraries print to our own."""
    number = os.environ.pop("MEMASCEND_PROGRESS_FD", None)
    return os.fdopen(int(number), "w", encoding="utf-8") if number else sys.stdout
