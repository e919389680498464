"""Throughput by batch, model, SSDs and GPUs: Figs. 2b, 2c, 5, 7 and 10 to 13, from the systems' schedules."""

from __future__ import annotations

from collections.abc import Iterator

from memascend.baselines.lohan.equations import GIB, DiT, best, iteration_s, released
from workflows.cases import Row
from workflows.papers.lohan.rows import settings
from workflows.papers.lohan.rows.sizes import largest_batch

shown = settings.shown

DRIVES = (1, 2, 3, 6, 12)
BATCHES = (8, 16, 32, 64, 128)  # batches of Fig. 5a
# Prices of Table VII in dollars, and the GiB of one of the DGX's GPUs.
SERVER, GPU_PRICE, SSD_PRICE, DGX = 14098, 1600, 308, 200000
DGX_GPU_GIB = 80
# The rule by which the runs swapped: their 34 GB of Fig. 1c follow from the released script, not from Algorithm 1
# (errata L17 and L18).
RUNS = "released"


def rows() -> Iterator[Row]:
    """Yield the rows of all exhibits on throughput."""
    yield from shares()
    yield from colossal_busy()
    systems = (settings.LOHAN, settings.ZERO, settings.OFFLOAD, settings.COLOSSAL)
    yield from by_batch("lohan-fig05a", "13B", (8, 16, 32, 64, 128), systems, settings.T4090)
    yield from by_batch("lohan-fig05b", "13B", (8, 16, 32, 64), systems, settings.T3090)
    arms = ("LoHan+ZeRO", "LoHan Naive", "LoHan Optimized")
    yield from by_batch("lohan-fig07a", "13B", (8, 16, 32, 64), arms, settings.T4090)
    yield from by_batch("lohan-fig07b", "175B", (8, 16), arms, settings.T4090)
    yield from best_of_sizes()
    yield from by_drives()
    for sub, model, gpus, batches in (
        ("a", "13B", 2, (16, 32, 64, 128, 256)),
        ("b", "70B", 2, (16, 32, 48, 64)),
        ("c", "13B", 4, (32, 64, 128, 256, 512)),
        ("d", "70B", 4, (32, 64, 96, 128)),
    ):
        yield from by_batch(f"lohan-fig11{sub}", model, batches, (settings.LOHAN, settings.ZERO), settings.T4X, gpus)
    yield from diffusion()
    yield from costs()


