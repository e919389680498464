"""Benchmark of the load latency of each memory node, by working-set size.

This is the curve behind Fig. 4 of CXL-aware allocation: a pointer chase in random order, where each load depends on the
previous one, from the core on which this thread runs. The steps of the curve are the caches; its end is the latency of
the node.
"""

from __future__ import annotations

from typing import Any

import torch

from memascend import _C
from memascend.bench.rounds import conditions, spread
from memascend.memory.latency_first import capacities_of
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.memory.placement import on_node
from memascend.memory.topology import Topology

HOPS = 1_000_000


def measure(kibs: list[int], repeats: int) -> dict[str, Any]:
    """Return the seconds per load of every round, for each node with enough free memory and each size in KiB.

    Every round measures all nodes and sizes in turn. Raises ValueError if a size fits on no node.
    """
    sizes = [kib << 10 for kib in kibs]
    # With huge pages, the latency is that of memory rather than of page-table walks.
    allocator = PageAlignedPinnedAllocator(lock=False, register_cuda=False, pages="transparent")
    walked, topology = {}, Topology.read()
    far = {node.number for node in topology.memory_only}
    for capacity in capacities_of(topology):
        for size in sizes:
            if size <= capacity.nbytes // 4:
                where = {"name": f"node {capacity.node}", "owner": "bench", "placement": on_node(capacity.node)}
                walked[capacity.node, size] = allocator.allocate(size, torch.uint8, **where)
    if missing := set(sizes) - {size for _, size in walked}:
        raise ValueError(f"--kib: {max(missing) >> 10} KiB exceed a quarter of the free memory of every node")
    seconds: dict[tuple[int, int], list[float]] = {key: [] for key in walked}
    for number in range(repeats):
        for (node, size), tensor in walked.items():
            seconds[node, size].append(_C.load_latency_ns(tensor.data_ptr(), size, HOPS, number) / 1e9)
    points = [
        {"method": f"node {node}", "node": node, "memory_only": node in far, "bytes": size, "seconds": taken}
        for (node, size), taken in seconds.items()
    ]
    summary = [
        {name: point[name] for name in ("node", "bytes")} | {"seconds": vars(spread(point["seconds"]))}
        for point in points
    ]
    return {"benchmark": "latency", "conditions": conditions(), "points": points, "summary": summary}
