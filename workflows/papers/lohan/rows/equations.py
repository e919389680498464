"""Eqs. 1 to 8 over the swapped volume, and the exhibits that follow from them alone: Figs. 9a and 9b."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from memascend.baselines.lohan.equations import (
    GIB,
    Net,
    Rates,
    backward_terms,
    best,
    case,
    forward_terms,
    iteration_s,
    on_ssd,
    policy_bytes,
)
from workflows.cases import Row
from workflows.papers.lohan.rows import settings

shown = settings.shown

SWAPPED = "swapped activations (GB)"
HOST_GIB = (0, 100, 200)  # GiB of main memory for activations


def rows() -> Iterator[Row]:
    """Yield the rows of all equations, for 13B at batch 48, and of Figs. 9a and 9b."""
    n = settings.net("13B", 48)
    volumes = [n.between_blocks + share * (n.all_activations - n.between_blocks) / 40 for share in range(41)]
    yield from times(n, volumes)
    yield from recomputation(n, volumes)
    yield from volumes_of_fig_9b()
    yield from policies()


def point(exhibit: str, series: str, metric: str, swapped: float, value: float, unit: str) -> Row:
    """Return a row at a volume of swapped activations, in bytes."""
    cells = {"series": series, "model": "13B", "x": (SWAPPED, swapped / 1e9)}
    return shown(exhibit, metric, value, unit, "the equation itself, batch 48", **cells)


def times(n: Net, volumes: list[float]) -> Iterator[Row]:
    """Yield Eqs. 1 to 5 at each volume: times of phases and of the whole, and the bytes on SSDs."""
    for swapped in volumes:
        r = settings.rates()
        ahead, back = forward_terms(n, r, swapped), backward_terms(n, r, swapped)
        whole = {"T_f": max(ahead.values()), "T_b": max(back.values()), "T_iter": iteration_s(n, r, swapped)}
        for exhibit, terms in (("lohan-eq01", whole), ("lohan-eq02", ahead), ("lohan-eq05", back)):
            for name, value in terms.items():
                yield point(exhibit, name, "time", swapped, value, "s")
        for host_gib in HOST_GIB:
            series = f"MEM_avail = {host_gib} GiB"
            yield point("lohan-eq03", series, "on SSDs", swapped, on_ssd(swapped, host_gib * GIB) / 1e9, "GB")
            known = max(forward_terms(n, settings.rates(host_bytes=host_gib * GIB), swapped).values())
            yield point("lohan-eq04", series, "time", swapped, known, "s")


def recomputation(n: Net, volumes: list[float]) -> Iterator[Row]:
    """Yield Eqs. 6 to 8: the benefit of each operator, the recomputed FLOP, and their slope at each operator's
    edges."""
    for each in n.operators():
        source, cells = (
            "FLOP / bytes of its output",
            {"series": each.name, "model": "13B", "x": ("operator", each.name)},
        )
        yield shown("lohan-eq06", "offloading benefit", each.benefit, "FLOP/byte", source, **cells)
    for swapped in volumes:
        yield point("lohan-eq07", "FLOP_r", "recomputation", swapped, n.recomputed_flops(swapped) / 1e12, "TFLOP")
    at = n.between_blocks
    for each in n.operators():
        for edge in (at, at + each.nbytes * 0.999):
            yield point("lohan-eq08", "d FLOP_r / d A", "slope", edge, n.slope(edge), "FLOP/byte")
        at += each.nbytes


def volumes_of_fig_9b() -> Iterator[Row]:
    """Yield the iteration time over the swapped volume at four batches, the predicted optimum, and its case.

    Raises ValueError if the curve is not convex.
    """
    r = settings.rates()
    for batch in (24, 36, 48, 60):
        n = settings.net("13B", batch)
        step = (n.all_activations - n.between_blocks) / 30
        cells = {"series": f"bsz={batch}", "model": "13B"}
        chosen = best(n, r)
        for swapped in sorted({chosen, *(n.between_blocks + k * step for k in range(31))}):
            x = SWAPPED, swapped / 1e9
            yield shown("lohan-fig09b", "iteration time", iteration_s(n, r, swapped), "s", "Eq. 1", **cells, x=x)
        seconds, x = iteration_s(n, r, chosen), (SWAPPED, chosen / 1e9)
        yield shown("lohan-fig09b", "predicted optimum", seconds, "s", "all prefixes", **cells, x=x)
        found = {case(n, settings.rates(host_bytes=gib * GIB)) for gib in (0, 100, 200, 400)}
        cells = {"series": "LoHan", "model": "13B", "x": ("batch_size", batch)}
        value = found.pop() if len(found) == 1 else 0
        yield shown("lohan-fig09b", "case", value, "", "for MEM_avail of 0, 100, 200 and 400 GiB alike", **cells)
        curve = [iteration_s(n, r, n.between_blocks + k * step) for k in range(31)]
        if not all(b - a <= d - c + 1e-6 for (a, b), (c, d) in pairwise(pairwise(curve))):
            raise ValueError(f"lohan-fig09b: the iteration time is not convex at batch {batch}")


def policies() -> Iterator[Row]:
    """Yield Fig. 9a: 70B at the batches of Table V; the main memory for activations is assumed."""
    share, found = settings.PAPER.value("memory_for_activations"), {}
    for (printed, memory), batch in settings.published("lohan-tab05", "batch_size").items():
        policy = printed.replace("LoHan+DS", "LoHan+ZeRO")  # the figure's legend has this name
        cells = {"series": policy, "model": "70B", "x": ("main_memory_GB", memory)}
        known: Rates = settings.rates(host_bytes=share * int(memory) * GIB)
        n = settings.net("70B", int(batch) if batch != "Failed" else 24)
        swapped = policy_bytes(policy, n, known) if batch != "Failed" else None
        value = "Failed" if swapped is None else n.tokens / iteration_s(n, known, swapped)
        found[policy, memory] = value
        source = "the policy's volume in Eq. 1; simulated from its description"
        yield shown("lohan-fig09a", "throughput", value, "token/s", source, **cells)
    ours = found.pop(("LoHan+Optimized", "512"))
    lead = min(ours / value for (_, memory), value in found.items() if memory == "512")
    cells = {"series": "LoHan+Optimized", "model": "70B", "x": ("main_memory_GB", 512)}
    yield shown("lohan-fig09a", "lead over the best of the others", lead, "x", "at batch 32, as all have it", **cells)
