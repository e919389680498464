"""Algorithm 1 of CXL-aware allocation, line by line as printed, and the allocation that results from it.

It contradicts the paper's own scenarios 1 and 2 (erratum X4: an item stays in DRAM while it fits, whatever its level)
and itself (X5: the even ratio ignores the free DRAM, DRAM counts as full after the first divided item, and the capacity
of CXL is an unused input). `memascend.memory.latency_first` is an algorithm without these faults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PURE_LOCAL, LOCAL_CXL, PURE_CXL = "pure_local", "local_cxl", "pure_cxl"


@dataclass(frozen=True)
class Published:
    """A policy and its interleave ratio, with DRAM first, then each card."""

    policy: str
    ratio: tuple[int, ...]


def algorithm_1(
    s_local: int, s_cxl: int, num_cxl: int, group_items_sizes: Mapping[int, Sequence[int]]
) -> dict[str, Published]:
    """Return the policy of each item according to Algorithm 1, with the names of the paper.

    Sizes are in bytes, levels go from 1 to 4. `s_cxl` is not used in the paper either.
    """
    del s_cxl
    remain = s_local
    allocations: dict[str, Published] = {}
    for level in range(1, 5):
        for index, size in enumerate(group_items_sizes.get(level, ())):
            key = f"level_{level}_item_{index}"
            if remain >= size:
                allocations[key] = Published(PURE_LOCAL, (1,) + (0,) * num_cxl)
                remain -= size
            elif remain > 0:
                allocations[key] = Published(LOCAL_CXL, (1,) * (num_cxl + 1))
                remain = 0
            else:
                allocations[key] = Published(PURE_CXL, (0,) + (1,) * num_cxl)
    return allocations


def bytes_by_node(size: int, published: Published) -> dict[int, int]:
    """Return the bytes on each node of an item of `size` bytes divided by its ratio; node 0 is DRAM, cards follow."""
    total = sum(published.ratio)
    shares = {node: size * part // total for node, part in enumerate(published.ratio) if part}
    last = max(shares)
    shares[last] += size - sum(shares.values())
    return shares


@dataclass(frozen=True)
class Overfull:
    """A node to which the algorithm assigns more bytes than it has."""

    node: int
    given: int
    has: int


def carried_out(
    capacities: Sequence[int], group_items_sizes: Mapping[int, Sequence[int]]
) -> tuple[dict[str, dict[int, int]], list[Overfull]]:
    """Apply Algorithm 1 to DRAM of `capacities[0]` bytes and cards of `capacities[1:]` bytes.

    Returns the bytes by item and node, and the overfull nodes.
    """
    allocations = algorithm_1(capacities[0], sum(capacities[1:]), len(capacities) - 1, group_items_sizes)
    sizes = {
        f"level_{level}_item_{index}": size
        for level, items in group_items_sizes.items()
        for index, size in enumerate(items)
    }
    placed = {key: bytes_by_node(sizes[key], published) for key, published in allocations.items()}
    given = [sum(shares.get(node, 0) for shares in placed.values()) for node in range(len(capacities))]
    overfull = [Overfull(node, given[node], has) for node, has in enumerate(capacities) if given[node] > has]
    return placed, overfull
