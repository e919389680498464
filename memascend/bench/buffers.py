"""Benchmark of pinned memory and buffer pools: the bytes that each policy reserves and the time of a request."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from memascend.bench.rounds import alternate, conditions, ratios, spread
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import CountingAllocator, PageAlignedPinnedAllocator, PowerOfTwoPinnedAllocator
from memascend.memory.pools import AdaptiveBufferPool, BufferPool, MonolithicBufferPool, adaptive_pool_classes
from memascend.planner import model_spec
from memascend.planner.pool import streamed

_ALLOCATORS: dict[str, Callable[..., Any]] = {
    "page_aligned": PageAlignedPinnedAllocator,
    "page_aligned, huge pages": partial(PageAlignedPinnedAllocator, pages="transparent"),
    "power_of_two": PowerOfTwoPinnedAllocator,
}
_LEASES = 2000  # a lease takes microseconds: many are timed together


def measure_pinned(sizes_bytes: list[int], repeats: int) -> dict[str, Any]:
    """Time each allocator at allocating, locking and freeing a buffer of each size; return points and summary."""
    points = []
    for size in sizes_bytes:
        seconds = alternate({name: _allocate_and_free(make, size) for name, make in _ALLOCATORS.items()}, repeats)
        for name, make in _ALLOCATORS.items():
            ledger = Ledger()
            kept = make(ledger).allocate(size, torch.uint8, name="bench", owner="bench")
            entry = ledger.entries()[0]
            del kept
            points.append(
                {
                    "method": name,
                    "requested_bytes": size,
                    "reserved_bytes": entry.reserved_bytes,
                    "locked": entry.locked,
                    "seconds": seconds[name],
                }
            )
    summary = [
        {
            "method": p["method"],
            "requested_bytes": p["requested_bytes"],
            "reserved_share": p["reserved_bytes"] / p["requested_bytes"],
            "locked": p["locked"],
            "seconds": vars(spread(p["seconds"])),
            "times_faster_than": {
                "power_of_two": vars(ratios(_seconds(points, "power_of_two", p["requested_bytes"]), p["seconds"]))
            },
        }
        for p in points
    ]
    return {"benchmark": "pinned", "conditions": conditions(), "points": points, "summary": summary}


def _seconds(points: list[dict[str, Any]], method: str, size: int) -> list[float]:
    return next(p["seconds"] for p in points if (p["method"], p["requested_bytes"]) == (method, size))


def _allocate_and_free(make: Callable[..., Any], size: int) -> Callable[[], None]:
    def run() -> None:
        make().allocate(size, torch.uint8, name="bench", owner="bench")

    return run


def measure_pool(model: str, repeats: int) -> dict[str, Any]:
    """Return the bytes of each kind of pool for a model, and the time of a lease and its return.

    The bytes are counted by the code that a run uses.
    """
    tensors = streamed(model_spec(model).tensors(), element_bytes=2)
    points = []
    for name, build in _pools(tensors).items():
        ledger = Ledger()
        pool = build(ledger)
        points.append({"method": name, "reserved_bytes": sum(e.reserved_bytes for e in ledger.entries()), "pool": pool})
    seconds = alternate({p["method"]: _lease_all(p["pool"], tensors.blocks[0]) for p in points}, repeats)
    for point in points:
        del point["pool"]
        leases = _LEASES // len(tensors.blocks[0]) * len(tensors.blocks[0])
        point["seconds"] = [taken / leases for taken in seconds[point["method"]]]
    summary = [
        {
            "method": p["method"],
            "reserved_bytes": p["reserved_bytes"],
            "share_of_monolithic": p["reserved_bytes"] / points[0]["reserved_bytes"],
            "seconds": vars(spread(p["seconds"])),
        }
        for p in points
    ]
    return {"benchmark": "pool", "model": model, "conditions": conditions(), "points": points, "summary": summary}


def _pools(tensors: Any) -> dict[str, Callable[[Ledger], BufferPool]]:
    """Return constructors of the pools: monolithic as published (each buffer rounded by itself), monolithic as one
    tensor (DeepSpeed), and adaptive."""
    count, classes = tensors.monolithic_count(), adaptive_pool_classes(tensors.blocks, tensors.outside)

    def monolithic(separate: bool) -> Callable[[Ledger], BufferPool]:
        return lambda ledger: MonolithicBufferPool(
            tensors.largest, count, torch.float16, CountingAllocator("power_of_two", ledger), separate
        )

    return {
        "monolithic, separate": monolithic(True),
        "monolithic": monolithic(False),
        "adaptive": lambda ledger: AdaptiveBufferPool(
            classes, torch.float16, CountingAllocator("page_aligned", ledger)
        ),
    }


def _lease_all(pool: BufferPool, block: tuple[int, ...]) -> Callable[[], None]:
    """Return a function that leases and returns a block's tensors repeatedly, as a forward pass does."""

    def run() -> None:
        for _ in range(_LEASES // len(block)):
            for place, numel in enumerate(block):
                if pool.lease(place, numel) is None:
                    raise RuntimeError(f"the pool has no buffer for {numel} elements of its own model")
            for place in range(len(block)):
                pool.release(place)

    return run
