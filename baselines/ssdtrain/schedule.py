"""Schedule of a step of SSDTrain: weights and states stay on the GPU; tensors saved for backward go to the SSD.

    GPU      | F0 | F1 | F2 | F3 | B3 | B2 | B1 | B0 |
    store         | a0 | a1 | a2 |                        as soon as it is computed, first in, first out
    load                         | a2 | a1 | a0 |         in reverse order, ahead of backward

Its parts (the paper's III) are: the end of the model is kept, since its backward begins at once; data that the drive
has not yet stored when their load would begin are *forwarded*, that is, backward finds them in memory and nothing is
read (III-C2). Loads run one piece of a block ahead of backward.

    ssdtrain      all but the last block is offloaded, as in our activation cache
    as_published  all but the last module is offloaded: the output layer and its loss, after the blocks (III-C2)
    hybrid        from the first piece on, as much as the drive takes during forward (Fig. 3); the rest is kept
    keep          everything stays
    recompute     only the input of each block stays, and backward recomputes the block (Fig. 7)

The optimizer is left out, as for every system with its states on the GPU. The bytes are those that a plan counts
(`memascend.planner.gpu_memory`); the pool `SAVED` shows how many of them the GPU holds at each instant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memascend.activation_policy import KEEP, OFFLOAD, RECOMPUTE
from memascend.planner.pieces import PIECES_PER_BLOCK
from memascend.planner.step import SAVED

if TYPE_CHECKING:
    from memascend.planner.pieces import Piece
    from memascend.planner.step import Step

_SHARE_OF_RATE = 0.9  # for `hybrid`: fraction of the drive's capacity during forward, as in the activation cache's plan
_MOST_BATCHES = 2  # micro batches are alike, so more of them are folded into two


@dataclass(frozen=True, kw_only=True)
class Region:
    """The activations of one piece of a block in one micro batch on one GPU, and their policy.

    `saved` are the bytes saved for backward. `entry` is the piece's share of the block's input in bytes, which is all
    that recomputation keeps. `working` are the bytes that the block saves while it is recomputed, at the piece with
    which backward begins a block, and 0 elsewhere. `forwarded`: the store has not ended when the load would have to
    begin.
    """

    piece: Piece
    saved: float
    entry: float
    working: float
    policy: str = KEEP
    forwarded: bool = False


def schedule(step: Step) -> None:
    """Add the micro batches, folded into at most two, each with a forward and a backward pass."""
    regions, done = regions_of(step, step.work.activation_policies), ""
    for batch in range(min(step.work.accumulation, _MOST_BATCHES)):
        done = forward(step, regions, batch=batch, after=done)
        done = backward(step, regions, batch=batch, after=done)


def regions_of(step: Step, policies: Sequence[str] | None = None) -> list[Region]:
    """Return the regions in the order of forward.

    `policies` holds one policy for each block (or fold of blocks); without it, the arm decides. Raises ValueError if
    their number does not match.
    """
    work, inner = step.work, step.pieces[1:-1]
    tokens, spec, last = work.batch * work.context, work.spec, PIECES_PER_BLOCK - 1
    block = tokens * _saved_per_token(step)
    whole, entry = sum(piece.flops for piece in inner), 2.0 * tokens * spec.hidden
    regions = []
    for number, piece in enumerate(inner):
        blocks = spec.layers * piece.flops / whole  # blocks are alike, and share their products and bytes
        working = block if number % PIECES_PER_BLOCK == last else 0.0
        regions.append(Region(piece=piece, saved=blocks * block, entry=blocks * entry, working=working))
    if policies is None:
        chosen = _policies_of_arm(step, regions)
    else:
        chosen = [policy for policy in policies for _ in range(PIECES_PER_BLOCK)]
    if len(chosen) != len(regions):
        raise ValueError(f"{len(chosen) // PIECES_PER_BLOCK} policies for {len(regions) // PIECES_PER_BLOCK} blocks")
    regions = [replace(region, policy=policy) for region, policy in zip(regions, chosen, strict=True)]
    late = _forwarded(step, regions)
    return [replace(region, forwarded=region.piece.name in late) for region in regions]


def _saved_per_token(step: Step) -> int:
    """Return the bytes that a block saves per token."""
    from memascend.planner.gpu_memory import block_bytes_per_token, megatron_bytes_per_token  # which imports torch

    spec, stack = step.work.spec, step.work.stack
    if stack.megatron_gpus:
        return megatron_bytes_per_token(spec, stack.megatron_gpus)
    return block_bytes_per_token(spec, step.work.context, flash=stack.flash, fused=stack.fused)


def _policies_of_arm(step: Step, regions: list[Region]) -> list[str]:
    """Return the arm's policy for each region, in the order of forward."""
    arm = step.work.arm_name
    if arm in (KEEP, RECOMPUTE):
        return [arm] * len(regions)
    kept = 0 if arm == "as_published" else PIECES_PER_BLOCK
    budget = _taken_in_forward(step) if arm == "hybrid" else float("inf")
    policies, used = [], 0.0
    for region in regions[: len(regions) - kept]:
        used += region.saved
        policies.append(OFFLOAD if used <= budget else KEEP)
    return policies + [KEEP] * kept


# -- timing of stores and loads ----------------------------------------------------------------------------------------


def _rates(step: Step) -> tuple[float, float, float] | None:
    """Return the GPU's FLOP/s and the bytes per second written to and read from its drive; None if unspecified."""
    machine, ranks = step.machine, step.work.ranks
    if machine is None or not (
        machine.gpu_flops_per_s and machine.ssd_read_bytes_per_s and machine.ssd_write_bytes_per_s
    ):
        return None
    link = machine.pcie_bytes_per_s or float("inf")
    write, read = (min(link, rate / ranks) for rate in (machine.ssd_write_bytes_per_s, machine.ssd_read_bytes_per_s))
    return machine.gpu_flops_per_s * step.costs.gpu_efficiency, write, read


