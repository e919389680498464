"""Architectures through the drop-in on DeepSpeed and through DeepSpeed's own CPU offload, one after another.

A test uses `Programs`. It has one program (``python drop_in.py ADDRESS FOLDER``), a process group of one rank, which
trains on request and is replaced if it crashes or hangs: imports and the start of the group take longer than a
training.
"""

from __future__ import annotations

import gc
import multiprocessing.connection
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a child process is started by path

from memascend.training.processes import free_port, remove_shared_buffers  # noqa: E402
from tests import forked  # noqa: E402

STEPS, MICRO_STEPS = 3, 2
DTYPES = ("bf16", "fp32")  # the first in which stock DeepSpeed trains an architecture
STOCK = {"pinned": "stock", "pool": "stock", "overflow": "stock", "aio": "stock"}
LEAST_SWAPPED_BYTES = 1024
TRAINING_S = 200
MOST_TRAININGS = 40  # per process, since DeepSpeed and torch leave memory behind after each


class Programs:
    """A context that gives the `outcome` of one architecture after another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listener = multiprocessing.connection.Listener(family="AF_UNIX")
        self._program: Any = None
        self._asked = 0

    def outcome(self, identity: str, dtypes: Sequence[str] = DTYPES) -> dict[str, Any]:
        """Return ``{"outcome": …, "why": …, "dtype": …, "trace": …}`` of the architecture with that id.

        `outcome`: ``equal``, ``refused`` (by memascend, in one line), ``stock fails`` (with all of `dtypes`; the first
        with which it does not fail is compared), ``fails`` (an error, or another loss or weight) or ``not built``.
        """
        if self._asked == MOST_TRAININGS:
            self._stop()
        if self._program is None:
            self._start()
        self._asked += 1
        self._line.send((identity, dtypes))
        try:
            if self._line.poll(TRAINING_S):
                return self._line.recv()
            reason = f"no end after {TRAINING_S} s"
        except EOFError:
            self._program.wait()
            reason = f"the process ended with {self._program.returncode}"
        log = self._log.read_text(errors="replace")[-2000:]
        self._stop()
        return {"outcome": "fails", "why": reason, "dtype": "", "trace": log}

    def _start(self) -> None:
        self._port, self._log = free_port(), self._folder / "program.log"
        one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port)}
        environment = os.environ | one_rank | address | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        with self._log.open("w") as log:
            command = [sys.executable, __file__, self._listener.address, str(self._folder)]
            self._program = forked.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self._line = self._listener.accept()

    def _stop(self) -> None:
        if self._program is not None:
            self._line.close()
            self._program.kill()
            self._program.wait()
            remove_shared_buffers(self._port)
            self._program, self._asked = None, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._listener.close()


# -- the program -------------------------------------------------------------------------------------------------------


def configuration(dtype: str, swap: Path | None) -> dict[str, Any]:
    """Return a configuration of ZeRO-3 with NVMe offload into that folder, or with CPU offload.

    Omitted keys have DeepSpeed's defaults, or are derived.
    """
    offload: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    if swap is not None:
        offload = {"device": "nvme", "nvme_path": str(swap)}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_STEPS,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 20_000,
            "reduce_bucket_size": 1_000_000,
            "stage3_param_persistence_threshold": 64,
            "memory_efficient_linear": False,
            "offload_param": dict(offload),
            "offload_optimizer": dict(offload),
        },
        "zero_force_ds_cpu_optimizer": True,
        "steps_per_print": 1_000_000,
    }


def train(architecture: Any, dtype: str, swap: Path | None) -> tuple[list[float], dict[str, Any]]:
    """Return the losses of the steps and of an evaluation after each, and
    the final weights (masters of trained ones)."""
    import deepspeed
    import torch
    from deepspeed.utils import safe_get_full_fp32_param

    import memascend
    from tests.zoo.architectures import batch

    config = configuration(dtype, swap)
    parts = STOCK if swap is None else {}
    model = architecture.make()
    enabled = memascend.enable(config, **parts, minimum_swap_bytes=LEAST_SWAPPED_BYTES)
    try:
        if dtype == "bf16":
            model.bfloat16()
        trained = [p for p in model.parameters() if p.requires_grad]
        engine = deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]
        torch.manual_seed(7)
        losses = []
        for step in range(STEPS):
            for micro in range(MICRO_STEPS):
                loss = engine(batch(10 * step + micro))
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
            engine.eval()
            with torch.no_grad():
                losses.append(engine(batch(1000 + step)).item())
            engine.train()
        weights = {}
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad and parameter.ds_numel:
                weights[name] = safe_get_full_fp32_param(parameter).float().clone()
            else:
                with deepspeed.zero.GatheredParameters([parameter]):
                    weights[name] = parameter.detach().float().clone()
        weights |= {name: buffer.float().clone() for name, buffer in engine.module.named_buffers()}
        if swap is not None and not enabled.io.bytes_read:
            raise AssertionError("nothing was read from the SSD")
        engine.destroy()
        return losses, weights
    finally:
        memascend.disable()
        if enabled.store is not None:
            enabled.store.close()
        gc.collect()


def tried(identity: str, dtypes: Sequence[str], folder: Path) -> dict[str, Any]:
    from tests.zoo.architectures import ARCHITECTURES, NotBuilt

    architecture = next(each for each in ARCHITECTURES if each.id == identity)
    found = {"outcome": "equal", "why": "", "dtype": "", "trace": ""}
    try:
        architecture.try_in_memory()
    except NotBuilt as reason:
        return found | {"outcome": "not built", "why": str(reason)}
    for dtype in dtypes:
        found["dtype"] = dtype
        try:
            stock = train(architecture, dtype, None)
            break
        except Exception as error:
            found |= {"outcome": "stock fails", "why": first_line(error), "trace": traceback.format_exc()}
    else:
        return found
    swap = folder / "swap"
    swap.mkdir()
    try:
        ours = train(architecture, dtype, swap)
    except Exception as error:
        outcome = "refused" if is_refusal(error) else "fails"
        return found | {"outcome": outcome, "why": first_line(error), "trace": traceback.format_exc()}
    finally:
        shutil.rmtree(swap)
    found |= {"outcome": "equal", "why": "", "trace": ""}
    if apart := differences(ours, stock):
        first = ", ".join([*apart][:3])
        found |= {"outcome": "fails", "why": f"{len(apart)} differ, by {max(apart.values()):.1e} at most: {first}"}
    return found


def differences(
    ours: tuple[list[float], dict[str, Any]], stock: tuple[list[float], dict[str, Any]]
) -> dict[str, float]:
    """Return what is not equal bit by bit (NaN equals NaN), with the
    largest difference relative to the largest value."""
    import torch

    losses = [torch.tensor(each[0], dtype=torch.float64) for each in (ours, stock)]
    pairs = {"losses": losses} | {name: [ours[1][name], values] for name, values in stock[1].items()}
    found = {}
    for name, (one, other) in pairs.items():
        equal = torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
        if not equal:
            found[name] = float((one - other).abs().max() / other.abs().max().clamp_min(1e-30))
    return found


def is_refusal(error: BaseException) -> bool:
    """Return whether the error is one line that memascend raised on purpose."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(last.filename).is_relative_to(ROOT / "memascend")
    return ours and isinstance(error, ValueError | RuntimeError) and len(str(error).splitlines()) == 1


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"


def main() -> None:
    import logging
    import warnings

    import deepspeed
    import torch
    import torch._dynamo  # imported before zero.Init, which replaces functions that it inspects
    import transformers

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    line = multiprocessing.connection.Client(sys.argv[1], family="AF_UNIX")
    while True:
        try:
            identity, dtypes = line.recv()
        except EOFError:
            os._exit(0)  # DeepSpeed's teardown of a second engine may touch freed objects
        line.send(tried(identity, dtypes, Path(sys.argv[2])))


if __name__ == "__main__":
    main()
