"""Largest trainable models by main memory (Figs. 2a, 6, 8), sizes of Table IV, batches of Table V.

A model of Table IV fits where the plan of the system's host buffers is within main memory and what it needs of the GPU
within the GPU's; the largest is found by halving the list, which grows. SSDs hold them all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import cache

from baselines.lohan.equations import GIB
from memascend.planner import Workload, plan
from memascend.planner.workload import papers
from workflows.cases import Row
from workflows.papers.lohan.rows import settings as own

shown = own.shown

MEMORY_GB = (128, 256, 384, 512, 640, 768)
PLANNED = "memascend.planner: host buffers; of the GPU 4 blocks and one block's activations"
CPU_ONLY = "LoHan+CpuAct"
BATCHES = (12, 24, 36, 60)


def rows() -> Iterator[Row]:
    for model in own.TABLE_IV:
        n = own.net(model, 1)
        cells = {"model": model, "series": "12 L h² + V h"}
        yield shown("lohan-tab04", "parameters (10⁹)", n.parameters / 1e9, "", "12 L h^2 + V h", **cells)
    yield from by_memory("lohan-fig02a", (own.ZERO,), 24, own.T4090)
    n = 24 * GIB / 16 / 1e9
    for memory in MEMORY_GB:
        cells = {"series": "FlashNeuron", "x": ("main_memory_GB", memory)}
        yield shown("lohan-fig02a", "max_trainable_model", n, "B", "24 GiB / 16 bytes a parameter", **cells)
    yield from by_memory("lohan-fig06a", (own.ZERO, own.OFFLOAD, own.LOHAN), 24, own.T4090)
    yield from by_memory("lohan-fig06b", (own.ZERO, own.OFFLOAD, own.LOHAN), 16, own.T4080)
    ratio = {"series": "LoHan / ZeRO-Infinity", "x": ("main_memory_GB", 768)}
    sizes = [billions(largest(lambda m, s=s: fits(s, m, 768, 24))) for s in (own.LOHAN, own.ZERO)]
    yield shown("lohan-fig06a", "model_size_ratio", sizes[0] / sizes[1], "x", PLANNED, **ratio)
    for exhibit, memory in (("lohan-fig08a", 128), ("lohan-fig08b", 256)):
        yield from with_activations(exhibit, memory)
    most = own.most_on_gpu("70B", 24, tuple(range(1, 129)))
    for memory in (128, 256, 512):
        cells = {"series": "LoHan+Optimized", "model": "70B", "x": ("main_memory_GB", memory)}
        source = "4 blocks and one block's activations within 24 GiB: an upper end, whatever the host has"
        yield shown("lohan-tab05", "batch_size that the GPU holds", most, "", source, **cells)


def largest(fitting: Callable[[str], bool]) -> str | None:
    """The last model of Table IV that fits, by bisection."""
    count = bisect_left(own.TABLE_IV, True, key=lambda model: not fitting(model))
    return own.TABLE_IV[count - 1] if count else None


def billions(model: str | None) -> float:
    """As Table IV calls it; 0 where none fits."""
    return float(model.removesuffix("B")) if model else 0.0


@cache
def host_bytes(series: str, model: str, batch: int = 1) -> int:
    """Of the plan, with the activation checkpoints that the system keeps in host memory."""
    system, arm = own.ARMS[series]
    work = Workload(spec=own.PAPER.spec(model), system=system, arm=arm, dtype="bf16", context=1024, batch=batch)
    return plan(papers(work)).host_bytes


def fits(series: str, model: str, memory_gb: int, gpu_gib: float, batch: int = 1) -> bool:
    return host_bytes(series, model, batch) <= memory_gb * GIB and own.on_gpu(model, batch, gpu_gib)


def by_memory(exhibit: str, systems: tuple[str, ...], gpu_gib: int, testbed: str) -> Iterator[Row]:
    """Batch 1. Main memory in GiB, as its modules are sold."""
    for series in systems:
        for memory in MEMORY_GB:
            found = largest(lambda model, s=series, gb=memory: fits(s, model, gb, gpu_gib))
            cells = {"series": series, "x": ("main_memory_GB", memory), "testbed": testbed}
            yield shown(exhibit, "max_trainable_model", billions(found), "B", PLANNED, **cells)


def with_activations(exhibit: str, memory_gb: int) -> Iterator[Row]:
    """What lies between blocks, the least that may leave the GPU, on the SSDs or within what main memory has for it."""
    room = own.PAPER.value("memory_for_activations") * memory_gb * GIB
    for batch in BATCHES:
        for series in ("LoHan Optimized", CPU_ONLY):

            def fitting(model: str, series: str = series, batch: int = batch) -> bool:
                held = fits(own.LOHAN, model, memory_gb, 24, batch)
                return held and (series != CPU_ONLY or own.net(model, batch).between_blocks <= room)

            cells = {"series": series, "x": ("batch_size", batch)}
            source = f"{PLANNED}; LoHan+CpuAct: 2 s b h L within half of main memory"
            yield shown(exhibit, "max_trainable_model", billions(largest(fitting)), "B", source, **cells)
