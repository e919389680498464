"""The probed machine, in the rows of MemAscend's Tables III and V."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from workflows.cases import Row, of_record


def rows(record: dict[str, Any]) -> Iterator[Row]:
    """Yield the rows of one record of kind ``testbed``."""
    name, probed = record["host"]["name"], record["testbed"]
    sockets = f"{probed['sockets']} × " if (probed["sockets"] or 1) > 1 else ""
    parts = {
        "CPU": f"{sockets}{probed['cpu']}, {probed['cores']} cores",
        "CPU Memory": f"{probed['memory_gib']:g} GiB",
        "PCIe": probed["pcie"] or "not visible",
        "GPU": listed(probed["gpus"], "memory_gib", "GiB") or "none",
        "SSD": listed(probed["ssds"], "capacity_tb", "TB") or "none visible",
    }
    for exhibit in ("memascend-tab03", "memascend-tab05"):
        for component, text in parts.items():
            cells = {"series": f"This machine ({name})", "x": ("component", component)}
            yield of_record(record, exhibit, "specification", text, "text", **cells)


def listed(devices: list[dict[str, Any]], size: str, unit: str) -> str:
    """Return devices in the format of the paper's tables: count, model, size."""
    texts = []
    for device in devices:
        amount = f" ({device[size]:.3g} {unit})" if device.get(size) else ""
        texts.append(f"{device.get('count') or 1} × {device['model']}{amount}")
    return ", ".join(texts)
