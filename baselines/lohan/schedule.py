"""Schedule of a step of LoHan: during backward, the optimizer processes each gradient as it arrives (active gradient
offloading, its section IV-C and Fig. 3).

    optimized              GPU   | b3 | b2 | b1 | b0 |
                           up    .| g3 | g2 | g1 | g0 |
                           SSD   |s3| |s2| w3 |s1| w2 | ...      states are read ahead, so that three stages overlap
                           CPU        |A3|  |A2|  |A1|  |A0|
    naive                  read, update and write of a piece follow one another, and the next piece waits for them
    none                   as ZeRO-Infinity: gradients wait on the SSD, the optimizer comes after (LoHan+ZeRO in Fig. 7)

A step's SSD traffic is the paper's: 2P of weights read in forward, 14P read in backward (2P weights, 12P states), and
14P written. Inputs of blocks are stored on the SSD, as in the streaming engine, and each block is recomputed.
`as_published` is `optimized`, with the additional swapping of the paper's Algorithm 1 (section IV-D), so that less is
recomputed; `released` swaps what the authors' released script does (erratum L18). If the parts of a workload name one
of these rules (`swap`), it applies in any arm.

In a run (`Workload.device` is known) the engine cuts the embedding and output matrices by rows, and a tied matrix has
two gradients, the first of which waits on the SSD; in the paper's steps the matrices are in one piece.

With a single version of the states from which a step can be repeated, all gradients must have arrived before the first
is used, so they wait on the SSD in every arm. With several accumulated batches, those of the earlier batches wait too.
(The paper has neither.) The simulated steps are not clipped; with two versions, such steps move no bytes for clipping
(`memascend.engine.speculation`). The bytes that a plan prints are exactly the engine's (`run.py`); these tasks
determine the time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from memascend.baselines.lohan.equations import Net, Rates
from memascend.baselines.lohan.options import SWAPPING_ARMS, step_options
from memascend.baselines.protocol.schedules import backward, forward, swapping_optimizer
from memascend.planner.pieces import EMBEDDING, OUTPUT, cut, part_of
from memascend.planner.workload import ELEMENT_BYTES, INT8_MOMENTS_BYTES
from memascend.swapping import RULES

if TYPE_CHECKING:
    from memascend.baselines.protocol.schedules import Arrived
    from memascend.planner.pieces import Piece
    from memascend.planner.step import Step
    from memascend.planner.workload import Workload

STATE_SLOTS = "state slots"
MOMENTS = 2
_SLOTS = 3  # one being read, one being updated, one being written (Fig. 3b)


def schedule(step: Step) -> None:
    """Add the passes and the optimizer, as part of backward unless all gradients have to wait."""
    if step.work.device is not None:
        step.pieces = by_slices(step)
    if rule := swapping_rule(step.work):
        swap_activations(step, rule)
    done = forward(step, stores_checkpoints=True)
    if gradients_wait(step.work):
        done = backward(step, after=done, stores_checkpoints=True, arrived=waiting_gradients(step))
        swapping_optimizer(
            step,
            after=done,
            state_tensors=state_tensors(step),
            gradient_bytes=gradient_bytes(step),
            reads_weights=own_masters(step.work),
            pipelined=step.work.arm_name not in ("naive", "none"),
        )
    else:
        backward(step, after=done, stores_checkpoints=True, arrived=active_gradients(step, done))


def by_slices(step: Step) -> list[Piece]:
    """Return the pieces of a run, with embedding and output matrix cut into slices.

    The engine cuts them by rows (`memascend.engine.layout`) and reads, computes and updates them slice by slice.
    """
    first, *blocks, last = step.pieces
    return [*cut(first, _slices(step.work, "embedding")), *blocks, *cut(last, _slices(step.work, "head"))]


def _slices(work: Workload, use: str) -> list[int]:
    """Return the elements of each slice of the `embedding` or `head` matrix; an empty list if it is in one piece."""
    from memascend.baselines.lohan.run import layout_of  # which imports torch

    layout, uses = layout_of(work)
    return [unit.numel for unit in layout.units if unit.matrix and getattr(uses[unit.matrix], use)]


def first_gradients(step: Step) -> dict[str, int]:
    """Return, by piece, the bytes of a tied output matrix's gradients, which wait on the SSD for the embedding's.

    The result is empty if the matrices are not tied or not sliced.
    """
    numels = _slices(step.work, "head") if step.work.device is not None and step.work.spec.tied else []
    size = ELEMENT_BYTES[step.work.gradients]
    return {f"{part} {number}": size * numel for number, numel in enumerate(numels) for part in (EMBEDDING, OUTPUT)}


def own_masters(work: Workload) -> bool:
    """Return whether the weights are their own master (`memascend.engine.layout.Layout.own_masters`).

    They are if they have the states' dtype, and with 8-bit moments.
    """
    return work.kept_states in (work.dtype, "int8")


def state_tensors(step: Step) -> float:
    """Return the number of state tensors in addition to the weights, as multiples of one tensor in the states' dtype.

    They are the master and two moments, or only the moments if the weights are their own master; the scales of 8-bit
    moments are included.
    """
    if step.work.kept_states == "int8":
        return INT8_MOMENTS_BYTES / step.state_bytes
    return MOMENTS if own_masters(step.work) else 1 + MOMENTS


def gradients_wait(work: Workload) -> bool:
    """Return whether all gradients of an unclipped step wait until the last one has arrived (`memascend.engine`)."""
    return step_options(work).waits


def gradient_bytes(step: Step) -> int:
    """Return the bytes of all gradients in the dtype in which they wait."""
    return step.swapped_states_bytes // step.state_bytes * ELEMENT_BYTES[step.work.gradients]


def waiting_gradients(step: Step) -> Arrived:
    """Return the callback that writes each piece's gradients to the SSD; those of several batches accumulate there."""
    batches = step.work.accumulation
    shares = dict(zip(step.pieces, step.divide(gradient_bytes(step), step.pieces), strict=True))

    def arrived(piece: Piece, gradient: str) -> list[str]:
        if not (nbytes := shares[piece]):
            return []
        needs = {"ssd.write": batches * nbytes}
        if batches > 1:
            needs["ssd.read"] = (batches - 1) * nbytes
        return [step.add(f"write gradients of {piece.name}", "backward", needs, after=(gradient,))]

    return arrived


