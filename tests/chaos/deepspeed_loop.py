"""DeepSpeed ZeRO-3 with weights and states on the SSD: through `memascend.enable`, or without it (`stock`).

Both run the same script: DeepSpeed's own checkpoint after every second step, and a restart from the last checkpoint.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

from tests.chaos.draws import STEPS
from tests.chaos.loops import Loop

EVERY = 2  # steps between two checkpoints
_K = 64  # the twin's divisor: a step takes some tenths of a second


def import_what_takes_long() -> None:
    """Import them in the process that all runs are forked from."""
    import deepspeed  # noqa: F401
    import torch._dynamo  # noqa: F401
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder
    from transformers.models.qwen2 import modeling_qwen2  # noqa: F401

    import tests.integration.trainings  # noqa: F401
    from memascend.integrations.processor import remember_processor

    remember_processor()
    for builder in (AsyncIOBuilder, CPUAdamBuilder):
        builder().load(verbose=False)


class DropInLoop(Loop):
    system, arm = "memascend", "memascend"

    def train(self) -> None:
        import logging

        import deepspeed
        import torch

        import memascend
        from memascend.baselines.protocol import scaled
        from memascend.training.processes import free_port
        from tests.integration.trainings import Job, Training
        from tests.one_rank import environment

        random.seed(os.getpid())
        os.environ.update(environment(0, 1, free_port()))
        deepspeed.utils.logger.setLevel(logging.ERROR)
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        try:
            chosen = self.training
            tiers = [self.folder / "nvme" / name for name in "ab"[: chosen["paths"]]]
            for path in tiers:
                path.mkdir(parents=True, exist_ok=True)
            two = {"tiers": [str(path) for path in tiers]} if len(tiers) > 1 and self.arm == "memascend" else {}
            job = Job(
                name="run",
                system=self.system,
                arm=self.arm,
                layers=1,
                k=_K,
                steps=STEPS,
                micro_steps=chosen["accumulate"],
                parts=two,
                config={"gradient_clipping": chosen["clip"]},
                checkpoint=str(self.folder / "checkpoints"),
            )
            training = Training(job, tiers[0])
            enabled = memascend.enable(training.config, **training.parts, minimum_swap_bytes=scaled(1 << 20, _K))
            try:
                self._steps(training)
            finally:
                memascend.disable()
                if enabled.store is not None:
                    enabled.store.close()
        finally:
            torch.distributed.destroy_process_group()

    def _steps(self, training: Any) -> None:
        engine = training._build()
        latest = Path(training.job.checkpoint) / "latest"
        first = training._resume(engine) if latest.exists() else 0
        self.say("resumed", step=first, digest=training._hash(engine))
        self.look(first, lambda: training._hash(engine))
        for step in range(first, self.until):
            try:
                losses = [loss.hex() for loss in training._step(engine, step)]
                if (step + 1) % EVERY == 0:
                    engine.save_checkpoint(training.job.checkpoint, client_state={"step": step + 1})
            except (Exception, KeyboardInterrupt) as error:
                self.say("error", step=step, error=f"{type(error).__name__}: {error}")
                self.on_error()  # the disk works again; the script starts anew
                raise
            self.say("step", step=step + 1, loss=losses)
            if (step + 1) % EVERY == 0:
                self.say("saved", step=step + 1)
            self.look(step + 1, lambda: training._hash(engine))
        if self.until == STEPS:
            self.say("done", digest=training._hash(engine), bytes_on_disk=self.bytes_on_disk())
        engine.destroy()

    def end(self) -> None:
        left = [path for path in self.folder.rglob("*") if path.is_file() and "checkpoints" not in path.parts]
        self.say("removed", files=sorted(str(path.relative_to(self.folder)) for path in left))
        self.say("left", bytes=sum(path.stat().st_blocks * 512 for path in left))


class StockLoop(DropInLoop):
    """DeepSpeed with nothing of ours except what it needs to train on a CPU at all."""

    system, arm = "zero_infinity", "today"
