"""Small real trainings, several in one process, for the tests of this folder: ``python trainings.py JOBS RESULTS``.

JOBS is a JSON list of :class:`Job` fields, RESULTS receives one result for each. With several ranks every rank runs the
same list, under torchrun's environment variables, and rank 0 writes. One process runs many trainings because importing
DeepSpeed and transformers takes longer than a training.
"""

from __future__ import annotations

import argparse as text_source  # its source code is the text that the models learn
import dataclasses
import errno
import functools
import gc
import hashlib
import importlib
import inspect
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a child process is started by path

from memascend.baselines.protocol import RunSpec, Sizes, load_system, scaled  # noqa: E402
from memascend.memory.placement import bytes_by_class, verify_nodes  # noqa: E402
from memascend.planner import model_spec  # noqa: E402
from memascend.planner.pool import streamed  # noqa: E402
from memascend.storage import open_paths, path_probing  # noqa: E402
from memascend.storage.multi_path import MultiPathTier  # noqa: E402
from memascend.storage.path_rates import measure  # noqa: E402
from memascend.storage.placement import Rates  # noqa: E402
from memascend.storage.write_budget import WriteBudgetExceeded  # noqa: E402
from memascend.training.processes import free_port, remove_shared_buffers  # noqa: E402
from tests import forked  # noqa: E402
from tests.one_rank import environment  # noqa: E402

SEQUENCE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One training.

    Attributes:
        layers: reduces the twin's depth.
        config: merged into the DeepSpeed configuration, from which ``leave_out`` (dotted keys) are then removed.
        model_config: merged into the model's configuration.
        overflow_at: the step (from 0) whose loss is multiplied by infinity.
        freeze: parts of names of parameters that are not trained.
        checkpoint: a folder. The training saves there after each number of steps in ``save_at``; with ``resume`` it
            starts from there. ``die_at_sync``: in the last of these saves the process is killed at that fsync.
        minimum_swap_bytes: smaller tensors stay in memory (default: DeepSpeed's 1 MiB, scaled).
        seed: chooses the text; ``init_seed`` the initial weights.
        evaluate_first: a forward pass in evaluation mode precedes the steps.
        lose_path: (step, folder); the folder is removed before that step.
        rehome_at: before this step all sub-groups are moved to the first path. ``die_at_move``: the process is killed
            when so many tensors have moved, or ``die_after_s`` seconds later.
        path_fault: (step, folder, kind, after): once so many transfers have passed after the start of that step, the
            path in that folder fails with EIO in writes (``eio``), is full (``full``), hangs (``hang``) or is gone
            (``vanish``). With ``disturbed`` it is measured as a thousandth of the others at the start, and correctly
            from that step on.
        heal_at: from this step on the path works again; probes in the background have then ended before each step.
        built: the model is made under ``zero.Init``, or ``outside`` of it, or by ``transformers`` as in its Trainer.
    """

    name: str
    system: str = "memascend"
    arm: str = "memascend"
    parts: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: str = "qwen2.5-7b"
    k: int = 64
    layers: int = 2
    tied: bool = False
    dtype: str = "fp16"
    steps: int = 30
    micro_steps: int = 1
    overflow_at: int | None = None
    freeze: tuple[str, ...] = ()
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    leave_out: tuple[str, ...] = ()
    model_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    checkpoint: str | None = None
    save_at: tuple[int, ...] = ()
    resume: bool = False
    die_at_sync: int | None = None
    minimum_swap_bytes: int | None = None
    seed: int = 0
    init_seed: int = 0
    evaluate_first: bool = False
    lose_path: tuple[int, str] | None = None
    rehome_at: int | None = None
    die_at_move: int | None = None
    die_after_s: float = 0.0
    path_fault: tuple[int, str, str, int] | None = None
    heal_at: int | None = None
    built: str = "under zero.Init"


def train_all(
    jobs: list[Job], folder: Path, ranks: int = 1, timeout_s: float = 600, python: Path | str = sys.executable
) -> dict[str, dict[str, Any]]:
    """Run ``jobs`` in one process per rank; return results by name. A crash fails the test with the end of its log.

    ``python``: the interpreter of the environment whose DeepSpeed trains.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps([dataclasses.asdict(job) for job in jobs]))
    results = folder / "results.json"
    results.unlink(missing_ok=True)
    port = free_port()
    command = [str(python), __file__, str(folder / "jobs.json"), str(results)]
    logs = [(folder / f"rank{rank}.log").open("w+") for rank in range(ranks)]
    children = [
        forked.Popen(command, cwd=ROOT, env=environment(r, ranks, port), stdout=logs[r], stderr=subprocess.STDOUT)
        for r in range(ranks)
    ]
    try:
        for child in children:
            child.wait(timeout=timeout_s)
    finally:
        for child in children:
            child.kill()
            child.wait()
        remove_shared_buffers(port)
        for log in logs:
            log.close()
    tail = (folder / "rank0.log").read_text()[-4000:]
    wanted = -signal.SIGKILL if jobs[-1].die_at_sync or jobs[-1].die_at_move else 0
    assert all(child.returncode == wanted for child in children), tail
    return {} if wanted else {result["name"]: result for result in json.loads(results.read_text())}


