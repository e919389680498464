"""One rank of a run, started by :mod:`.launch`, or as the command itself by torchrun and the deepspeed launcher."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch

from memascend.training import checkpoint, report
from memascend.training.config import TrainConfig, complete
from memascend.training.data import Sequences
from memascend.training.folder import Lock, RunFolder
from memascend.training.processes import die_with_parent
from memascend.training.progress import Progress, StepRecord, first_step_note, read_metrics, rewind_metrics
from memascend.training.schedule import learning_rate, sequence_numbers
from memascend.training.tensor_file import TensorFileWriter

FINISHED, STOPPED = "finished", "stopped"
EXIT_STOPPED = 143
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Stop:
    """SIGTERM and SIGINT: the first asks for a checkpoint after this step, the second leaves at once."""

    def __init__(self) -> None:
        self.asked = False
        self.training = False

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._received)

    def _received(self, *_: Any) -> None:
        if self.asked or not self.training:  # before the first step there is nothing to save
            os._exit(EXIT_STOPPED)
        self.asked = True


def resident_bytes(name: str) -> int:
    """`VmHWM` (peak) or `VmRSS` (now) of this process."""
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(f"{name}:"):
            return int(text.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


class Worker:
    """A rank's part of the run described by `job` (see launch._job). `out`: where rank 0 speaks."""

    def __init__(self, job: dict[str, Any], out: TextIO) -> None:
        self.job, self.rank, self.ranks = job, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.config: TrainConfig = complete(job["config"])
        self.folder = RunFolder(Path(job["output"]))
        self.steps = int(self.config.steps or 0)
        self.stop = Stop()
        self.out = out
        self.step = 0

    # -- start ---------------------------------------------------------------------------------------------------------

    def run(self) -> str:
        """Train to the end or to a stop; returns FINISHED or STOPPED."""
        from memascend.integrations.deepspeed import trainer

        self.stop.install()
        lock = self._hold_swap_folder()
        self.trainer = trainer
        if not torch.distributed.is_initialized():
            trainer.start(self.job["threads"])
        self.idle_bytes = resident_bytes("VmRSS")
        self._say_if(trainer.ops_not_compiled(), "DeepSpeed compiles {} now, once; this takes some minutes")
        source = self._restore_point()
        self._build(source)
        self._open_data()
        self.progress = Progress(
            self.out if self.rank == 0 else io.StringIO(),  # one line a step: what the others would say is dropped
            self.folder.metrics if self.rank == 0 else Path(os.devnull),
            terminal=self.job["terminal"],
            steps=self.steps,
            log_every=self.config.log_every,
        )
        self.startup_peak = resident_bytes("VmHWM")
        wait = first_step_note(self.config, self.job["prepared"]["context"])
        if wait and self.step == 0 and not torch.cuda.is_available():
            self.progress.say(wait)
        self.stop.training = True
        outcome = self._train()
        self._report(outcome)
        self.progress.close()
        if self.enabled.store is not None:
            self.enabled.store.close()
        if lock is not None:
            lock.close()
        return outcome

    def _hold_swap_folder(self) -> Lock | None:
        """Share the swap folder's lock: as long as any rank lives, no other run collects its files."""
        swap = self.job.get("swap")
        return Lock(Path(swap), alone=False) if swap else None

    def _say_if(self, what: list[str], text: str) -> None:
        if what and self.rank == 0:
            print(text.format(", ".join(what)), file=self.out, flush=True)

    def _restore_point(self) -> checkpoint.Checkpoint | None:
        """The checkpoint to go on from, its state files checked."""
        if self.job["checkpoint"] is None:
            if self.rank == 0:
                rewind_metrics(self.folder.metrics, 0)
            return None
        found = {str(c.path): c for c in checkpoint.listed(self.folder.checkpoints)[0]}[self.job["checkpoint"]]
        found.check(found.state / f"rank{self.rank}.safetensors")
        found.check(found.state / "trainer.json")
        if self.rank == 0:
            for path in sorted(found.model.glob("*.safetensors")):
                found.check(path)
            rewind_metrics(self.folder.metrics, found.step)
        return found

    def _build(self, source: checkpoint.Checkpoint | None) -> None:
        import memascend
        from memascend.integrations.pretrained import partitioned_model

        config, job = self.config, self.job
        torch.manual_seed(config.seed)
        self.enabled = memascend.enable(
            job["deepspeed_config"], **job["parts"], minimum_swap_bytes=job["minimum_swap_bytes"]
        )
        prepared = job["prepared"]
        start = Path(prepared["model_folder"]) if prepared["model_folder"] else prepared["model_config"]
        model = partitioned_model(source.model if source else start, job["deepspeed_config"], _DTYPES[config.dtype])
        self._apply_memory_options(model)
        self.engine = self.trainer.build_engine(model, job["deepspeed_config"])
        self.device = self.trainer.device()
        torch.manual_seed(config.seed * self.ranks + self.rank)
        if source is not None:
            facts = json.loads((source.state / "trainer.json").read_text())[str(self.rank)]
            self.trainer.restore_states(self.engine, source.state / f"rank{self.rank}.safetensors", facts)
            self.step = source.step

    def _apply_memory_options(self, model: Any) -> None:
        """Offloaded checkpoints are pinned as the system's other buffers are."""
        from memascend.integrations.memory_options import MemoryOptions, apply_memory_options
        from memascend.memory.pinned import PageAlignedPinnedAllocator, PowerOfTwoPinnedAllocator

        config = self.config
        rounding = self.enabled.parts.pinned == "power_of_two"
        allocator = (PowerOfTwoPinnedAllocator if rounding else PageAlignedPinnedAllocator)(self.enabled.ledger)
        options = MemoryOptions(attention=config.attention, loss=config.loss, checkpointing=config.checkpointing)
        applied = apply_memory_options(model, options, allocator=allocator, use_reentrant=True)
        self.memory_options = applied.chosen

    def _open_data(self) -> None:
        context = self.job["prepared"]["context"]
        self.train_data = Sequences(self.folder.data / "train.tokens", context)
        self.eval_data = Sequences(self.folder.data / "eval.tokens", context)

    # -- training ------------------------------------------------------------------------------------------------------

    def _train(self) -> str:
        config, saved = self.config, self.step
        while self.step < self.steps:
            stop = self._one_step()
            last = self.step == self.steps
            if not stop and self._is_due(config.eval_every, last):
                stop = self._evaluate()
            if stop or self._is_due(config.save_every, last):
                self._save()
                saved = self.step
            if stop and not last:
                return STOPPED
        assert saved == self.step
        return FINISHED

    def _is_due(self, every: int, last: bool) -> bool:
        return last or bool(every and self.step % every == 0)

    def _one_step(self) -> bool:
        """One optimizer step; returns whether any rank was asked to stop."""
        config, begin = self.config, time.monotonic()
        rate = learning_rate(
            self.step, peak=config.peak_learning_rate, steps=self.steps, warmup=config.warmup, schedule=config.schedule
        )
        self.enabled.io.reset()
        self.trainer.set_learning_rate(self.engine, rate)
        skipped, scale = self.engine.skipped_steps, self.trainer.loss_scale(self.engine)
        losses = [self._micro_batch(number) for number in range(config.accumulate)]
        self.step += 1
        mine = [
            float(torch.stack(losses).mean()),
            resident_bytes("VmHWM"),
            torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
            self.enabled.io.bytes_read,
            self.enabled.io.bytes_written,
            self.stop.asked,
        ]
        loss, host, gpu, read, written, stop = self._sums(mine)
        overflow = self.engine.skipped_steps > skipped
        norm = None if overflow else float(self.engine.get_global_grad_norm())
        record = StepRecord(
            step=self.step,
            loss=loss / self.ranks,
            learning_rate=rate,
            grad_norm=norm,
            loss_scale=scale,
            skipped=overflow,
            tokens=config.batch * config.accumulate * self.ranks * self.job["prepared"]["context"],
            seconds=time.monotonic() - begin,
            host_peak_bytes=int(host),
            device_peak_bytes=int(gpu),
            read_bytes=int(read),
            written_bytes=int(written),
        )
        self.progress.step(record)
        if not math.isfinite(record.loss) and not overflow and config.dtype == "bf16":
            raise ValueError(
                f"the loss of step {self.step} is {record.loss}: training has diverged; go back to an earlier "
                "checkpoint with a lower --learning-rate"
            )
        return stop > 0

    def _micro_batch(self, number: int) -> torch.Tensor:
        config = self.config
        first = ((self.step * config.accumulate + number) * self.ranks + self.rank) * config.batch
        numbers = sequence_numbers(first, config.batch, sequences=len(self.train_data), seed=config.seed)
        ids = torch.from_numpy(self.train_data.rows(numbers)).to(self.device)
        loss = self.engine(input_ids=ids, labels=ids).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach().float()

    def _sums(self, values: list[float]) -> list[float]:
        """Sums over all ranks, which are also where ranks agree."""
        if self.ranks == 1:
            return [float(value) for value in values]
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(sums)
        return sums.tolist()

    @torch.no_grad()
    def _evaluate(self) -> bool:
        """Mean loss over the evaluation sequences; returns whether any rank was asked to stop meanwhile."""
        config, begin = self.config, time.monotonic()
        batches = min(len(self.eval_data), config.eval_sequences) // (self.ranks * config.batch)
        if not batches:
            return False
        self.progress.passing(f"evaluating {batches * self.ranks * config.batch} sequences ...")
        total = 0.0
        self.engine.eval()
        for number in range(batches):
            first = (number * self.ranks + self.rank) * config.batch
            ids = torch.from_numpy(self.eval_data.rows(range(first, first + config.batch))).to(self.device)
            loss, stop = self._sums([float(self.engine(input_ids=ids, labels=ids).loss), self.stop.asked])
            if stop:
                break
            total += loss
        self.engine.train()
        if stop:
            return True
        sequences = batches * self.ranks * config.batch
        self.progress.evaluation(self.step, total / (batches * self.ranks), sequences, time.monotonic() - begin)
        return False

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        begin = time.monotonic()
        self.progress.passing("saving a checkpoint ...")
        folder = self.folder.checkpoints
        partial = folder / f".partial-step-{self.step:08d}"
        if self.rank == 0:
            checkpoint.begin(folder, self.step)
        self._barrier()
        name = f"state/rank{self.rank}.safetensors"
        crc, facts = self.trainer.save_states(self.engine, partial / name)
        checksums = {name: crc}
        checksums |= self._save_weights(partial / "model")
        everything = self._gather({"checksums": checksums, "facts": facts})
        if self.rank == 0:
            self._commit(partial, everything)
            self.progress.say(
                f"{self.step:>6}  checkpoint {folder / f'step-{self.step:08d}'}, {time.monotonic() - begin:.1f} s"
            )
        self._barrier()

    def _commit(self, partial: Path, everything: list[dict[str, Any]]) -> None:
        from memascend.integrations.pretrained import save_configuration

        save_configuration(self.engine.module, partial / "model", self.folder.tokenizer)
        facts = {str(rank): entry["facts"] for rank, entry in enumerate(everything)}
        (partial / "state" / "trainer.json").write_text(json.dumps(facts))
        checksums = {name: crc for entry in everything for name, crc in entry["checksums"].items()}
        final = checkpoint.commit(partial, self.step, checksums, {"ranks": self.ranks})
        checkpoint.point(self.folder.model, final / "model")
        checkpoint.prune(self.folder.checkpoints, self.config.keep)

    def _save_weights(self, folder: Path) -> dict[str, int]:
        """Weights in one safetensors file, gathered tensor by tensor by all ranks, written by rank 0."""
        name = "model.safetensors"
        if self.rank:
            for _ in self.trainer.gathered_weights(self.engine):
                pass
            return {}
        layouts = self.trainer.weight_layouts(self.engine)
        with TensorFileWriter(folder / name, layouts, {"format": "pt"}) as writer:
            for key, tensor in self.trainer.gathered_weights(self.engine):
                writer.write(key, tensor)
        return {f"model/{name}": writer.checksum}

    def _barrier(self) -> None:
        if self.ranks > 1:
            torch.distributed.barrier()

    def _gather(self, value: Any) -> list[Any]:
        if self.ranks == 1:
            return [value]
        values: list[Any] = [None] * self.ranks
        torch.distributed.all_gather_object(values, value)
        return values

    # -- end -----------------------------------------------------------------------------------------------------------

    def _report(self, outcome: str) -> None:
        peaks = self._sums(
            [
                resident_bytes("VmHWM"),
                self.idle_bytes,
                torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
                self.startup_peak,
            ]
        )
        rows = report.merged(self._gather(report.ledger_rows(self.enabled.ledger)))
        if self.rank:
            return
        held = sum(row["reserved_bytes"] for row in rows)
        result = {
            "outcome": outcome,
            "config": self.job["config"],
            "deepspeed_config": self.job["deepspeed_config"],
            "parts": self.job["parts"],
            "shims": self.enabled.shims,
            "memory_options": self.memory_options,
            "parameters": self.job["prepared"]["parameters"],
            "summary": report.summary(read_metrics(self.folder.metrics)),
            "memory": report.memory_facts(held, int(peaks[1]), int(peaks[0]), int(peaks[2]), int(peaks[3])),
            "planned_host_bytes": self.job["prepared"]["planned_host_bytes"],
            "ledger": rows,
        }
        report.write(self.folder.report, result)
        root = self.folder.root
        if outcome == STOPPED:
            self.progress.say(f"stopped after step {self.step} of {self.steps}; go on with:")
            self.progress.say(f"  memascend train --output {root} --resume")
        else:
            self.progress.say(
                f"done: weights for from_pretrained in {self.folder.model}, report in {root / 'report.md'}"
            )


def progress_output() -> TextIO:
    """Where the parent wants our lines; its own standard output, since libraries print to ours."""
    number = os.environ.pop("MEMASCEND_PROGRESS_FD", None)
    return os.fdopen(int(number), "w", encoding="utf-8") if number else sys.stdout


def main() -> int:
    die_with_parent()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # DeepSpeed's Muon would load the compiler, for seconds
    job = json.loads(Path(sys.argv[1]).read_text())
    result = Path(job["results"]) / f"result{os.environ['RANK']}.json"
    try:
        outcome = Worker(job, progress_output()).run()
        result.write_text(json.dumps({"outcome": outcome}))
    except (ValueError, OSError, MemoryError) as error:
        with contextlib.suppress(OSError):
            result.write_text(json.dumps({"error": " ".join(str(error).split())}))
        sys.stdout.flush()
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(2)
    sys.stdout.flush()
    os._exit(EXIT_STOPPED if outcome == STOPPED else 0)  # teardown would touch swap files that the parent removes


if __name__ == "__main__":
    main()
