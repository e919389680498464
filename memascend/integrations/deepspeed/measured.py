"""An instrumented training run on DeepSpeed: phases, peak memory of each phase, allocations, bytes of I/O.

Runs one rank of a job (a dict) and records phases with CLOCK_MONOTONIC times, the kernel's high-water mark of each,
allocation events, losses and the hash of the master weights. The parent process samples its memory at the same time
(`memascend.memory.account` joins both). If the job has a pair of descriptors, steps are taken on request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import importlib.metadata
import inspect
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from memascend.integrations.deepspeed import ops
from memascend.integrations.processor import remember_processor
from memascend.memory.heap import trim_heap
from memascend.memory.resident import read_proportional, read_status, written_bytes
from memascend.simulator.recorder import MAIN, READ, WAIT, WRITE, Recorder, phase
from memascend.simulator.trace import busy_s

EVALUATION_BATCHES = 4


def warm_up_steps(steps: int) -> int:
    """Return the number of steps before the steady state: the first creates the Adam states, the second the
    prefetcher's records."""
    return min(2, max(1, steps - 1))


def schedule(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the points of a run, stack by stack, with first and last step (counted from 1).

    In a sweep the warm-up steps are part of the first point.
    """
    points = job["points"] or [[job["sequence"], job["batch"]]]
    sweep = bool(job["points"] or job["stacks"])
    out, last = [], warm_up_steps(3) if sweep else 0
    for stack in job["stacks"] or [None]:
        for sequence, batch in points:
            first = last + 1 if out else 1
            last += job["steps"]
            out.append({"sequence": sequence, "batch": batch, "first_step": first, "last_step": last, "stack": stack})
    return out


class Phases:
    """Records named phases; resets the kernel's high-water mark at the start of each and reads it at the end."""

    def __init__(self, set_role: Any, track_memory: bool, finish_device: Any = lambda: None) -> None:
        self.rows: list[dict[str, Any]] = []
        self._finish_device = finish_device
        self._set_role, self._track = set_role, track_memory

    @contextlib.contextmanager
    def __call__(self, name: str, role: str):
        self._set_role(role)
        self._reset_high_water_mark()
        begin = time.monotonic()
        try:
            yield
        finally:
            self._finish_device()
            end = time.monotonic()
            self._set_role("host")
            row = {"name": name, "role": role, "begin_s": begin, "end_s": end, "seconds": end - begin}
            self.rows.append(row | {"hwm_bytes": read_status()["VmHWM"]})

    def _reset_high_water_mark(self) -> None:
        if self._track:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")


def require_compiled_ops() -> None:
    """Raise RuntimeError for ops that are not compiled, and ValueError for ops that could not be loaded.

    DeepSpeed would compile missing ops on first use, for minutes and inside the measurement.
    """
    from deepspeed.accelerator import get_accelerator

    ops.refuse_abandoned_locks()
    if missing := ops.not_compiled():
        device = get_accelerator()._name
        fix = "make setup" if device == "cpu" else "python -m workflows.gpu --load-ops"
        raise RuntimeError(f"DeepSpeed's ops {', '.join(missing)} are not compiled for {device}; run: {fix}")


def import_everything() -> None:
    """Import modules and load DeepSpeed's compiled op, which takes seconds and is the same for every run."""
    ops.readable_architectures()
    require_compiled_ops()
    import deepspeed
    import torch._dynamo  # noqa: F401
    import transformers
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen2.modeling_qwen2
    from deepspeed.ops.op_builder import CPUAdamBuilder
    from transformers import AutoModelForCausalLM  # noqa: F401

    import memascend.integrations.deepspeed.hooks
    import memascend.integrations.huggingface
    import memascend.memory.tracking  # noqa: F401

    transformers.logging.set_verbosity_error()
    deepspeed.utils.logger.setLevel(logging.ERROR)
    CPUAdamBuilder().load(verbose=False)
    remember_processor()


def prepare_imports(job: dict[str, Any]) -> None:
    """Import everything and load the compiled ops before anything is measured."""
    import torch

    torch.set_num_threads(job["threads"])
    torch.manual_seed(job["seed"])
    import_everything()
    import deepspeed

    if job["device"] == "cuda":
        torch.cuda.set_device(job["rank"])
    deepspeed.init_distributed(dist_backend="nccl" if job["device"] == "cuda" else "gloo", verbose=False)


def drop_what_is_freed() -> None:
    """Collect garbage and return freed heap to the system, so that an idle reading shows only memory in use."""
    gc.collect()
    trim_heap()


class MeasuredTraining:
    """A training run described by a job; ``result`` is the content of the result file."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.result: dict[str, Any] = {"losses": [], "skipped_steps": 0, "io_steps": []}
        self.memory_mode = job["mode"] == "memory"
        self.points = schedule(job)
        self.steps = self.points[-1]["last_step"]
        self.applied: Any = None  # the stack in use, if the job names any
        self.recorder: Recorder | None = None

    def execute(self) -> dict[str, Any]:
        """Run the job to its end and return `result`. Imports precede the reading of the memory floor, so they count as
        floor."""
        job, result = self.job, self.result
        prepare_imports(job)
        import torch

        import memascend
        from memascend.memory import tracking

        drop_what_is_freed()
        result["floor"] = read_status()
        if self.memory_mode:
            tracking.install()
        on_gpu = job["device"] == "cuda"  # device memory is then the GPU's; on a CPU it is tracked by the device role
        set_role = tracking.set_role if self.memory_mode and not on_gpu else (lambda role: None)
        self.phases = Phases(set_role, self.memory_mode, torch.cuda.synchronize if on_gpu else lambda: None)
        how = {name: job[name] for name in ("minimum_swap_bytes", "gather_clone")}
        self.enabled = memascend.enable(job["deepspeed_config"], **job["parts"], **how)
        result["shims"] = self.enabled.shims
        self.engine = self._build()
        self._watch_overflow_check(set_role)
        if job["turn_fd"] is None:
            self._train()
        else:
            self._take_turns()
        self._finish()
        if on_gpu:
            result["cuda_peak_bytes"] = torch.cuda.max_memory_allocated()
        return result

    def _build(self) -> Any:
        """Build the model under zero.Init and the engine, each as a phase of its own."""
        import deepspeed
        import torch

        from memascend.integrations.huggingface import causal_lm
        from memascend.ops.half_linear import products_in_fp32

        job = self.job
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[job["dtype"]]
        with (
            self.phases("init-model", "device"),
            deepspeed.zero.Init(config_dict_or_path=job["deepspeed_config"], dtype=dtype),
        ):
            model = causal_lm(job["model_config"], checkpointing="none" if job["stacks"] else job["checkpointing"])
        if job["matmul"] == "fp32":
            # Rounded once, as on a GPU; on a CPU without 16-bit arithmetic 16-bit products take five times as long.
            products_in_fp32(torch.float16, torch.bfloat16)
            self.result["shims"].append("matmul=fp32")
        with self.phases("init-engine", "host"):
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=job["deepspeed_config"]
            )
        self._note_partitions(engine)
        return engine

    def _choose_stack(self, stack: dict[str, str]) -> None:
        """Switch attention, loss and checkpointing; offloaded checkpoints use the same kind of allocator as the arm."""
        from memascend.integrations.memory_options import MemoryOptions, apply_memory_options
        from memascend.memory.pinned import PageAlignedPinnedAllocator, PowerOfTwoPinnedAllocator

        if self.applied is not None:
            self.applied.undo()
        rounded = self.job["parts"].get("pinned") == "power_of_two"
        allocator = (PowerOfTwoPinnedAllocator if rounded else PageAlignedPinnedAllocator)(self.enabled.ledger)
        chosen = {name: stack[name] for name in ("attention", "loss", "checkpointing")}
        self.applied = apply_memory_options(
            self.engine.module, MemoryOptions(**chosen), allocator=allocator, use_reentrant=True
        )

    def _note_partitions(self, engine: Any) -> None:
        """Note the numbers of parameters, and those on NVMe. Raises RuntimeError if there should be some, but
        are none."""
        names = {p: n for n, p in engine.module.named_parameters()}
        on_nvme = [
            names[p]
            for p in engine.module.parameters()
            if str(getattr(p.ds_tensor.final_location, "value", p.ds_tensor.final_location)) == "nvme"
        ]
        self.result["parameters"] = sum(p.ds_numel for p in engine.module.parameters())
        self.result["parameters_on_nvme"] = len(on_nvme)
        self.result["parameter_tensors"] = len(names)
        expected = self.job["deepspeed_config"]["zero_optimization"]["offload_param"]["device"] == "nvme"
        if expected and not on_nvme:
            why = "offload_param.max_in_cpu kept all of them in memory; set it to 0"
            raise RuntimeError(f"no parameter is on NVMe: {why}")

    def _watch_overflow_check(self, set_role: Any) -> None:
        """Record time stamps around the overflow check and attribute its temporaries to the host."""
        optimizer = self.engine.optimizer
        check = optimizer.has_overflow
        self.result["overflow_checks"] = []

        def watched(*args: Any, **kwargs: Any) -> bool:
            set_role("host")
            begin = time.monotonic()
            found = check(*args, **kwargs)
            self.result["overflow_checks"].append({"begin_s": begin, "end_s": time.monotonic(), "overflow": found})
            return found

        optimizer.has_overflow = watched

    def _train(self) -> None:
        """Take all steps of all points, with idle readings after the warm-up and after the last step."""
        job, result = self.job, self.result
        warm_up = warm_up_steps(self.steps)
        for point in self.points:
            if point["stack"] is not None:
                self._choose_stack(point["stack"])  # its checkpoint store is allocated in the first forward pass
            for step in range(point["first_step"], point["last_step"] + 1):
                self._step(step, point["sequence"], point["batch"])
                if self.memory_mode and step in (warm_up, self.steps):
                    self._read_idle(f"after-step{step}", last=step == self.steps)
                if job["evaluate_every"] and step % job["evaluate_every"] == 0:
                    self._evaluate(step, point["sequence"], point["batch"])
        result["points"] = self.points
        result["warm_up_steps"] = warm_up
        result["skipped_steps"] = int(self.engine.skipped_steps)

    def _step(self, step: int, sequence: int, batch: int, batches: int = 0) -> None:
        """Take one training step (counted from 1), after which its phases are named.

        `batches` is the number of accumulated batches (0: as configured, which is one).
        """
        if batches:
            once = self.engine.train_micro_batch_size_per_gpu() * self.engine.dp_world_size
            self.engine.set_train_batch_size(batches * once)
        self.enabled.io.reset()
        for number in range(batches or 1):
            if batches:
                self.engine.set_gradient_accumulation_boundary(number == batches - 1)
            ids = self._ids(sequence, batch, (step - 1) * (batches or 1) + number)
            with self.phases(f"step{step}-forward", "device"), phase(self.recorder, "forward"):
                loss = self.engine(input_ids=ids, labels=ids).loss
            self.result["losses"].append(loss.detach().float().item())
            with self.phases(f"step{step}-backward", "device"), phase(self.recorder, "backward"):
                self.engine.backward(loss)
            del loss
            with self.phases(f"step{step}-optimizer", "host"), phase(self.recorder, "optimizer"):
                self.engine.step()
        self.result["io_steps"].append(vars(self.enabled.io).copy())

    def _ids(self, sequence: int, batch: int, step: int, held_out: bool = False) -> Any:
        """Return the token ids of one step; the last tenth of the text is reserved for evaluation (`held_out`)."""
        import numpy as np
        import torch

        from memascend.integrations.huggingface import batches

        tokens = np.load(self.job["token_file"], mmap_mode="r")
        border = len(tokens) * 9 // 10
        tokens = tokens[border:] if held_out else tokens
        ids = torch.from_numpy(batches(tokens, sequence, batch, self.job["ranks"], self.job["rank"], step))
        return ids.to(self.job["device"])

    def _evaluate(self, step: int, sequence: int, batch: int) -> None:
        """Record the mean loss over the same evaluation batches each time."""
        import torch

        losses = []
        self.engine.eval()
        with torch.no_grad(), self.phases(f"evaluation-after-step{step}", "device"):
            for index in range(EVALUATION_BATCHES):
                ids = self._ids(sequence, batch, index, held_out=True)
                losses.append(self.engine(input_ids=ids, labels=ids).loss.float().item())
        self.engine.train()
        self.result.setdefault("evaluation", []).append({"step": step, "loss": sum(losses) / len(losses)})

    def _take_turns(self) -> None:
        """Take steps on request.

        Each input line has the sequence length, the batch and optionally the number of accumulated batches; each output
        line reports the step. A line "save FOLDER WAY" saves a checkpoint instead.
        """
        self.result["points"] = []
        if self.job["record_step"]:
            from memascend.integrations.deepspeed.recorded import record_step

            self.recorder = Recorder(self.job["rank"])
            record_step(self.engine, self.enabled, self.recorder)
        with os.fdopen(self.job["turn_fd"]) as turns, os.fdopen(self.job["done_fd"], "w", buffering=1) as done:
            done.write(f"ready {importlib.metadata.version('deepspeed')}\n")
            for step, line in enumerate(turns, 1):
                if line.startswith("save "):
                    done.write(json.dumps(self._save(*line.split()[1:])) + "\n")
                    continue
                before = len(self.phases.rows)
                self._step(step, *map(int, line.split()))
                io, took = self.result["io_steps"][-1], dict.fromkeys(("forward_s", "backward_s", "optimizer_s"), 0.0)
                for row in self.phases.rows[before:]:
                    took[f"{row['name'].partition('-')[2]}_s"] += row["seconds"]
                took |= {name: io[name] for name in ("bytes_read", "bytes_written")}
                if paths := self.enabled.store.paths_report() if self.enabled.store is not None else []:
                    # Writes left in flight would share the drives with steps of others; stock DeepSpeed leaves none.
                    begin = time.monotonic()
                    self.engine.optimizer.optimizer_swapper.wait_written()
                    took["optimizer_s"] += time.monotonic() - begin
                    took["paths"] = [[path.bytes, path.rates.read, path.rates.write] for path in paths]
                done.write(json.dumps(took | self._without_waits()) + "\n")
        self.result["skipped_steps"] = int(self.engine.skipped_steps)

    def _save(self, folder: str, way: str) -> dict[str, Any]:
        """Save a checkpoint with swapped states `referenced` if possible, or `copied`; return seconds and bytes."""
        optimizer = self.engine.optimizer
        optimizer.settings = dataclasses.replace(optimizer.settings, prestage_checkpoints=way == "referenced")
        before, begin = written_bytes(), time.monotonic()
        self.engine.save_checkpoint(folder, tag=way)
        seconds = time.monotonic() - begin
        return {"seconds": seconds, "bytes_written": written_bytes() - before}

    def _without_waits(self) -> dict[str, Any]:
        """Return the seconds of a recorded step in which the training thread did not wait for storage."""
        if self.recorder is None:
            return {}
        events = self.recorder.take()
        busy = busy_s(events)
        own = {name: found.get(MAIN, 0.0) - found.get(WAIT, 0.0) for name, found in busy.items()}
        device = own.get("forward", 0.0) + own.get("backward", 0.0)
        check = own.get("overflow check", 0.0)
        found = {"device_s": device, "host_s": own.get("optimizer", 0.0) + check, "overflow_check_s": check}
        return found | ({"transfers": transfers_of(events)} if self.job["record_step"] == "transfers" else {})

    def _read_idle(self, name: str, last: bool) -> None:
        """Note resident memory between two steps, the owners of addresses, and ledger entries that the kernel
        contradicts."""
        from memascend.memory.ledger import verify_by_address

        time.sleep(0.05)
        status, at_s = self._resident_now(), time.monotonic()
        if last:
            drop_what_is_freed()  # only after the last reading, since a step does not trim the heap either
        reading = {"name": name, "at_s": at_s, "status": status, "trimmed": self._resident_now()}
        checked = verify_by_address(self.enabled.ledger.live())
        reading |= {"named": self._named_addresses(), "disagreeing": [c.entry.name for c in checked if not c.agrees]}
        self.result.setdefault("idle", []).append(reading)

    def _resident_now(self) -> dict[str, int]:
        """Return resident bytes; with several ranks proportional ones, read at one barrier, as the parent does."""
        if self.job["ranks"] == 1:
            return read_status()
        import torch.distributed

        torch.distributed.barrier()
        now = read_proportional()
        torch.distributed.barrier()
        return now

    def _named_addresses(self) -> dict[str, str]:
        """Return the owners of DeepSpeed's torch blocks in host memory, by address."""
        optimizer, named = self.engine.optimizer, {}

        def note(tensor: Any, owner: str) -> None:
            if tensor is not None and tensor.numel():
                named[str(tensor.untyped_storage().data_ptr())] = owner

        for tensor in optimizer.fp32_partitioned_groups_flat:
            note(tensor.detach(), "in_memory_optimizer")
            if tensor.grad is not None:
                note(tensor.grad, "initial_gradient")
            for state in optimizer.optimizer.state.get(tensor, {}).values():
                if hasattr(state, "numel"):
                    note(state, "adam_states")
        for tensor in optimizer.param_groups_fp16_flat_cpu_memory:
            note(tensor, "parameter_flat_buffer")
        note(optimizer.grad_partitions_flat_buffer, "gradient_flat_buffer")
        for bucket in getattr(optimizer, "ipg_buckets", {}).values():
            note(bucket.buffer, "reduce_bucket")
        of_016 = "_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer"
        note(getattr(optimizer, of_016, None), "reduce_bucket")
        for parameter in self.engine.module.parameters():
            note(parameter.ds_tensor, "small_parameters")
            note(parameter.data, "persistent_parameters")
        return named

    def _finish(self) -> None:
        """Put events, ledger, phases, hash and counters into the result, and close the store."""
        from memascend.memory import tracking
        from memascend.ops.adamw import chunk_counts

        if self.memory_mode:
            self.result["tracked_events"] = [list(e) for e in tracking.events()]
            self.result["dropped_events"] = tracking.dropped_events()
        if any(chunks := chunk_counts()):
            self.result["adamw_chunks"] = chunks
        self.result["ledger"] = self.enabled.ledger.to_json()
        self.result["phases"] = self.phases.rows
        if self.job["hash_master_weights"]:
            self.result["master_weights_sha256"] = self._hash_master_weights()
        swapper = next(
            (p.nvme_swapper for p in self.engine.module.parameters() if getattr(p, "nvme_swapper", None)), None
        )
        waits = ("denied_prefetches", "evicted_prefetches", "released_gathered", "buffers_beside_pool")
        for name in (*waits, "pool_fallbacks", "pool_fallback_wasted_bytes"):
            self.result[name] = getattr(swapper, name, 0)
        if self.enabled.store is not None:
            self.result["direct_io"] = self.enabled.store.direct
            self.enabled.store.close()  # because the main program ends without teardown

    def _fix_reading_of_016(self) -> None:
        """Make an argument optional that DeepSpeed 0.16 leaves out when it reads swapped master weights."""
        for name in ("_optimizer_states_and_gradient_swap_in", "_optimizer_states_and_gradient_swap_out"):
            call = getattr(self.engine.optimizer, name)
            if inspect.signature(call).parameters["timer_names"].default is inspect.Parameter.empty:
                setattr(self.engine.optimizer, name, lambda i, timer_names=None, call=call: call(i, set()))

    def _hash_master_weights(self) -> str:
        """Return the SHA-256 of all fp32 master weights with their names, sorted by name."""
        import torch
        from deepspeed.utils import safe_get_full_fp32_param

        self._fix_reading_of_016()
        digest = hashlib.sha256()
        for name, parameter in sorted(self.engine.module.named_parameters()):
            value = safe_get_full_fp32_param(parameter)
            digest.update(name.encode())
            digest.update(value.contiguous().view(torch.uint8).numpy().tobytes())  # numpy has no bf16
        return digest.hexdigest()


def transfers_of(events: list[Any]) -> list[list[Any]]:
    """Return the update's transfers by their end: rank, direction, begin and end (s since it began), bytes."""
    update = [event for event in events if event.phase == "optimizer"]
    zero = min((event.begin_s for event in update if event.resource == MAIN), default=0.0)
    moved = sorted((event for event in update if event.resource in (READ, WRITE)), key=lambda event: event.end_s)
    times = [(round(e.begin_s - zero, 4), round(e.end_s - zero, 4)) for e in moved]
    return [[e.rank, e.resource.partition(".")[2], *at, int(e.amount)] for e, at in zip(moved, times, strict=True)]
