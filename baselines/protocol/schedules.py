"""Parts of a step that several systems share, as tasks. A system's `schedule.py` says which it has, and in which order.

Each function adds one phase to a `memascend.planner.step.Step` and returns the name of the task that ends it.
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
_EMBEDDING_BUFFERS = 2  # "2 embedding" of MemAscend IV-B
_GROUPS = "sub-groups"
_MOST_GROUPS = 32  # sub-groups beyond this many are folded: they follow one another, so their seconds add up


Arrived = Callable[["Piece", str], list[str]]


def forward(step: Step, *, weights_wait: bool = True, stores_checkpoints: bool = False) -> str:
    """Weights come from where they wait, piece by piece and ahead of the GPU (or are there: `weights_wait` False);
    activation checkpoints leave it for host memory, and with `stores_checkpoints` go on to the SSD.
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
    """The blocks in reverse. Weights come once more, checkpoints come back, each block is recomputed (with
    checkpointing) and differentiated, and its gradients go to the host.

    `arrived(piece, task)` adds what follows when the gradients of a piece are there, which `task` ends with; the phase
    ends when the tasks that it returns have ended. Of several accumulated batches that is at the last one.
    """
    earlier = step.work.accumulation - 1 if arrived is not None else 0
    pieces = step.pieces[::-1]
    if earlier:
        first = _Pass(step, "backward", weights_wait, stores_checkpoints, earlier, name="earlier batches, ")
        after = first.add(pieces, after)
    last = _Pass(step, "backward", weights_wait, stores_checkpoints, step.work.accumulation - earlier, arrived)
    return last.add(pieces, after)


def gradients_to_ssd(step: Step) -> Arrived:
    """Gradients go on to the SSD, in the states' dtype and once per step: DeepSpeed accumulates them in host memory,
    and writes them in the backward pass of the last batch.
    """
    shares = dict(zip(step.pieces, step.divide(step.swapped_states_bytes, step.pieces), strict=True))

    def arrived(piece: Piece, task: str) -> list[str]:
        needs = {"ssd.write": shares[piece]}
        return [step.add(f"write gradients of {piece.name}", "backward", needs, after=(task,))] if shares[piece] else []

    return arrived


@dataclass(frozen=True)
class _Pass:
    """One pass through the model, for so many `batches` of the accumulated ones; `name` begins that of each task."""

    step: Step
    phase: str
    weights_wait: bool
    stores_checkpoints: bool
    batches: int
    arrived: Arrived | None = None
    name: str = ""

    @property
    def back(self) -> bool:
        return self.phase == "backward"

    def add(self, pieces: list[Piece], after: str) -> str:
        """The four things that overlap: reads into free buffers, copies to the GPU, products, and what comes back.

        A buffer of the pool is taken when a read begins and given back when the GPU is done with the piece, so the pool
        decides how far reads run ahead. Reads follow one another in the order of use, and so do copies.
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
        """Of weights into a buffer of the pool, and of a checkpoint that has gone to the SSD."""
        if self.weights_wait and piece.stored_bytes:
            needs = {"ssd.read": self.batches * piece.stored_bytes}
            name = f"{self.name}{self.phase}: read {piece.name}"
            yield {"name": name, "phase": self.phase, "needs": needs, "takes": _buffer(piece)}
        if self.back and self.stores_checkpoints and piece.checkpoint_bytes:
            needs = {"ssd.read": self.batches * self.step.work.ranks * piece.checkpoint_bytes}
            yield {"name": f"{self.name}read checkpoint of {piece.name}", "phase": self.phase, "needs": needs}

    def _copied(self, piece: Piece) -> dict[str, float]:
        """What copying weights, and in backward the checkpoint, to the GPU needs; nothing where nothing is copied."""
        ranks = self.step.work.ranks
        weights = self.step.gathered_share * piece.weight_bytes if self.weights_wait else 0
        kept = piece.checkpoint_bytes if self.back else 0
        if not (self.step.work.offloads and weights + kept):
            return {}
        moved = self.step.memory(weights=self.batches * ranks * weights, activations=self.batches * ranks * kept)
        return {"pcie0.down": self.batches * (weights + kept)} | moved

    def _outward(self, piece: Piece, computed: str) -> Iterator[str]:
        """Tasks that take gradients, or in forward the checkpoint, from the GPU, and what follows them."""
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
    """The embedding and the output matrix have buffers of their own."""
    if part_of(piece) in (EMBEDDING, OUTPUT):
        return {EMBEDDING_BUFFERS: 1}
    return {PARAMETER_POOL: piece.weight_bytes}


def overflow_check(step: Step, *, after: str, chain: bool) -> str:
    """Between backward and optimizer, with fp16 alone: every gradient in host memory is looked at once."""
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
    """Sub-group by sub-group: read states, update, write them and the new weights, one after the other (DeepSpeed's
    defaults `pipeline_read` and `pipeline_write` false), or, `pipelined`, of three sub-groups side by side. Gradients
    come along unless the arm keeps them in memory. `state_tensors`: master and moments, or moments alone.
    `gradient_bytes`: of all gradients, in another type than the states'; `reads_weights`: which are their own masters.
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
    """AdamW over states that never leave host memory."""
    return step.add("AdamW", "optimizer", {"cpu": step.adamw_s(step.work.spec.parameters)}, after=(after,))


def _share(whole: int, part: int, parts: int) -> int:
    return whole * (part + 1) // parts - whole * part // parts
