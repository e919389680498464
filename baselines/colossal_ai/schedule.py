"""Schedule of a step of Colossal-AI: weights in host memory, moments on the SSD, the optimizer after backward.

    PCIe   |   weights down           |   weights down, gradients up   |
    GPU    |     products             |     recompute, backward        |
    CPU    |                          |                                |  AdamW 0 | AdamW 1 | ...
    SSD    |                          |                         read 0 |  read 1  | write 0, read 2 | ...

Its documentation of NVMe offload calls the update pipelined: reading, computing and offloading of three tensors
overlap. The overhead of its runtime is not published, and not modelled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.baselines.protocol.schedules import backward, forward

if TYPE_CHECKING:
    from memascend.planner.step import Step

_SLOTS = "moments on their way"
_IN_FLIGHT = 3  # tensors: one being read, one being updated, one being written
_MOMENTS = 2


def schedule(step: Step) -> None:
    """Add the forward pass, the backward pass and after them the optimizer."""
    optimizer(step, backward(step, after=forward(step)))


def optimizer(step: Step, after: str) -> str:
    """Add the update, piece by piece: read the moments, update the masters in host memory, write the moments.

    Returns the name of the last task.
    """
    slots = step.pool(_SLOTS, _IN_FLIGHT)
    nbytes = _MOMENTS * step.state_bytes * step.work.spec.parameters
    step.store("moments", nbytes)
    pieces = [piece for piece in step.pieces if piece.parameters]
    read = updated = written = after
    for piece, moments in zip(pieces, step.divide(nbytes, pieces), strict=True):
        needs = {"ssd.read": moments}
        read = step.add(f"read moments of {piece.name}", "optimizer", needs, after=(read,), takes={slots: 1})
        needs = {"cpu": step.adamw_s(piece.parameters)}
        updated = step.add(f"AdamW {piece.name}", "optimizer", needs, after=(read, updated))
        needs = {"ssd.write": moments}
        name = f"write moments of {piece.name}"
        written = step.add(name, "optimizer", needs, after=(updated, written), gives={slots: 1})
    return written
