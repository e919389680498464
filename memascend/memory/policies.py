"""NUMA placement policies as plain values that can be checked against a machine. No torch, no system calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from memascend.memory.topology import Topology

_LARGEST_WEIGHT = 2**56

_STRICT, _PREFERRED, _PREFERRED_MANY, _INTERLEAVED, _WEIGHTED, _STRIPED = (
    "bind", "preferred", "preferred_many", "interleaved", "weighted", "striped",
)  # fmt: skip


@dataclass(frozen=True)
class Placement:
    """A policy, made by `on_node`, `prefer`, `interleaved` or `weighted`. `weights`: one per node, or None."""

    mode: str
    nodes: tuple[int, ...]
    weights: tuple[int, ...] | None = None

    @property
    def strict(self) -> bool:
        """Whether memory must come from these nodes, so that an allocation fails otherwise."""
        return self.mode == _STRICT

    def check(self, topology: Topology, reserved_bytes: int) -> None:
        """Raise ValueError for nodes that cannot work, or MemoryError for a strict node without space, in one line."""
        known = ", ".join(map(str, topology.nodes))
        if not self.nodes:
            raise ValueError(f"placement {self}: no node is named; name some of {known}")
        for number in self.nodes:
            node = topology.nodes.get(number)
            if node is None:
                raise ValueError(f"placement {self}: there is no node {number} here; name some of {known}")
            if node.total_bytes == 0:
                raise ValueError(f"placement {self}: node {number} has no memory; name a node that has some")
            if number not in topology.allowed:
                allowed = ", ".join(map(str, sorted(topology.allowed)))
                raise ValueError(f"placement {self}: this process may not use node {number} (cpuset), only {allowed}")
        if len(set(self.nodes)) != len(self.nodes):
            raise ValueError(f"placement {self}: a node is named more than once; name each once, or give weights")
        self._check_weights(topology)
        available = sum(topology.nodes[number].available_bytes for number in self.nodes)
        if self.strict and reserved_bytes > available:
            raise MemoryError(
                f"placement {self}: {reserved_bytes >> 20} MiB exceed the {available >> 20} MiB free there, and the "
                "kernel would kill the process: stop other programs, or use strict=False, which takes the rest from "
                "other nodes"
            )

    def _check_weights(self, topology: Topology) -> None:
        """Raise ValueError for weights that do not fit the nodes, or that this kernel does not support."""
        if self.mode == _WEIGHTED and any(topology.nodes[number].weight is None for number in self.nodes):
            raise ValueError(
                f"placement {self}: weighted interleaving by the kernel needs Linux 6.9; give weights of its own, as "
                f"weighted({{{', '.join(f'{number}: 1' for number in self.nodes)}}}), or use interleaved(...)"
            )
        if self.weights is None:
            return
        whole = all(isinstance(weight, int) and 0 <= weight < _LARGEST_WEIGHT for weight in self.weights)
        if len(self.weights) != len(self.nodes) or not whole or not any(self.weights):
            raise ValueError(f"placement {self}: give each node a whole weight of 0 or more, and one above 0")

    def shares(self, nbytes: int, topology: Topology) -> dict[int, int]:
        """Return how many of `nbytes` the policy requests on each node.

        Interleaving divides evenly or by weights. Preferred nodes are filled in order, as far as they have memory
        available; the last one gets the rest.
        """
        if self.mode in (_STRICT, _PREFERRED, _PREFERRED_MANY):
            left, shares = nbytes, {}
            for number in self.nodes:
                shares[number] = min(left, topology.nodes[number].available_bytes) if len(self.nodes) > 1 else left
                left -= shares[number]
            shares[self.nodes[-1]] += left
            return shares
        weights = self.weights or tuple(
            (topology.nodes[number].weight or 1) if self.mode == _WEIGHTED else 1 for number in self.nodes
        )
        return {number: nbytes * w // sum(weights) for number, w in zip(self.nodes, weights, strict=True)}

    def native(self) -> tuple[str, list[int], list[int]]:
        """Return the arguments that the extension takes: mode, nodes, weights."""
        return self.mode, list(self.nodes), list(self.weights or ())

    def __str__(self) -> str:
        weights = f" by {':'.join(map(str, self.weights))}" if self.weights else ""
        return f"{self.mode} on node {', '.join(map(str, self.nodes)) or '(none)'}{weights}"


def on_node(node: int, *, strict: bool = False) -> Placement:
    """Put all pages on one node; what does not fit goes to others, or with `strict` is refused."""
    return Placement(_STRICT if strict else _PREFERRED, (node,))


def prefer(nodes: Iterable[int]) -> Placement:
    """Put pages on any of these nodes, the nearest first, and on others when they are full (Linux 5.15)."""
    return Placement(_PREFERRED_MANY, tuple(nodes))


def interleaved(nodes: Iterable[int]) -> Placement:
    """Put pages on each node in turn. What does not fit on a full node goes to others."""
    return Placement(_INTERLEAVED, tuple(nodes))


def weighted(nodes: Iterable[int] | Mapping[int, int]) -> Placement:
    """Put as many pages on each node in turn as its weight.

    Given nodes only, the kernel's weights apply, up to one round more or less depending on the address (Linux 6.9;
    /sys/kernel/mm/mempolicy/weighted_interleave, one set per machine: 1, or from 6.16 on the firmware's bandwidths, or
    what root has set). Given a mapping node -> weight, this memory has its own weights, on any kernel and exact to the
    page; a weight of 0 means no pages, and weights may be byte counts. Stripes are then up to 2 MiB, and are touched
    when they are allocated.
    """
    if isinstance(nodes, Mapping):
        return Placement(_STRIPED, tuple(nodes), tuple(nodes.values()))
    return Placement(_WEIGHTED, tuple(nodes))
