"""Trainings of a small model with parameters that get a gradient always, sometimes or never, several in one process.

Started as ``python unused_parameter_trainings.py JOBS RESULTS`` by :func:`train_all`. A :class:`Job` says which experts
compute in which micro-batch; all ranks agree on it, because ZeRO-3 reduces each gradient over all of them.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import logging
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a child process is started by path

from trainings import merged  # noqa: E402

from memascend.memory import run_buffers  # noqa: E402
from memascend.training.processes import free_port, remove_shared_buffers  # noqa: E402
from tests import forked  # noqa: E402
from tests.one_rank import environment  # noqa: E402

WIDTH, HIDDEN, EXPERTS = 60, 67, 3  # odd, so that pieces of gradients end at any place
NVME = {"device": "nvme", "pin_memory": True}
LARGEST_IN_MEMORY = 4096  # bytes; smaller gradients and sub-groups are not swapped
CONVERTED_AT_ONCE = 1024  # elements; a sub-group is several pieces and a remainder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One training: ``experts[step][micro batch]`` are the experts that compute; others get no gradient.

    With ``parts`` None it is the reference, DeepSpeed with the optimizer in memory; otherwise ``parts`` is the section
    "memascend", with both offloads on NVMe, and ``tiers`` in it are names of folders. ``scales[step]`` multiplies the
    loss. ``set_gradient_at``: in that step the gradient of expert 0's weight is replaced by another one before it is
    applied. ``save_at``: after that many steps a checkpoint is saved in ``checkpoint``; with ``resume`` the training
    starts from it.
    """

    name: str
    experts: tuple[tuple[tuple[int, ...], ...], ...]
    parts: dict[str, Any] | None = None
    dtype: str = "bf16"
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    scales: dict[str, float] = dataclasses.field(default_factory=dict)
    weight_decay: float = 0.0
    sub_group_size: int | None = 4000
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    set_gradient_at: int | None = None
    checkpoint: str | None = None
    save_at: int | None = None
    resume: bool = False