def _initialise_experts(modeling: Any) -> None:
    """Initialise fused experts, which are bare ``torch.empty`` and filled after
    construction, when they are already partitioned under zero.Init."""
    import torch

    for name, experts in vars(modeling).items():
        if not name.endswith("Experts") or hasattr(experts, "initialised_here"):
            continue

        def construct(self: Any, *args: Any, stock: Any = experts.__init__, **kwargs: Any) -> None:
            stock(self, *args, **kwargs)
            for parameter in self.parameters(recurse=False):
                torch.nn.init.normal_(parameter, std=0.02)

        experts.__init__, experts.initialised_here = construct, True


def _fix_reading_of_016(optimizer: Any) -> None:
    """Repair DeepSpeed 0.16, which reads swapped master weights by a call that omits an argument."""
    for name in ("_optimizer_states_and_gradient_swap_in", "_optimizer_states_and_gradient_swap_out"):
        call = getattr(optimizer, name)
        if inspect.signature(call).parameters["timer_names"].default is inspect.Parameter.empty:
            setattr(optimizer, name, lambda group, names=None, call=call: call(group, set()))


def _bytes_by_owner(entries: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in entries:
        found[entry.owner] = found.get(entry.owner, 0) + entry.requested_bytes
    return found


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in changes.items():
        out[key] = merged(out.get(key) or {}, value) if isinstance(value, dict) else value
    return out


class Training:
    """The run of one :class:`Job` in this process."""

    def __init__(self, job: Job, nvme: Path) -> None:
        self.job, self.nvme = job, nvme
        spec = model_spec(job.model).twin(job.k)
        flow = streamed(spec.tensors(), element_bytes=2, ranks=self.ranks, threshold_bytes=scaled(1 << 20, job.k))
        self.model_config = spec.hf_config_dict() | {
            "num_hidden_layers": job.layers,
            "tie_word_embeddings": job.tied or spec.tied,
            **job.model_config,
        }
        sizes = Sizes(largest_tensor=flow.largest, parameters=0, pool_buffers=flow.monolithic_count())
        fields = {f: getattr(job, f, None) for f in RunSpec.__dataclass_fields__}
        run = RunSpec(**fields | {"run_id": job.name, "sequence": SEQUENCE, "batch": 1, "ranks": self.ranks})
        system = load_system(job.system, job.arm)
        self.parts = system.parts(job.arm) | job.parts
        config = merged(system.deepspeed_config(run, sizes, str(nvme)), {"optimizer": {"params": {"lr": 1e-3}}})
        config["gradient_accumulation_steps"] = job.micro_steps
        config["train_batch_size"] = job.micro_steps * self.ranks
        self.config = merged(config, job.config)
        for dotted in job.leave_out:
            *outer, key = dotted.split(".")
            section = self.config
            for name in outer:
                section = section[name]
            section.pop(key, None)

    @property
    def ranks(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def run(self) -> dict[str, Any]:
        import memascend

        result: dict[str, Any] = {"name": self.job.name}
        result |= {name: [] for name in ("losses", "skipped", "scales", "io_bytes", "groups")}
        faults = self._faulty_path()
        smallest = self.job.minimum_swap_bytes or scaled(1 << 20, self.job.k)
        enabled = memascend.enable(self.config, **self.parts, minimum_swap_bytes=smallest)
        try:
            engine = self._build()
            first = self._resume(engine) if self.job.resume else 0
            if self.job.evaluate_first:
                self._evaluate(engine)
            for step in range(first, self.job.steps):
                enabled.io.reset()
                self._disturb_paths(enabled, step)
                if faults is not None and self.job.path_fault[0] == step:
                    self._break(faults)
                if step == self.job.heal_at:
                    faults.clear()
                try:
                    result["losses"].append(self._step(engine, step))
                except OSError as error:
                    if self.job.lose_path is None and faults is None:
                        raise
                    return result | {"error": str(error)}
                except WriteBudgetExceeded as error:
                    return result | {"error": str(error)}
                result["skipped"].append(int(engine.skipped_steps))
                result["scales"].append(float(engine.optimizer.loss_scale))
                result["io_bytes"].append(enabled.io.bytes_read + enabled.io.bytes_written)
                result["groups"].append([each.groups for each in enabled.store.paths_report()] if enabled.store else [])
                if step + 1 in self.job.save_at:
                    self._save(engine, step + 1)
            result["activations"] = self._activations(engine.module)
            result["parameters"] = sum(p.ds_numel for p in engine.module.parameters())
            result["weights_sha256"] = self._hash(engine)
            result["paths"] = (
                [dataclasses.asdict(each) for each in enabled.store.paths_report()] if enabled.store else []
            )
            result["host"] = _bytes_by_owner(enabled.ledger.live("host"))
            checks = verify_nodes(enabled.ledger.live("host"))
            result["bytes_by_class"] = bytes_by_class(checks)
            result["misplaced"] = [check.entry.name for check in checks if not check.agrees]
            result["unplaced"] = sorted({check.entry.owner for check in checks if check.entry.nodes is None})
            engine.destroy()
        finally:
            if faults is not None:
                faults.clear()
                open_paths.MultiPathTier, open_paths.measure, path_probing.measure = MultiPathTier, measure, measure
            memascend.disable()
            if enabled.store is not None:
                enabled.store.close()  # main ends without a teardown
        return result

    @staticmethod
    def _activations(model: Any) -> dict[str, Any] | None:
        from memascend.activation import cache_of

        cache = cache_of(model)
        return None if cache is None else dataclasses.asdict(cache.statistics) | {"saved": cache.record.tensors}

    def _faulty_path(self) -> Any:
        """Put faults below the path that the job names, before it is opened."""
        if self.job.path_fault is None:
            return None
        from memascend import _C
        from memascend.storage.engine_tiers import DirectTier

        faults, wanted, stock = _C.FaultLayer(), self.job.path_fault[1], open_paths._open

        def opened(path: str, owner: str, kind: str, config: Any) -> Any:
            if path != wanted:
                return stock(path, owner, kind, config)
            os.makedirs(path, exist_ok=True)
            open_paths._open = stock
            tier = DirectTier.in_file(path, owner, config, faults)
            if self.job.path_fault[2] == "disturbed":
                open_paths.measure = lambda other: Rates(1e3, 1e3) if other is tier else Rates(1e6, 1e6)
                path_probing.measure = lambda _: None
            return tier

        open_paths._open = opened
        if self.job.path_fault[2] == "hang":
            open_paths.MultiPathTier = functools.partial(MultiPathTier, hang_s=2)
        return faults

    def _break(self, faults: Any) -> None:
        _, _, kind, after = self.job.path_fault
        if kind == "disturbed":
            path_probing.measure = measure
            return
        operation, how = {
            "eio": ("write", {"error": errno.EIO}),
            "full": ("write", {"error": errno.ENOSPC}),
            "hang": ("any", {"delay_us": 5_000_000}),
            "vanish": ("any", {"error": errno.EIO}),
        }[kind]
        faults.add(operation, after=after, **how)

    def _disturb_paths(self, enabled: Any, step: int) -> None:
        if self.job.lose_path is not None and self.job.lose_path[0] == step:
            shutil.rmtree(self.job.lose_path[1])
        tier = next((place.open_tier for place in enabled.store._places.values()), None) if enabled.store else None
        if tier is not None and (self.job.heal_at is not None or (self.job.path_fault or ("",) * 3)[2] == "disturbed"):
            tier._idle.wait(60)
        if self.job.rehome_at != step:
            return
        tier._groups.placement = [1.0, *(0.0 for _ in tier._paths[1:])]
        assert tier.observe()
        stock = tier._written

        def written(*args: Any) -> None:
            stock(*args)
            if tier.moves == self.job.die_at_move and self.job.die_after_s:
                threading.Timer(self.job.die_after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            elif tier.moves == self.job.die_at_move:
                os.kill(os.getpid(), signal.SIGKILL)

        tier._written = written

    def _build(self) -> Any:
        import deepspeed
        import torch
        from deepspeed.runtime.zero.partition_parameters import Init

        from memascend.integrations.huggingface import causal_lm

        Init.param_id = 0
        # If this class were first imported under zero.Init, it would lose its wrapped __init__.
        kind = self.model_config["model_type"]
        _initialise_experts(importlib.import_module(f"transformers.models.{kind}.modeling_{kind}"))
        torch.manual_seed(self.job.init_seed)
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[self.job.dtype]
        if self.job.built == "transformers":
            model = self._built_by_transformers(dtype)
        elif self.job.built == "outside":
            model = causal_lm(self.model_config, checkpointing="reentrant").to(dtype)
        else:
            with deepspeed.zero.Init(config_dict_or_path=self.config, dtype=dtype):
                model = causal_lm(self.model_config, checkpointing="reentrant")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in self.job.freeze))
        trainable = [p for p in model.parameters() if p.requires_grad]
        return deepspeed.initialize(model=model, model_parameters=trainable, config=self.config)[0]

    def _built_by_transformers(self, dtype: Any) -> Any:
        """Build the model as under the Trainer of transformers: its own
        initialisation gathers a module's parameters together."""
        import transformers
        from transformers.integrations import HfDeepSpeedConfig

        fields = dict(self.model_config)
        model_config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields, use_cache=False)
        announced = HfDeepSpeedConfig(self.config)  # in force as long as this object exists
        model = transformers.AutoModelForCausalLM.from_config(model_config, dtype=dtype)
        del announced
        return model

    def _save(self, engine: Any, step: int) -> None:
        syncs, stock = 0, os.fsync

        def sync(handle: int) -> None:
            nonlocal syncs
            syncs += 1
            if syncs == self.job.die_at_sync:
                os.kill(os.getpid(), signal.SIGKILL)
            stock(handle)

        if step == max(self.job.save_at):
            os.fsync = sync
        try:
            engine.save_checkpoint(self.job.checkpoint, client_state={"step": step})
        finally:
            os.fsync = stock

    def _resume(self, engine: Any) -> int:
        _, client_state = engine.load_checkpoint(self.job.checkpoint)
        return client_state["step"]

    def _step(self, engine: Any, step: int) -> list[float]:
        """Run one optimizer step; return the loss of each micro-batch."""
        losses = []
        for micro in range(self.job.micro_steps):
            ids = self._batch(step * self.job.micro_steps + micro)
            loss = engine(input_ids=ids, labels=ids).loss
            losses.append(loss.detach().float().item())
            engine.backward(loss * float("inf") if step == self.job.overflow_at else loss)
            engine.step()
        return losses

    def _evaluate(self, engine: Any) -> None:
        import torch

        engine.eval()
        with torch.no_grad():
            engine(input_ids=self._batch(0), labels=self._batch(0))
        engine.train()

    def _batch(self, index: int) -> Any:
        """Return the next window of characters, a different one for each rank; ``seed`` moves the start."""
        import torch

        text = torch.frombuffer(bytearray(inspect.getsource(text_source), "ascii"), dtype=torch.uint8)
        window = index * self.ranks + int(os.environ["RANK"])
        begin = (self.job.seed * 7919 + window * SEQUENCE) % (len(text) - SEQUENCE)
        return text[begin : begin + SEQUENCE].long()[None]

    def _hash(self, engine: Any) -> str:
        """Return a hash of the master weights of trained parameters and of the 16-bit weights of frozen ones."""
        import deepspeed
        from deepspeed.utils import safe_get_full_fp32_param

        _fix_reading_of_016(engine.optimizer)
        digest = hashlib.sha256()
        for name, parameter in sorted(engine.module.named_parameters()):
            if parameter.requires_grad:
                value = safe_get_full_fp32_param(parameter)
            else:
                with deepspeed.zero.GatheredParameters([parameter]):
                    value = parameter.data.float().clone()
            digest.update(name.encode())
            digest.update(value.float().contiguous().numpy().tobytes())
        return digest.hexdigest()


def main() -> None:
    jobs, results = Path(sys.argv[1]), Path(sys.argv[2])
    import deepspeed
    import torch
    import torch._dynamo  # before zero.Init, which replaces functions that it inspects
    import transformers
    from transformers import AutoModelForCausalLM  # noqa: F401

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    rank = int(os.environ["RANK"])
    out = []
    shared = results.parent / "nvme"  # every rank writes into its own folders under it
    shared.mkdir(exist_ok=True)
    for fields in json.loads(jobs.read_text()):
        nvme = shared / fields["name"]
        out.append(Training(Job(**fields), nvme).run())
        gc.collect()
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(nvme, ignore_errors=True)
        torch.distributed.barrier()
    if rank == 0:
        handle, name = tempfile.mkstemp(dir=results.parent)
        with os.fdopen(handle, "w") as f:
            json.dump(out, f)
        os.replace(name, results)
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's teardown of a second engine may touch freed objects


if __name__ == "__main__":
    main()
