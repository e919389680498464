"""Assignment of tensor classes to NUMA nodes by latency: CXL-aware allocation, section IV-B. No system calls.

    nodes = [NodeCapacity(0, 128 * GIB, near=True), NodeCapacity(1, 512 * GIB)]
    plan = latency_first([Item(MASTERS, 46 * GIB), ...], nodes)
    plan["master_weights"].bytes_by_node  # {0: 49392123904}

Items are placed from the lowest latency tolerance to the highest, in near memory as long as it has space. This differs
from the printed algorithm in three points. An item that only partly fits in near memory is divided by the nodes'
bandwidths, within what each has left (printed: evenly, regardless of what is left, and near memory then counts as
full). Once near memory is full, items are divided over the far nodes by bandwidth and space (printed: evenly,
regardless of their capacity). And items that fit nowhere are refused. The printed algorithm is in
`baselines/cxl/published_algorithm.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from memascend.memory.classes import CLASSES, LEVELS
from memascend.memory.policies import Placement, on_node, weighted
from memascend.memory.topology import Topology

NEAR, SPLIT, FAR = "near", "split", "far"  # the algorithm's pure_local, local_cxl and pure_cxl


@dataclass(frozen=True)
class Item:
    """A class of tensors, and its bytes."""

    name: str
    nbytes: int

    @property
    def level(self) -> int:
        """The class's tolerance of latency, from 1, the lowest (see `memascend.memory.classes`)."""
        return LEVELS[self.name]


@dataclass(frozen=True)
class NodeCapacity:
    """The memory of a node that is available for tensors.

    `near`: memory of the processors that compute. `bandwidth`: in any unit that all nodes of a plan share; None if
    unknown, and then all nodes count equally.
    """

    node: int
    nbytes: int
    near: bool = False
    bandwidth: float | None = None


@dataclass(frozen=True)
class Allocation:
    """The placement of an item. `kind`: near, split over near and far memory, or far."""

    item: Item
    kind: str
    bytes_by_node: Mapping[int, int]

    def placement(self) -> Placement:
        """Return the allocation as a policy; shares of a page or more are exact to the page."""
        if len(self.bytes_by_node) == 1:
            return on_node(next(iter(self.bytes_by_node)))
        return weighted(self.bytes_by_node)


def latency_first(items: Iterable[Item], capacities: Sequence[NodeCapacity]) -> dict[str, Allocation]:
    """Return allocations by name, in the order in which they were made. Items of the same name are merged.

    Raises ValueError for unknown class names, MemoryError if all nodes together cannot hold the items.
    """
    sizes: dict[str, int] = {}
    for item in items:
        if item.name not in LEVELS:
            raise ValueError(f"latency_first: unknown class {item.name!r}: use {', '.join(CLASSES)}")
        sizes[item.name] = sizes.get(item.name, 0) + item.nbytes
    left = {capacity.node: capacity.nbytes for capacity in capacities}
    wanted, there = sum(sizes.values()), sum(left.values())
    if wanted > there:
        raise MemoryError(
            f"latency_first: {wanted / 2**30:.2f} GiB of tensors, and nodes {', '.join(map(str, left))} have "
            f"{there / 2**30:.2f} GiB for them: use a smaller model or batch, or give them more nodes"
        )
    near = [capacity for capacity in capacities if capacity.near]
    made: dict[str, Allocation] = {}
    for name in sorted(sizes, key=CLASSES.index):
        item = Item(name, sizes[name])
        candidates, kind = _candidates(item, near, capacities, left)
        shares = divide(item.nbytes, candidates, left)
        for node, taken in shares.items():
            left[node] -= taken
        made[name] = Allocation(item, kind, shares)
    return made


def _candidates(
    item: Item, near: list[NodeCapacity], capacities: Sequence[NodeCapacity], left: dict[int, int]
) -> tuple[list[NodeCapacity], str]:
    """Return the nodes to divide an item over, which together have enough memory for it, and the kind of allocation."""
    near_left = sum(left[capacity.node] for capacity in near)
    if near_left >= item.nbytes:
        return near, NEAR
    far = [capacity for capacity in capacities if not capacity.near]
    if near_left == 0:
        return far, FAR
    return list(capacities), SPLIT


def divide(nbytes: int, capacities: Sequence[NodeCapacity], left: Mapping[int, int]) -> dict[int, int]:
    """Divide bytes over nodes by bandwidth; what exceeds a node's space goes to the others by theirs. Omits zeros."""
    rates = {capacity.node: float(capacity.bandwidth or 1) for capacity in capacities if left[capacity.node] > 0}
    if any(capacity.bandwidth is None for capacity in capacities):
        rates = dict.fromkeys(rates, 1.0)
    shares: dict[int, int] = {}
    remaining = nbytes
    while remaining > 0 and rates:
        total = sum(rates.values())
        ideal = {node: remaining * rate / total for node, rate in rates.items()}
        full = [node for node, share in ideal.items() if share >= left[node]]
        if not full:
            whole = {node: int(share) for node, share in ideal.items()}
            first = max(whole, key=lambda node: left[node] - whole[node])
            whole[first] += remaining - sum(whole.values())  # the remainder of rounding
            shares |= whole
            break
        for node in full:
            shares[node] = left[node]
            remaining -= left[node]
            del rates[node]
    return {capacity.node: shares[capacity.node] for capacity in capacities if shares.get(capacity.node)}


def capacities_of(topology: Topology, limits: Mapping[int, int] | None = None) -> list[NodeCapacity]:
    """Return the memory of a machine's nodes: what is available, or less if `limits` says so, in bytes by node.

    Nodes with processors are near; bandwidths are the firmware's (HMAT), and used if it states them for all nodes.
    """
    limits = limits or {}
    for number in limits:
        if number not in topology.nodes:
            raise ValueError(f"placement: there is no node {number} to limit; there are {_listed(topology)}")
    capacities = [
        NodeCapacity(
            number,
            min(node.available_bytes, limits.get(number, node.available_bytes)),
            near=not node.memory_only,
            bandwidth=node.bandwidth_bytes_per_s,
        )
        for number, node in topology.nodes.items()
        if node.total_bytes and number in topology.allowed
    ]
    return capacities


def _listed(topology: Topology) -> str:
    return ", ".join(map(str, topology.nodes))
