"""The machine that a plan is for, as plain numbers from a testbed's YAML file or from a probe of this machine.

Rates come from data sheets or measurements, in bytes or floating-point operations per second. The fraction of them that
training reaches is a `Calibration`, each with its reason, its reach, and the published rows that it was solved from.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memascend.simulator.calibration import Calibration

GIB = 2**30
GB = 1e9
# YAML key under `rates`: the field of MachineSpec, and the factor from the key's unit to the field's.
RATES = {
    "gpu_tflops_16bit": ("gpu_flops_per_s", 1e12),
    "pcie_gb_per_s": ("pcie_bytes_per_s", GB),
    "ssd_read_gb_per_s": ("ssd_read_bytes_per_s", GB),
    "ssd_write_gb_per_s": ("ssd_write_bytes_per_s", GB),
    "memory_gb_per_s": ("memory_bytes_per_s", GB),
}
_ZERO_INFINITY = "ZeRO-Infinity (as published)"  # its name in the rows of an exhibit


@dataclass(frozen=True, kw_only=True)
class MachineSpec:
    """Peak rates of one machine. If a rate is None, times that depend on it are not predicted.

    `gpu_flops_per_s`: one GPU's dense 16-bit matrix rate with 32-bit accumulation. `pcie_bytes_per_s`: one GPU's link
    in each direction. SSD and host memory are shared by all GPUs. `direct_gpu_link`: whether GPUs exchange weights over
    a link other than PCIe (NVLink). `described`: links, paths and memory nodes as in the YAML. `sources`: the origin of
    each number.
    """

    name: str
    gpus: int = 1
    gpu_flops_per_s: float | None = None
    gpu_memory_bytes: float | None = None
    pcie_bytes_per_s: float | None = None
    ssd_read_bytes_per_s: float | None = None
    ssd_write_bytes_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    ram_bytes: float | None = None
    direct_gpu_link: bool = False
    described: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def missing(self) -> list[str]:
        """Return the names of the unspecified rates."""
        return [name for name, (field, _) in RATES.items() if getattr(self, field) is None]


_FIG17 = tuple(f"memascend-fig17:MemAscend:Qwen2.5-32B:{batch}:throughput" for batch in (1, 48))
_FIG08 = tuple(f"memascend-fig08:{series}:Qwen2.5-7B::process overhead" for series in (_ZERO_INFINITY, "MemAscend"))
CALIBRATIONS = (
    Calibration(
        name="gpu_efficiency",
        value=0.4511,
        unit="of the peak rate",
        reason="MemAscend Fig. 17, Qwen2.5-32B on 2 H100 PCIe: 49.32 tokens/s at batch 1 and 1322.55 at batch 48, "
        "solved for this and the next by the simulator",
        reach="H100 PCIe, dense models; on the GPUs of configurations 2 and 3 and for mixtures it is an extrapolation",
        solved_from=_FIG17,
    ),
    Calibration(
        name="host_seconds_per_parameter",
        value=1.643e-9,
        unit="s",
        reason="what Fig. 17's step at batch 1 leaves once the SSD runs at its rated speed: work of DeepSpeed for each "
        "parameter that no byte count explains",
        reach="configuration 1, where it is 13 of the 41 s of Llama3.1-8B's step; used unscaled on configurations 2 "
        "and 3, whose processors are others: an extrapolation there",
        solved_from=_FIG17,
    ),
    Calibration(
        name="adam_memory_efficiency",
        value=0.8,
        unit="of memory bandwidth",
        reason="assumed, not measured on any of the papers' machines: CPU AdamW streams its operands, and some of the "
        "peak is always lost; memascend bench adamw prints this machine's share",
        reach="all machines; nothing was fitted to it, and a step's bytes of AdamW are a small part of its seconds",
    ),
    Calibration(
        name="chain_seconds_per_element",
        value=5.507 / 8.03e9,
        unit="s",
        reason="MemAscend III-C: 5507 ms for 8.03e9 gradients in one process on Configuration 1 (one process is our "
        "reading: erratum M5); scaled by memory bandwidth on other machines",
        reach="configuration 1; elsewhere an extrapolation by bandwidth, though few threads are bound by their cores",
        solved_from=(f"memascend-fig03:{_ZERO_INFINITY}:Llama3.1-8B::overflow check latency",),
    ),
    Calibration(
        name="chain_memory_bytes_per_s",
        value=409.6e9,
        unit="B/s",
        reason="the memory bandwidth of Configuration 1 that the previous one is scaled from: 8 channels of DDR5-6400, "
        "51.2 GB/s each, by the data sheet",
        reach="only as the base of that scaling",
    ),
    Calibration(
        name="fused_memory_efficiency",
        value=0.95,
        unit="of memory bandwidth",
        reason="one pass at the read limit: 0.95 to 1.05 of the fastest read loop on two cores of an EPYC Milan "
        "(results/reference/epyc-milan-2core); memascend bench overflow prints this machine's share",
        reach="all machines; that enough threads reach the data sheet's bandwidth is assumed, not measured",
    ),
)
# Used for host memory rather than times: see PROCESS_OVERHEAD_BYTES in footprint.py.
PROCESS_OVERHEAD = Calibration(
    name="process_overhead",
    value=1.63,
    unit="GiB",
    reason="the 1.63 GiB that MemAscend's Fig. 8 leaves as pinned memory overhead, where exact allocations round "
    "nothing",
    reach="a process of the papers' runs; a twin's own baseline is measured and taken off instead",
    solved_from=(*_FIG08, "memascend-fig08:MemAscend:Qwen2.5-7B::peak system memory"),
)
# The same for a process on a machine without a GPU.
CPU_PROCESS_OVERHEAD = Calibration(
    name="cpu_process_overhead",
    value=0.44,
    unit="GiB",
    reason="the largest process among the records of results/reference/epyc-genoa-2core before it builds its model: "
    "466 MB, with PyTorch's CPU build and DeepSpeed",
    reach="runs on a CPU; no claim rests on it",
)
REASONS = {each.name: each.reason for each in CALIBRATIONS}
_VALUES = {each.name: each.value for each in CALIBRATIONS}


@dataclass(frozen=True, kw_only=True)
class Calibrations:
    """The fractions of peak rates that training reaches; the defaults are in `CALIBRATIONS`, with reason and reach.

    `backward_products`: products of a backward pass divided by those of a forward pass, without recomputation.
    `own_s`: seconds per phase that the runtime itself takes, regardless of sizes (on a CPU its Python code does not
    overlap with the computation); zero on the papers' machines, except for CXL-aware allocation's.
    `output_s`: seconds per phase of the output matrix and the loss, if they were measured separately; otherwise their
    products run at the rate of the blocks.
    `hook_s`: seconds per phase, part of the computing time of a CPU, that pass in a module's hook before it starts to
    read the next weights: DeepSpeed's Python code, and copies of what was read (`memascend.baselines.protocol.on_cpu`).
    `adam_card_efficiency`: fraction of a memory card's rate when the CPU updates data on it; None: as for DRAM.
    `ssd_efficiency`: fraction of the SSD's rates when a step writes more than the drives absorb in a burst.
    """

    gpu_efficiency: float = _VALUES["gpu_efficiency"]
    host_seconds_per_parameter: float = _VALUES["host_seconds_per_parameter"]
    adam_memory_efficiency: float = _VALUES["adam_memory_efficiency"]
    chain_seconds_per_element: float = _VALUES["chain_seconds_per_element"]
    chain_memory_bytes_per_s: float = _VALUES["chain_memory_bytes_per_s"]
    fused_memory_efficiency: float = _VALUES["fused_memory_efficiency"]
    backward_products: float = 2.0
    own_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    output_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    hook_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    adam_card_efficiency: float | None = None
    ssd_efficiency: float = 1.0


def machine_from_testbed(testbed: Mapping[str, Any], where: str = "testbed") -> MachineSpec:
    """Return a MachineSpec from the keys of `hardware/testbeds/*.yaml`. Raises a ValueError that names a wrong key."""
    if not isinstance(testbed, Mapping):
        raise ValueError(f"{where}: a testbed is a mapping of keys such as 'memory_gib' and 'rates'")
    gpus = testbed.get("gpus") or []
    rates = testbed.get("rates") or {}
    if not isinstance(gpus, list) or not all(isinstance(gpu, Mapping) for gpu in gpus):
        raise ValueError(f"{where}: gpus must be a list of entries with model, count and memory_gib")
    if not isinstance(rates, Mapping):
        raise ValueError(f"{where}: rates must be a mapping, such as ssd_read_gb_per_s: {{value: 7.0, source: fio}}")
    unknown = sorted(set(rates) - set(RATES))
    if unknown:
        raise ValueError(f"{where}: rates has an unknown key '{unknown[0]}'; known: {', '.join(RATES)}")
    fields: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key, rate in rates.items():
        field, unit = RATES[key]
        value = rate.get("value") if isinstance(rate, Mapping) else rate
        fields[field] = _positive(value, f"{where}: rates.{key}") * unit
        sources[field] = str(rate.get("source", where)) if isinstance(rate, Mapping) else where
    gpu = gpus[0] if gpus else {}
    link = str(testbed.get("gpu_link") or "").lower()
    local = testbed.get("local")
    probed = local if isinstance(local, Mapping) else {}  # a control group may limit memory to less than is installed
    ram, vram = probed.get("usable_memory_gib", testbed.get("memory_gib")), gpu.get("memory_gib")
    # With several nodes their sum counts: there are memory cards besides DRAM, or not all of the DRAM is usable.
    if len(nodes := testbed.get("memory_nodes") or []) > 1:
        sizes = [node.get("memory_gib") if isinstance(node, Mapping) else None for node in nodes]
        ram = sum((size.get("value") if isinstance(size, Mapping) else size) or 0 for size in sizes)
    return MachineSpec(
        name=str(testbed.get("id") or testbed.get("name") or where),
        gpus=sum(int(each.get("count", 1)) for each in gpus) or 1,
        gpu_memory_bytes=None if vram is None else _positive(vram, f"{where}: gpus.memory_gib") * GIB,
        ram_bytes=None if ram is None else _positive(ram, f"{where}: memory_gib") * GIB,
        direct_gpu_link="nvlink" in link and "none" not in link,
        described={key: testbed[key] for key in ("links", "paths", "memory_nodes", "ssd_duplex") if testbed.get(key)},
        sources=sources,
        **fields,
    )


def machine_from_file(path: str | Path) -> MachineSpec:
    """Return a MachineSpec from a YAML or JSON file. Raises a one-line ValueError if it cannot be read."""
    import yaml

    path = Path(path)
    try:
        testbed = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the testbed {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"the testbed {path} is not YAML: {' '.join(str(error).split())}") from None
    return machine_from_testbed(testbed, str(path))


def _positive(value: Any, where: str) -> float:
    """Return `value` as a float. Raises ValueError, naming `where`, unless it is a positive finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{where} must be a positive number, got {value!r}")
    return float(value)