def train_all(jobs: list[Job], folder: Path, ranks: int = 1, timeout_s: float = 300) -> dict[str, dict[str, Any]]:
    """Return rank 0's results by name: losses, norms, and for each parameter the hashes of weight and moments.

    The result of a job that raises is {"error": the message, "trace": where}; with several ranks it is an
    AssertionError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps([dataclasses.asdict(job) for job in jobs]))
    results = folder / "results.json"
    port = free_port()
    command = [sys.executable, __file__, str(folder / "jobs.json"), str(results)]
    logs = [(folder / f"rank{rank}.log").open("w") for rank in range(ranks)]
    children = [
        forked.Popen(command, cwd=ROOT, env=environment(r, ranks, port), stdout=logs[r], stderr=subprocess.STDOUT)
        for r in range(ranks)
    ]
    deadline = time.monotonic() + timeout_s
    try:
        while any(child.poll() is None for child in children) and not any(child.poll() for child in children):
            time.sleep(0.05)
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {timeout_s} s: {(folder / 'rank0.log').read_text()[-4000:]}")
    finally:
        for child in children:
            child.kill()
            child.wait()
        remove_shared_buffers(port)
        for log in logs:
            log.close()
    failed = [rank for rank, child in enumerate(children) if child.returncode > 0 or -child.returncode not in (0, 9)]
    assert not failed, "\n".join((folder / f"rank{rank}.log").read_text()[-4000:] for rank in failed)
    return {result["name"]: result for result in json.loads(results.read_text())}


def _model() -> Any:
    import torch

    class Mixture(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(WIDTH, HIDDEN)
            self.unused = torch.nn.Linear(HIDDEN, HIDDEN)
            self.frozen = torch.nn.Linear(HIDDEN, HIDDEN)
            self.experts = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))
            self.last = torch.nn.Linear(HIDDEN, WIDTH)

        def forward(self, x: Any, experts: tuple[int, ...]) -> Any:
            hidden = self.frozen(torch.tanh(self.first(x)))
            for index in experts:
                hidden = hidden + self.experts[index](torch.tanh(hidden))
            return self.last(hidden).float().square().mean()

    return Mixture()


class Training:
    def __init__(self, job: Job, nvme: Path) -> None:
        self.job, self.nvme = job, nvme
        self.micro_steps = len(job.experts[0])
        zero: dict[str, Any] = {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "memory_efficient_linear": False,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        }
        if job.sub_group_size is not None:
            zero["sub_group_size"] = job.sub_group_size
        if job.parts is not None:
            nvme.mkdir(parents=True, exist_ok=True)
            zero["offload_param"] = NVME | {"nvme_path": str(nvme)}
            zero["offload_optimizer"] = NVME | {"nvme_path": str(nvme)} | job.optimizer
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.micro_steps,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": job.weight_decay}},
            job.dtype: {"enabled": True},
            "zero_optimization": zero,
            "zero_force_ds_cpu_optimizer": True,
        }
        self.config = merged(config, job.config)

    def run(self) -> dict[str, Any]:
        import memascend

        # Without our parts a training has only the repairs that DeepSpeed needs on a CPU.
        stock = {"pinned": "stock", "pool": "stock", "overflow": "stock", "aio": "stock"}
        parts = stock if self.job.parts is None else dict(self.job.parts)
        if "tiers" in parts:
            parts["tiers"] = [str(self.nvme / name) for name in parts["tiers"]]
            for folder in parts["tiers"]:
                os.makedirs(folder, exist_ok=True)
        enabled = memascend.enable(self.config, **parts, minimum_swap_bytes=LARGEST_IN_MEMORY)
        try:
            return self._train()
        except Exception as error:
            if os.environ["WORLD_SIZE"] != "1":  # the other ranks would wait for this one
                raise
            return {"name": self.job.name, "error": str(error), "trace": traceback.format_exc()}
        finally:
            memascend.disable()
            if enabled.store is not None:
                enabled.store.close()

    def _train(self) -> dict[str, Any]:
        import deepspeed
        import torch
        from deepspeed.runtime.zero.partition_parameters import Init

        Init.param_id = 0
        torch.manual_seed(0)
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[self.job.dtype]
        with deepspeed.zero.Init(config_dict_or_path=self.config, dtype=dtype):
            model = _model()
        for parameter in model.frozen.parameters():
            parameter.requires_grad_(False)
        trainable = [p for p in model.parameters() if p.requires_grad]
        engine = deepspeed.initialize(model=model, model_parameters=trainable, config=self.config)[0]
        result: dict[str, Any] = {"name": self.job.name, "losses": [], "norms": [], "skipped": []}
        first = engine.load_checkpoint(self.job.checkpoint)[1]["step"] if self.job.resume else 0
        for step in range(first, len(self.job.experts)):
            for micro in range(self.micro_steps):
                result["losses"].append(self._micro_batch(engine, step, micro, dtype))
            norm = engine.get_global_grad_norm()
            result["norms"].append(None if norm is None else float(norm))
            result["skipped"].append(engine.skipped_steps)
            if step + 1 == self.job.save_at:
                engine.save_checkpoint(self.job.checkpoint, client_state={"step": step + 1})
        result["converted_late"] = getattr(engine.optimizer, "_piece", None) is not None
        result["tensors"] = self._hashes(engine)
        engine.destroy()
        return result

    def _micro_batch(self, engine: Any, step: int, micro: int, dtype: Any) -> float:
        import torch

        index = (step * self.micro_steps + micro) * int(os.environ["WORLD_SIZE"]) + int(os.environ["RANK"])
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index)).to(dtype)
        loss = engine(x, self.job.experts[step][micro])
        engine.backward(loss * self.job.scales.get(str(step), 1.0))
        if step == self.job.set_gradient_at:
            self._set_gradient(engine)
        engine.step()
        return loss.item()

    @staticmethod
    def _set_gradient(engine: Any) -> None:
        import torch
        from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

        weight = engine.module.experts[0].weight
        safe_set_full_grad(weight, 1 + safe_get_full_grad(weight) + torch.rand(HIDDEN, HIDDEN))

    @staticmethod
    def _hashes(engine: Any) -> dict[str, str]:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        found = {}
        for name, parameter in engine.module.named_parameters():
            if not parameter.requires_grad:
                continue
            values = {"": safe_get_full_fp32_param(parameter)}
            for moment in ("exp_avg", "exp_avg_sq"):
                values[f".{moment}"] = safe_get_full_optimizer_state(parameter, moment)
            for what, value in values.items():
                bits = (value.float() + 0.0).contiguous().numpy().tobytes()  # + 0.0: no zero has a sign
                found[name + what] = "zero" if not value.any() else hashlib.sha256(bits).hexdigest()
        return found


def main() -> None:
    jobs, results = Path(sys.argv[1]), Path(sys.argv[2])
    import deepspeed
    import torch

    torch.set_num_threads(1)
    run_buffers.CONVERSION_ELEMENTS = CONVERTED_AT_ONCE
    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    out = []
    for fields in json.loads(jobs.read_text()):
        out.append(Training(Job(**fields), results.parent / "nvme" / fields["name"]).run())
        gc.collect()
        torch.distributed.barrier()
    if os.environ["RANK"] == "0":
        results.write_text(json.dumps(out))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's teardown of a second engine may touch freed objects


if __name__ == "__main__":
    main()
