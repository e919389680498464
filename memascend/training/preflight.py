"""Will there be room? Memory and disk against what the run needs, before hours are spent. No torch here."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from memascend.training.config import TrainConfig
from memascend.training.progress import byte_count

# Bytes a parameter on the swap device, where there is no plan: 2 weights, 12 master and moments, 4 gradients (evidence:
# DeepSpeed's swappers write 18 B/parameter a step), and a tenth for alignment.
SWAP_BYTES = 20
# What is taken beyond a plan: alignment, and what a store grows by at a time (swap_store.py), for each rank.
SWAP_SLACK, SWAP_GROWTH_BYTES = 1.02, 64 << 20
# In a checkpoint: 2 weights, and master and moments in 4 or 2 bytes each.
CHECKPOINT_BYTES = {"fp32": 14, "bf16": 8}


def available_memory() -> int:
    """Bytes that this process may still take: the machine's, or what its control group leaves."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        cache = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return available
    if limit == "max":
        return available
    return min(available, int(limit) - used + int(cache.get("inactive_file", 0)))


def check(config: TrainConfig, prepared: dict[str, Any], output: Path, swap: Path | None) -> None:
    """ValueError that says what is missing and what would help."""
    needed = prepared["planned_host_bytes"]
    available = available_memory()
    if needed is not None and needed > available:
        largest = max(prepared["planned_components"].items(), key=lambda part: part[1])
        raise ValueError(
            f"this run needs {byte_count(needed)} of host memory and {byte_count(available)} are available: "
            f"{byte_count(needed - available)} are missing; largest part: {largest[0]}, "
            f"{byte_count(largest[1])}. {_less_memory(config)}"
        )
    parameters = prepared["parameters"]
    wants = [
        (
            output,
            (config.keep + 1) * CHECKPOINT_BYTES[config.states] * parameters,
            "checkpoints",
            "--output, or --keep 1",
        )
    ]
    planned = prepared.get("planned_swap_bytes")  # a run of an earlier version has not noted it
    swapped = SWAP_BYTES * parameters if planned is None else round(SWAP_SLACK * planned)
    if swap is not None and config.devices:
        _check_devices(config.devices, swapped)
    elif swap is not None:
        wants.append((swap, swapped + config.ranks * SWAP_GROWTH_BYTES, "swap files", "--nvme"))
    by_device: dict[int, list[tuple[Path, int, str, str]]] = {}
    for want in wants:
        by_device.setdefault(os.stat(want[0]).st_dev, []).append(want)
    for group in by_device.values():
        free, need = shutil.disk_usage(group[0][0]).free, sum(want[1] for want in group)
        if need > free:
            what = " and ".join(f"{byte_count(want[1])} of {want[2]}" for want in group)
            mend = " or ".join(want[3] for want in group)
            raise ValueError(
                f"{group[0][0]} has {byte_count(free)} free and this run writes {what}: "
                f"{byte_count(need - free)} are missing; free space, or name another folder ({mend})"
            )


def _check_devices(devices: list[str], needed: int) -> None:
    there = 0
    for device in devices:
        try:
            with open(device, "rb", buffering=0) as file:
                there += file.seek(0, os.SEEK_END)
        except OSError as error:
            raise ValueError(f"cannot read the device {device}: {error.strerror}") from None
    if needed > there:
        raise ValueError(
            f"{', '.join(devices)}: {byte_count(there)} in all, and this run swaps {byte_count(needed)}; name more or "
            "larger --devices, or swap to files (--nvme)"
        )


def _less_memory(config: TrainConfig) -> str:
    if config.system != "memascend":
        return "Try --system memascend, a smaller model, or close other programs"
    return "Try a smaller model, fewer --ranks, or close other programs (memascend plan shows every part)"
