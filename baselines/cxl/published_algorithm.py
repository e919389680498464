"""Algorithm 1 of CXL-aware allocation, line by line, and what it comes to when it is carried out.

It contradicts the paper's own scenarios 1 and 2 (erratum X4: an item stays in DRAM while it fits, whatever its level)
and itself (X5: the even ratio ignores what is left of DRAM, DRAM counts as full after the first item that is divided,
and the capacity of CXL is an input that nothing reads). `memascend.memory.latency_first` is the one without these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PURE_LOCAL, LOCAL_CXL, PURE_CXL = "pure_local", "local_cxl", "pure_cxl"


@dataclass(frozen=True)
class Published:
    """A policy and its interleave ratio: of DRAM, then of each card."""

    policy: str
    ratio: tuple[int, ...]


def algorithm_1(
    s_local: int, s_cxl: int, num_cxl: int, group_items_sizes: Mapping[int, Sequence[int]]
) -> dict[str, Published]:
    """As printed, names and all; `s_cxl` is not used there either. Sizes in bytes, levels from 1 to 4."""
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
    """What an item of `size` bytes puts on each node when its ratio is carried out: 0 is DRAM, cards from 1."""
    total = sum(published.ratio)
    shares = {node: size * part // total for node, part in enumerate(published.ratio) if part}
    last = max(shares)
    shares[last] += size - sum(shares.values())
    return shares


@dataclass(frozen=True)
class Overfull:
    """A node that the algorithm gives more than it has, in bytes."""

    node: int
    given: int
    has: int


def carried_out(
    rooms: Sequence[int], group_items_sizes: Mapping[int, Sequence[int]]
) -> tuple[dict[str, dict[int, int]], list[Overfull]]:
    """Bytes by item and node of algorithm 1 on DRAM (`rooms[0]`) and cards, and the nodes that it overfills."""
    allocations = algorithm_1(rooms[0], sum(rooms[1:]), len(rooms) - 1, group_items_sizes)
    sizes = {
        f"level_{level}_item_{index}": size
        for level, items in group_items_sizes.items()
        for index, size in enumerate(items)
    }
    placed = {key: bytes_by_node(sizes[key], published) for key, published in allocations.items()}
    given = [sum(shares.get(node, 0) for shares in placed.values()) for node in range(len(rooms))]
    overfull = [Overfull(node, given[node], has) for node, has in enumerate(rooms) if given[node] > has]
    return placed, overfull
