"""What may be chosen of a streaming engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from memascend.engine.buffers import BLOCKS_IN_FLIGHT, STATE_SLOTS
from memascend.memory.budget import parse_bytes
from memascend.swapping import RULES

ARMS = ("optimized", "naive", "none")  # how gradients go into the states: see `memascend.engine.updates`
STATES = (torch.float32, torch.bfloat16, torch.int8)
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
        clip: the largest 2-norm of all gradients; 0 for any. Gradients wait on the tier for it, except in steps that
            can be done again (`memascend.engine.speculation`).
        wait: gradients wait on the tier until `step()`, for a loop that looks at them or clips them by itself.
        checkpoints: where the inputs of blocks wait for backward: `tier` (the SSD) or `device` (its memory).
        states: dtype of moments and master weights: torch.float32, or torch.bfloat16 (rounded stochastically; for
            weights of 16 bits alone), or torch.int8: weights of bfloat16 alone, rounded stochastically, are the only
            master, and both moments are 8-bit codes (`memascend.ops.adamw8`): 4.1 bytes per parameter. Bits are
            those of `AdamW8bit(model.parameters(), seed=ROUNDING_SEED)`, which numbers elements in that order too.
        gradients: dtype of gradients that wait: torch.float32, bfloat16 or float16.
        zero_missing: a parameter that got no gradient in a step is updated with zeros, as in ZeRO's flat groups; else
            it is left as it is, as torch.optim does.
        measure: find out how fast a step could be (`StreamingEngine.limit`); the first step profiles each block.
        swap: results inside of blocks that are swapped to the SSD in place of being computed again, decided after the
            first step: a rule (`best`, `algorithm 1` or `released`, see `memascend.swapping`), `all`, a number of bytes
            per pass, or a share such as `50%`. None: none.
        swap_room: bytes of host memory that these may take before the SSD has them, also as a text such as `1GiB`.
        blocks_in_flight: slots in host memory for blocks of one size, at least 1.
        piece_elements: elements of a piece of states at most (see `make_layout`). None: those of the largest block, but
            no more than 16.8 million.
        versions: of the states on the tier: 2, or 1 with the step's gradients next to it
            (`memascend.engine.in_place_update`). None: two if the disk has space for them.
        redo: with one version, whether a step that a kill cuts off can be done again. Else its gradients do not wait
            for that, and a kill in the middle of a step leaves incomplete states (`InterruptedUpdate`); so do an error
            in a backward pass that uses gradients as they come, and a gradient that is infinite or NaN there.
        device: what computes, whose memory holds copies of the weights that are at work (such as "cuda"). None: where
            the model's parameters are.
        implicit_step: each forward pass with a graph completes the step before it (LoHan, Fig. 4b: a loop without
            `optimizer.step()`). Without it such a pass is refused where the step's updates have begun.
        unfreezes: parameters in the optimizer's groups that are frozen when it is made may be trained later: they get
            states, and a step writes them with what else of their block it trains (see `streaming.optimizer`).

    Raises:
        ValueError: a value of another type, an unknown word, a number out of range; it names the option.

    Example:

        session.optimizer(torch.optim.AdamW, lr=1e-5, options=EngineOptions(versions=1, states=torch.bfloat16))
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
    swap: str | int | None = None
    swap_room: int | str = 0
    blocks_in_flight: int = BLOCKS_IN_FLIGHT
    piece_elements: int | None = None
    versions: int | None = None
    redo: bool = True
    device: torch.device | str | None = None
    implicit_step: bool = False
    unfreezes: bool = False

    def __post_init__(self) -> None:
        for name, words in (("arm", ARMS), ("checkpoints", ("tier", "device"))):
            self._require(name, isinstance(value := getattr(self, name), str) and value in words, " or ".join(words))
        for name, known in (("states", STATES), ("gradients", GRADIENTS)):
            dtype = isinstance(value := getattr(self, name), torch.dtype) and value in known
            self._require(name, dtype, " or ".join(map(str, known)))
        for name in ("wait", "zero_missing", "measure", "redo", "implicit_step", "unfreezes"):
            self._require(name, isinstance(getattr(self, name), bool), "True or False")
        for name in ("accumulate", "blocks_in_flight"):
            self._require(name, _is_whole(getattr(self, name), 1), "a whole number, at least 1")
        self._require("clip", _is_norm(self.clip), "a finite number, at least 0 (which is for any norm)")
        elements = self.piece_elements is None or _is_whole(self.piece_elements, 1)
        self._require("piece_elements", elements, "a whole number, at least 1, or None")
        count = self.versions is None or (_is_whole(self.versions, 1) and self.versions <= 2)
        self._require("versions", count, "1 or 2, or None for what the disk has space for")
        if not self.redo and self.versions == 2:
            raise ValueError("EngineOptions.redo: False requires versions=1, got versions=2: leave one out")
        self._require_swap()
        self._require("device", _computes(self.device), "what torch computes on, such as 'cpu' or 'cuda:0', or None")

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"EngineOptions.{name}: {what}, got {getattr(self, name)!r}")

    def _require_swap(self) -> None:
        if _is_whole(self.swap, 0):
            object.__setattr__(self, "swap", str(self.swap))
        holds = self.swap is None or self.swap in (*RULES, "all")
        if not holds and isinstance(self.swap, str):
            number = self.swap.removesuffix("%")
            holds = number.isdecimal() and (number == self.swap or int(number) <= 100)
        self._require("swap", holds, f"{', '.join(RULES)}, all, bytes, a share from 0% to 100%, or None")
        if isinstance(self.swap_room, str):
            object.__setattr__(self, "swap_room", parse_bytes(self.swap_room, "EngineOptions.swap_room"))
        self._require("swap_room", _is_whole(self.swap_room, 0), "bytes, at least 0, or a text such as '1GiB'")

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
    def replaces_without_redo(self) -> bool:
        """Whether a step replaces the states in parts, which are of no use where that is cut off."""
        return self.versions == 1 and not self.redo


def _is_whole(value: object, least: int) -> bool:
    return type(value) is int and value >= least


def _is_norm(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _computes(device: object) -> bool:
    if device is None:
        return True
    try:
        return isinstance(device, str | torch.device) and torch.device(device).type != "meta"
    except RuntimeError:  # a name that torch does not know
        return False
