"""What may be chosen of a streaming engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memascend.engine.buffers import BLOCKS_IN_FLIGHT, STATE_SLOTS
from memascend.engine.updates import ARMS
from memascend.swapping import RULES

STATES = (torch.float32, torch.bfloat16)
# By what `memascend train` calls them; with `ssd` the inputs wait on the tier, too.
CHECKPOINTS = {"offloaded": "tier", "ssd": "tier", "plain": "device"}
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How a model is streamed; immutable.

    Args:
        arm: how gradients go into the states: `optimized` (reads, updates and writes overlap while backward goes on),
            `naive` (one after the other) or `none` (after backward); see `memascend.engine.updates`.
        accumulate: backward passes in a step, at least 1. With more than one, gradients wait on the tier.
        clip: the largest 2-norm of all gradients; 0 for any. Gradients wait on the tier for it.
        wait: gradients wait on the tier until `step()`, for a loop that looks at them or clips them by itself.
        checkpoints: where the inputs of blocks wait for backward: `tier` (the SSD) or `device` (its memory).
        states: dtype of moments and master weights: torch.float32 or torch.bfloat16 (rounded stochastically; for
            weights of 16 bits alone).
        gradients: dtype of gradients that wait: torch.float32, bfloat16 or float16.
        zero_missing: a parameter that got no gradient in a step is updated with zeros, as in ZeRO's flat groups; else
            it is left as it is, as torch.optim does.
        measure: find out how fast a step could be (`StreamingEngine.limit`); the first step profiles each block.
        swap: results inside of blocks that are swapped to the SSD in place of being computed again, decided after the
            first step: a rule (`best`, `algorithm 1` or `released`, see `memascend.swapping`), `all`, a number of bytes
            a pass, or a share such as `50%`. None: none.
        swap_room: bytes of host memory that these may take before the SSD has them.
        blocks_in_flight: slots in host memory for blocks of one size, at least 1.
        piece_elements: elements of a piece of states at most (see `make_layout`). None: those of the largest block, but
            no more than 16.8 million.
        versions: of the states on the tier: 2, or 1 with the step's gradients beside it
            (`memascend.engine.one_version`). None: two if the disk has room for them.
        redo: with one version, whether a step that a kill cuts off can be done again. Else its gradients do not wait
            for that, and a kill in the middle of a step leaves torn states (`TornStates`); so do an error in a backward
            pass that uses gradients as they come, and a gradient that is infinite or NaN there.
        device: what computes, whose memory holds copies of the weights that are at work (such as "cuda"). None: where
            the model's parameters are.
        implicit_step: each forward pass with a graph completes the step before it (LoHan, Fig. 4b: a loop without
            `optimizer.step()`). Without it such a pass is refused where the step's updates have begun.
        unfreezes: parameters in the optimizer's groups that are frozen when it is made may be trained later: they get
            states, and a step writes them with what else of their block it trains (see `streaming.optimizer`).

    Raises:
        ValueError: an unknown word, a number out of range, a dtype that is not named above.

    Example:
        home.optimizer(torch.optim.AdamW, lr=1e-5, options=EngineOptions(versions=1, states=torch.bfloat16))
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
    unfreezes: bool = False

    def __post_init__(self) -> None:
        if self.arm not in ARMS:
            raise ValueError(f"unknown arm {self.arm!r} of gradient offloading: use one of {', '.join(ARMS)}")
        if self.checkpoints not in ("tier", "device"):
            raise ValueError(f"checkpoints must be 'tier' or 'device', got {self.checkpoints!r}")
        for name, known in (("states", STATES), ("gradients", GRADIENTS)):
            if getattr(self, name) not in known:
                words = ", ".join(str(dtype) for dtype in known)
                raise ValueError(f"{name} must be one of {words}, got {getattr(self, name)!r}")
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
