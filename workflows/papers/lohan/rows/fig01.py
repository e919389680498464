"""One step of 13B at batch 32: Fig. 1 by formulas and by the simulator, and Fig. 3 from the simulator's tasks."""

from __future__ import annotations

from collections.abc import Iterator

from memascend.baselines.lohan.equations import GIB, algorithm_1, backward_terms, forward_terms, released
from memascend.simulator import SimulationResult
from memascend.simulator.trace import Event
from workflows.cases import Row
from workflows.paper_models import block_of, spans
from workflows.papers.lohan.rows import settings

shown = settings.shown

SIZE, BATCH = "13B", 32
SERVERS = {"pcie0.down": "PCIe_M2G", "pcie0.up": "PCIe_G2M", "ssd": "PCIe_SSD"}
LINES = {"gpu0": "GPU", "pcie0.up": "GPU to memory", "pcie0.down": "memory to GPU", "ssd.read": "SSD read"}
LINES |= {"ssd.write": "SSD write", "cpu": "CPU Adam"}
SWAPPED = 34e9  # Fig. 1c


def rows() -> Iterator[Row]:
    """Yield the rows of Figs. 1a to 1c, 3a and 3b."""
    yield from simulated("lohan-fig01a", settings.ZERO)
    yield from simulated("lohan-fig01c", settings.LOHAN)
    yield from formulas()
    yield from g10()
    yield from by_equations()
    for exhibit, series in (("lohan-fig03a", "LoHan Naive"), ("lohan-fig03b", "LoHan Optimized")):
        yield from by_tensor(exhibit, settings.step(series, "four blocks", BATCH).simulated, series)


def simulated(exhibit: str, series: str) -> Iterator[Row]:
    """Yield the seconds of the stages, how long each link is busy in them, and a timeline of the stages by resource."""
    made = settings.step(series, SIZE, BATCH)
    for phase in made.phases:
        cells = {"series": series, "model": SIZE, "x": ("stage", phase.name)}
        yield shown(
            exhibit, "stage_time", phase.seconds, "s", f"{settings.SIMULATED}, mostly {phase.bottleneck}", **cells
        )
        served = made.simulated.served_s[phase.name]
        for server, name in SERVERS.items():
            busy = 100 * served.get(server, 0.0) / phase.seconds
            yield shown(exhibit, f"{name}_utilisation", busy, "%", f"{settings.SIMULATED}: busy over stage", **cells)
            yield shown(exhibit, f"{name}_time", served.get(server, 0.0), "s", f"{settings.SIMULATED}: busy", **cells)
    lines = spans(made.simulated.events, lambda e: (LINES[e.resource], e.phase) if e.resource in LINES else None)
    yield from settings.PAPER.bars(exhibit, lines, model=SIZE)


def by_tensor(exhibit: str, simulated: SimulationResult, series: str) -> Iterator[Row]:
    """Yield the backward pass of four blocks, a bar per block and resource."""

    def named(event: Event) -> tuple[str, str] | None:
        block = block_of(event)
        if event.phase != "backward" or not block or event.resource not in LINES or event.resource == "pcie0.down":
            return None
        weights = event.name.startswith("backward: read") or "checkpoint" in event.name
        if event.resource == "ssd.read" and weights:
            return None
        return LINES[event.resource], str(block)

    lines = spans(simulated.events, named)
    begun = min(begin for begin, _ in lines.values())
    yield from settings.PAPER.bars(
        exhibit, {bar: [at - begun for at in span] for bar, span in lines.items()}, model=SIZE
    )
    begin, end = dict(simulated.phases())["backward"]
    yield shown(exhibit, "backward", end - begin, "s", settings.SIMULATED, series=series, model="four blocks of 13B")


def formulas() -> Iterator[Row]:
    """Yield what follows from the paper alone: sizes of Tables II and IV, 21 GiB/s, 5.96 s, and its printed stage
    times."""
    n, r = settings.net(SIZE, BATCH), settings.rates()
    again = n.block_flops / r.gpu
    cells, exhibit, inside = (
        {"series": settings.ZERO, "model": SIZE},
        "lohan-fig01a",
        n.all_activations - n.between_blocks,
    )
    sizes = {
        "activation_offloaded": (n.between_blocks / 1e9, "GB", "2 s b h L"),
        "inter_block_activation": (n.between_blocks / 1e9, "GB", "2 s b h L"),
        "inter_block_activation (GiB)": (n.between_blocks / GIB, "GiB", "2 s b h L"),
        "intra_block_activation": (inside / 1e9, "GB", "32 s b h L"),
        "intra_block_activation (GiB)": (inside / GIB, "GiB", "32 s b h L"),
        "activation_offload_time": (n.between_blocks / r.link, "s", "2 s b h L / BW_G"),
        "gpu_recompute_time": (again, "s", "FLOP of the blocks / THP_G"),
        "recompute_share_of_backward": (100 * again / printed_s()["backward"], "%", "of the printed 26 s"),
    }
    for metric, size in sizes.items():
        yield shown(exhibit, metric, *size, **cells, x=("batch_size", BATCH))
    both = backward_terms(n, r, n.between_blocks)["GPU"]
    yield shown(exhibit, "gpu_compute_time", both, "s", "(2 FLOP_f + FLOP_r) / THP_G", **cells, x=("stage", "backward"))
    metric, alone = "gpu_compute_time, without recomputation", 2 * n.forward_flops / r.gpu
    yield shown(exhibit, metric, alone, "s", "2 FLOP_f / THP_G", **cells, x=("stage", "backward"))
    for name, nbytes in (("PCIe_M2G", 2 * n.parameters), ("PCIe_G2M", n.between_blocks)):
        busy, source = 100 * nbytes / r.link / printed_s()["forward"], "bytes of Table II / BW_G / 14 s"
        metric = f"{name}_utilisation, of the printed time"
        yield shown(exhibit, metric, busy, "%", source, **cells, x=("stage", "forward"))
    busy = 100 * (n.forward_flops / r.gpu + both) / sum(printed_s().values())
    source = "(3 FLOP_f + FLOP_r) / THP_G over the printed 63 s"
    yield shown("lohan-fig02b", "gpu_busy, of the printed time", busy, "%", source, **cells, x=("batch_size", BATCH))


