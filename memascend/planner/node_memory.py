"""Distribution of a plan over the memory nodes of a described machine, by the run's placement policy.

Memory that is not a tensor of the training (the process, temporaries, bounce buffers) is in near memory, where the
kernel puts pages that its processors touch first. It is subtracted before the policy divides the rest. This module does
not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from memascend.memory.classes import CLASSES, class_of
from memascend.memory.latency_first import NodeCapacity, divide
from memascend.memory.ledger import HOST
from memascend.memory.placement_policy import LATENCY_FIRST, PROCESS_INTERLEAVE, PlacementPolicy
from memascend.memory.topology import Node, Topology

if TYPE_CHECKING:
    from memascend.memory.ledger import LedgerEntry

GIB = 2**30
OTHER = "process and temporaries"
_KINDS = ("dram", "cxl")


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """Bytes by class and memory node. `refused`: why the policy cannot be followed; nothing is placed then."""

    policy: str
    names: Mapping[int, str]
    capacity: Mapping[int, int]
    placed: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    refused: str = ""

    def used(self, node: int) -> int:
        """Return the bytes that are placed on a node."""
        return sum(shares.get(node, 0) for shares in self.placed.values())

    @property
    def overfull(self) -> dict[int, int]:
        """Bytes beyond the capacity, for each node that is assigned more than it has."""
        beyond = {node: self.used(node) - capacity for node, capacity in self.capacity.items()}
        return {node: more for node, more in beyond.items() if more > 0}

    @property
    def fits(self) -> bool:
        """Whether the policy can be followed and no node is assigned more than it has."""
        return not self.refused and not self.overfull


def described_nodes(topology: Topology) -> list[dict[str, Any]]:
    """Return the nodes with memory that this process may use, in the form of a testbed's `memory_nodes`."""
    entries = []
    for number, node in topology.nodes.items():
        if node.total_bytes and number in topology.allowed:
            kind = "cxl" if node.memory_only else "dram"
            size = {"memory_gib": node.total_bytes / GIB}
            entry: dict[str, Any] = {"name": f"node{number}", "number": number, "kind": kind, **size}
            if node.bandwidth_bytes_per_s:
                entry["gb_per_s"] = node.bandwidth_bytes_per_s / 1e9
            if node.latency_ns:
                entry["latency_ns"] = node.latency_ns
            entries.append(entry)
    return entries


def topology_of(described: Mapping[str, Any], where: str = "testbed") -> Topology:
    """Return the memory nodes of a testbed, numbered in order unless they specify a number.

    Raises a one-line ValueError for an invalid node.
    """
    nodes = []
    for number, entry in enumerate(described.get("memory_nodes") or ()):
        place = f"{where}: memory_nodes.{number}"
        if not isinstance(entry, Mapping) or entry.get("kind") not in _KINDS:
            raise ValueError(f"{place}: kind must be one of {', '.join(_KINDS)}")
        size, rate = (_number(entry, key, place) for key in ("memory_gib", "gb_per_s"))
        if size is None:
            raise ValueError(f"{place}: memory_gib is needed")
        number = entry.get("number", number)
        nodes.append(
            Node(
                number=number,
                cpus="0" if entry["kind"] == "dram" else "",
                total_bytes=int(size * GIB),
                available_bytes=int(size * GIB),
                distances={number: 10},
                bandwidth_bytes_per_s=None if rate is None else rate * 1e9,
                latency_ns=_number(entry, "latency_ns", place),
            )
        )
    return Topology.of(*nodes)


def place(
    entries: Iterable[LedgerEntry],
    topology: Topology,
    policy: str | None,
    names: Mapping[int, str] | None = None,
    *,
    host_gradients: bool = False,
) -> NodePlan:
    """Distribute the host entries of a plan over the memory nodes.

    `policy`: the text of a `placement:` key, None for latency first. `names`: names of the nodes by number.
    `host_gradients`: as for `class_of`. A policy that cannot be followed is reported in `NodePlan.refused`.
    """
    chosen = PlacementPolicy.parse(policy or LATENCY_FIRST)
    capacity = {number: node.total_bytes for number, node in topology.nodes.items()}
    sizes: dict[str, int] = {}
    for entry in entries:
        if entry.role == HOST:
            name = class_of(entry.owner, host_gradients=host_gradients) or OTHER
            sizes[name] = sizes.get(name, 0) + entry.reserved_bytes
    other = sizes.pop(OTHER, 0)
    common: dict[str, Any] = {
        "policy": chosen.as_text(),
        "names": names or {number: str(number) for number in topology.nodes},
        "capacity": capacity,
    }
    if chosen.kind == PROCESS_INTERLEAVE:
        return NodePlan(placed=_even(sizes | {OTHER: other}, capacity), **common)
    left, others = _near(other, topology)
    try:
        if others is None:
            raise MemoryError(f"near memory has no room for {other / GIB:.2f} GiB of the process and temporaries")
        policies = chosen.resolve(sizes, left)
    except (MemoryError, ValueError) as error:
        return NodePlan(refused=str(error), **common)
    placed = {}
    for name in sorted(sizes, key=CLASSES.index):
        where = policies.placements.get(name) if policies else None
        shares = _near(sizes[name], left)[1] if where is None else where.shares(sizes[name], left)
        placed[name] = {node: nbytes for node, nbytes in (shares or {}).items() if nbytes}
    if other:
        placed[OTHER] = others
    return NodePlan(placed=placed, **common)


def _even(sizes: Mapping[str, int], capacity: Mapping[int, int]) -> dict[str, dict[int, int]]:
    """Distribute all classes page by page over the nodes.

    The share of a full node goes to the others, and what does not fit on any of them to the first node.
    """
    left, placed = dict(capacity), {}
    for name, size in sizes.items():
        shares = divide(size, [NodeCapacity(node, nbytes) for node, nbytes in left.items()], left)
        for node, nbytes in shares.items():
            left[node] -= nbytes
        first = next(iter(capacity))
        if beyond := size - sum(shares.values()):
            shares[first] = shares.get(first, 0) + beyond
        if size:
            placed[name] = shares
    return placed


def _near(size: int, topology: Topology) -> tuple[Topology, dict[int, int] | None]:
    """Place `size` bytes on the first nodes with processors.

    Returns the topology with that much less available memory, and the bytes by node, or None if they do not fit.
    """
    remaining, shares, nodes = size, {}, dict(topology.nodes)
    for node in topology.with_cpus:
        taken = min(remaining, node.available_bytes)
        shares[node.number] = taken
        nodes[node.number] = replace(node, available_bytes=node.available_bytes - taken)
        remaining -= taken
    return Topology(nodes=nodes, allowed=topology.allowed), None if remaining else shares


def _number(entry: Mapping[str, Any], key: str, place: str) -> float | None:
    """Return a positive number of a node's description, or None if it is missing. Raises ValueError."""
    given = entry.get(key)
    value = given.get("value") if isinstance(given, Mapping) else given
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{place}.{key} must be a positive number, got {value!r}")
    return float(value)