def _taken_in_forward(step: Step) -> float:
    """Return the bytes that the drive takes during forward; infinite without rates."""
    rates = _rates(step)
    if rates is None:
        return float("inf")
    seconds = sum(_products(step, "forward", piece) for piece in step.pieces) / rates[0]
    return _SHARE_OF_RATE * rates[1] * seconds


def _forwarded(step: Step, regions: list[Region]) -> set[str]:
    """Return the names of the forwarded pieces, assuming that backward follows forward at once; none without rates."""
    rates = _rates(step)
    if rates is None:
        return set()
    flops, write, read = rates
    at, stored, ends = _products(step, "forward", step.pieces[0]) / flops, 0.0, {}
    for region in regions:
        at += _products(step, "forward", region.piece) / flops
        if region.policy == OFFLOAD:
            stored = ends[region.piece.name] = max(stored, at) + region.saved / write
    at += sum(_products(step, phase, step.pieces[-1]) for phase in ("forward", "backward")) / flops
    late = set()
    for region in reversed(regions):
        if ends.get(region.piece.name, 0.0) > at - region.saved / read:
            late.add(region.piece.name)
        at += _products(step, "backward", region.piece, region.policy == RECOMPUTE) / flops
    return late


# -- tasks -------------------------------------------------------------------------------------------------------------


def forward(step: Step, regions: list[Region], *, batch: int = 0, after: str = "") -> str:
    """Add the forward pass and return the name of its last task.

    A piece's saved tensors are in memory from the end of its products; the end of their store frees them, unless they
    are forwarded.
    """
    first, last = step.pieces[0], step.pieces[-1]
    done = _compute(step, "forward", batch, first, (after,))
    for region in regions:
        done = _compute(step, "forward", batch, region.piece, (done,))
        size = region.entry if region.policy == RECOMPUTE else region.saved
        saved = _saves(step, batch, region.piece, size, done)
        if region.policy == OFFLOAD:
            gone = {} if region.forwarded else {SAVED: size}
            _transfer(step, "store", batch, region, after=(saved,), gives=gone)
    done = _compute(step, "forward", batch, last, (done,))
    return _saves(step, batch, last, _loss_bytes(step), done)


def backward(step: Step, regions: list[Region], *, batch: int = 0, after: str) -> str:
    """Add the backward pass in reverse order and return the name of its last task.

    Each piece's memory is freed when backward has processed it.
    """
    last = step.pieces[-1]
    step.pool(SAVED, float("inf"))
    before, done = after, _compute(step, "backward", batch, last, (after,), {SAVED: _loss_bytes(step)})
    loaded, block = "", 0.0
    for region in reversed(regions):
        gives, ready, again = {SAVED: region.saved}, [done], region.policy == RECOMPUTE
        if again:
            block = region.working or block
            gives = {SAVED: block / PIECES_PER_BLOCK + region.entry}
            if region.working:
                name = f"recompute {batch}: {region.piece.name}"
                ready = [step.add(name, "backward", after=(done,), takes={SAVED: region.working})]
        elif region.policy == OFFLOAD and not region.forwarded:
            wait = (before, loaded, f"store {batch}: {region.piece.name}")  # during backward of the following piece
            loaded = _transfer(step, "load", batch, region, after=wait, takes=gives)
            ready.append(loaded)
        before, done = done, _compute(step, "backward", batch, region.piece, ready, gives, recomputed=again)
    return done


def _loss_bytes(step: Step) -> float:
    """Return the bytes of the logits, or of a chunk of them, that the loss needs."""
    from memascend.planner.gpu_memory import logits_bytes  # which imports torch

    work = step.work
    return float(logits_bytes(work.spec, work.batch * work.context, chunked=work.stack.loss != "plain"))


def _products(step: Step, phase: str, piece: Piece, recomputed: bool = False) -> float:
    """Return the FLOP of a piece in one micro batch."""
    return step.products(phase, piece, recomputed=recomputed) / step.work.accumulation


def _stands_for(step: Step) -> float:
    """Return the number of micro batches for which each simulated one stands."""
    return step.work.accumulation / min(step.work.accumulation, _MOST_BATCHES)


def _compute(
    step: Step,
    phase: str,
    batch: int,
    piece: Piece,
    after: Sequence[str],
    gives: Mapping[str, float] | None = None,
    *,
    recomputed: bool = False,
) -> str:
    """Add the products of a piece and return the task's name."""
    needs = {"gpu0": _stands_for(step) * _products(step, phase, piece, recomputed)}
    return step.add(f"{phase} {batch}: {piece.name}", phase, needs, after=after, gives=gives)


def _saves(step: Step, batch: int, piece: Piece, nbytes: float, after: str) -> str:
    """Add a task that takes memory for saved tensors at the end of the products that compute them."""
    return step.add(f"save {batch}: {piece.name}", "forward", after=(after,), takes={SAVED: nbytes})


def _transfer(
    step: Step,
    what: str,
    batch: int,
    region: Region,
    *,
    after: Sequence[str],
    takes: Mapping[str, float] | None = None,
    gives: Mapping[str, float] | None = None,
) -> str:
    """Add a transfer between GPU and drive, over the GPU's link."""
    moved = _stands_for(step) * region.saved
    if what == "store":
        step.activation_bytes += step.work.ranks * moved
    direction, link, phase = ("write", "up", "forward") if what == "store" else ("read", "down", "backward")
    needs = {f"ssd.{direction}": step.work.ranks * moved, f"pcie0.{link}": moved}
    return step.add(f"{what} {batch}: {region.piece.name}", phase, needs, after=after, takes=takes, gives=gives)
