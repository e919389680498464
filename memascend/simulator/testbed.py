"""Construction of a `ResourceModel` from a testbed's YAML: its resources, their names and their rates.

| name | resource | one per |
|---|---|---|
| `gpu0` ... | FIFO, floating-point operations | GPU |
| `pcie0.down`, `pcie0.up` | shared, bytes to and from the GPU | GPU |
| `link0` | shared, bytes from other GPUs (if there is a link in addition to PCIe) | GPU |
| `cpu` | FIFO, seconds: the CPU optimizer and other host work of the machine | machine |
| `dram` | shared, bytes | machine |
| `ssd.read`, `ssd.write` | a path: the drive or array as one; simplex unless `ssd_duplex` is set | machine |
| `NAME.read`, `NAME.write` | a path of `paths` | path |
| `NODE` | shared, bytes | CXL node |
| `network` | shared, bytes | machine |

Rates are peaks times the calibrated efficiency. A resource without a stated rate is left out, and a task that needs it
is refused with the resource's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from memascend.simulator.calibration import Calibration
from memascend.simulator.machine import Drive, Fifo, Resource, ResourceModel, Shared

_GB = 1e9


def resources_of_testbed(
    testbed: Mapping[str, Any],
    *,
    gpus: int | None = None,
    pools: Mapping[str, float] | None = None,
    locks: Iterable[str] = (),
    calibrations: Iterable[Calibration] = (),
) -> ResourceModel:
    """Return the machine of a testbed (keys as in `hardware/testbeds.schema.json`), with `gpus` of its GPUs.

    `calibrations` named `efficiency of RESOURCE` multiply that resource's rate (for a path, in both directions;
    `efficiency of gpu` and `efficiency of pcie` apply to all GPUs). Raises ValueError for one that names no resource.
    """
    reached = {each.name.removeprefix("efficiency of "): each.value for each in calibrations}
    resources = _resources(testbed, gpus or sum(int(gpu["count"]) for gpu in testbed.get("gpus") or []) or 1)
    unknown = [name for name in reached if not any(_kind(name, each) for each in resources)]
    if unknown:
        raise ValueError(f"calibration 'efficiency of {unknown[0]}': testbed {testbed['id']} has no such resource")
    for name, resource in resources.items():
        for kind, factor in reached.items():
            if _kind(kind, name):
                resources[name] = _scaled(resource, factor)
    return ResourceModel(name=str(testbed["id"]), resources=resources, pools=dict(pools or {}), locks=tuple(locks))


def _kind(kind: str, name: str) -> bool:
    """Return whether `kind` covers resource `name`: `gpu` covers gpu0, gpu1 ..., `pcie` covers pcie0.down ..."""
    return name == kind or name.partition(".")[0].rstrip("0123456789") == kind


def _scaled(resource: Resource, factor: float) -> Resource:
    """Return a resource with its rates multiplied by `factor`."""
    if isinstance(resource, Drive):
        return Drive(read=resource.read * factor, write=resource.write * factor, duplex=resource.duplex)
    return type(resource)(rate=resource.rate * factor)


def _resources(testbed: Mapping[str, Any], gpus: int) -> dict[str, Resource]:
    """Return the resources of a testbed by name; those without a stated rate are left out."""
    rates = testbed.get("rates") or {}
    links = testbed.get("links") or {}
    found: dict[str, Resource] = {"cpu": Fifo(rate=1.0)}
    for number in range(gpus):
        if "gpu_tflops_16bit" in rates:
            found[f"gpu{number}"] = Fifo(rate=_value(rates["gpu_tflops_16bit"]) * 1e12)
        if "pcie_gb_per_s" in rates:
            for direction in ("down", "up"):
                found[f"pcie{number}.{direction}"] = Shared(rate=_value(rates["pcie_gb_per_s"]) * _GB)
        if "gpu_gb_per_s" in links:
            found[f"link{number}"] = Shared(rate=_value(links["gpu_gb_per_s"]) * _GB)
    if "memory_gb_per_s" in rates:
        found["dram"] = Shared(rate=_value(rates["memory_gb_per_s"]) * _GB)
    if "network_gb_per_s" in links:
        found["network"] = Shared(rate=_value(links["network_gb_per_s"]) * _GB)
    if "ssd_read_gb_per_s" in rates and "ssd_write_gb_per_s" in rates:
        found["ssd"] = _drive(
            rates["ssd_read_gb_per_s"], rates["ssd_write_gb_per_s"], duplex=bool(testbed.get("ssd_duplex"))
        )
    for path in testbed.get("paths") or []:
        found[path["name"]] = _drive(path["read_gb_per_s"], path["write_gb_per_s"], duplex=path["duplex"])
    for node in testbed.get("memory_nodes") or []:
        if node["kind"] == "cxl" and "gb_per_s" in node:
            found[node["name"]] = Shared(rate=_value(node["gb_per_s"]) * _GB)
    return found


def _drive(read: Any, write: Any, *, duplex: bool) -> Drive:
    return Drive(read=_value(read) * _GB, write=_value(write) * _GB, duplex=duplex)


def _value(rate: Any) -> float:
    """Return a rate that is given as a number or as a section with `value`."""
    return float(rate["value"] if isinstance(rate, Mapping) else rate)