def swapping_rule(work: Workload) -> str | None:
    """Return the rule by which more than the inputs of blocks is swapped, or None.

    It is the arm's rule or the one that the workload's parts name.
    """
    return SWAPPING_ARMS.get(work.arm_name) or work.arrangement.parts.get("swap")


def swap_activations(step: Step, rule: str) -> None:
    """Apply a swapping rule: let pieces carry the bytes that it swaps on this machine, and reduce the recomputation.

    The operators are those of a GPT of the model's depth and width; GPUs share the SSDs equally. Without the machine's
    rates, only the inputs of blocks are swapped.
    """
    work, machine = step.work, step.machine
    if machine is None or None in (machine.gpu_flops_per_s, machine.pcie_bytes_per_s, machine.ssd_read_bytes_per_s):
        return
    spec = work.spec
    sizes = {"layers": spec.layers, "hidden": spec.hidden, "vocab": spec.vocab}
    net = Net(batch=work.batch, context=work.context, gpus=work.ranks, **sizes)
    rates = Rates(
        gpu=machine.gpu_flops_per_s * step.costs.gpu_efficiency,
        link=machine.pcie_bytes_per_s,
        read=machine.ssd_read_bytes_per_s,
        write=machine.ssd_write_bytes_per_s,
    )
    swapped = RULES[rule](net, rates)
    more = swapped / net.between_blocks
    step.pieces = [replace(piece, checkpoint_bytes=round(more * piece.checkpoint_bytes)) for piece in step.pieces]
    again = net.recomputed_flops(swapped) / net.block_flops
    step.costs = replace(step.costs, backward_products=step.costs.backward_products + again - 1.0)


def active_gradients(step: Step, begin: str) -> Arrived:
    """Return the callback that reads a piece's states, updates them with its gradient, and writes states and weights.

    The first read starts after the task `begin`. A piece's states occupy a slot from the start of their read to the end
    of their write. With several accumulated batches only the last one updates; gradients of the earlier ones accumulate
    on the SSD.
    """
    overlapped = step.work.arm_name != "naive"
    pieces = step.pieces[::-1]
    on_ssd = round(state_tensors(step) * step.swapped_states_bytes)
    states = step.divide(on_ssd, pieces)
    of_piece = dict(zip(pieces, states, strict=True))
    weights_of = dict(zip(pieces, step.divide(step.swapped_weight_bytes, pieces), strict=True))
    earlier = (step.work.accumulation - 1) * gradient_bytes(step)
    earlier_of = dict(zip(pieces, step.divide(earlier, pieces), strict=True))
    first_of = first_gradients(step)
    step.pool(STATE_SLOTS, _SLOTS if overlapped else 1)
    last = {"read": begin, "write": begin}

    def arrived(piece: Piece, gradient: str) -> list[str]:
        nbytes, phase, waited = of_piece[piece], "backward", first_of.get(piece.name, 0)
        written = []
        if waited and part_of(piece) == OUTPUT:
            name = f"write first gradients of {piece.name}"
            written, waited = [step.add(name, phase, {"ssd.write": waited}, after=(gradient,))], 0
        first = (last["read"],) if overlapped else (last["write"], gradient)
        read = step.add(
            f"read states of {piece.name}",
            phase,
            {"ssd.read": nbytes + earlier_of[piece] + waited},
            after=first,
            takes={STATE_SLOTS: 1},
        )
        needs = {"cpu": step.adamw_s(piece.parameters)}
        update = step.add(f"AdamW {piece.name}", phase, needs, after=(read, gradient))
        needs = {"ssd.write": nbytes + weights_of[piece] + earlier_of[piece]}
        write = step.add(f"write states of {piece.name}", phase, needs, after=(update,), gives={STATE_SLOTS: 1})
        last["read"], last["write"] = read, write
        return [*written, write]

    return arrived
