"""Checks of available memory and disk space against what a run needs, before hours are spent.

This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

from memascend import systems
from memascend.memory.budget import parse_bytes
from memascend.memory.cgroup import host_memory
from memascend.planner.options import KEPT_STATE_BYTES
from memascend.storage.shared_memory import headroom
from memascend.training.config import TrainConfig
from memascend.training.progress import byte_count

# Bytes per parameter on the swap device if there is no plan: 2 for weights, 12 for master weights and moments, 4 for
# gradients (evidence: DeepSpeed's swappers write 18 bytes per parameter and step), and a tenth for alignment.
SWAP_BYTES = 20
NVIDIA_DEVICE = Path("/dev/nvidiactl")  # ranks on GPUs do not reduce through /dev/shm
# Space in addition to a plan: alignment as a factor, and the increment by which a rank's store grows (swap_store.py).
SWAP_SLACK, SWAP_INDEX_BYTES = 1.02, 1 << 20
# Bytes per parameter in a checkpoint: those of the weights and of the states.
CHECKPOINT_BYTES = {states: 2 + size for states, size in KEPT_STATE_BYTES.items()}
WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def check(config: TrainConfig, prepared: dict[str, Any], output: Path, swap: Path | None) -> None:
    """Check host memory and disks. Raises a ValueError that says how much is missing and what would help.

    `swap`: the folder for swap files or states, None if the run needs none or has it already.
    """
    if config.trace and Path(config.trace).is_dir():
        raise ValueError(f"--trace {config.trace} is a folder: name a file in it, such as {config.trace}/trace.json")
    needed = prepared["planned_host_bytes"]
    budget = parse_bytes(config.host_memory) if config.host_memory else None
    if needed is not None and budget is not None and needed > budget:
        raise ValueError(
            f"this run needs {byte_count(needed)} of host memory, {byte_count(needed - budget)} more than the "
            f"--host-memory of {byte_count(budget)}; raise it, or see what would fit: memascend plan --host-memory"
        )
    memory = host_memory()
    available = memory.available_bytes
    if needed is not None and needed > available:
        where = f" in the control group of {memory.scarce_in.file}" if memory.scarce_in else ""
        largest = max(prepared["planned_components"].items(), key=lambda part: part[1])
        raise ValueError(
            f"this run needs {byte_count(needed)} of host memory and {byte_count(available)} are available{where}: "
            f"{byte_count(needed - available)} are missing; largest part: {largest[0]}, "
            f"{byte_count(largest[1])}. {_less_memory(prepared)}"
        )
    _check_disks(config, prepared, output, swap)


def check_shared_memory(ranks: int) -> None:
    """Raise ValueError if the buffers of DeepSpeed's ranks on CPUs would fill /dev/shm.

    Later allocations in it would then fail.
    """
    left = headroom(ranks)
    if not left.suffices and not NVIDIA_DEVICE.exists():
        raise ValueError(
            f"/dev/shm has {byte_count(left.free_bytes)} free and {ranks} rank{'s' if ranks > 1 else ''} of DeepSpeed "
            f"on a CPU take{'' if ranks > 1 else 's'} {byte_count(left.needed_bytes)}: {left.FIX}"
        )


def _check_disks(config: TrainConfig, prepared: dict[str, Any], output: Path, swap: Path | None) -> None:
    """Check that each file system has space for everything that is written there; several tiers are checked jointly."""
    parameters = prepared["parameters"]
    checkpoints = round(_checkpoint_bytes(config) * parameters)
    wants = [(output, checkpoints, "checkpoints", "another --output")]
    planned = prepared.get("planned_swap_bytes")  # missing in runs of earlier versions
    swapped = SWAP_BYTES * parameters if planned is None else round(SWAP_SLACK * planned)
    if swap is not None and config.tiers:
        _check_tiers(config, swapped, output, checkpoints)
    elif swap is not None and config.devices:
        _check_devices(config.devices, swapped)
    elif swap is not None:
        free = shutil.disk_usage(swap).free
        if os.stat(swap).st_dev == os.stat(output).st_dev:
            free -= checkpoints
        if swapped > free and (least := prepared.get("least_swap_bytes")) is not None:
            swapped = round(SWAP_SLACK * least)  # one version of the states, with the data to redo a step
        wants.append((swap, swapped + config.ranks * SWAP_INDEX_BYTES, "swap files", "another --nvme"))
    by_device: dict[int, list[tuple[Path, int, str, str]]] = {}
    for want in wants:
        by_device.setdefault(os.stat(want[0]).st_dev, []).append(want)
    for group in by_device.values():
        free, need = shutil.disk_usage(group[0][0]).free, sum(want[1] for want in group)
        if need > free:
            what = " and ".join(f"{byte_count(want[1])} of {want[2]}" for want in group)
            ways = " or ".join([*(want[3] for want in group), *_fewer_checkpoints(config, parameters, need - free)])
            raise ValueError(
                f"{group[0][0]} has {byte_count(free)} free and this run writes {what}: "
                f"{byte_count(need - free)} are missing; free space, or use {ways}"
            )


def _checkpoint_bytes(config: TrainConfig) -> float:
    """Return the bytes per parameter of all checkpoints that exist at the same time."""
    each = {"full": CHECKPOINT_BYTES[config.states], "weights": WEIGHT_BYTES[config.dtype], "none": 0}
    return (config.keep + 1) * each[config.checkpoints]


def _fewer_checkpoints(config: TrainConfig, parameters: int, missing: int) -> list[str]:
    """Return options that reduce the checkpoints by at least as many bytes as are missing."""
    ways = {}
    if config.keep > 1:
        ways["--keep 1"] = dataclasses.replace(config, keep=1)
    if hasattr(systems.load(config.system), "stored_in") and config.checkpoints != "none":
        ways["--checkpoints none"] = dataclasses.replace(config, checkpoints="none")
    whole = _checkpoint_bytes(config)
    return [way for way, less in ways.items() if (whole - _checkpoint_bytes(less)) * parameters >= missing]


def _check_tiers(config: TrainConfig, needed: int, output: Path, checkpoints: int) -> None:
    """Check the free space of all tiers together, because data that does not fit on its path goes to another one.

    Folders on the same file system share its free space, also with checkpoints that are written to it. A path that is
    too small for its own index contributes nothing.
    """
    first = systems.arrangement(config.system, config.arm).first_path
    used = config.tiers[:1] if first else config.tiers
    disks: dict[tuple[str, int], list[str]] = {}
    free: dict[tuple[str, int], int] = {}
    for path in used:
        folder = Path(path) if Path(path).exists() else Path(path).parent
        try:
            if folder.is_block_device():
                disk, free_bytes = ("device", os.stat(folder).st_rdev), _size_of(path)
            else:
                disk, free_bytes = ("file system", os.stat(folder).st_dev), shutil.disk_usage(folder).free
        except OSError as error:
            raise ValueError(
                f"cannot use {path} of the tiers: {error.strerror}; name folders or raw devices that exist"
            ) from None
        disks.setdefault(disk, []).append(path)
        free[disk] = free_bytes
    own = ("file system", os.stat(output).st_dev)
    usable_bytes = {}
    for disk, paths in disks.items():
        index = len(paths) * config.ranks * SWAP_INDEX_BYTES
        usable_bytes[disk] = max(0, free[disk] - index - (checkpoints if disk == own else 0))
    if needed <= (there := sum(usable_bytes.values())):
        return
    said = []
    for disk, paths in disks.items():
        one = " (one file system)" if len(paths) > 1 else ""
        less = f" less {byte_count(checkpoints)} of checkpoints" if checkpoints and disk == own else ""
        said.append(f"{' and '.join(paths)}{one}: {byte_count(free[disk])}{less}")
    if len(config.tiers) > len(used):
        said.append(f"not used by this arm: {' and '.join(config.tiers[len(used) :])}")
    raise ValueError(
        f"the tiers have {byte_count(there)} in all ({'; '.join(said)}), and this run swaps {byte_count(needed)}: "
        f"{byte_count(needed - there)} are missing; free space, or name more --tiers, each on a drive of its own"
    )


def _size_of(device: str) -> int:
    with open(device, "rb", buffering=0) as file:
        return file.seek(0, os.SEEK_END)


def _check_devices(devices: list[str], needed: int) -> None:
    """Raise ValueError if the devices together are smaller than the `needed` bytes."""
    there = 0
    for device in devices:
        try:
            there += _size_of(device)
        except OSError as error:
            raise ValueError(f"cannot read the device {device}: {error.strerror}") from None
    if needed > there:
        raise ValueError(
            f"{', '.join(devices)}: {byte_count(there)} in all, and this run swaps {byte_count(needed)}; name more or "
            "larger --devices, or swap to files (--nvme)"
        )


def _less_memory(prepared: dict[str, Any]) -> str:
    """Return advice for a run that needs more host memory than there is."""
    fits = prepared.get("what_fits")
    if fits:
        return f"What fits: {'; or '.join(fits)}"
    nothing = "no setting of this run does: " if fits is not None else ""
    return f"To make it fit, {nothing}take a smaller model, or close other programs (memascend plan shows every part)"
