"""Schedule of a step with host memory on several nodes: ZeRO-Offload, with the load on the node that holds the data.

    DRAM     masters, moments, gradients: data of the CPU's computation       (level 1, first into near memory)
    cards    weights and activations: data that the GPU fetches and stores, at the rate of its link (levels 2 to 4)

Latency first fills DRAM with the levels in that order (its section IV-B), either as printed (`as_published`, which may
overfill a node: erratum X5) or within all capacities. `naive` interleaves every page over all nodes, so with one card
half of the optimizer's bytes and half of the GPU's come from it. `baseline` uses DRAM only. Two findings of the paper
follow from the nodes' rates: AdamW waits for the slower node of its data (Fig. 5), and two GPUs that fetch from one
card share its link (Fig. 6). Latency itself is not modelled, since large transfers hide it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.baselines.cxl.scenarios import CLASSES_OF, by_algorithm_1
from memascend.baselines.protocol.schedules import backward, forward, overflow_check
from memascend.memory.classes import ACTIVATIONS, ARRIVING, GRADIENTS, MASTERS, MOMENTUM, VARIANCE, WEIGHTS
from memascend.memory.latency_first import Item, NodeCapacity, latency_first

if TYPE_CHECKING:
    from memascend.planner.step import Step

GIB = 2**30
DRAM = "dram"
Shares = dict[str, dict[str, float]]  # class -> resource -> share of its bytes


def schedule(step: Step) -> None:
    """Add the passes, the chain of the overflow check and AdamW, each with its load on the nodes."""
    step.places = shares_of(step)
    done = backward(step, after=forward(step))
    done = overflow_check(step, after=done, chain=True)
    step.add("AdamW", "optimizer", update(step), after=(done,))


def update(step: Step) -> dict[str, float]:
    """Return the work of AdamW by resource: its traffic on each node, and its own CPU time.

    For each parameter, master and moments are read and written and the gradient is read (28 bytes with fp32 states).
    As in the paper's Fig. 5, the 16-bit copy of the weights is not counted.
    """
    costs, each = step.costs, step.work.spec.parameters * step.state_bytes
    moved = step.memory(master_weights=2 * each, momentum=2 * each, variance=2 * each, gradients=each)
    on_cards = costs.adam_card_efficiency or costs.adam_memory_efficiency
    needs = {node: size / (costs.adam_memory_efficiency if node == DRAM else on_cards) for node, size in moved.items()}
    own = costs.own_s.get("optimizer", 0.0) + costs.host_seconds_per_parameter * step.work.spec.parameters
    return {"cpu": own, **needs}


def shares_of(step: Step) -> Shares:
    """Return the share of each class of tensors on each node, by the arm's policy.

    Raises MemoryError if the tensors do not fit on the nodes.
    """
    described = list(step.machine.described.get("memory_nodes", [])) if step.machine is not None else []
    sizes = class_bytes(step)
    if step.work.arm_name == "baseline" or len(described) < 2:
        return {name: {DRAM: 1.0} for name in sizes}
    capacities = [
        NodeCapacity(
            number,
            int(_value(node["memory_gib"]) * GIB),
            near=node["kind"] == "dram",
            bandwidth=_value(node["gb_per_s"]),
        )
        for number, node in enumerate(described)
    ]
    names = [DRAM if node["kind"] == "dram" else str(node["name"]) for node in described]
    if step.work.arm_name == "naive":
        even = {capacity.node: 1.0 / len(capacities) for capacity in capacities}
        placed = {name: {node: share * size for node, share in even.items()} for name, size in sizes.items()}
    elif step.work.arm_name == "as_published":
        items = {item: sum(sizes[name] for name in classes) for item, classes in CLASSES_OF.items()}
        made = by_algorithm_1(items, [capacity.nbytes for capacity in capacities])
        placed = {
            name: {node: part * sizes[name] / items[item] for node, part in made[item].items()}
            for item, classes in CLASSES_OF.items()
            for name in classes
            if sizes[name]
        }
    else:
        made = latency_first([Item(name, size) for name, size in sizes.items()], capacities)
        placed = {name: dict(allocation.bytes_by_node) for name, allocation in made.items()}
    return {
        name: {names[node]: nbytes / sizes[name] for node, nbytes in by_node.items()}
        for name, by_node in placed.items()
        if sizes[name]
    }


def class_bytes(step: Step) -> dict[str, int]:
    """Return the bytes of each class for all ranks together (Table I).

    The CPU computes on 16 bytes per parameter (masters, moments, gradients). In addition there are 16-bit weights and
    arriving gradients, and activation checkpoints.
    """
    numel, state = step.work.spec.parameters, step.state_bytes
    kept = step.work.ranks * sum(piece.checkpoint_bytes for piece in step.pieces)
    weights = sum(piece.weight_bytes for piece in step.pieces)
    sizes = dict.fromkeys((MASTERS, MOMENTUM, VARIANCE, GRADIENTS), state * numel)
    return sizes | {WEIGHTS: weights, ACTIVATIONS: kept, ARRIVING: 2 * numel}


def _value(number: Any) -> float:
    """Return a number of a testbed, which is given as such or as a section with `value`."""
    return float(number["value"] if isinstance(number, dict) else number)
