"""Largest trainable models by main memory (Figs. 2a, 6, 8), sizes of Tables IV and VI, batches of Table V.

A model of Table IV fits if the planned host buffers of the system are within main memory and its GPU memory within the
GPU's. The largest is found by bisection, since the list is in ascending order. The SSDs are large enough for all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import cache

from memascend.baselines.lohan.equations import GIB, POLICIES, DiT
from memascend.planner import Workload, plan
from memascend.planner.gpu_memory import gpu_memory
from memascend.planner.options import Stack
from memascend.planner.workload import papers
from workflows.cases import Row
from workflows.papers.lohan.rows import settings

shown = settings.shown

MEMORY_GB = (128, 256, 384, 512, 640, 768)
PLANNED = "memascend.planner: host buffers; of the GPU 4 blocks and one block's activations"
CPU_ONLY = "LoHan+CpuAct"
BATCHES = (12, 24, 36, 60)
# Where V-A does not keep activations in main memory: the inputs of blocks on the GPU, or all activations on the SSDs.
CHECKPOINTING = {settings.COLOSSAL: "plain", settings.FLASHNEURON: "ssd"}


def rows() -> Iterator[Row]:
    """Yield the rows of all exhibits on sizes."""
    for model in settings.TABLE_IV:
        n = settings.net(model, 1)
        cells = {"model": model, "series": "12 L h² + V h"}
        yield shown("lohan-tab04", "parameters (10⁹)", n.parameters / 1e9, "", "12 L h^2 + V h", **cells)
    for model, (layers, hidden) in settings.DITS.items():
        n = DiT(layers=layers, hidden=hidden, batch=1)
        cells = {"model": model, "series": "18 L h²"}
        yield shown("lohan-tab06", "parameters (10⁹)", n.parameters / 1e9, "", "18 L h^2", **cells)
    yield from by_memory("lohan-fig02a", (settings.COLOSSAL, settings.ZERO), 24, settings.T4090)
    systems = (settings.COLOSSAL, settings.ZERO, settings.OFFLOAD, settings.LOHAN)
    yield from by_memory("lohan-fig06a", systems, 24, settings.T4090)
    yield from by_memory("lohan-fig06b", systems, 16, settings.T4080)
    for exhibit, gpu_gib, testbed in (
        ("02a", 24, settings.T4090),
        ("06a", 24, settings.T4090),
        ("06b", 16, settings.T4080),
    ):
        yield from flashneuron(f"lohan-fig{exhibit}", gpu_gib, testbed)
    ratio = {"series": "LoHan / ZeRO-Infinity", "x": ("main_memory_GB", 768)}
    sizes = [settings.billions(largest(lambda m, s=s: fits(s, m, 768, 24))) for s in (settings.LOHAN, settings.ZERO)]
    yield shown("lohan-fig06a", "model_size_ratio", sizes[0] / sizes[1], "x", PLANNED, **ratio)
    for exhibit, memory in (("lohan-fig08a", 128), ("lohan-fig08b", 256)):
        yield from with_activations(exhibit, memory)
    yield from needed()
    yield from batches_of_policies()


def flashneuron(exhibit: str, gpu_gib: int, testbed: str) -> Iterator[Row]:
    """Yield FlashNeuron's largest model, at 16 bytes per parameter in the GPU memory that is left at batch 1.

    The rest is used by a GPT of width 1600: two blocks' activations, logits, kernels and context. Main memory does not
    matter.
    """
    work = workload(settings.FLASHNEURON, "1.6B", 1)
    other_bytes = gpu_memory(work).device_bytes - 16 * work.spec.parameters
    value = (gpu_gib * GIB - other_bytes) / 16 / 1e9
    source = f"memascend.planner.gpu_memory: ({gpu_gib} GiB - {other_bytes / 1e9:.2f} GB) / 16 bytes per parameter"
    for memory in MEMORY_GB:
        cells = {"series": settings.FLASHNEURON, "testbed": testbed, "x": ("main_memory_GB", memory)}
        yield shown(exhibit, "max_trainable_model", value, "B", source, **cells)


def needed() -> Iterator[Row]:
    """Yield the introduction's numbers for 100B and 175B, and the largest model of ZeRO-Infinity on four GPUs."""
    sixteen = "Table II: 4 P + 8 P + 2 P + 2 P"
    for model, parameters in (("100B", 100e9), ("175B", settings.net("175B", 1).parameters)):
        cells = {"series": "Table II", "model": model}
        yield shown("lohan-fig02a", "model states", 16 * parameters / 1e12, "TB", sixteen, **cells)
    cells, source = {"series": settings.ZERO, "model": "175B"}, "memascend.planner: host buffers, batch 1"
    yield shown("lohan-fig02a", "main memory needed", host_bytes(settings.ZERO, "175B") / 1e12, "TB", source, **cells)
    found = largest(lambda model: fits(settings.ZERO, model, 768, 24, gpus=4))
    cells = {"series": settings.ZERO, "testbed": settings.T4X, "x": ("num_GPUs", 4)}
    source = f"{PLANNED}, of four processes at batch 1 each, 768 GiB"
    yield shown("lohan-fig11d", "max_trainable_model", settings.billions(found), "B", source, **cells)


