"""Schedule of a step of MLP-Offload: weights stay on the GPUs; the update streams states over several paths at once.

    NVMe   |            | read | write | read | write | ...        each path works through its own sub-groups
    PFS    |            |   read   |   write   |   read ...        so that all paths end together
    CPU    |            |      | Adam | Adam | Adam | ...
    GPU    | fwd | bwd  |
           gradients stay in host memory in 16 bits and are converted to fp32 in the update (its section 3.2)

Its parts, each of which an arm may lack, are: several paths (3.1), with sub-groups divided so that the paths' times are
equal (or by its Eq. 1, `as_published`, or by a fixed ratio, `by_hand`); one process at a time on a path
(`tier_exclusive`, always true for one rank that stands for all); an update order that is reversed with each step, so
that the sub-groups left in host memory come first (3.3); and gradients that are not written. DeepSpeed's ZeRO-3 lacks
them all: it has one path, and writes gradients in fp32 in backward and reads them back in the update; its reads and
writes are pipelined. On a CPU these gradients are written bucket by bucket, the last one after backward.

A rank's sub-groups share a fixed number of slots in host memory, given by its buffers. In the order of the update, the
next sub-group is read once the write of another has freed a slot, whichever paths the two are on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memascend.baselines.protocol import on_cpu
from memascend.baselines.protocol.schedules import backward, forward
from memascend.planner.derived_sizes import cached_sub_groups_in
from memascend.storage.placement import Rates, arrange, weights

if TYPE_CHECKING:
    from memascend.baselines.protocol.schedules import Arrived
    from memascend.planner.pieces import Piece
    from memascend.planner.step import Step

_PIPELINED = 3  # slots that DeepSpeed's swapper uses, even if it has more: it reads one ahead and writes one behind
_RANKS = 4  # simulated ranks that take turns on the paths; further ranks are on equal nodes, in step with them


@dataclass(frozen=True, kw_only=True)
class PathShare:
    """A path with its `rates` (None: unknown) and its `share` of all sub-groups according to the arm's placement."""

    name: str
    share: float
    rates: Rates | None = None


def schedule(step: Step) -> None:
    """Add the passes, the gradients' way to the paths if the arm writes them, and the update over the paths."""
    parts = step.work.arrangement
    waits = not parts.weights_on_gpu
    paths = paths_of(step)
    done = forward(step, weights_wait=waits)
    arrived = None
    if parts.swaps_gradients:
        by_buckets = step.work.on_cpu and not parts.over_paths
        arrived = on_cpu.gradients_by_buckets(step) if by_buckets else gradients_to_paths(step, paths)
    done = backward(step, after=done, weights_wait=waits, arrived=arrived)
    update(step, done, paths)


def slots(step: Step) -> int:
    """Return how many sub-groups of a rank are in host memory at once, which its optimizer buffers determine."""
    parts = step.work.arrangement
    return (
        max(1, cached_sub_groups_in(step.work.optimizer_buffers, parts.swaps_gradients))
        if parts.over_paths
        else _PIPELINED
    )


def paths_of(step: Step) -> list[PathShare]:
    """Return the paths of the testbed, or its SSD as the only path, with their shares by the arm's placement."""
    described = step.machine.described.get("paths", []) if step.machine is not None else []
    if not described or not step.work.arrangement.over_paths:
        return [PathShare(name=described[0]["name"] if described else "ssd", share=1.0)]
    used = described[:1] if step.work.arrangement.first_path else described
    rates = [Rates(_rate(path["read_gb_per_s"]), _rate(path["write_gb_per_s"])) for path in used]
    shares = weights(_placement(step), rates) if len(used) > 1 else [1.0]
    named = zip(used, shares, rates, strict=True)
    return [PathShare(name=path["name"], share=share / sum(shares), rates=each) for path, share, each in named]


def _placement(step: Step) -> str | list[float]:
    """Return the arm's placement: a name, or the ratio of the paths."""
    return step.work.arrangement.parts.get("tier_placement", "balanced")