def printed_s() -> dict[str, float]:
    """Return the printed seconds of Fig. 1a's stages, to which the shares refer."""
    return {stage: float(value) for (_, stage), value in settings.published("lohan-fig01a", "stage_time").items()}


def g10() -> Iterator[Row]:
    """Yield G10 as the paper simulates it: everything overlaps within a stage, and all activations are swapped.

    The GPU's optimizer reads and writes each of 14 bytes per parameter once. Where it overlaps with the backward pass,
    gradients stay on the GPU: 2 P of weights, 12 P of states and the activations are moved to it, 14 P are moved back.
    """
    n, r = settings.net(SIZE, BATCH), settings.rates()
    states, weights = 14 * n.parameters, 2 * n.parameters
    forward, update = n.forward_flops / r.gpu, 2 * states / (1e9 * settings.PAPER.value("gpu_memory_gb_per_s"))
    moved = {  # stage -> (to the GPU, from it, seconds of the GPU)
        "forward": (weights, n.all_activations, forward),
        "backward": (weights + n.all_activations, weights, 2 * forward),
        "optimizer": (states, states, update),
        "backward and optimizer": (states + n.all_activations, states, 2 * forward + update),
    }
    for stage, (down, up, gpu) in moved.items():
        seconds = max(down / r.link, up / r.link, gpu)
        cells = {"series": settings.G10, "model": SIZE, "x": ("stages in one" if " and " in stage else "stage", stage)}
        source = "longest of GPU and link, 21 GiB/s each way"
        yield shown("lohan-fig01b", "stage_time", seconds, "s", source, **cells)
        of_gpu = "FLOP / THP_G; 28 P bytes of the GPU's memory in the optimizer"
        yield shown("lohan-fig01b", "gpu_compute_time", gpu, "s", of_gpu, **cells)
        for name, nbytes in (("PCIe_U2G", down), ("PCIe_G2U", up)):
            yield shown("lohan-fig01b", f"{name}_utilisation", 100 * nbytes / r.link / seconds, "%", source, **cells)
    cells, seconds = {"series": settings.G10, "model": SIZE, "x": ("batch_size", BATCH)}, n.all_activations / r.link
    for ending, one, unit in (("", 1e9, "GB"), (" (GiB)", GIB, "GiB")):
        metric = f"activation_volume{ending}"
        yield shown("lohan-fig01b", metric, n.all_activations / one, unit, "34 s b h L", **cells)
    yield shown("lohan-fig01b", "activation_transfer_time", seconds, "s", "34 s b h L / BW_G", **cells)
    again = n.recomputed_flops(n.all_activations) / r.gpu
    yield shown("lohan-fig01b", "gpu_recompute_time", again, "s", "Eq. 7 with all activations swapped", **cells)
    cells |= {"x": ("stage", "optimizer")}
    yield shown("lohan-fig01b", "traffic_per_direction", states / 1e9, "GB", "14 P", **cells)


def by_equations() -> Iterator[Row]:
    """Yield Fig. 1c by Eqs. 1 to 5 with the 34 GB that it prints, all of them on the SSDs."""
    n, r = settings.net(SIZE, BATCH), settings.rates()
    for stage, terms in (("forward", forward_terms(n, r, SWAPPED)), ("backward", backward_terms(n, r, SWAPPED))):
        cells = {"series": settings.BY_EQUATIONS, "model": SIZE, "x": ("stage", stage)}
        yield shown("lohan-fig01c", "stage_time", max(terms.values()), "s", settings.EQUATIONS, **cells)
        busy = {"PCIe_M2G": "memory to GPU", "PCIe_G2M": "GPU to memory", "PCIe_SSD": "SSD"}
        for name, term in busy.items():
            share = 100 * terms[term] / max(terms.values())
            yield shown("lohan-fig01c", f"{name}_utilisation", share, "%", settings.EQUATIONS, **cells)
    batch = {"series": settings.BY_EQUATIONS, "model": SIZE, "x": ("batch_size", BATCH)}
    again = n.recomputed_flops(SWAPPED) / settings.PAPER.value("gpu_throughput")
    yield shown("lohan-fig01c", "gpu_recompute_time", again, "s", "Eq. 7 at 34 GB / THP_G", **batch)
    yield shown("lohan-fig01c", "activation_offload_time", SWAPPED / r.link, "s", "34 GB / BW_G", **batch)
    for ending, chosen in (("", algorithm_1(n, r)), (", released", released(n, r))):
        source = "what the released code swaps (erratum L18)" if ending else "Algorithm 1"
        yield shown("lohan-fig01c", f"activation_offloaded{ending}", chosen / 1e9, "GB", source, **batch)
    extra = 100 * again / (2 * n.forward_flops / r.gpu)
    yield shown("lohan-fig01c", "extra_gpu_compute", extra, "%", "FLOP_r / 2 FLOP_f", **batch)
