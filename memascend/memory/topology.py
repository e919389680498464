"""NUMA nodes of a machine, from /sys/devices/system/node: sizes, free memory, distances, CPUs. Imports no torch.

A node without CPUs is memory only, such as a CXL card. A kernel without NUMA has one node, 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from memascend.memory.cgroup import ram_bytes

_ROOT = Path("/")
_NODES = "sys/devices/system/node"
_WEIGHTS = "sys/kernel/mm/mempolicy/weighted_interleave"
_TIERS = "sys/devices/virtual/memory_tiering"
_INITIATORS = "access0/initiators"  # as seen by the nearest processors, in MB/s and ns
# In addition to free memory, what the kernel can drop for a new allocation on a node.
_RECLAIMABLE = ("Active(file)", "Inactive(file)", "SReclaimable")
LOCAL_DISTANCE = 10  # distance of a node to itself, by the ACPI specification


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node. `cpus` as the kernel lists them ("0-7,16"), empty for memory only; `distances` by node number.

    `available_bytes` is free memory plus reclaimable cache. `weight` is that of the kernel's weighted interleaving
    (Linux 6.9), else None. `bandwidth_bytes_per_s` and `latency_ns` are the firmware's values (HMAT) for reads by the
    nearest processors, or None. `tier` is the kernel's memory tier, where a smaller number is faster, or None.
    """

    number: int
    cpus: str = ""
    total_bytes: int = 0
    available_bytes: int = 0
    distances: dict[int, int]
    weight: int | None = None
    bandwidth_bytes_per_s: float | None = None
    latency_ns: float | None = None
    tier: int | None = None

    @property
    def memory_only(self) -> bool:
        return not self.cpus


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Nodes by number, in ascending order; `allowed` are those that this process may take memory from (cpusets)."""

    nodes: dict[int, Node]
    allowed: frozenset[int]

    @classmethod
    def of(cls, *nodes: Node) -> Topology:
        """Return a described machine, for plans and tests: all of its nodes are allowed."""
        by_number = {node.number: node for node in sorted(nodes, key=lambda node: node.number)}
        return cls(nodes=by_number, allowed=frozenset(by_number))

    @classmethod
    def read(cls, root: Path = _ROOT) -> Topology:
        """Return the machine under `root` (default: this one)."""
        folders = sorted((root / _NODES).glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
        nodes = [_read_node(path, root) for path in folders] or [_whole_machine(root)]
        by_number = {node.number: node for node in nodes}
        status = re.search(r"^Mems_allowed_list:\s*(\S+)", _read(root / "proc/self/status"), re.MULTILINE)
        allowed = _listed(status[1]) & by_number.keys() if status else by_number.keys()
        return cls(nodes=by_number, allowed=frozenset(allowed or by_number))

    @property
    def with_cpus(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes.values() if not node.memory_only)

    @property
    def memory_only(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes.values() if node.memory_only)


def _read_node(folder: Path, root: Path) -> Node:
    """Read one node from its folder in /sys."""
    memory = {name: int(kib) * 1024 for name, kib in re.findall(r"(\S+):\s+(\d+) kB", _read(folder / "meminfo"))}
    number = int(folder.name[4:])
    others = sorted(int(path.name[4:]) for path in folder.parent.glob("node[0-9]*"))
    row = [int(text) for text in _read(folder / "distance").split() if text.isdecimal()]
    weight = _read(root / _WEIGHTS / folder.name).strip()
    return Node(
        number=number,
        cpus=_read(folder / "cpulist").strip(),
        total_bytes=memory.get("MemTotal", 0),
        available_bytes=memory.get("MemFree", 0) + sum(memory.get(name, 0) for name in _RECLAIMABLE),
        distances=dict(zip(others, row, strict=False)) if row else {number: LOCAL_DISTANCE},
        weight=int(weight) if weight.isdecimal() else None,
        bandwidth_bytes_per_s=_positive(folder / _INITIATORS / "read_bandwidth", 1e6),
        latency_ns=_positive(folder / _INITIATORS / "read_latency", 1.0),
        tier=_tier(number, root),
    )


def _positive(path: Path, unit: float) -> float | None:
    """Return the number in a file times `unit`, or None if there is none or it is zero."""
    text = _read(path).strip()
    return int(text) * unit if text.isdecimal() and int(text) else None


def _tier(number: int, root: Path) -> int | None:
    """Return the kernel's memory tier of a node, or None if the kernel has none for it."""
    for folder in (root / _TIERS).glob("memory_tier[0-9]*"):
        if number in _listed(_read(folder / "nodelist").strip()):
            return int(folder.name.removeprefix("memory_tier"))
    return None


def _whole_machine(root: Path) -> Node:
    """Return the machine as node 0, for a kernel without NUMA."""
    total, available = ram_bytes(root)
    cpus = _read(root / "sys/devices/system/cpu/online").strip() or "0"
    return Node(number=0, cpus=cpus, total_bytes=total, available_bytes=available, distances={0: LOCAL_DISTANCE})


def _listed(text: str) -> set[int]:
    """Return the numbers of a kernel list such as 0-3,8."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _read(path: Path) -> str:
    """Return the text of a file, or an empty string if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