def by_batch(
    exhibit: str, model: str, batches: tuple[int, ...], systems: tuple[str, ...], testbed: str, gpus: int = 1
) -> Iterator[Row]:
    """Yield tokens per second of each system at the batches that fit the GPU, and the ratios at each batch.

    On the RTX 4090, LoHan is also computed by its equations. Fig. 7's arms swap alike and differ only in how they
    handle gradients.
    """
    of_gradients = exhibit.startswith("lohan-fig07")
    for batch in (b for b in batches if settings.on_gpu(model, b // gpus, 24)):
        cells = {"model": model, "testbed": testbed, "x": ("global_batch_size" if gpus > 1 else "batch_size", batch)}
        found = {}
        fitting = [series for series in systems if settings.on_gpu(model, batch // gpus, 24, series)]
        for series in fitting:
            made = settings.step(series, model, batch // gpus, testbed, gpus=gpus, swap=RUNS if of_gradients else "")
            found[series] = made.tokens_per_second
            source = f"{settings.SIMULATED}, mostly {made.bottleneck}"
            yield shown(exhibit, "throughput", found[series], "token/s", source, series=series, **cells)
        if exhibit == "lohan-fig05a":
            n, r = settings.net(model, batch), settings.rates()
            tokens = n.tokens / iteration_s(n, r, best(n, r))
            yield shown(
                exhibit, "throughput", tokens, "token/s", settings.EQUATIONS, series=settings.BY_EQUATIONS, **cells
            )
        first = systems[-1] if of_gradients else systems[0]
        for other in (each for each in fitting if each != first):
            series, ratio = f"{first} / {other.removeprefix('LoHan ')}", found[first] / found[other]
            yield shown(exhibit, "throughput_ratio", ratio, "x", settings.SIMULATED, series=series, **cells)


def shares() -> Iterator[Row]:
    """Yield the shares of the GPU and of the optimizer in ZeRO-Infinity's step."""
    for model in ("13B", "30B", "70B"):
        for batch in (8, 16, 32, 64):
            made = settings.step(settings.ZERO, model, batch)
            cells = {"series": model, "model": model, "x": ("batch_size", batch)}
            served = sum(made.simulated.served_s[phase.name].get("gpu0", 0.0) for phase in made.phases)
            busy = served - len(settings.PASSES) * settings.runtime_s(settings.ZERO, model)
            yield shown("lohan-fig02b", "gpu_busy", 100 * busy / made.seconds, "%", settings.SIMULATED, **cells)
            optimizer = next(phase.seconds for phase in made.phases if phase.name == "optimizer")
            yield shown(
                "lohan-fig02c", "optimizer_share", 100 * optimizer / made.seconds, "%", settings.SIMULATED, **cells
            )


def colossal_busy() -> Iterator[Row]:
    """Yield the GPU's share of Colossal-AI's step, at the batch of ZeRO-Infinity's 36 %."""
    made = settings.step(settings.COLOSSAL, "13B", 32)
    busy = sum(made.simulated.served_s[phase.name].get("gpu0", 0.0) for phase in made.phases)
    cells = {"series": settings.COLOSSAL, "model": "13B", "x": ("batch_size", 32)}
    yield shown("lohan-fig02b", "gpu_busy", 100 * busy / made.seconds, "%", settings.SIMULATED, **cells)


def best_of_sizes() -> Iterator[Row]:
    """Yield Fig. 5c: each system at its largest batch, by the paper's count of FLOP."""
    peak = settings.net("13B", 32)
    whole = 2 * peak.forward_flops + peak.forward_flops + peak.block_flops
    top = peak.reported_tflops(whole / settings.PAPER.value("gpu_throughput"))
    baselines = (settings.ZERO, settings.OFFLOAD)
    most = dict.fromkeys(baselines, 0.0)
    for model in ("13B", "30B", "70B", "135B", "175B"):
        cells = {"model": model, "x": ("model_size_B", model.removesuffix("B"))}
        found = {series: largest_batch(series, model, BATCHES) for series in (settings.LOHAN, *baselines)}
        reached = {
            series: (
                settings.net(model, batch).reported_tflops(settings.step(series, model, batch).seconds),
                settings.SIMULATED,
                batch,
            )
            for series, batch in found.items()
            if batch
        }
        n, r = settings.net(model, found[settings.LOHAN]), settings.rates()
        tflops = n.reported_tflops(iteration_s(n, r, best(n, r)))
        reached[settings.BY_EQUATIONS] = tflops, settings.EQUATIONS, found[settings.LOHAN]
        for series, (value, how, batch) in reached.items():
            source = f"{how}, batch {batch}"
            yield shown("lohan-fig05c", "throughput", value, "TFLOPS", source, series=series, **cells)
            yield shown("lohan-fig05c", "share_of_peak", 100 * value / top, "%", source, series=series, **cells)
        yield shown("lohan-fig05c", "throughput", top, "TFLOPS", "THP_G alone", series="peak of the GPU", **cells)
        most = {series: max(so_far, reached.get(series, (0.0,))[0]) for series, so_far in most.items()}
    yield shown(
        "lohan-fig05c", "most of any size", most[settings.ZERO], "TFLOPS", settings.SIMULATED, series=settings.ZERO
    )
    for series, value in most.items():
        share = 100 * value / top
        yield shown(
            "lohan-fig05c", "share of the peak, most of any size", share, "%", settings.SIMULATED, series=series
        )


def by_drives() -> Iterator[Row]:
    """Yield Fig. 10: 135B at the largest batch of each system, 13B at three batches.

    By the equations the 13B's activations stay in main memory, which is filled first (Eq. 3); the simulator writes all
    of them to the SSDs.
    """
    most = {series: largest_batch(series, "135B", BATCHES) for series in (settings.LOHAN, settings.ZERO)}
    for series, batch in most.items():
        few, many = (settings.step(series, "135B", batch, ssds=n).tokens_per_second for n in (DRIVES[0], DRIVES[-1]))
        cells = {"series": series, "model": "135B"}
        yield shown("lohan-fig10a", "gain from 1 to 12 SSDs", many / few, "x", settings.SIMULATED, **cells)
    for few, many in ((1, 3), (6, 12)):
        first, last = (settings.step(settings.LOHAN, "135B", most[settings.LOHAN], ssds=n) for n in (few, many))
        share = last.tokens_per_second / first.tokens_per_second / (many / few)
        metric, cells = f"gain from {few} to {many} SSDs over a linear one", {"series": settings.LOHAN, "model": "135B"}
        yield shown("lohan-fig10a", metric, share, "", settings.SIMULATED, **cells)
    host_bytes = settings.PAPER.value("memory_for_activations") * settings.MEMORY_GB * GIB
    for drives in DRIVES:
        for series, batch in most.items():
            tokens = settings.step(series, "135B", batch, ssds=drives).tokens_per_second
            source = f"{settings.SIMULATED}; batch {batch}, the largest by plan"
            cells = {"series": series, "model": "135B", "x": ("num_SSDs", drives)}
            yield shown("lohan-fig10a", "throughput", tokens, "token/s", source, **cells)
        for size in (32, 48, 64):
            n, r = settings.net("13B", size), settings.rates(drives, host_bytes)
            ways = {"": n.reported_tflops(iteration_s(n, r, released(n, r)))}
            ways[", simulated"] = n.reported_tflops(settings.step(settings.LOHAN, "13B", size, ssds=drives).seconds)
            for ending, value in ways.items():
                cells = {"series": f"bsz={size}{ending}", "model": "13B", "x": ("num_SSDs", drives)}
                source = settings.SIMULATED if ending else settings.EQUATIONS
                yield shown("lohan-fig10b", "throughput", value, "TFLOPS", source, **cells)


def dit(name: str, batch: int) -> DiT:
    """Return a model of Table VI at a batch of images."""
    layers, hidden = settings.DITS[name]
    return DiT(layers=layers, hidden=hidden, batch=batch, context=1024, vocab=0)


def most_in_memory(name: str) -> int:
    """Return the images per step of Fast-DiT, which keeps 16 bytes per parameter and all activations on the GPU; 0:
    none."""
    nets = (dit(name, batch) for batch in (16, 8, 4, 2, 1))
    return next((n.batch for n in nets if 16 * n.parameters + n.all_activations < 24 * GIB), 0)


def diffusion() -> Iterator[Row]:
    """Yield Fig. 12: LoHan by its equations, Fast-DiT by its products alone."""
    batch = int(settings.PAPER.value("dit_batch"))
    largest = max((float(name.removesuffix("B")) for name in settings.DITS if most_in_memory(name)), default=0.0)
    source = "16 bytes per parameter and all activations of one image within 24 GiB"
    yield shown("lohan-fig12", "max_trainable_model", largest, "B", source, series="Fast-DiT")
    for name in settings.DITS:
        n, rates = dit(name, batch), settings.rates()
        cells = {"model": name, "x": ("model_size_B", name.removesuffix("B"))}
        seconds = iteration_s(n, rates, released(n, rates))
        yield shown(
            "lohan-fig12", "throughput", batch / seconds, "image/s", settings.EQUATIONS, series=settings.LOHAN, **cells
        )
        most = most_in_memory(name)
        value: float | str = most * rates.gpu / (3 * dit(name, most).forward_flops) if most else "OOM"
        source = f"3 FLOP_f / THP_G, batch {most}" if most else "over 24 GiB at batch 1"
        yield shown("lohan-fig12", "throughput", value, "image/s", source, series="Fast-DiT", **cells)


def costs() -> Iterator[Row]:
    """Yield Fig. 13: 30B on four RTX 4090 and on a DGX-A100, in tokens per second per 1000 dollars."""
    batch = settings.most_on_gpu("30B", 24, (8, 16, 32, 64))
    n = settings.net("30B", batch)
    flops = 3 * n.forward_flops + n.block_flops
    megatron = n.tokens * settings.PAPER.value("megatron_efficiency") * 8 * 312e12 / flops / (DGX / 1000)
    holds = [
        settings.billions(m) for m in settings.TABLE_IV if 16 * settings.net(m, 1).parameters <= 8 * DGX_GPU_GIB * GIB
    ]
    cells = {"series": "Megatron-LM on DGX-A100", "testbed": settings.T4X}
    source = "16 bytes per parameter (Table II) within eight GPUs of 80 GiB"
    yield shown("lohan-fig13", "max_trainable_model", max(holds), "B", source, **cells)
    for drives in DRIVES:
        x = {"model": "30B", "x": ("num_SSDs", drives), "testbed": settings.T4X}
        price = SERVER + 4 * GPU_PRICE + drives * SSD_PRICE
        value = settings.step(settings.LOHAN, "30B", batch, settings.T4X, drives, 4).tokens_per_second / (price / 1000)
        unit, source = "token/s per 1K$", f"{settings.SIMULATED}; batch {batch} a GPU is assumed; prices of Table VII"
        yield shown("lohan-fig13", "cost_effectiveness", value, unit, source, series="LoHan on 4 RTX 4090", **x)
        whole = "assumed share of 8 A100 over the price of Table VII"
        yield shown("lohan-fig13", "cost_effectiveness", megatron, unit, whole, series="Megatron-LM on DGX-A100", **x)
        ratio = {"series": "LoHan 4x4090 / Megatron DGX-A100", **x}
        yield shown("lohan-fig13", "cost_effectiveness_ratio", value / megatron, "x", source, **ratio)
