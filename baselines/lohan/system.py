"""LoHan on the streaming engine: weights, gradients and optimizer states on the SSD, one device."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baselines.lohan.footprint import footprint
from baselines.lohan.schedule import schedule
from baselines.protocol import PlannedSystem
from memascend.arrangements import Arrangement
from memascend.training.backends import STREAMING, Setup

if TYPE_CHECKING:
    from memascend.training.config import TrainConfig


def _arm(variant: str) -> Arrangement:
    label = f"LoHan ({variant})" if variant else "LoHan"
    # Our norm and AdamW are what `verify` compares with; buffers are exact, and there is one engine below them.
    return Arrangement(
        label=label,
        parts={"numerics": "fast"},
        pinned="page_aligned",
        swapped="page_aligned",
        pool="adaptive",
        overflow="fused",
        direct=True,
    )


_ARMS = {
    "optimized": _arm(""),
    "as_published": replace(_arm("Algorithm 1"), runs=False),
    "naive": _arm("naive"),
    "none": _arm("optimizer after backward"),
}


class LoHan(PlannedSystem):
    """One process; the states lie in a folder of their own beside the run's swap files."""

    def refuse(self, config: TrainConfig) -> None:
        if config.ranks > 1:
            raise ValueError(f"system 'lohan' is one process, not {config.ranks}: leave --ranks out, or use another")
        if config.devices:
            raise ValueError("system 'lohan' keeps its states in a file so far: leave --devices out, and name --nvme")
        if config.checkpointing not in ("offloaded", "plain"):
            raise ValueError(
                f"system 'lohan' recomputes its blocks, and checkpointing {config.checkpointing!r} does not fit: set "
                "offloaded (their inputs wait on the SSD) or plain (on the device)"
            )
        if config.states == "bf16" and config.dtype != "bf16":
            raise ValueError("states 'bf16' need dtype bf16: set --dtype bf16, or --states fp32")

    def trainer(self, config: TrainConfig, prepared: dict[str, Any], run_id: str, swap: str) -> Setup:
        """States outlive a kill: they are not among the swap files, which do not."""
        parent = Path(config.nvme).absolute() if config.nvme else config.output_folder
        name = hashlib.sha256(str(config.output_folder).encode()).hexdigest()[:8]
        folder = parent / f"memascend-states-{run_id}-{name}"
        arm = config.arm or next(iter(_ARMS))
        return Setup(backend=STREAMING, settings={"folder": str(folder), "arm": arm}, swaps=False)


SYSTEM = LoHan(name="lohan", arms=_ARMS, buffers=footprint, tasks=schedule)