def _rate(value: object) -> float:
    """Return a rate that is given as a number or as a section with `value`."""
    return float(value["value"] if isinstance(value, dict) else value)


def gradients_to_paths(step: Step, paths: list[PathShare]) -> Arrived:
    """Return the callback that writes a piece's fp32 gradients to the paths, by their shares.

    This happens once per step; gradients of several batches accumulate in host memory.
    """
    shares = dict(zip(step.pieces, step.divide(step.swapped_states_bytes, step.pieces), strict=True))

    def arrived(piece: Piece, task: str) -> list[str]:
        return [
            step.add(
                f"write gradients of {piece.name} to {path.name}",
                "backward",
                {f"{path.name}.write": path.share * shares[piece]},
                after=(task,),
            )
            for path in paths
        ]

    return arrived


def update(step: Step, after: str, paths: list[PathShare]) -> str:
    """Add the update: each sub-group in order is read from its path into a slot, updated, and written back.

    If the order alternates, the first sub-groups are still in their slots from the previous step and are not read, and
    the last ones stay there and are not written. If backward wrote the gradients, they are read in any case. Returns
    the name of the last task.
    """
    work, states = step.work, step.swapped_states_bytes
    step.store("master weights and moments", 3 * states)
    if work.arrangement.swaps_gradients:
        step.store("gradients", states)
    ranks = min(work.ranks, _RANKS)
    size = step.state_bytes
    numels = [n for n in map(sum, work.sub_groups()) if n * size >= work.swap_threshold_bytes]
    small = max(0.0, work.spec.parameters / work.ranks - sum(numels))  # always in host memory
    groups = _grouped(step, numels, paths)
    done = [
        *(_update_of_rank(step, after, groups, work.ranks / ranks, f"{rank}.") for rank in range(ranks)),
        step.add(
            "AdamW of what is not swapped", "optimizer", {"cpu": step.adamw_s(work.ranks * small)}, after=(after,)
        ),
    ]
    return step.add("end of the update", "optimizer", after=done)


def _grouped(step: Step, numels: list[int], paths: list[PathShare]) -> list[tuple[int, str]]:
    """Return the elements and the path of each sub-group of a rank."""
    if len(paths) == 1:
        return [(numel, paths[0].name) for numel in numels]
    places = arrange({str(n): numel for n, numel in enumerate(numels)}, _placement(step), [p.rates for p in paths])
    return [(numel, paths[places[str(n)]].name) for n, numel in enumerate(numels)]


def _update_of_rank(step: Step, after: str, groups: list[tuple[int, str]], times: float, name: str) -> str:
    """Add the update of one rank that stands for `times` ranks; `name` is part of its task names.

    Returns the name of the last task.
    """
    swaps, turns = step.work.arrangement.swaps_gradients, step.work.arrangement.turns_order
    count = max(1, min(slots(step), len(groups)))
    pool = step.pool(f"rooms {name}", count)
    written, slot, updated = [], after, ""
    for number, (numel, path) in enumerate(groups):
        nbytes = times * numel * step.state_bytes
        is_cached = turns and number < count
        stays = turns and number >= len(groups) - count
        slot = step.add(f"room {name}{number}", "optimizer", after=(slot,), takes={pool: 1})
        states = (0 if is_cached else 3) + (1 if swaps else 0)
        read = step.add(f"read {name}{number}", "optimizer", {f"{path}.read": states * nbytes}, after=(slot,))
        needs = {"cpu": step.adamw_s(times * numel)}
        updated = step.add(f"AdamW {name}{number}", "optimizer", needs, after=(read, updated))
        if not stays:
            needs = {f"{path}.write": 3 * nbytes}
            written.append(step.add(f"write {name}{number}", "optimizer", needs, after=(updated,), gives={pool: 1}))
    return step.add(f"end {name}", "optimizer", after=(updated, *written))