def batches_of_policies() -> Iterator[Row]:
    """Yield Table V by plans: the largest multiple of 8 that fits the GPU and main memory; 0 if not even 8 does.

    The engine's buffers are LoHan's. Policies that swap only to main memory keep at least the activations between
    blocks.
    """
    for policy in POLICIES:
        to_ssds = policy in ("LoHan+Optimized", "LoHan+G10")
        for memory in (128, 256, 512):

            def fitting(batch: int, to_ssds: bool = to_ssds, memory: int = memory) -> bool:
                needed = host_bytes(settings.LOHAN, "70B", batch) + (
                    0 if to_ssds else settings.net("70B", batch).between_blocks
                )
                return needed <= memory * GIB and settings.on_gpu("70B", batch, 24)

            most = max((batch for batch in range(8, 129, 8) if fitting(batch)), default=0)
            cells = {"series": policy.replace("LoHan+ZeRO", "LoHan+DS"), "model": "70B"}
            where = "to SSDs" if to_ssds else "2 s b h L in main memory"
            source = f"{PLANNED}; activations: {where}"
            yield shown("lohan-tab05", "batch_size", most, "", source, **cells, x=("main_memory_GB", memory))


def largest(fitting: Callable[[str], bool]) -> str | None:
    """Return the last model of Table IV that fits, by bisection, or None."""
    count = bisect_left(settings.TABLE_IV, True, key=lambda model: not fitting(model))
    return settings.TABLE_IV[count - 1] if count else None


@cache
def host_bytes(series: str, model: str, batch: int = 1, gpus: int = 1) -> int:
    """Return the planned bytes, including the activation checkpoints that the system keeps in host memory."""
    return plan(workload(series, model, batch, gpus)).host_bytes


def workload(series: str, model: str, batch: int, gpus: int = 1) -> Workload:
    """Return a workload with PyTorch's own cross-entropy, which keeps all logits on the GPU."""
    system, arm = settings.ARMS[series]
    stack = Stack(loss="plain", checkpointing=CHECKPOINTING.get(series, "offloaded"))
    work = {"dtype": "bf16", "context": 1024, "batch": batch, "ranks": gpus, "stack": stack}
    return papers(Workload(spec=settings.PAPER.spec(model), system=system, arm=arm, **work))


def largest_batch(series: str, model: str, among: tuple[int, ...], gpu_gib: int = 24) -> int:
    """Return the largest batch that fits; 0 if none does.

    LoHan's follows the rule of Fig. 6, without logits: its released model has no output matrix, and Fig. 5a has 13B at
    batch 128. A baseline's follows DeepSpeed's plan of the GPU, with logits.
    """

    def fitting(batch: int) -> bool:
        if series == settings.LOHAN:
            return settings.on_gpu(model, batch, gpu_gib)
        return gpu_memory(workload(series, model, batch)).device_bytes <= gpu_gib * GIB

    fitting_batches = (b for b in among if fitting(b) and host_bytes(series, model, b) <= settings.MEMORY_GB * GIB)
    return max(fitting_batches, default=0)


def fits(series: str, model: str, memory_gb: int, gpu_gib: float, batch: int = 1, gpus: int = 1) -> bool:
    """Return whether a model fits main memory, in GiB, and the GPU."""
    fits_gpu = settings.on_gpu(model, batch, gpu_gib, series)
    return host_bytes(series, model, batch, gpus) <= memory_gb * GIB and fits_gpu


def by_memory(exhibit: str, systems: tuple[str, ...], gpu_gib: int, testbed: str) -> Iterator[Row]:
    """Yield the largest model by main memory at batch 1. Main memory is in GiB, as its modules are sold."""
    for series in systems:
        for memory in MEMORY_GB:
            found = largest(lambda model, s=series, gb=memory: fits(s, model, gb, gpu_gib))
            cells = {"series": series, "x": ("main_memory_GB", memory), "testbed": testbed}
            yield shown(exhibit, "max_trainable_model", settings.billions(found), "B", PLANNED, **cells)


def with_activations(exhibit: str, memory_gb: int) -> Iterator[Row]:
    """Yield the largest model with the activations between blocks on the SSDs, or within the share of main memory for
    them.

    These activations are the least that must leave the GPU.
    """
    limit = settings.PAPER.value("memory_for_activations") * memory_gb * GIB
    for batch in BATCHES:
        for series in ("LoHan Optimized", CPU_ONLY):

            def fitting(model: str, series: str = series, batch: int = batch) -> bool:
                fits_both = fits(settings.LOHAN, model, memory_gb, 24, batch)
                return fits_both and (series != CPU_ONLY or settings.net(model, batch).between_blocks <= limit)

            cells = {"series": series, "x": ("batch_size", batch)}
            source = f"{PLANNED}; LoHan+CpuAct: 2 s b h L within half of main memory"
            yield shown(exhibit, "max_trainable_model", settings.billions(largest(fitting)), "B", source, **cells)
