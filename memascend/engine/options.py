"""Options of a streaming engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from memascend.engine.buffers import BLOCKS_IN_FLIGHT, STATE_SLOTS
from memascend.memory.budget import parse_bytes
from memascend.swapping import RULES

ARMS = ("optimized", "naive", "none")  # how gradients go into the states: see `memascend.engine.updates`
STATES = (torch.float32, torch.bfloat16, torch.int8)
# By their names in `memascend train`; `ssd` also keeps the inputs of blocks on the tier.
CHECKPOINTS = {"offloaded": "tier", "ssd": "tier", "plain": "device"}
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of how a model is streamed; immutable.

    Args:
        arm: how gradients are applied to the states: `optimized` (reads, updates and writes overlap during backward),
            `naive` (one after the other during backward) or `none` (after backward); see `memascend.engine.updates`.
        accumulate: backward passes per step, at least 1. With more than one, gradients wait on the tier.
        clip: the largest 2-norm of all gradients; 0 for no limit. Gradients wait on the tier for their norm, except in
            steps that can be done again (`memascend.engine.speculation`).
        wait: gradients wait on the tier until `step()`, for a loop that reads or clips them itself.
        checkpoints: where the inputs of blocks wait for backward: `tier` (the SSD) or `device` (its memory).
        states: dtype of moments and master weights: torch.float32; torch.bfloat16 (stochastically rounded, only for
            16-bit weights); or torch.int8 (only for bfloat16 weights, which are stochastically rounded and the only
            master, with both moments as 8-bit codes, see `memascend.ops.adamw8`: 4.1 bytes per parameter). With int8
            results equal those of `AdamW8bit(model.parameters(), seed=ROUNDING_SEED)` to the bit, which numbers
            elements in the same order.
        gradients: dtype of gradients that wait: torch.float32, bfloat16 or float16.
        zero_missing: a parameter without a gradient in a step is updated with zeros, as in ZeRO's flat groups;
            otherwise it stays unchanged, as in torch.optim.
        measure: measure how fast a step could be (`StreamingEngine.limit`); the first step profiles each block.
        swap: which results inside of blocks are swapped to the SSD instead of being recomputed: a rule (`best`,
            `algorithm 1` or `released`, see `memascend.swapping`), which needs two forward passes to decide, or what
            to swap from the second step on: `all`, a number of bytes per pass, or a share such as `50%`. None: nothing
            is swapped.
        swap_room: bytes of host memory that swapped results fill before they go to the SSD, also as a text like `1GiB`.
        blocks_in_flight: number of slots in host memory for blocks of one size, at least 1.
        piece_elements: the largest number of elements in a piece of states (see `make_layout`). None: that of the
            largest block, at most 16.8 million.
        versions: versions of the states on the tier: 2, or 1 together with the step's gradients
            (`memascend.engine.in_place_update`). None: 2 if they fit on the disk, otherwise 1.
        redo: with one version, whether a step that a kill cuts off can be redone. If not, its gradients do not wait for
            that, and a kill in the middle of a step leaves incomplete states (`InterruptedUpdate`); so do an error in a
            backward pass that uses gradients as they arrive, and an infinite or NaN gradient in such a pass.
        device: the device that computes, such as "cuda"; its memory has copies of the weights in use. None: the device
            of the model's parameters.
        implicit_step: each forward pass with a graph completes the previous step (LoHan, Fig. 4b: a loop without
            `optimizer.step()`). Without it, such a pass raises an error once updates of the step have begun.
        unfreezes: parameters in the optimizer's groups that are frozen when it is created may be trained later: they
            get states, and each step writes them with the trained part of their block (see `streaming.optimizer`).

    Raises:
        ValueError: a value of the wrong type, an unknown word, or a number out of range; the message names the option.

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
        """Raise ValueError for the option unless `holds`. `what`: the values that are accepted."""
        if not holds:
            raise ValueError(f"EngineOptions.{name}: {what}, got {getattr(self, name)!r}")

    def _require_swap(self) -> None:
        """Check `swap` and `swap_room`, and set them to their normal form."""
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
        """Whether the rates of I/O and AdamW and the times of blocks are measured."""
        return self.measure or self.swap is not None

    @property
    def state_slots(self) -> int:
        """Number of buffers for pieces of states; the arm `naive` uses one, since its stages do not overlap."""
        return 1 if self.arm == "naive" else STATE_SLOTS

    @property
    def waits(self) -> bool:
        """Whether gradients wait on the tier until all gradients of a step have arrived."""
        return self.arm == "none" or self.clip > 0 or self.wait or self.redoes

    @property
    def redoes(self) -> bool:
        """Whether a step replaces the states in parts and is redone after an interruption."""
        return self.versions == 1 and self.redo

    @property
    def replaces_without_redo(self) -> bool:
        """Whether a step replaces the states in parts, which are unusable after an interruption."""
        return self.versions == 1 and not self.redo


def _is_whole(value: object, least: int) -> bool:
    return type(value) is int and value >= least


def _is_norm(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _computes(device: object) -> bool:
    """Return whether `device` is None or a device that torch could compute on."""
    if device is None:
        return True
    try:
        return isinstance(device, str | torch.device) and torch.device(device).type != "meta"
    except RuntimeError:  # an unknown device name
        return False
