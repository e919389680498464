"""Phases of a step that several systems share, as tasks; a system's `schedule.py` combines them.

Each phase function adds its tasks to a `memascend.planner.step.Step` and returns the name of the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memascend.planner.pieces import EMBEDDING, OUTPUT, part_of

if TYPE_CHECKING:
    from memascend.planner.pieces import Piece
    from memascend.planner.step import Step

PARAMETER_POOL, EMBEDDING_BUFFERS = "parameter pool", "embedding buffers"
_EMBEDDING_BUFFERS = 2  # "2 embedding" in MemAscend IV-B
_GROUPS = "sub-groups"
_MOST_GROUPS = 32  # more sub-groups are folded into this many: they run in sequence, so their times add up


Arrived = Callable[["Piece", str], list[str]]


def forward(step: Step, *, weights_wait: bool = True, stores_checkpoints: bool = False) -> str:
    """Add the forward pass.

    Weights are read piece by piece, ahead of the GPU, unless `weights_wait` is False and they are on the GPU already.
    Activation checkpoints go to host memory and, with `stores_checkpoints`, on to the SSD.
    """
    return _Pass(step, "forward", weights_wait, stores_checkpoints, step.work.accumulation).add(step.pieces, "")


def backward(
    step: Step,
    *,
    after: str,
    weights_wait: bool = True,
    stores_checkpoints: bool = False,
    arrived: Arrived | None = None,
) -> str:
    """Add the backward pass, with the blocks in reverse order, after the task `after`.

    Weights and checkpoints are read again, each block is recomputed (with checkpointing) and differentiated, and its
    gradients go to the host. `arrived(piece, task)` adds the tasks that follow the arrival of a piece's gradients at
    the end of `task`, and returns those which have to end before the phase does. With several accumulated batches, it
    is called for the last one only.
    """
    earlier = step.work.accumulation - 1 if arrived is not None else 0
    pieces = step.pieces[::-1]
    if earlier:
        first = _Pass(step, "backward", weights_wait, stores_checkpoints, earlier, name="earlier batches, ")
        after = first.add(pieces, after)
    last = _Pass(step, "backward", weights_wait, stores_checkpoints, step.work.accumulation - earlier, arrived)
    return last.add(pieces, after)


def gradients_to_ssd(step: Step) -> Arrived:
    """Return the callback that writes a piece's gradients to the SSD, in the states' dtype and once per step.

    DeepSpeed accumulates them in host memory, and writes them in the backward pass of the last batch.
    """
    shares = dict(zip(step.pieces, step.divide(step.swapped_states_bytes, step.pieces), strict=True))

    def arrived(piece: Piece, task: str) -> list[str]:
        needs = {"ssd.write": shares[piece]}
        return [step.add(f"write gradients of {piece.name}", "backward", needs, after=(task,))] if shares[piece] else []

    return arrived


@dataclass(frozen=True)
class _Pass:
    """One pass through the model, for `batches` of the accumulated batches; `name` is a prefix of its task names."""

    step: Step
    phase: str
    weights_wait: bool
    stores_checkpoints: bool
    batches: int
    arrived: Arrived | None = None
    name: str = ""

    @property
    def back(self) -> bool:
        """Whether this is a backward pass."""
        return self.phase == "backward"

    def add(self, pieces: list[Piece], after: str) -> str:
        """Add the tasks of the pass: reads into free buffers, copies to the GPU, products, and copies from the GPU.

        All four overlap. A buffer of the pool is taken when a read begins and released when the GPU is done with the
        piece, so the pool decides how far reads run ahead. Reads are sequential in the order of use, and so are copies.
        Returns the name of the last task.
        """
        step, phase = self.step, self.phase
        if step.work.swaps and self.weights_wait:
            step.pool(PARAMETER_POOL, step.pool_bytes)
            step.pool(EMBEDDING_BUFFERS, _EMBEDDING_BUFFERS)
        last_read = last_copy = after
        done = []
        for piece in pieces:
            sources = []
            for read in self._reads(piece):
                last_read = step.add(after=(last_read,), **read)
                sources.append(last_read)
            if needs := self._copied(piece):
                last_copy = step.add(
                    f"{self.name}{phase}: copy {piece.name}", phase, needs, after=(last_copy, *sources)
                )
            computed = step.add(
                f"{self.name}{phase}: {piece.name}",
                phase,
                {"gpu0": step.products(phase, piece) * self.batches / step.work.accumulation},
                after=(last_copy,),
                gives=_buffer(piece) if self.weights_wait and piece.stored_bytes else {},
            )
            done += [computed, *self._outward(piece, computed)]
        return step.add(f"{self.name}end of {phase}", phase, after=done)

    def _reads(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yield the reads for a piece: its weights into a buffer of the pool, and a checkpoint that is on the SSD."""
        if self.weights_wait and piece.stored_bytes:
            needs = {"ssd.read": self.batches * piece.stored_bytes}
            name = f"{self.name}{self.phase}: read {piece.name}"
            yield {"name": name, "phase": self.phase, "needs": needs, "takes": _buffer(piece)}
        if self.back and self.stores_checkpoints and piece.checkpoint_bytes:
            needs = {"ssd.read": self.batches * self.step.work.ranks * piece.checkpoint_bytes}
            yield {"name": f"{self.name}read checkpoint of {piece.name}", "phase": self.phase, "needs": needs}

    def _copied(self, piece: Piece) -> dict[str, float]:
        """Return the work of copying weights (and in backward the checkpoint) to the GPU; empty if none is copied."""
        ranks = self.step.work.ranks
        weights = self.step.gathered_share * piece.weight_bytes if self.weights_wait else 0
        kept = piece.checkpoint_bytes if self.back else 0
        if not (self.step.work.offloads and weights + kept):
            return {}
        moved = self.step.memory(weights=self.batches * ranks * weights, activations=self.batches * ranks * kept)
        return {"pcie0.down": self.batches * (weights + kept)} | moved

    def _outward(self, piece: Piece, computed: str) -> Iterator[str]:
        """Yield the tasks that move gradients, or in forward the checkpoint, from the GPU, and those that follow."""
        step, ranks = self.step, self.step.work.ranks
        outward = piece.weight_bytes / ranks if self.back else piece.checkpoint_bytes
        if not (step.work.offloads and outward):
            return
        what = "gradients of" if self.back else "checkpoint of"
        arriving = {"arriving_gradients" if self.back else "activations": self.batches * ranks * outward}
        needs = {"pcie0.up": self.batches * outward, **step.memory(**arriving)}
        sent = step.add(f"{self.name}{what} {piece.name}", self.phase, needs, after=(computed,))
        yield sent
        if self.back and self.arrived is not None:
            yield from self.arrived(piece, sent)
        if not self.back and self.stores_checkpoints:
            needs = {"ssd.write": self.batches * ranks * outward}
            yield step.add(f"write checkpoint of {piece.name}", self.phase, needs, after=(sent,))


