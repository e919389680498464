"""The three allocation examples of CXL-aware allocation (IV-B3, Figs. 10 to 12), by each algorithm and by the text.

The paper gives no sizes for them. The sizes here are those of its experiments: Table I's bytes for a model of P
parameters and one GPU, on 128 GiB of DRAM and the cards of Table II. The text of scenarios 1 and 2 puts all of levels 2
to 4 on the cards; if DRAM has free space, neither algorithm does that (erratum X4), so the text is a third variant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memascend.baselines.cxl.published_algorithm import carried_out
from memascend.memory.classes import (
    ACTIVATIONS,
    ARRIVING,
    GRADIENTS,
    MASTERS,
    MOMENTUM,
    VARIANCE,
    WEIGHTS,
)
from memascend.memory.latency_first import Item, NodeCapacity, divide, latency_first

GIB = 2**30
QWEN25_7B, NEMO_12B = 7_615_616_512, 12_247_782_400  # parameters
AS_TEXT, AS_PUBLISHED, OURS = "text", "as published", "default"
DRAM_GB_PER_S, CARD_GB_PER_S = 120.0, 27.0  # reached in STEP (erratum X3: 109 to 133, and 26.3 to 28.1 per card)


@dataclass(frozen=True)
class Scenario:
    """The machine and the data of one figure; `capacities` are those of the nodes in bytes, DRAM first."""

    exhibit: str
    name: str
    capacities: tuple[int, ...]
    parameters: int
    activation_bytes: int

    def published_items(self) -> dict[str, int]:
        """Return the bytes of the items of Table I, in the order of Algorithm 1's levels.

        They are fp32 parameters, gradients and optimizer states, then 16-bit parameters, activations and gradients.
        """
        p = self.parameters
        return {
            "fp32 P": 4 * p, "fp32 G": 4 * p, "fp32 O": 8 * p,
            "bf16 P": 2 * p, "bf16 A": self.activation_bytes, "bf16 G": 2 * p,
        }  # fmt: skip


_LEVEL_OF = {"fp32 P": 1, "fp32 G": 1, "fp32 O": 1, "bf16 P": 2, "bf16 A": 3, "bf16 G": 4}
CLASSES_OF = {
    "fp32 P": (MASTERS,), "fp32 G": (GRADIENTS,), "fp32 O": (MOMENTUM, VARIANCE),
    "bf16 P": (WEIGHTS,), "bf16 A": (ACTIVATIONS,), "bf16 G": (ARRIVING,),
}  # fmt: skip


def checkpoints(batch: int, context: int, layers: int, hidden: int) -> int:
    """Return the bytes of one GPU's checkpointed activations (Table I)."""
    return 2 * batch * context * layers * hidden


_A7, _A12 = checkpoints(4, 32768, 28, 3584), checkpoints(4, 32768, 40, 5120)
SCENARIOS = (
    Scenario("cxl-fig10", "one card, DRAM enough for level 1", (128 * GIB, 512 * GIB), QWEN25_7B, _A7),
    Scenario("cxl-fig11", "two cards, DRAM enough for level 1", (128 * GIB, 256 * GIB, 256 * GIB), QWEN25_7B, _A7),
    Scenario("cxl-fig12", "two cards, DRAM too small for level 1", (128 * GIB, 256 * GIB, 256 * GIB), NEMO_12B, _A12),
)


def allocation(scenario: Scenario, algorithm: str) -> dict[str, dict[int, int]]:
    """Return the bytes by item of Table I and node; node 0 is DRAM, cards follow."""
    items = scenario.published_items()
    if algorithm == AS_PUBLISHED:
        return by_algorithm_1(items, scenario.capacities)
    capacities = [
        NodeCapacity(node, nbytes, near=node == 0, bandwidth=DRAM_GB_PER_S if node == 0 else CARD_GB_PER_S)
        for node, nbytes in enumerate(scenario.capacities)
    ]
    if algorithm == OURS:
        return _default(items, capacities)
    return _as_the_text_says(items, capacities)


def by_algorithm_1(items: Mapping[str, int], capacities: Sequence[int]) -> dict[str, dict[int, int]]:
    """Return the bytes by item of Table I and node according to Algorithm 1 as printed, ignoring overfull nodes."""
    groups: dict[int, list[str]] = {}
    for name in items:
        groups.setdefault(_LEVEL_OF[name], []).append(name)
    placed, _ = carried_out(capacities, {level: [items[n] for n in names] for level, names in groups.items()})
    return {names[i]: placed[f"level_{level}_item_{i}"] for level, names in groups.items() for i in range(len(names))}


def _default(items: dict[str, int], capacities: list[NodeCapacity]) -> dict[str, dict[int, int]]:
    """Return the bytes by item and node that our latency-first placement gives within all capacities."""
    parts = {name: size // len(CLASSES_OF[name]) for name, size in items.items()}
    made = latency_first([Item(each, parts[name]) for name in items for each in CLASSES_OF[name]], capacities)
    placed: dict[str, dict[int, int]] = {}
    for name, classes in CLASSES_OF.items():
        shares = placed.setdefault(name, {})
        for each in classes:
            for node, nbytes in made[each].bytes_by_node.items():
                shares[node] = shares.get(node, 0) + nbytes
    return placed


def _as_the_text_says(items: dict[str, int], capacities: list[NodeCapacity]) -> dict[str, dict[int, int]]:
    """Return the allocation of the text: level 1 in DRAM, or divided over the remaining DRAM and the cards if it does
    not fit; all other levels on the cards."""
    left = {capacity.node: capacity.nbytes for capacity in capacities}
    placed = {}
    for name, size in items.items():
        if _LEVEL_OF[name] > 1:
            where = [capacity for capacity in capacities if not capacity.near]
        elif left[0] >= size:
            where = capacities[:1]
        else:
            where = capacities
        placed[name] = divide(size, where, left)
        for node, nbytes in placed[name].items():
            left[node] -= nbytes
    return placed


def overfull(scenario: Scenario, placed: dict[str, dict[int, int]]) -> dict[int, int]:
    """Return, for each overfull node, the bytes in excess of its capacity."""
    given = {node: sum(shares.get(node, 0) for shares in placed.values()) for node in range(len(scenario.capacities))}
    return {node: given[node] - has for node, has in enumerate(scenario.capacities) if given[node] > has}
