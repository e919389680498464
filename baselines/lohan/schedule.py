"""A step of LoHan: the optimizer works in the backward pass, on each gradient as it arrives (active gradient
offloading, its section IV-C and Fig. 3).

    optimized              GPU   | b3 | b2 | b1 | b0 |
                           up    .| g3 | g2 | g1 | g0 |
                           SSD   |s3| |s2| w3 |s1| w2 | ...      states are read ahead, so that three stages overlap
                           CPU        |A3|  |A2|  |A1|  |A0|
    naive                  read, update and write of a piece follow one another, and the next piece waits for them
    none                   as ZeRO-Infinity: gradients wait on the SSD, the optimizer comes after (LoHan+ZeRO in Fig. 7)

Traffic of a step over the SSD is the paper's: weights 2P in forward, 14P in backward (2P weights, 12P states), and 14P
written. Inputs of blocks wait on the SSD, as the streaming engine keeps them; each block is recomputed. `as_published`
is `optimized` with what the paper's Algorithm 1 swaps besides (section IV-D), so that less is computed again;
`released` swaps what the authors' released script does (erratum L18). A workload whose parts name one of these rules
(`swap`) has it in any arm.

In a run (`Workload.device` is known) the engine cuts embedding and output matrix by rows, and a tied one has two
gradients of which the first waits on the SSD; the paper's steps have them in one piece.

With one version of the states that a step can be done again from, all gradients must have come before one is used: they
wait on the SSD in every arm. Of several batches those of the earlier ones do. (The paper has neither.) Steps are
simulated that are not clipped: with two versions they move nothing for clipping (`memascend.engine.speculation`).
Bytes that a plan prints are the engine's, to the byte (`run.py`); these tasks say how long they take.
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
_SLOTS = 3  # one that is read, one that is updated, one that is written (Fig. 3b)


def schedule(step: Step) -> None:
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
    """The pieces of a run: the engine cuts embedding and output matrix by rows (`memascend.engine.layout`), and reads,
    computes and updates them slice by slice."""
    first, *blocks, last = step.pieces
    return [*cut(first, _slices(step.work, "embedding")), *blocks, *cut(last, _slices(step.work, "head"))]


def _slices(work: Workload, use: str) -> list[int]:
    """Elements of the slices of the matrix that is an `embedding` or a `head`; none where it is in one piece."""
    from memascend.baselines.lohan.run import layout_of  # which imports torch

    layout, uses = layout_of(work)
    return [unit.numel for unit in layout.units if unit.matrix and getattr(uses[unit.matrix], use)]


def first_gradients(step: Step) -> dict[str, int]:
    """Piece -> bytes of the gradients that an output matrix leaves on the SSD, slice by slice, until those of the
    embedding come, which it is as well; empty where they are two matrices, or where it is in one piece."""
    numels = _slices(step.work, "head") if step.work.device is not None and step.work.spec.tied else []
    size = ELEMENT_BYTES[step.work.gradients]
    return {f"{part} {number}": size * numel for number, numel in enumerate(numels) for part in (EMBEDDING, OUTPUT)}


def own_masters(work: Workload) -> bool:
    """Whether the weights are the only master (`memascend.engine.layout.Layout.own_masters`): where they are of the
    states' type, and beside 8-bit moments."""
    return work.kept_states in (work.dtype, "int8")


def state_tensors(step: Step) -> float:
    """Beside the weights: master and two moments, or the moments alone where the weights are their own master; of 8-bit
    moments with their scales."""
    if step.work.kept_states == "int8":
        return INT8_MOMENTS_BYTES / step.state_bytes
    return MOMENTS if own_masters(step.work) else 1 + MOMENTS


def gradients_wait(work: Workload) -> bool:
    """Whether all gradients of a step that is not clipped wait until the last one has come (`memascend.engine`)."""
    return step_options(work).waits


def gradient_bytes(step: Step) -> int:
    """Of all gradients, as they wait."""
    return step.swapped_states_bytes // step.state_bytes * ELEMENT_BYTES[step.work.gradients]


def waiting_gradients(step: Step) -> Arrived:
    """Each piece's gradients go on to the SSD, and those of several batches are added up there."""
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
    """By which an arm swaps more than the inputs of blocks: its own, or the one that the workload's parts name."""
    return SWAPPING_ARMS.get(work.arm_name) or work.arrangement.parts.get("swap")


def swap_activations(step: Step, rule: str) -> None:
    """Pieces carry what the rule swaps on this machine, and backward computes only the rest again.

    The operators are those of a GPT of the model's depth and width; GPUs share the SSDs alike. Without a machine's
    rates nothing but the inputs of blocks is swapped.
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
    """Read states, update with the gradient that has arrived, write states and weights; `begin`: no earlier than that.

    Each piece's states take a slot from their read to the end of their write. Only the last of several accumulated
    batches updates; gradients of the earlier ones wait on the SSD, and are added up there.
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
