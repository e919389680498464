"""Which node each class of tensors goes to, latency first: CXL-aware allocation, section IV-B. No system call.

    plan = latency_first([Item(MASTERS, 46 * GIB), ...], [Room(0, 128 * GIB, near=True), Room(1, 512 * GIB)])
    plan["master_weights"].bytes_by_node  # {0: 49392123904}

Items are placed from the lowest tolerance of latency to the highest, in near memory as long as it has room. Where the
algorithm as printed and this one part: an item that near memory holds only in part is divided by the bandwidths of the
nodes, within what each has left (printed: evenly, whatever is left, and near memory counts as full afterwards); what no
near memory is left for is divided over the far nodes by bandwidth and room (printed: evenly, without a look at their
capacity); and what fits nowhere is refused. The algorithm as printed is `baselines/cxl/published_algorithm.py`.
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
    """A class of tensors, and the bytes of it."""

    name: str
    nbytes: int

    @property
    def level(self) -> int:
        return LEVELS[self.name]


@dataclass(frozen=True)
class Room:
    """What a node has for tensors. `near`: memory of the processors that compute. `bandwidth`: in any unit, the same
    for all nodes of a plan; None if unspecified, and then nodes count alike."""

    node: int
    nbytes: int
    near: bool = False
    bandwidth: float | None = None


@dataclass(frozen=True)
class Allocation:
    """Where an item goes. `kind`: near, split over near and far memory, or far."""

    item: Item
    kind: str
    bytes_by_node: Mapping[int, int]

    def placement(self) -> Placement:
        """As a policy; shares of a page or more are kept to the page."""
        if len(self.bytes_by_node) == 1:
            return on_node(next(iter(self.bytes_by_node)))
        return weighted(self.bytes_by_node)


def latency_first(items: Iterable[Item], rooms: Sequence[Room]) -> dict[str, Allocation]:
    """Allocations by name, in the order in which they were made. Items of a name are one.

    Raises ValueError for names that are no class, MemoryError where all nodes together do not hold the items.
    """
    sizes: dict[str, int] = {}
    for item in items:
        if item.name not in LEVELS:
            raise ValueError(f"latency_first: unknown class {item.name!r}: use {', '.join(CLASSES)}")
        sizes[item.name] = sizes.get(item.name, 0) + item.nbytes
    left = {room.node: room.nbytes for room in rooms}
    wanted, there = sum(sizes.values()), sum(left.values())
    if wanted > there:
        raise MemoryError(
            f"latency_first: {wanted / 2**30:.2f} GiB of tensors, and nodes {', '.join(map(str, left))} have "
            f"{there / 2**30:.2f} GiB for them: use a smaller model or batch, or give them more nodes"
        )
    near = [room for room in rooms if room.near]
    made: dict[str, Allocation] = {}
    for name in sorted(sizes, key=CLASSES.index):
        item = Item(name, sizes[name])
        candidates, kind = _candidates(item, near, rooms, left)
        shares = divide(item.nbytes, candidates, left)
        for node, taken in shares.items():
            left[node] -= taken
        made[name] = Allocation(item, kind, shares)
    return made


def _candidates(item: Item, near: list[Room], rooms: Sequence[Room], left: dict[int, int]) -> tuple[list[Room], str]:
    """The nodes that an item is divided over, which have room for it together."""
    near_left = sum(left[room.node] for room in near)
    if near_left >= item.nbytes:
        return near, NEAR
    far = [room for room in rooms if not room.near]
    if near_left == 0:
        return far, FAR
    return list(rooms), SPLIT


def divide(nbytes: int, rooms: Sequence[Room], left: Mapping[int, int]) -> dict[int, int]:
    """Bytes by node, without zeros: by bandwidth, and what exceeds a node's room goes to the others by theirs."""
    rates = {room.node: float(room.bandwidth or 1) for room in rooms if left[room.node] > 0}
    if any(room.bandwidth is None for room in rooms):
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
            whole[first] += remaining - sum(whole.values())  # bytes that rounding has left
            shares |= whole
            break
        for node in full:
            shares[node] = left[node]
            remaining -= left[node]
            del rates[node]
    return {room.node: shares[room.node] for room in rooms if shares.get(room.node)}


def rooms_of(topology: Topology, limits: Mapping[int, int] | None = None) -> list[Room]:
    """What the nodes of a machine have: what is available there, or less where `limits` says so, in bytes by node.

    Near are the nodes with processors; bandwidths are the firmware's (HMAT), where it gives them for all.
    """
    limits = limits or {}
    for number in limits:
        if number not in topology.nodes:
            raise ValueError(f"placement: there is no node {number} to limit; there are {_listed(topology)}")
    rooms = [
        Room(
            number,
            min(node.available_bytes, limits.get(number, node.available_bytes)),
            near=not node.memory_only,
            bandwidth=node.bandwidth_bytes_per_s,
        )
        for number, node in topology.nodes.items()
        if node.total_bytes and number in topology.allowed
    ]
    return rooms


def _listed(topology: Topology) -> str:
    return ", ".join(map(str, topology.nodes))
