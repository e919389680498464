"""Opening a tier over user-given folders and raw devices, each measured and guarded by a lock."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from memascend.storage.devices import inspect
from memascend.storage.direct_engine import DirectEngineConfig
from memascend.storage.engine_tiers import DirectTier, FileTier
from memascend.storage.errors import StorageError
from memascend.storage.fair_lock import FairLock, name_of_place
from memascend.storage.multi_path import MultiPathTier, StoragePath
from memascend.storage.path_lock import PathLock, path_lock_of
from memascend.storage.path_rates import measure
from memascend.storage.tier import Tier

__all__ = ["open_paths"]

log = logging.getLogger("memascend")


# More than eight parameters: most are keys of the section `memascend`, each with its own default.
def open_paths(
    paths: Sequence[str],
    owner: str,
    *,
    kind: str = "direct",
    config: DirectEngineConfig,
    exclusive: bool,
    placement: str | Sequence[float] = "balanced",
    rehome: bool = True,
    group_of: Callable[[str], str] = lambda key: key,
    around: Callable[[str, Tier], Tier] | None = None,
) -> MultiPathTier:
    """Return a tier over `paths`: folders, which are created if they are missing, and formatted devices.

    `kind`: `direct` (one file per folder) or `file` (one file per tensor). `around` wraps the tier of a path in another
    one; if that has a `drive_name`, it gets its own lock, else paths share the lock of their drive, which excludes
    other processes but not transfers of the same process. Each path is measured, without other users if `exclusive`.
    Errors name the paths as given. Raises StorageError, and what the tiers raise; then nothing stays open.
    """
    with contextlib.ExitStack() as opened:
        opened_paths: list[StoragePath] = []
        on_drive: dict[str, str] = {}
        for path in paths:
            tier = _open(path, owner, kind, config)
            if around is not None:
                tier = around(path, tier)
            opened.callback(tier.close)
            name = getattr(tier, "drive_name", None) or name_of_place(path)
            if (first := on_drive.setdefault(name, os.fspath(path))) != os.fspath(path):
                log.warning(
                    "memascend: %s and %s are on one drive: they share its bandwidth, so two paths are no faster than "
                    "one; name folders on different drives",
                    first,
                    path,
                )
            with _alone(name) if exclusive else contextlib.nullcontext():
                rates = measure(tier)
            lock = path_lock_of(name) if exclusive else PathLock(None)
            opened.callback(lock.close)
            opened_paths.append(StoragePath(os.fspath(path), tier, rates, lock))
        tier = MultiPathTier(opened_paths, placement=placement, rehome=rehome, group_of=group_of)
        opened.pop_all()
        return tier


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """Keep other processes, and other tiers of this one, off the drive.

    If the lock file, which every user may write, cannot be used, log a warning and continue without it.
    """
    with contextlib.ExitStack() as held:
        try:
            lock = held.enter_context(contextlib.closing(FairLock(name)))
            lock.acquire()
        except OSError as error:
            log.warning("memascend: drive %s is measured without the inter-process lock: %s", name, error)
        yield


def _open(path: str, owner: str, kind: str, config: DirectEngineConfig) -> Tier:
    """Return the tier of one path, a device or a folder, which is created if missing. Raises StorageError."""
    if Path(path).is_block_device():
        return DirectTier.on_devices([path], inspect(path).owner or "", config)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise StorageError("create", path, 0, 0, 0, error.errno, error.strerror or str(error)) from error
    if kind == "file":
        threads = 2 * config.workers
        return FileTier(
            path, owner, threads=threads, block_bytes=config.block_bytes, require_direct=config.require_direct
        )
    return DirectTier.in_file(path, owner, config)
