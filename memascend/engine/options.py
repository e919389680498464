"""What may be chosen of a streaming engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memascend.engine.buffers import BLOCKS_IN_FLIGHT, STATE_SLOTS
from memascend.engine.updates import ARMS
from memascend.swapping import RULES


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How a model is streamed.

    `arm`: optimized, naive or none (`memascend.engine.updates`). `accumulate`: backward passes in a step; `clip`: the
    largest norm of all gradients, 0 for any. With either, gradients wait on the tier for the norm or for the others;
    `wait`: for a norm that is asked for later (`gradient_views`). `checkpoints`: `tier` (inputs of blocks wait on the
    SSD) or `device`. `states`: dtype of moments and masters; `gradients`: of those that wait. `zero_missing`: see
    `Updates`. `piece_elements`: see `make_layout`. `measure`: find out how fast a step could be (`limit`). `swap`:
    results inside of blocks that are swapped rather than computed again, decided after the first step by a rule (best,
    algorithm 1 or released, see `memascend.swapping`), all, a number of bytes a pass, or a share such as 50%; None:
    none. `swap_room`: bytes of host memory that they may take before the SSD has them. `versions`: of the states on
    the tier, 2, or 1 with gradients that wait beside it (`memascend.engine.one_version`); None: two if the disk has
    room for them. `redo`: with one version, whether a step that is cut off can be done again; else nothing waits for
    it, a kill in the middle of a step leaves torn states (`TornStates`), and so do an error in a backward pass that
    uses gradients as they come and a gradient that is infinite or NaN there. `device`: what computes, whose memory
    holds copies of the weights that are at work ("cuda"); None: where the model's parameters are. `implicit_step`: a
    forward pass completes the step before it (LoHan, Fig. 4b: a loop without `optimizer.step()`); without it, a forward
    pass after the last backward pass of a step is refused where its updates have begun.
    """

    arm: str = "optimized"
    accumulate: int = 1
    clip: float = 0.0
    wait: bool = False
    checkpoints: str = "tier"
    states: torch.dtype = torch.float32
    gradients: torch.dtype = torch.float32
    zero_missing: bool = False
    measure: bool = False
    swap: str | None = None
    swap_room: int = 0
    blocks_in_flight: int = BLOCKS_IN_FLIGHT
    piece_elements: int | None = None
    versions: int | None = None
    redo: bool = True
    device: torch.device | str | None = None
    implicit_step: bool = False

    def __post_init__(self) -> None:
        if self.arm not in ARMS:
            raise ValueError(f"unknown arm {self.arm!r} of gradient offloading: use one of {', '.join(ARMS)}")
        if self.checkpoints not in ("tier", "device"):
            raise ValueError(f"checkpoints must be 'tier' or 'device', got {self.checkpoints!r}")
        if self.swap is not None and not (self.swap in (*RULES, "all") or self.swap.removesuffix("%").isdecimal()):
            known = f"{', '.join(RULES)}, 'all', bytes, or a share such as 50%"
            raise ValueError(f"swap must be one of {known}, got {self.swap!r}")
        if self.versions not in (None, 1, 2):
            raise ValueError(f"versions must be 1 or 2, or None for what the disk has room for, got {self.versions}")
        if not self.redo and self.versions == 2:
            raise ValueError("redo is of one version of the states, and versions is 2: leave redo out, or versions=1")
        if self.accumulate < 1 or not self.clip >= 0 or self.blocks_in_flight < 1:
            raise ValueError(
                f"accumulate {self.accumulate}, clip {self.clip}, blocks_in_flight {self.blocks_in_flight}: need at "
                "least 1, 0 and 1"
            )

    @property
    def profiles(self) -> bool:
        """Whether rates and the blocks' times are measured."""
        return self.measure or self.swap is not None

    @property
    def state_slots(self) -> int:
        return 1 if self.arm == "naive" else STATE_SLOTS

    @property
    def waits(self) -> bool:
        """Whether gradients wait on the tier until all of a step have come."""
        return self.arm == "none" or self.clip > 0 or self.wait or self.redoes

    @property
    def redoes(self) -> bool:
        """Whether a step replaces the states in parts, and is done again where that is cut off."""
        return self.versions == 1 and self.redo

    @property
    def tears(self) -> bool:
        """Whether a step replaces the states in parts, which are of no use where that is cut off."""
        return self.versions == 1 and not self.redo
