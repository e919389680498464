"""Parsing of a run's `placement:` key, and its resolution on a machine.

- latency_first: the classes least tolerant of latency go to the nearest memory, as far as it suffices (the rule for
  machines with CXL cards);
- interleave: each tensor is interleaved page by page over all nodes;
- process_interleave: the whole process is interleaved, as by `numactl --interleave=all`;
- {momentum: 1, activations: [1, 2], variance: {0: 3, 1: 1}}: classes on one node, over several, or by weights; classes
  that are not named are left to the kernel;
- {policy: latency_first, limits: {0: 100GiB}}: with an upper limit per node.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memascend.memory.budget import parse_bytes
from memascend.memory.classes import CLASSES, LEVELS, ByClass
from memascend.memory.latency_first import Item, capacities_of, latency_first
from memascend.memory.policies import Placement, interleaved, on_node, weighted
from memascend.memory.topology import Topology

LATENCY_FIRST, INTERLEAVE, PROCESS_INTERLEAVE, BY_CLASS = (
    "latency_first", "interleave", "process_interleave", "by_class",
)  # fmt: skip
POLICIES = (LATENCY_FIRST, INTERLEAVE, PROCESS_INTERLEAVE)


@dataclass(frozen=True, kw_only=True)
class PlacementPolicy:
    """A validated `placement:`. `nodes` is used by BY_CLASS, `limits` (bytes by node) by LATENCY_FIRST."""

    kind: str
    nodes: Mapping[str, tuple[int, ...] | Mapping[int, int]] = field(default_factory=dict)
    limits: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, value: Any, where: str = "placement") -> PlacementPolicy:
        """Parse a name, a mapping, or either as YAML text. Raises ValueError, in one line that names `where`."""
        if isinstance(value, str) and value.strip().startswith("{"):
            import yaml

            try:
                value = yaml.safe_load(value)
            except yaml.YAMLError:
                raise ValueError(
                    f"{where}: {value!r} is not a mapping: write it as {{momentum: 1, weights: 2}}"
                ) from None
        if isinstance(value, str):
            return cls(kind=_known(value, where))
        if not isinstance(value, dict) or not value:
            raise ValueError(f"{where}: {value!r}: use one of {', '.join(POLICIES)}, or a mapping of class to node")
        if "policy" in value or "limits" in value:
            return cls._with_limits(value, where)
        return cls(kind=BY_CLASS, nodes={_class(name, where): _nodes(name, at, where) for name, at in value.items()})

    @classmethod
    def _with_limits(cls, value: dict[Any, Any], where: str) -> PlacementPolicy:
        """Parse a mapping with the keys `policy` and `limits`. Raises ValueError."""
        unknown = sorted(map(str, set(value) - {"policy", "limits"}))
        if unknown:
            raise ValueError(f"{where}: unknown key {unknown[0]!r} next to policy and limits")
        kind = _known(value.get("policy", LATENCY_FIRST), where)
        limits = value.get("limits") or {}
        if kind != LATENCY_FIRST and limits:
            raise ValueError(f"{where}: limits only apply to latency_first, not to {kind}: remove them")
        if not isinstance(limits, dict):
            raise ValueError(f"{where}: limits are a mapping of node to size, such as {{0: 100GiB}}, not {limits!r}")
        return cls(kind=kind, limits={_number(n, where): parse_bytes(str(v), where) for n, v in limits.items()})

    def as_text(self) -> str:
        """Return a text from which `parse` makes this policy again."""
        if self.kind == BY_CLASS:
            return json.dumps({n: dict(at) if isinstance(at, Mapping) else list(at) for n, at in self.nodes.items()})
        if self.limits:
            return json.dumps({"policy": self.kind, "limits": {str(n): v for n, v in self.limits.items()}})
        return self.kind

    def resolve(self, sizes: Mapping[str, int], topology: Topology) -> ByClass | None:
        """Return the placement of each class, given the bytes of each in `sizes`.

        Returns None for PROCESS_INTERLEAVE, which applies to the process (`memascend.memory.process_policy`). Raises
        ValueError for nodes that do not exist, MemoryError if a plan by size does not fit.
        """
        if self.kind == PROCESS_INTERLEAVE:
            return None
        if self.kind == LATENCY_FIRST:
            capacities = capacities_of(topology, self.limits)
            made = latency_first([Item(name, size) for name, size in sizes.items() if size], capacities)
            return ByClass({name: allocation.placement() for name, allocation in made.items()})
        usable = [n for n, node in topology.nodes.items() if node.total_bytes and n in topology.allowed]
        if self.kind == INTERLEAVE:
            return ByClass(dict.fromkeys(CLASSES, interleaved(usable)))
        placements = {name: _policy(nodes) for name, nodes in self.nodes.items()}
        for placement in placements.values():
            placement.check(topology, 0)
        return ByClass(placements)


def _policy(nodes: tuple[int, ...] | Mapping[int, int]) -> Placement:
    """Return the placement for one node, several, or several with weights."""
    if isinstance(nodes, Mapping):
        return weighted(nodes)
    return on_node(nodes[0]) if len(nodes) == 1 else interleaved(nodes)


def _known(kind: Any, where: str) -> str:
    """Return the name of a policy. Raises ValueError for an unknown one."""
    if kind not in POLICIES:
        raise ValueError(f"{where}: unknown policy {kind!r}: use {', '.join(POLICIES)}, or a mapping of class to node")
    return str(kind)


def _class(name: Any, where: str) -> str:
    """Return the name of a class of tensors. Raises ValueError for an unknown one."""
    if name not in LEVELS:
        raise ValueError(f"{where}: unknown class {name!r}: use {', '.join(CLASSES)}")
    return str(name)


def _nodes(name: str, value: Any, where: str) -> tuple[int, ...] | dict[int, int]:
    """Parse the node, the list of nodes, or the weights by node of the class `name`. Raises ValueError."""
    if isinstance(value, dict):
        weights = list(value.values())
        if not all(type(weight) is int and weight >= 0 for weight in weights) or not any(weights):
            raise ValueError(f"{where}: weights of {name} are whole numbers of 0 or more, one above 0, not {weights}")
        return {_number(node, where): weight for node, weight in value.items()}
    nodes = value if isinstance(value, list) else [value]
    if not nodes:
        raise ValueError(f"{where}: no node for {name}: name one, or several in brackets")
    return tuple(_number(node, where) for node in nodes)


def _number(value: Any, where: str) -> int:
    """Parse the number of a node. Raises ValueError."""
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(f"{where}: {value!r} is not a node: nodes have numbers from 0 (memascend doctor lists them)")
    return number
