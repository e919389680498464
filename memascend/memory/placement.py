"""On which NUMA nodes memory lies: policies, set before the first touch, asked about, and changed later.

    allocator = PageAlignedPinnedAllocator(ledger, placement=on_node(2))
    states = allocator.allocate(n, torch.float32, name="moments", owner="adamw", placement=interleaved([1, 2]))
    nodes_of(states)  # {1: 512, 2: 512}: pages by node
    move(states, on_node(0))

A policy is checked against the machine's `Topology` before anything is taken: the kernel answers a strict policy that
a node cannot hold by killing the process, and mistakes by ordinary memory. Pages are set in turn one by one (4 KiB), or
in units of 2 MiB where huge pages are asked for. On one node everything works, and nothing is moved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from memascend import _C
from memascend.memory.topology import Topology

UNTOUCHED = -1  # in `nodes_of`: pages that are not resident, and so lie nowhere yet

_STRICT, _PREFERRED, _PREFERRED_MANY, _INTERLEAVED, _WEIGHTED = (
    "bind", "preferred", "preferred_many", "interleaved", "weighted",
)  # fmt: skip


@dataclass(frozen=True)
class Placement:
    """A policy; made by `on_node`, `prefer`, `interleaved` and `weighted`. `weights` belong to `nodes`, None: any."""

    mode: str
    nodes: tuple[int, ...]
    weights: tuple[int, ...] | None = None

    @property
    def strict(self) -> bool:
        """Whether memory comes from these nodes or not at all."""
        return self.mode == _STRICT

    def check(self, topology: Topology, reserved_bytes: int) -> None:
        """Refuse, in one line, what cannot work: ValueError for the nodes, MemoryError for a full strict one."""
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
        if self.weights is not None:
            self._check_weights(topology)
        available = sum(topology.nodes[number].available_bytes for number in self.nodes)
        if self.strict and reserved_bytes > available:
            raise MemoryError(
                f"placement {self}: {reserved_bytes >> 20} MiB are more than the {available >> 20} MiB that are free "
                "there, and the kernel would kill the process: end other programs, or use strict=False, which takes "
                "the rest from other nodes"
            )

    def _check_weights(self, topology: Topology) -> None:
        """Linux has one set of weights for the machine, and a mapping cannot have its own: they must agree."""
        wanted = self.weights or ()
        if len(wanted) != len(self.nodes) or any(not 1 <= weight <= 255 for weight in wanted):
            raise ValueError(f"placement {self}: give each node a weight from 1 to 255")
        kernel = [topology.nodes[number].weight for number in self.nodes]
        if None in kernel:
            raise ValueError(f"placement {self}: weighted interleaving needs Linux 6.9; use interleaved(...)")
        if _ratio(wanted) != _ratio([weight or 0 for weight in kernel]):
            folder = "/sys/kernel/mm/mempolicy/weighted_interleave"
            orders = "; ".join(f"echo {w} > {folder}/node{n}" for n, w in zip(self.nodes, wanted, strict=True))
            raise ValueError(
                f"placement {self}: the kernel's weights are {':'.join(map(str, kernel))}, and there is one set for "
                f"the machine; set them as root ({orders}), or leave the weights out"
            )

    def native(self) -> tuple[str, list[int]]:
        """As the extension takes it."""
        return self.mode, list(self.nodes)

    def __str__(self) -> str:
        weights = f" by {':'.join(map(str, self.weights))}" if self.weights else ""
        return f"{self.mode} on node {', '.join(map(str, self.nodes)) or '(none)'}{weights}"


def on_node(node: int, *, strict: bool = False) -> Placement:
    """All pages on one node; what it has no room for goes to others, or with `strict` is refused."""
    return Placement(_STRICT if strict else _PREFERRED, (node,))


def prefer(nodes: Iterable[int]) -> Placement:
    """On any of these nodes, the nearest first, and on others when they are full (Linux 5.15)."""
    return Placement(_PREFERRED_MANY, tuple(nodes))


def interleaved(nodes: Iterable[int]) -> Placement:
    """A page on each node in turn. What a full node would have had goes to others."""
    return Placement(_INTERLEAVED, tuple(nodes))


def weighted(nodes: Iterable[int] | Mapping[int, int]) -> Placement:
    """As many pages on each node in turn as its weight (Linux 6.9), up to one round, more or less by the address.

    The weights are the kernel's (/sys/kernel/mm/mempolicy/weighted_interleave), from the firmware's bandwidths or set
    by root, one set for the machine. A mapping node -> weight asks for these in particular, and is refused where the
    kernel's are in another ratio.
    """
    if isinstance(nodes, Mapping):
        return Placement(_WEIGHTED, tuple(nodes), tuple(nodes.values()))
    return Placement(_WEIGHTED, tuple(nodes))


def nodes_of(tensor: torch.Tensor) -> dict[int, int]:
    """Pages of 4 KiB by node, of the memory from the tensor's first to its last element; UNTOUCHED where not resident.

    Raises ValueError for what is no strided CPU tensor with elements, RuntimeError if the kernel does not say.
    """
    begin, end = _range(tensor)
    return _C.pages_by_node(begin, end - begin)


def move(tensor: torch.Tensor, placement: Placement, topology: Topology | None = None) -> dict[int, int]:
    """Move the tensor's whole pages to where the policy says, and return `nodes_of` it. Pages on one of several nodes
    stay there; a page at either end that others share stays where it is.

    Contents and address are the same after it. Raises ValueError for the policy, MemoryError for a full strict node,
    RuntimeError for pages that cannot move (registered with CUDA or io_uring).
    """
    begin, end = _range(tensor)
    page = _C.PAGE_BYTES
    down, up = begin // page * page, -(-end // page) * page
    if _C.pinned_contains(down, up - down):
        begin, end = down, up  # a block of ours shares its pages with nobody
    else:
        begin, end = -(-begin // page) * page, end // page * page
    placement.check(Topology.read() if topology is None else topology, max(0, end - begin))
    if begin < end:
        _C.move_pages(begin, end - begin, placement.native())
    return nodes_of(tensor)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.numel() == 0:
        raise ValueError(
            f"placement: a strided CPU tensor with elements is needed, not {tensor.layout} on "
            f"{tensor.device} with {tensor.numel()} elements"
        )
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _ratio(weights: Iterable[int]) -> list[int]:
    numbers = list(weights)
    common = math.gcd(*numbers) or 1
    return [number // common for number in numbers]
