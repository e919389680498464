"""Short measurements of each memory node: the latency of a load, and the bandwidth of a copy and of AdamW.

They run on the cores available to this process, for about two seconds per node; this is not a benchmark. Figures 4 and
5 of CXL-aware allocation show these quantities for DRAM and a card.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from memascend.memory.latency_first import NodeCapacity, capacities_of
from memascend.memory.topology import Topology

MIB = 2**20
# Far larger than the caches of most processors; a node with little free memory is tested with a quarter of it.
CHASED_BYTES = 256 * MIB
STREAMED_BYTES = 64 * MIB  # per tensor: two tensors in a copy, four in AdamW
HOPS = 1_000_000
ADAMW_BYTES_A_PARAMETER = 28  # it reads master, gradient and moments, and writes all but the gradient
_TIMES = 3


@dataclass(frozen=True, kw_only=True)
class NodeSpeed:
    """Speeds of one node. A copy counts both the bytes read and the bytes written."""

    number: int
    latency_ns: float
    copy_bytes_per_s: float
    adamw_bytes_per_s: float


def measure_nodes(*, bytes_at_most: int = CHASED_BYTES) -> list[NodeSpeed]:
    """Measure every usable node with at least 16 MiB available; return an empty list if our extension is missing."""
    try:
        from memascend import _C  # noqa: F401  another check reports it if it is missing
    except ImportError:
        return []
    found = []
    for capacity in capacities_of(Topology.read()):
        size = min(bytes_at_most, capacity.nbytes // 4) // MIB * MIB
        if size >= 4 * MIB:
            found.append(_measure(capacity.node, size))
    return found


def _measure(node: int, size: int) -> NodeSpeed:
    """Measure one node with buffers on it; the latency is measured over `size` bytes."""
    import torch

    from memascend import _C
    from memascend.memory.pinned import PageAlignedPinnedAllocator
    from memascend.memory.placement import on_node
    from memascend.ops.adamw import adamw_

    # With huge pages, the latency is that of memory rather than of page-table walks.
    allocator = PageAlignedPinnedAllocator(lock=False, register_cuda=False, pages="transparent")

    def taken(numel: int, dtype: torch.dtype) -> torch.Tensor:
        return allocator.allocate(numel, dtype, name=f"node {node}", owner="doctor", placement=on_node(node))

    chased = taken(size, torch.uint8)
    latency_ns = min(_C.load_latency_ns(chased.data_ptr(), size, HOPS, seed) for seed in range(2))
    del chased
    numel = min(STREAMED_BYTES, size // 4) // 4
    master, gradient, *moments = (taken(numel, torch.float32) for _ in range(4))
    copy_s = _best(lambda: master.copy_(gradient))
    adamw_s = _best(lambda: adamw_(master, gradient, *moments, step=1))
    return NodeSpeed(
        number=node,
        latency_ns=latency_ns,
        copy_bytes_per_s=8 * numel / copy_s,
        adamw_bytes_per_s=ADAMW_BYTES_A_PARAMETER * numel / adamw_s,
    )


def _best(call: Callable[[], object]) -> float:
    """Return the shortest of three times of a call, in seconds."""
    seconds = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def chosen_placement(topology: Topology, speeds: list[NodeSpeed]) -> str:
    """Describe what `latency_first` would do on this machine.

    Divided buffers are split by the firmware's bandwidths or, if these are unknown, evenly.
    """
    capacities = capacities_of(topology)
    near, far = ([capacity for capacity in capacities if capacity.near is wanted] for wanted in (True, False))
    if not far:
        return "latency_first leaves all host buffers on " + _named(near)
    rates = {capacity.node: capacity.bandwidth for capacity in capacities}
    known = all(rates.values())
    shares = " : ".join(f"{(rates[capacity.node] or 0) / 1e9:.0f}" if known else "1" for capacity in capacities)
    origin = "GB/s of the firmware" if known else "the firmware gives no bandwidths"
    measured = " : ".join(f"{speed.adamw_bytes_per_s / 1e9:.1f}" for speed in speeds)
    return f"latency_first fills {_named(near)}, then {_named(far)}; what is divided is divided {shares} ({origin}" + (
        f"; AdamW measured {measured})" if speeds else ")"
    )


def _named(capacities: list[NodeCapacity]) -> str:
    """Return the numbers of the nodes and their bytes in all."""
    numbers = ", ".join(str(capacity.node) for capacity in capacities)
    total = sum(capacity.nbytes for capacity in capacities)
    return f"node{'s' if len(capacities) > 1 else ''} {numbers} ({total / 2**30:.1f} GiB)"
