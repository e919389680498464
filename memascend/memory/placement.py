"""Placement of memory on NUMA nodes: policies are set before the first touch, can be queried, and changed later.

    allocator = PageAlignedPinnedAllocator(ledger, placement=on_node(2))
    states = allocator.allocate(n, torch.float32, name="moments", owner="adamw", placement=interleaved([1, 2]))
    nodes_of(states)  # {1: 512, 2: 512}: pages by node
    move(states, on_node(0))

A policy is checked against the machine's `Topology` before anything is allocated: if a node cannot satisfy a strict
policy, the kernel kills the process, and it answers other mistakes with ordinary memory. Pages are interleaved one by
one (4 KiB), or in units of 2 MiB with huge pages. On a machine with one node everything works, and nothing is moved.

`Placement.native()` returns the arguments of the extension: mode, nodes, and this memory's own weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from memascend import _C
from memascend.memory.classes import class_of
from memascend.memory.ledger import LedgerEntry
from memascend.memory.policies import Placement, interleaved, on_node, prefer, weighted
from memascend.memory.topology import Topology

__all__ = [
    "UNTOUCHED",
    "NodeCheck",
    "Placement",
    "bytes_by_class",
    "interleaved",
    "move",
    "nodes_of",
    "on_node",
    "prefer",
    "verify_nodes",
    "weighted",
]

UNTOUCHED = -1  # key in `nodes_of`: pages that are not resident, and so on no node yet


def nodes_of(tensor: torch.Tensor) -> dict[int, int]:
    """Return the number of 4-KiB pages by node, from the tensor's first to its last element.

    Pages that are not resident count under UNTOUCHED. Raises ValueError unless it is a strided CPU tensor with
    elements, RuntimeError if the kernel does not report nodes.
    """
    begin, end = _range(tensor)
    return _C.pages_by_node(begin, end - begin)


def move(tensor: torch.Tensor, placement: Placement, topology: Topology | None = None) -> dict[int, int]:
    """Move the tensor's pages to the nodes of the policy, and return `nodes_of` it.

    With several nodes, pages that are on one of them stay. A page at either end that is shared with other data stays,
    too. Contents and address do not change. Raises ValueError for an invalid policy, MemoryError for a full strict
    node, RuntimeError for pages that cannot move (registered with CUDA or io_uring).
    """
    begin, end = _range(tensor)
    page = _C.PAGE_BYTES
    down, up = begin // page * page, -(-end // page) * page
    if _C.pinned_contains(down, up - down):
        begin, end = down, up  # a block of ours shares no pages with other data
    else:
        begin, end = -(-begin // page) * page, end // page * page
    placement.check(Topology.read() if topology is None else topology, max(0, end - begin))
    if begin < end:
        _C.move_pages(begin, end - begin, placement.native())
    return nodes_of(tensor)


@dataclass(frozen=True)
class NodeCheck:
    """The kernel's report for one ledger entry: `pages` by node, now."""

    entry: LedgerEntry
    pages: dict[int, int]

    @property
    def agrees(self) -> bool:
        """Whether the pages are on the nodes that the entry states."""
        return self.entry.nodes is None or set(self.pages) - {UNTOUCHED} == set(self.entry.nodes)


def verify_nodes(entries: Iterable[LedgerEntry]) -> list[NodeCheck]:
    """Query every live entry that has an address. Raises RuntimeError if the kernel does not report nodes."""
    return [
        NodeCheck(entry, _C.pages_by_node(entry.address, entry.reserved_bytes))
        for entry in entries
        if entry.address is not None and entry.died_s is None
    ]


def bytes_by_class(checks: Iterable[NodeCheck]) -> dict[str, dict[int, int]]:
    """Return the resident bytes by node of each class of tensors (other buffers: by owner)."""
    found: dict[str, dict[int, int]] = {}
    for check in checks:
        shares = found.setdefault(class_of(check.entry.owner) or check.entry.owner, {})
        for node, pages in check.pages.items():
            if node != UNTOUCHED:
                shares[node] = shares.get(node, 0) + pages * _C.PAGE_BYTES
    return found


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the tensor's first byte and after its last one. Raises ValueError for other tensors than
    strided ones on the CPU with elements."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.numel() == 0:
        raise ValueError(
            f"placement: a strided CPU tensor with elements is needed, not {tensor.layout} on "
            f"{tensor.device} with {tensor.numel()} elements"
        )
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
