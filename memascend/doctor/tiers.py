"""`memascend doctor --tiers`: checks whether several paths can be used together, and how fast they are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from memascend.doctor.checks import FAIL, OK, WARN, Check, Needs, check_folder, check_speed, file_system, size
from memascend.doctor.speed import DeviceSpeed
from memascend.storage.devices import DeviceRefused, require_usable
from memascend.storage.direct_engine import DirectEngineConfig
from memascend.storage.engine_tiers import DirectTier
from memascend.storage.fair_lock import name_of_place
from memascend.storage.path_rates import PROBE_BYTES, measure
from memascend.storage.placement import Rates, weights
from memascend.storage.write_budget import written


def check_tiers(paths: Sequence[Path], needs: Needs | None, *, try_speed: bool = True) -> Iterator[Check]:
    """Check each path by itself, then all together.

    The last check gives the share of each path, and the seconds of a step with all paths and with each one alone; or,
    if fewer than two are timed, only whether the plan has room.
    """
    speeds: dict[Path, DeviceSpeed] = {}
    free: dict[Path, int] = {}
    drives: dict[str, Path] = {}
    for path in (each.absolute() for each in paths):
        if path.is_block_device():
            check, free_bytes, speed = _device(path, try_speed)
            if check.status == OK:
                free[path] = free_bytes
            if speed is not None:
                speeds[path] = speed
            yield check
            continue
        check = check_folder(path, file_system(path.resolve()), "--tiers")
        if check.status == FAIL:
            yield Check(name="path", status=FAIL, found=check.found, fix=check.fix)
            continue
        drive = name_of_place(path)
        if drive in drives:
            fix = "name one of them in tiers, or a folder on another drive"
            yield Check(
                name="path", status=WARN, found=f"{path} is on the same file system as {drives[drive]}", fix=fix
            )
            continue
        drives[drive] = path
        volume = os.statvfs(path)
        free[path] = volume.f_bavail * volume.f_frsize
        there = written(str(path))["total"]
        found = f"{path}: {size(free[path])} free" + (f", {there / 1e12:.2f} TB written by trainings" if there else "")
        status, fix = OK, ""
        if try_speed:
            tried, speed = check_speed(path, None, "--tiers")
            found, status, fix = f"{found}, {tried.found.removeprefix(f'{path}: ')}", tried.status, tried.fix
            if speed is not None:
                speeds[path] = speed
        yield Check(name="path", status=status, found=found, fix=fix)
    if len(speeds) > 1:
        yield _together(speeds, free, needs)
    elif needs is not None and free:
        yield _space(free, needs)


def _device(path: Path, try_speed: bool) -> tuple[Check, int, DeviceSpeed | None]:
    """Check a formatted raw device without harming its tensors; return the check, its free bytes and its rates."""
    try:
        owner = require_usable(path).owner or ""
        with DirectTier.on_devices([path], owner, DirectEngineConfig(volatile=True)) as tier:
            free_bytes, rates = tier.free_bytes, measure(tier) if try_speed else None
    except (DeviceRefused, OSError) as refused:  # StorageError is an OSError
        fix = "see memascend storage format, or name another path"
        return Check(name="path", status=FAIL, found=str(refused), fix=fix), 0, None
    found = f"{path}: {size(free_bytes)} free on a raw device"
    if rates is None:
        return Check(name="path", status=OK, found=found), free_bytes, None
    speed = DeviceSpeed(write_bytes_per_s=rates.write, read_bytes_per_s=rates.read, tried_bytes=PROBE_BYTES)
    found += f", written at {rates.write / 1e9:.2f} GB/s, read at {rates.read / 1e9:.2f} GB/s"
    return Check(name="path", status=OK, found=found), free_bytes, speed


def _space(free: dict[Path, int], needs: Needs) -> Check:
    """Check the free space of all usable paths against the plan, where their shares are not known."""
    total = sum(free.values())
    found = f"{size(total)} on {', '.join(map(str, free))}; the plan needs {size(needs.ssd_bytes)}"
    if total < needs.ssd_bytes:
        fix = f"free {size(needs.ssd_bytes - total)} on any of them, or name another drive"
        return Check(name="free space", status=FAIL, found=found, fix=fix)
    return Check(name="free space", status=OK, found=found)


def _together(speeds: dict[Path, DeviceSpeed], free: dict[Path, int], needs: Needs | None) -> Check:
    """Check all paths together, with rates measured one after the other.

    Paths behind one controller or network would be slower together than this predicts.
    """
    rates = [Rates(speed.read_bytes_per_s, speed.write_bytes_per_s) for speed in speeds.values()]
    shares = weights("balanced", rates)
    parts = [share / sum(shares) for share in shares]
    found = ", ".join(f"{path} {part:.0%}" for path, part in zip(speeds, parts, strict=True))
    if needs is None or not needs.write_bytes:
        return Check(name="paths together", status=OK, found=f"shares {found}")

    def seconds(part: float, rate: Rates) -> float:
        return part * (needs.read_bytes / rate.read + needs.write_bytes / rate.write)

    together = max(seconds(part, rate) for part, rate in zip(parts, rates, strict=True))
    alone = ", ".join(f"{path} alone {seconds(1, rate):,.3g} s" for path, rate in zip(speeds, rates, strict=True))
    found += f"; a step of the plan would spend {together:,.3g} s on them together, {alone}"
    daily = ", ".join(
        f"{path} {part * needs.write_bytes / together * 86400 / 1e12:.1f} TB"
        for path, part in zip(speeds, parts, strict=True)
    )
    found += f"; written in a day of steps that wait for nothing else: {daily}"
    short = {path: part * needs.ssd_bytes - free[path] for path, part in zip(speeds, parts, strict=True)}
    lacking = [f"{path} lacks {size(missing)}" for path, missing in short.items() if missing > 0]
    if sum(free.values()) < needs.ssd_bytes:
        missing = needs.ssd_bytes - sum(free.values())
        return Check(name="paths together", status=FAIL, found=found, fix=f"free {size(missing)} on any of them")
    if lacking:
        fix = "what has no room there goes to the others, which are then slower; free that much"
        return Check(name="paths together", status=WARN, found=f"{found}; {'; '.join(lacking)}", fix=fix)
    return Check(name="paths together", status=OK, found=found)
