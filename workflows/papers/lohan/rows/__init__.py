"""What LoHan's exhibits compute: its equations, and its schedule and those of its peers on its testbeds."""

from __future__ import annotations

from collections.abc import Iterator

from workflows.cases import Row
from workflows.papers.lohan.rows import equations, first_figure, sizes, throughput
from workflows.papers.lohan.rows.settings import PAPER, T4X, T4090

CALIBRATIONS = tuple(PAPER.constants.values())
_GPU, _SSD, _ONE = (
    ["gpu_throughput"],
    ["ssd_read_gb_per_s", "ssd_write_gb_per_s"],
    ["one_ssd_read_gb_per_s", "one_ssd_write_gb_per_s"],
)
_PLAYED = ["gpu_efficiency", *_SSD, "adam_memory_efficiency"]
NEEDS = {  # exhibits -> the constants behind them
    "fig01a": [*_GPU, *_PLAYED], "fig01b": _GPU, "fig01c": [*_GPU, *_PLAYED], "fig02a": [], "fig02b": _PLAYED,
    "fig02c": _PLAYED, "fig03a": _PLAYED, "fig03b": _PLAYED, "fig05a": [*_GPU, *_PLAYED], "fig05b": _PLAYED,
    "fig05c": [*_GPU, *_PLAYED, "blocks_on_gpu"], "fig06a": ["blocks_on_gpu"], "fig06b": ["blocks_on_gpu"],
    "fig07a": _PLAYED, "fig07b": _PLAYED, "fig08a": ["blocks_on_gpu", "memory_for_activations"],
    "fig08b": ["blocks_on_gpu", "memory_for_activations"], "fig09a": [*_GPU, *_SSD, "memory_for_activations"],
    "fig09b": [*_GPU, *_SSD], "fig10a": [*_PLAYED, *_ONE], "fig10b": [*_GPU, *_PLAYED, *_ONE],
    "fig11a": _PLAYED, "fig11b": _PLAYED, "fig11c": _PLAYED, "fig11d": _PLAYED,
    "fig12": [*_GPU, *_SSD, "dit_batch"], "fig13": [*_PLAYED, *_ONE, "megatron_efficiency"], "tab05": ["blocks_on_gpu"],
    **{f"eq0{n}": [*_GPU, *_SSD] for n in (1, 2, 3, 4, 5)},
}  # fmt: skip


def modelled() -> Iterator[Row]:
    yield from first_figure.rows()
    yield from sizes.rows()
    yield from throughput.rows()
    yield from equations.rows()
    for exhibit, names in NEEDS.items():
        testbed = T4X if exhibit.startswith("fig11") or exhibit == "fig13" else T4090
        yield from PAPER.assumptions({f"lohan-{exhibit}": testbed}, names)
