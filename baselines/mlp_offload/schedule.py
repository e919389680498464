"""A step of MLP-Offload: weights stay on the GPUs, the update streams optimizer states over several paths at once.

    NVMe   |            | read | write | read | write | ...        each path works through its own sub-groups
    PFS    |            |   read   |   write   |   read ...        so that all paths end together
    CPU    |            |      | Adam | Adam | Adam | ...
    GPU    | fwd | bwd  |
           gradients stay in host memory in 16 bits and become fp32 where the update meets them (its section 3.2)

Its parts, each of which an arm may lack: several paths (3.1), their sub-groups divided so that their times are equal
(or by its Eq. 1, `as_published`, or a ratio `by_hand`); one process at a time on a path (`tier_exclusive`, which one
rank that stands for all always is); an update order that turns with each step, so that the sub-groups left in host
memory are met first (3.3); gradients that are not written. DeepSpeed's ZeRO-3 lacks them all: one path, gradients
written in fp32 in backward and read back in the update; its reads and writes are pipelined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baselines.protocol.schedules import backward, forward
from memascend.planner.derived_sizes import held_in
from memascend.storage.placement import Rates, weights

if TYPE_CHECKING:
    from baselines.protocol.schedules import Arrived
    from memascend.planner.pieces import Piece
    from memascend.planner.step import Step

_SLOTS = 3  # sub-groups under way on a path: one that is read, one that is updated, one that is written
_PARTS = 48  # the update is folded into so many pieces


@dataclass(frozen=True, kw_only=True)
class StoragePath:
    """A path; `share` of all sub-groups lie there."""

    name: str
    share: float


def schedule(step: Step) -> None:
    parts = step.work.arrangement
    waits = not parts.weights_on_gpu
    paths = paths_of(step)
    done = forward(step, weights_wait=waits)
    writes = parts.swaps_gradients
    done = backward(step, after=done, weights_wait=waits, arrived=gradients_to_paths(step, paths) if writes else None)
    update(step, done, paths, held=held_groups(step) if parts.turns_order else 0, reads_gradients=writes)


def held_groups(step: Step) -> int:
    """Sub-groups that stay in host memory: as many as the optimizer's buffers are for."""
    return held_in(step.work.optimizer_buffers, step.work.arrangement.swaps_gradients)


def paths_of(step: Step) -> list[StoragePath]:
    """Those of the testbed, or its SSD as one; a share of each by the arm's rule."""
    described = step.machine.described.get("paths", []) if step.machine is not None else []
    if not described or not step.work.arrangement.over_paths:
        return [StoragePath(name=described[0]["name"] if described else "ssd", share=1.0)]
    used = described[:1] if step.work.arrangement.first_path else described
    rates = [Rates(_rate(path["read_gb_per_s"]), _rate(path["write_gb_per_s"])) for path in used]
    placement = step.work.arrangement.parts.get("tier_placement", "balanced")
    shares = weights(placement, rates) if len(used) > 1 else [1.0]
    return [StoragePath(name=path["name"], share=share / sum(shares)) for path, share in zip(used, shares, strict=True)]


def _rate(value: object) -> float:
    return float(value["value"] if isinstance(value, dict) else value)


def gradients_to_paths(step: Step, paths: list[StoragePath]) -> Arrived:
    """fp32 gradients of each piece, to the paths by their shares."""
    shares = dict(zip(step.pieces, step.divide(step.swapped_states_bytes, step.pieces), strict=True))

    def arrived(piece: Piece, task: str) -> list[str]:
        return [
            step.add(
                f"write gradients of {piece.name} to {path.name}",
                "backward",
                {f"{path.name}.write": step.work.accumulation * path.share * shares[piece]},
                after=(task,),
            )
            for path in paths
        ]

    return arrived


def update(
    step: Step, after: str, paths: list[StoragePath], *, held: int, reads_gradients: bool, parts: int = _PARTS
) -> str:
    """Every path reads, and after AdamW writes, its own part of the states; what host memory holds is only updated,
    with gradients that are read all the same where backward wrote them."""
    states = step.swapped_states_bytes
    kept = min(1.0, held / len(step.work.sub_groups()))
    step.store("master weights and moments", 3 * states)
    if reads_gradients:
        step.store("gradients", states)
    done = []
    if kept:
        seconds = step.adamw_s(kept * step.work.spec.parameters)
        done.append(step.add("AdamW of what host memory holds", "optimizer", {"cpu": seconds}, after=(after,)))
    for path in paths:
        slots = step.pool(f"slots of {path.name}", _SLOTS)
        amount = (1 - kept) * path.share / parts
        last = after
        for part in range(parts):
            gradients = path.share / parts if reads_gradients else 0.0
            needs = {f"{path.name}.read": (amount * 3 + gradients) * states}
            last = step.add(f"read {path.name} {part}", "optimizer", needs, after=(last,), takes={slots: 1})
            needs = {"cpu": step.adamw_s(amount * step.work.spec.parameters)}
            updated = step.add(f"AdamW {path.name} {part}", "optimizer", needs, after=(last,))
            needs = {f"{path.name}.write": amount * 3 * states}
            done.append(step.add(f"write {path.name} {part}", "optimizer", needs, after=(updated,), gives={slots: 1}))
    return step.add("end of the update", "optimizer", after=done)
