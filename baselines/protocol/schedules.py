"""Parts of a step that several systems share, as tasks. A system's `schedule.py` says which it has, and in which order.

Each function adds one phase to a `memascend.planner.step.Step` and returns the name of the task that ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from memascend.planner.pieces import EMBEDDING, OUTPUT

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
    return _through_the_model(step, "forward", step.pieces, "", weights_wait, stores_checkpoints, None)


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
    backwards = (step, "backward", step.pieces[::-1])
    if earlier:
        name = "earlier batches, "
        after = _through_the_model(*backwards, after, weights_wait, stores_checkpoints, None, earlier, name)
    last = step.work.accumulation - earlier
    return _through_the_model(*backwards, after, weights_wait, stores_checkpoints, arrived, last)


def gradients_to_ssd(step: Step) -> Arrived:
    """Gradients go on to the SSD, in the states' dtype and once per step: DeepSpeed accumulates them in host memory,
    and writes them in the backward pass of the last batch.
    """
    shares = dict(zip(step.pieces, step.divide(step.swapped_states_bytes, step.pieces), strict=True))

    def arrived(piece: Piece, task: str) -> list[str]:
        needs = {"ssd.write": shares[piece]}
        return [step.add(f"write gradients of {piece.name}", "backward", needs, after=(task,))] if shares[piece] else []

    return arrived


def _through_the_model(
    step: Step,
    phase: str,
    pieces: list[Piece],
    after: str,
    weights_wait: bool,
    stores_checkpoints: bool,
    arrived: Arrived | None,
    batches: int = 0,
    name: str = "",
) -> str:
    """The four things that overlap: reads into free buffers, copies to the GPU, products, and what comes back.

    A buffer of the pool is taken when a read begins and given back when the GPU is done with the piece, so the pool
    decides how far reads run ahead. Reads follow one another in the order of use, and so do copies. `batches`: of the
    accumulated ones (0: all); `name` begins that of each task.
    """
    work, ranks, back = step.work, step.work.ranks, phase == "backward"
    batches = batches or work.accumulation
    if work.swaps and weights_wait:
        step.pool(PARAMETER_POOL, step.pool_bytes)
        step.pool(EMBEDDING_BUFFERS, _EMBEDDING_BUFFERS)
    last_read = last_copy = after
    done = []
    for piece in pieces:
        reads, sources = weights_wait and piece.stored_bytes, []
        if reads:
            needs = {"ssd.read": batches * piece.stored_bytes}
            last_read = step.add(
                f"{name}{phase}: read {piece.name}", phase, needs, after=(last_read,), takes=_buffer(piece)
            )
            sources.append(last_read)
        if back and stores_checkpoints and piece.checkpoint_bytes:
            needs = {"ssd.read": batches * work.ranks * piece.checkpoint_bytes}
            last_read = step.add(f"{name}read checkpoint of {piece.name}", phase, needs, after=(last_read,))
            sources.append(last_read)
        weights = step.gathered_share * piece.weight_bytes if weights_wait else 0
        kept = piece.checkpoint_bytes if back else 0
        if work.offloads and weights + kept:
            needs = {"pcie0.down": batches * (weights + kept)}
            needs |= step.memory(weights=batches * ranks * weights, activations=batches * ranks * kept)
            last_copy = step.add(f"{name}{phase}: copy {piece.name}", phase, needs, after=(last_copy, *sources))
        computed = step.add(
            f"{name}{phase}: {piece.name}",
            phase,
            {"gpu0": step.products(phase, piece) * batches / work.accumulation},
            after=(last_copy,),
            gives=_buffer(piece) if reads else {},
        )
        done.append(computed)
        outward = piece.weight_bytes / work.ranks if back else piece.checkpoint_bytes
        if work.offloads and outward:
            what = "gradients of" if back else "checkpoint of"
            arriving = {"arriving_gradients" if back else "activations": batches * ranks * outward}
            needs = {"pcie0.up": batches * outward, **step.memory(**arriving)}
            sent = step.add(f"{name}{what} {piece.name}", phase, needs, after=(computed,))
            done.append(sent)
            if back and arrived is not None:
                done += arrived(piece, sent)
            if not back and stores_checkpoints:
                needs = {"ssd.write": batches * work.ranks * outward}
                done.append(step.add(f"write checkpoint of {piece.name}", phase, needs, after=(sent,)))
    return step.add(f"{name}end of {phase}", phase, after=done)


def _buffer(piece: Piece) -> dict[str, float]:
    """The embedding and the output matrix have buffers of their own."""
    if piece.name in (EMBEDDING, OUTPUT):
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
