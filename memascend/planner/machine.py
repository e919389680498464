"""The machine that a plan is for, as plain numbers: from a testbed's YAML, or from what a probe of this machine found.

Rates are what the data sheet or a measurement says, in bytes and floating-point operations a second; how much of them
training reaches is a `Calibration`, each with the published or measured number that it rests on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30
GB = 1e9
# YAML key under `rates`, field of Machine, and the unit that turns one into the other.
RATES = {
    "gpu_tflops_16bit": ("gpu_flops_per_s", 1e12),
    "pcie_gb_per_s": ("pcie_bytes_per_s", GB),
    "ssd_read_gb_per_s": ("ssd_read_bytes_per_s", GB),
    "ssd_write_gb_per_s": ("ssd_write_bytes_per_s", GB),
    "memory_gb_per_s": ("memory_bytes_per_s", GB),
}
_MEMORY_KEYS = ("memory_gib", "gpu_memory_gib")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Peak rates of one machine; None where nobody says, and then times that need it are not given.

    `gpu_flops_per_s` is one GPU's dense 16-bit matrix rate with 32-bit sums, `pcie_bytes_per_s` one GPU's link each
    way; SSD and host memory are shared by all GPUs. `direct_gpu_link`: GPUs exchange weights beside PCIe (NVLink).
    `sources` says for each field where its number comes from.
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
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def missing(self) -> list[str]:
        """Names of the rates that nobody says."""
        return [name for name, (field, _) in RATES.items() if getattr(self, field) is None]


@dataclass(frozen=True, kw_only=True)
class Calibrations:
    """What training reaches of the peak rates. Every default rests on a number that `REASONS` names."""

    gpu_efficiency: float = 0.449
    host_seconds_per_parameter: float = 1.644e-9
    adam_memory_efficiency: float = 0.8
    chain_seconds_per_element: float = 5.507 / 8.03e9
    chain_memory_bytes_per_s: float = 409.6e9
    fused_memory_efficiency: float = 0.95


REASONS = {
    "gpu_efficiency": "MemAscend Fig. 17, Qwen2.5-32B on 2 H100 PCIe: 49.32 tokens/s at batch 1 and 1322.55 at batch "
    "48, solved for this and the next",
    "host_seconds_per_parameter": "what Fig. 17's step at batch 1 leaves once the SSD runs at its rated speed: work of "
    "DeepSpeed for each parameter that no byte count explains",
    "adam_memory_efficiency": "CPU AdamW streams its operands; memascend bench adamw prints this machine's share",
    "chain_seconds_per_element": "MemAscend III-C: 5507 ms for 8.03e9 gradients in one process on Configuration 1; "
    "scaled by memory bandwidth on other machines",
    "fused_memory_efficiency": "one pass at the read limit; memascend bench overflow prints this machine's share",
}


def machine_from_testbed(testbed: Mapping[str, Any], where: str = "testbed") -> Machine:
    """A Machine from the keys of `hardware/testbeds/*.yaml`; ValueError names the key that is wrong."""
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
    probed = testbed.get("local") if isinstance(testbed.get("local"), Mapping) else {}  # a control group may allow less
    ram, vram = probed.get("usable_memory_gib", testbed.get("memory_gib")), gpu.get("memory_gib")
    return Machine(
        name=str(testbed.get("id") or testbed.get("name") or where),
        gpus=sum(int(each.get("count", 1)) for each in gpus) or 1,
        gpu_memory_bytes=None if vram is None else _positive(vram, f"{where}: gpus.memory_gib") * GIB,
        ram_bytes=None if ram is None else _positive(ram, f"{where}: memory_gib") * GIB,
        direct_gpu_link="nvlink" in link and "none" not in link,
        sources=sources,
        **fields,
    )


def machine_from_file(path: str | Path) -> Machine:
    """A Machine from a YAML or JSON file; ValueError in one line where it cannot be read."""
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
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{where} must be a positive number, got {value!r}")
    return float(value)
