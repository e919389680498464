"""One rank of a run, started by :mod:`.launch`, or as the command itself by torchrun or the deepspeed launcher."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

from memascend import systems
from memascend.memory.budget import HostBudget
from memascend.memory.ledger import Ledger
from memascend.memory.placement_policy import PROCESS_INTERLEAVE
from memascend.memory.process_policy import interleave_process
from memascend.memory.resident import resident_bytes
from memascend.memory.topology import Topology
from memascend.ops.adamw import chunk_counts, divided_work
from memascend.ops.half_linear import products
from memascend.simulator.recorder import Recorder, from_zero
from memascend.simulator.trace import write_trace
from memascend.storage.tensor_file import TensorFileReader
from memascend.training import backends, checkpoint, random_state, report
from memascend.training.backends.protocol import KeptStepIsPartial
from memascend.training.background import BackgroundCheckpoint
from memascend.training.checkpoint_writer import CheckpointWriter
from memascend.training.config import TrainConfig, complete
from memascend.training.data import Sequences
from memascend.training.folder import Lock, RunFolder
from memascend.training.processes import FINISHED, NOTHING_TO_DO, STOPPED, die_with_parent
from memascend.training.progress import (
    Progress,
    StepRecord,
    add_cut_off_step,
    byte_count,
    nothing_to_do,
    progress_output,
    read_metrics,
    rewind_metrics,
    start_notes,
)
from memascend.training.ranks import gather, sums
from memascend.training.schedule import learning_rate, sequence_numbers
from memascend.training.stop import Stop

STEP_IN_TRACE = "{step}"  # placeholder for the step number in the file name of --trace


class Worker:
    """A rank's part of the run described by `job` (see launch._job). `out`: stream for the lines of rank 0."""

    saving: BackgroundCheckpoint | None = None  # the checkpoint that is being written while training continues
    saves_meanwhile = False
    products = "native"  # how matrix products are computed; set once the model exists

    def __init__(self, job: dict[str, Any], out: TextIO) -> None:
        self.job, self.rank, self.ranks = job, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.config: TrainConfig = complete(job["config"])
        self.placement: str | None = job["settings"].get("placement") or self.config.placement
        self.folder = RunFolder(Path(job["output"]))
        self.steps = int(self.config.steps or 0)
        self.stop = Stop()
        self.out = out
        self.step = self.first = 0  # the newest step, and the step after which this process began
        self.saved = self.evaluated = 0  # the step of the newest checkpoint, and of the newest evaluation
        # Contents of the metrics row of the step that the run resumes after, if a kill may have prevented the row.
        self.cut_off: dict[str, Any] | None = None
        self.recorder: Recorder | None = None

    # -- start ---------------------------------------------------------------------------------------------------------

    def run(self) -> str:
        """Train to the end or until stopped; return FINISHED, STOPPED or NOTHING_TO_DO."""
        self.stop.install()
        if self.placement == PROCESS_INTERLEAVE:
            interleave_process()
        lock = self._hold_swap_folder()
        backend = backends.load(self.job["backend"])
        if not torch.distributed.is_initialized():
            backend.start(self.job["threads"])
        self.memory = report.ProcessMemory(on_cpu=not torch.cuda.is_available())
        if self.rank == 0:
            for note in backend.notes():
                print(note, file=self.out, flush=True)
        self.backend = backend(self.config, self.job["settings"], Ledger(self._budget()))
        if not self._begin():
            return NOTHING_TO_DO
        self.saves_meanwhile = self.config.saves_meanwhile and hasattr(self.backend, "save_meanwhile")
        self._open_data()
        if self.config.trace:
            self.recorder = Recorder(self.rank)
            self.backend.trace(self.recorder)
            second = min(self.step + 2, self.steps)  # the first step still allocates buffers
            last = self.steps if STEP_IN_TRACE in self.config.trace else second
            self.traced_steps = range(second, last + 1)
            if self.step == self.steps and self.rank == 0:
                print("note: --trace: no step is left to train, so none is traced", file=self.out, flush=True)
        self.progress = Progress(
            self.out if self.rank == 0 else io.StringIO(),  # one line per step: output of other ranks is dropped
            self.folder.metrics if self.rank == 0 else Path(os.devnull),
            terminal=self.job["terminal"],
            steps=self.steps,
            log_every=self.config.log_every,
            eval_every=self.config.eval_every,
            eval_batches=self._eval_batches() / self.config.accumulate,
        )
        self.memory.training_begins(self.backend.ledger)
        self.products = products(self.backend.model.dtype, self.config.matmul, self.backend.device)
        on_cpu = not torch.cuda.is_available()
        for note in start_notes(self.config, self.job, self.step, self.products, on_cpu=on_cpu):
            self.progress.say(note)
        self.stop.training = True
        outcome = self._train()
        self._end_saving()
        if outcome != NOTHING_TO_DO:
            self._report(outcome)
        self.progress.close()
        self.backend.close()
        if lock is not None:
            lock.close()
        return outcome

    def _hold_swap_folder(self) -> Lock | None:
        """Take a shared lock of the swap folder, so that no other run removes its files while any rank is alive."""
        swap = self.job.get("swap")
        return Lock(Path(swap), alone=False) if swap else None

    def _budget(self) -> HostBudget | None:
        limit = self.config.host_memory
        return HostBudget.of_machine(limit, self.ranks) if limit else None

    def _begin(self) -> bool:
        """Start from scratch, or resume from the newest checkpoint or the backend's kept states, whichever is later.

        Return False, after saying so and with the states untouched, if the kept states are past the last step.
        """
        source = self._restore_point()
        kept = self._kept_step(source)
        if kept is not None and kept > self.steps:
            if self.rank == 0:
                print(nothing_to_do("the states are", kept, self.steps), file=self.out, flush=True)
            return False
        if kept is not None and kept >= (source.step if source else 1):
            self._go_on(source)
        else:
            self._require_states(source, kept)
            if self.rank == 0 and source is None and (made := self._steps_made()):
                anew = f"from the start: there is no checkpoint in {self.folder.checkpoints}"
                print(f"resume  {anew}, the {made} finished steps are lost", file=self.out, flush=True)
            self._build(source)
        self.first = self.step
        self.saved = max((each.step for each in self._saved() if each.step <= self.step), default=0)
        evaluated = {row["step"] for row in read_metrics(self.folder.metrics) if row["kind"] == "eval"}
        self.evaluated = self.step if self.step in evaluated else 0
        if self.rank == 0:
            rewind_metrics(self.folder.metrics, self.step)
            if self.cut_off is not None:
                add_cut_off_step(self.folder.metrics, self.step, tokens=self._tokens(), **self.cut_off)
            if missing := self.step - sum(row["kind"] == "step" for row in read_metrics(self.folder.metrics)):
                lacks = f"{self.folder.metrics} has no rows for {missing} of {self.step} steps"
                print(f"note: {lacks}: the report leaves them out", file=self.out, flush=True)
        return True

    def _saved(self) -> list[checkpoint.Checkpoint]:
        """Return the checkpoints that contain at least what --checkpoints asks for."""
        found = checkpoint.listed(self.folder.checkpoints)[0]
        return [each for each in found if each.is_full or self.config.checkpoints != "full"]

    def _require_states(self, source: checkpoint.Checkpoint | None, kept: int | None) -> None:
        """Raise ValueError if a run without a checkpoint to resume from has lost its states."""
        if self.config.checkpoints == "full" or source is not None:
            return
        made = self._steps_made()
        if made > 1 + (kept or 0):  # the last step may have been interrupted before its states were kept
            raise ValueError(
                f"this run has finished {made} steps, but {self.job['settings']['folder']} does not hold the states "
                "after a step (they were removed, or a kill interrupted an update), and there is no full checkpoint: "
                "restore them, or start over in another --output"
            )

    def _steps_made(self) -> int:
        return max((row["step"] for row in read_metrics(self.folder.metrics)), default=0)

    def _kept_step(self, source: checkpoint.Checkpoint | None) -> int | None:
        """Return the step of the backend's kept states; None, after saying so, if they are from the middle of a
        step."""
        try:
            return self.backend.kept_step()
        except KeptStepIsPartial as error:
            where = f"from the last checkpoint, {source.path}" if source else "from the start: there is no checkpoint"
            if self.rank == 0:
                print(f"resume  {where}: {error}", file=self.out, flush=True)
            return None

    def _go_on(self, source: checkpoint.Checkpoint | None) -> None:
        """Resume from the backend's kept states."""
        facts = self.backend.go_on(self._start(source))
        random_state.restore_json(facts["random"])
        self.step, self.cut_off = facts["step"], facts.get("row")
        if self.rank == 0:
            print(f"resume  from step {self.step}, whose states are on the SSD", file=self.out, flush=True)

    def _start(self, source: checkpoint.Checkpoint | None) -> Path | dict[str, Any]:
        """Return the folder of the weights to load, or the configuration of a model to initialise."""
        prepared = self.job["prepared"]
        start = Path(prepared["model_folder"]) if prepared["model_folder"] else prepared["model_config"]
        return source.model if source else start

    def _restore_point(self) -> checkpoint.Checkpoint | None:
        """Return the checkpoint to resume from, with the checksums of its files verified; None if there is none."""
        if self.job["checkpoint"] is None:
            return None
        found = {str(c.path): c for c in checkpoint.listed(self.folder.checkpoints)[0]}[self.job["checkpoint"]]
        found.check(found.state / f"rank{self.rank}.safetensors")
        found.check(found.state / "trainer.json")
        if self.rank == 0:
            for path in sorted(found.model.glob("*.safetensors")):
                found.check(path)
        return found

    def _build(self, source: checkpoint.Checkpoint | None) -> None:
        """Build the model and, with a checkpoint, restore states and generators. Initial weights are equal on all
        ranks."""
        torch.manual_seed(self.config.seed)
        self.backend.build(self._start(source))
        torch.manual_seed(self.config.seed * self.ranks + self.rank)
        if source is not None:
            facts = json.loads((source.state / "trainer.json").read_text())[str(self.rank)]
            with TensorFileReader(source.state / f"rank{self.rank}.safetensors") as reader:
                self.backend.restore(reader, facts)
                random_state.restore(reader, facts)
            self.step = source.step
            self._keep()

    def _keep(self) -> None:
        self.backend.keep({"step": self.step, "random": random_state.as_json()})

    def _open_data(self) -> None:
        context = self.job["prepared"]["context"]
        self.train_data = Sequences(self.folder.data / "train.tokens", context)
        self.eval_data = Sequences(self.folder.data / "eval.tokens", context)

    # -- training ------------------------------------------------------------------------------------------------------

    def _train(self) -> str:
        if self.step == self.steps and self._has_evaluated() and self.config.checkpoints == "none":
            self.progress.say(nothing_to_do("the states are", self.step, self.steps))
        if self.step and self._after_step(False):  # evaluation and checkpoint that a kill or a stop interrupted
            return STOPPED
        while self.step < self.steps:
            stop = self._one_step()
            self._keep()  # before evaluation and checkpoint, which may take long
            if self._after_step(stop):
                return STOPPED
        assert self.saved == self.step
        return FINISHED

    def _after_step(self, stop: bool) -> bool:
        """Evaluate and save a checkpoint if they are due and not done yet. Return whether the run stops here."""
        config, last = self.config, self.step == self.steps
        if self.saving is not None and self.saving.done():
            self._end_saving()
        if not stop and not self._has_evaluated() and self._is_due(config.eval_every, last):
            stop = self._evaluate()
        if self.step > self.saved and (stop or self._is_due(config.save_every, last)):
            self._save(meanwhile=self.saves_meanwhile and not stop and not last)
        return stop and not (last and self._has_evaluated())

    def _has_evaluated(self) -> bool:
        """Return whether nothing is left to evaluate after this step."""
        return self.evaluated == self.step or not self._eval_batches()

    def _eval_batches(self) -> int:
        """Return the number of batches per rank in one evaluation."""
        return min(len(self.eval_data), self.config.eval_sequences) // (self.ranks * self.config.batch)

    def _is_due(self, every: int, last: bool) -> bool:
        return last or bool(every and self.step % every == 0)

    def _one_step(self) -> bool:
        """Make one optimizer step; return whether any rank was asked to stop."""
        config, begin = self.config, time.monotonic()
        rate = learning_rate(
            self.step, peak=config.peak_learning_rate, steps=self.steps, warmup=config.warmup, schedule=config.schedule
        )
        scale = self.backend.loss_scale()
        if self.recorder is not None:
            self.recorder.take()
        mean, norm = self.backend.step([self._batch(number) for number in range(config.accumulate)], rate)
        self.step += 1
        moved = self.backend.statistics()
        mine = [
            float(mean),
            resident_bytes("VmHWM"),
            torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
            moved["read_bytes"],
            moved["written_bytes"],
            self.stop.asked,
        ]
        loss, host, gpu, read, written, stop = self._sums(mine)
        record = StepRecord(
            step=self.step,
            loss=loss / self.ranks,
            learning_rate=rate,
            grad_norm=norm,
            loss_scale=scale,
            skipped=norm is None,
            tokens=self._tokens(),
            seconds=time.monotonic() - begin,
            host_peak_bytes=int(host),
            device_peak_bytes=int(gpu),
            read_bytes=int(read),
            written_bytes=int(written),
            remark=self.backend.remark(),
        )
        self.progress.step(record)
        if self.recorder is not None and self.step in self.traced_steps:
            self._write_trace(record)
        if not math.isfinite(record.loss) and norm is not None and config.dtype != "fp16":
            raise ValueError(
                f"the loss of step {self.step} is {record.loss}: training has diverged; resume from an earlier "
                "checkpoint with a lower --learning-rate"
            )
        return stop > 0

    def _write_trace(self, record: StepRecord) -> None:
        """Write the events of all ranks in this step to one file."""
        config, path = self.config, Path(str(self.config.trace).replace(STEP_IN_TRACE, str(record.step)))
        events = [event for rank in gather(self.ranks, self.recorder.take()) for event in rank]
        if self.rank:
            return
        facts = {name: getattr(config, name) for name in ("system", "model", "twin", "dtype", "ranks", "batch")}
        facts |= {"arm": systems.arm_of(config.system, config.arm), "context": self.job["prepared"]["context"]}
        facts |= {"accumulate": config.accumulate, "step": record.step, "seconds": record.seconds}
        try:
            write_trace(path, from_zero(events), lane="measured", source=platform.node() or "this machine", **facts)
        except OSError as error:
            raise ValueError(f"cannot write the trace {path}: {error.strerror}; name another file") from None
        self.progress.say(f"{record.step:>6}  trace of this step: {path}")

    def _tokens(self) -> int:
        """Return the tokens of one step, summed over all ranks."""
        config = self.config
        return config.batch * config.accumulate * self.ranks * self.job["prepared"]["context"]

    def _batch(self, number: int) -> torch.Tensor:
        config = self.config
        first = ((self.step * config.accumulate + number) * self.ranks + self.rank) * config.batch
        numbers = sequence_numbers(first, config.batch, sequences=len(self.train_data), seed=config.seed)
        return torch.from_numpy(self.train_data.rows(numbers)).to(self.backend.device)

    def _sums(self, values: list[float]) -> list[float]:
        """Return the sums over all ranks. This also synchronises decisions such as stopping."""
        return sums(self.ranks, values, self.backend)

    def _evaluate(self) -> bool:
        """Compute the mean loss over the evaluation sequences; return whether any rank was asked to stop meanwhile."""
        config, begin, batches, total = self.config, time.monotonic(), self._eval_batches(), 0.0
        each = self.ranks * config.batch
        for number in range(batches):
            first = (number * self.ranks + self.rank) * config.batch
            ids = torch.from_numpy(self.eval_data.rows(range(first, first + config.batch))).to(self.backend.device)
            loss, stop = self._sums([self.backend.evaluate(ids), self.stop.asked])
            if stop:
                break
            total += loss
            self.progress.evaluating((number + 1) * each, batches * each, time.monotonic() - begin)
        if stop:
            self.progress.say(f"{self.step:>6}  evaluation interrupted")
            return True
        self.evaluated = self.step
        self.progress.evaluation(self.step, total / (batches * self.ranks), batches * each, time.monotonic() - begin)
        return False

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _save(self, *, meanwhile: bool = False) -> None:
        """Save a checkpoint of this step: in the background if `meanwhile`, else before training continues.

        Raises a ValueError that says how much space it needs and how to continue if the disk is full.
        """
        self._end_saving()
        with self._disk_full_explained(self.step):
            if meanwhile and self.config.checkpoints != "none":
                self.saving = BackgroundCheckpoint(self.config, self.folder, self.backend, self.step)
            elif self.config.checkpoints != "none":
                self._write_checkpoint()
            self.saved = self.step

    def _end_saving(self) -> None:
        """Wait for the checkpoint that is being written in the background, if any. Raises as `_save` does."""
        if (saving := self.saving) is None:
            return
        self.saving = None
        with self._disk_full_explained(saving.step):
            saving.wait()
        self.progress.say(
            f"{saving.step:>6}  checkpoint {saving.path}, {saving.seconds:.1f} s, for {saving.stood_still_s:.1f} s of "
            "which training waited"
        )
        self.progress.saved(saving.step, saving.seconds, saving.nbytes, 0, saving.stood_still_s)

    @contextlib.contextmanager
    def _disk_full_explained(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise ValueError(self._writer.disk_full_message(error, step)) from error

    @property
    def _writer(self) -> CheckpointWriter:
        return CheckpointWriter(self.config, self.folder, self.backend, self.rank, self.ranks)

    def _write_checkpoint(self) -> None:
        self.progress.passing("saving a checkpoint ...")
        done = self._writer.write(self.step)
        if done is not None:
            self.progress.say(
                f"{self.step:>6}  checkpoint {done.path}, {done.seconds:.1f} s"
                + (f", {byte_count(done.shared_bytes)} of it shared with the swap files" if done.shared_bytes else "")
            )
            self.progress.saved(self.step, done.seconds, done.written_bytes, done.shared_bytes, done.seconds)

    # -- end -----------------------------------------------------------------------------------------------------------

    def _report(self, outcome: str) -> None:
        *peaks, near, elsewhere = self._sums([*self.memory.measured(), *chunk_counts()])
        rows = report.merged(gather(self.ranks, report.ledger_rows(self.backend.ledger)))
        if self.rank:
            return
        result = {
            "outcome": outcome,
            "config": self.job["config"],
            **self.backend.facts(),
            "matmul": self.products,
            "parameters": self.job["prepared"]["parameters"],
            "summary": report.summary(read_metrics(self.folder.metrics)),
            "memory": report.memory_facts(rows, [int(each) for each in peaks]),
            "planned_host_bytes": self.job["prepared"]["planned_host_bytes"],
            "ledger": rows,
        }
        if self.placement is not None:
            result["memory_nodes"] = report.memory_nodes(self.backend.ledger, self.placement)
        if (divided := divided_work(int(near), int(elsewhere), Topology.read())) is not None:
            result["adamw_by_node"] = divided
        # A process that only evaluated keeps the measurements of the earlier report.
        before = report.read(self.folder.report) if self.step == self.first else None
        if before is not None and before["summary"].get("steps") == self.step:
            result = before | {name: result[name] for name in ("outcome", "summary", "config")}
        report.write(self.folder.report, result)
        root = self.folder.root
        if self.job.get("temporary"):
            return
        if outcome == STOPPED:
            missing = " before its evaluation" if self.step == self.steps else ""
            self.progress.say(f"stopped after step {self.step} of {self.steps}{missing}; to continue:")
            self.progress.say(f"  memascend train --output {root} --resume")
        elif self.config.checkpoints == "none":
            said = f"done: states kept on the SSD, report in {root / 'report.md'}; weights for from_pretrained:"
            self.progress.say(said)
            self.progress.say(f"  memascend export {root} NEW_FOLDER")
        else:
            written = f"done: weights for from_pretrained in {self.folder.model}, report in {root / 'report.md'}"
            self.progress.say(written)


def main() -> int:
    die_with_parent()
    job = json.loads(Path(sys.argv[1]).read_text())
    result = Path(job["results"]) / f"result{os.environ['RANK']}.json"
    try:
        outcome = (worker := Worker(job, progress_output())).run()
        result.write_text(json.dumps({"outcome": outcome}))
    except (ValueError, OSError, MemoryError) as error:
        with contextlib.suppress(OSError):
            result.write_text(json.dumps({"error": " ".join(str(error).split())}))
        sys.stdout.flush()
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(2)
    sys.stdout.flush()
    os._exit(worker.stop.status if outcome == STOPPED else 0)  # teardown would touch swap files that the parent removes


if __name__ == "__main__":
    main()