def _buffer(piece: Piece) -> dict[str, float]:
    """Return the buffers that a piece takes; the embedding and the output matrix have buffers of their own."""
    if part_of(piece) in (EMBEDDING, OUTPUT):
        return {EMBEDDING_BUFFERS: 1}
    return {PARAMETER_POOL: piece.weight_bytes}


def overflow_check(step: Step, *, after: str, chain: bool) -> str:
    """Add the overflow check between backward and optimizer, which reads every gradient in host memory; fp16 only."""
    if step.work.dtype != "fp16":
        return after
    return step.add("overflow check", "overflow check", {"cpu": step.check_s(chain=chain)}, after=(after,))


def swapping_optimizer(
    step: Step,
    *,
    after: str,
    state_tensors: float = 3,
    gradient_bytes: int | None = None,
    reads_weights: bool = False,
    pipelined: bool | None = None,
) -> str:
    """Add the optimizer, which reads, updates and writes the states, and writes new weights, by sub-group.

    The three stages run in sequence (DeepSpeed's defaults `pipeline_read` and `pipeline_write` false) or, if
    `pipelined`, overlap for three sub-groups. Gradients are read too unless the arm keeps them in memory.
    `state_tensors` counts master and moments, or only moments. `gradient_bytes` are the bytes of all gradients if their
    dtype differs from the states'. With `reads_weights`, weights are their own masters and are read too.
    """
    work, states = step.work, step.swapped_states_bytes
    on_ssd = round(state_tensors * states)
    gradients = states if work.arrangement.swaps_gradients else 0
    gradients = gradients if gradient_bytes is None else gradient_bytes
    weights = step.swapped_weight_bytes
    step.store("weights", weights)
    step.store("master weights and moments", on_ssd)
    step.store("gradients", gradients)
    count = min(len(work.sub_groups()), _MOST_GROUPS)
    update_s = step.adamw_s(work.spec.parameters) / count
    pipelined = work.arrangement.pipelined if pipelined is None else pipelined
    one = {step.pool(_GROUPS, 3): 1} if pipelined else {}
    read = update = written = after
    for group in range(count):
        needs = {"ssd.read": _share(on_ssd + gradients + reads_weights * weights, group, count)}
        before = read if pipelined else written
        read = step.add(f"read states {group}", "optimizer", needs, after=(before,), takes=one)
        update = step.add(f"AdamW {group}", "optimizer", {"cpu": update_s}, after=(read, update))
        needs = {"ssd.write": _share(on_ssd + weights, group, count)}
        written = step.add(f"write states {group}", "optimizer", needs, after=(update, written), gives=one)
    return written


def host_optimizer(step: Step, *, after: str) -> str:
    """Add AdamW over states that stay in host memory."""
    return step.add("AdamW", "optimizer", {"cpu": step.adamw_s(step.work.spec.parameters)}, after=(after,))


def _share(whole: int, part: int, parts: int) -> int:
    """Return a part's share of `whole`; the shares differ by at most one and sum to it."""
    return whole * (part + 1) // parts - whole * part // parts
