"""A store that keeps DeepSpeed's swap files as tensors in a tier, under the same names (MemAscend IV-E).

DeepSpeed's swappers work with files: one path per tensor under ``<nvme_path>/zero_stage_3``, the same for every
training run of a model. :class:`SwapStore` keeps these tensors in a tier of this process, with the path as the key: in
the direct engine's file, on its devices, or in a folder of files. Any other path (a checkpoint written through
DeepNVMe) stays a file.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from memascend.memory.budget import local_ranks
from memascend.memory.ledger import Ledger
from memascend.planner.derived_sizes import IoSettings
from memascend.storage.completion import Completion
from memascend.storage.devices import inspect
from memascend.storage.direct_engine import DirectEngineConfig
from memascend.storage.engine_tiers import DirectTier, FileTier
from memascend.storage.errors import StorageError
from memascend.storage.folders import direct_limits
from memascend.storage.multi_path import MultiPathTier, PathReport
from memascend.storage.open_paths import open_paths
from memascend.storage.tier import Tier

from .long_lived import LongLivedBuffers
from .tier_options import NO_TIERS, TierOptions

SWAP_FOLDER = "zero_stage_3"  # DeepSpeed's folder in nvme_path

# The smallest alignment, whatever a device reports: older kernels do not report one, and DeepSpeed's buffers and the
# plans assume at least this.
LEAST_ALIGNMENT_BYTES = 512
# Reads for forward and backward come first; nothing waits for a write until its buffer is needed again.
PARAMETER_READ, OPTIMIZER_READ, WRITE = 2, 1, 0


def owner_name() -> str:
    """Return the owner recorded in a swap file: the program and, with several ranks, its rank."""
    program = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] not in ("", "-c") else "python"
    rank = os.environ.get("RANK")
    return (program if rank is None else f"{program}, rank {rank}").encode()[:200].decode(errors="ignore")


def sub_group_of(path: str) -> str:
    """Return DeepSpeed's id of a swap file's sub-group, whose master weights, moments and gradients share a path."""
    name = os.path.basename(path)
    return name.partition("_gradient_")[0].removesuffix(".tensor.swp").rpartition("-")[2]


def _engine_config(io: IoSettings, require_direct: bool) -> DirectEngineConfig:
    return DirectEngineConfig(
        workers=max(1, io.workers // 2),
        block_bytes=io.block_bytes,
        depth=io.queue_depth,
        volatile=True,
        require_direct=require_direct,
    )


def _direct_tier(folder: Path, devices: Sequence[str], config: DirectEngineConfig) -> DirectTier:
    """Open the tier of the direct engine: on the formatted ``devices``, or in one file in ``folder`` without any."""
    if devices:
        return DirectTier.on_devices(devices, inspect(devices[0]).owner or "", config)
    return DirectTier.in_file(folder, owner_name(), config)


class _Place:
    """A tier that is opened when first needed. Thread-safe."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        devices: Sequence[str],
        io: IoSettings,
        ledger: Ledger,
        buffers: LongLivedBuffers,
        require_direct: bool,
        tiers: TierOptions,
    ) -> None:
        self._tiers = tiers
        self._folder, self._kind, self._devices, self._io, self._ledger = folder, kind, devices, io, ledger
        self._buffers, self._require_direct = buffers, require_direct
        self._booked: list[int] = []
        self._tier: Tier | None = None
        self._lock = threading.Lock()

    @property
    def tier(self) -> Tier:
        """The tier, opened by the first caller. Raises StorageError or OSError if it cannot be opened."""
        if (there := self._tier) is not None:
            return there
        with self._lock:
            if self._tier is None:
                config = _engine_config(self._io, self._require_direct)
                if not self._devices and not self._tiers:
                    self._folder.mkdir(parents=True, exist_ok=True)
                if self._tiers:
                    exclusive = self._tiers.tier_exclusive
                    self._tier = open_paths(
                        self._tiers.tiers,
                        owner_name(),
                        kind=self._kind,
                        config=config,
                        exclusive=local_ranks() > 1 if exclusive is None else exclusive,
                        placement=self._tiers.tier_placement,
                        rehome=self._tiers.tier_rehome,
                        group_of=sub_group_of,
                    )
                    self._booked = [self._book(*buffer) for buffer in self._tier.bounce_buffers]
                elif self._kind == "file":
                    self._tier = FileTier(
                        self._folder,
                        owner_name(),
                        threads=self._io.workers,
                        block_bytes=self._io.block_bytes,
                        require_direct=self._require_direct,
                    )
                else:
                    self._tier = _direct_tier(self._folder, self._devices, config)
                    self._booked = [self._book(*buffer) for buffer in self._tier.engine.bounce_buffers]
                self._buffers.opened(self._tier)
            return self._tier

    def memory_alignment_bytes(self) -> int:
        """Return the largest alignment, in bytes, that any of the places requires of addresses."""
        if not self._devices and not self._tiers:
            self._folder.mkdir(parents=True, exist_ok=True)
        asked = [direct_limits(place) for place in (self._tiers.tiers or self._devices or [self._folder])]
        return max(limits.alignment_bytes for limits in asked)

    @property
    def open_tier(self) -> Tier | None:
        """The tier if it is open, else None."""
        return self._tier

    def _book(self, address: int, nbytes: int) -> int:
        """Record a bounce buffer in the ledger; transfers to DeepSpeed's unaligned slices of buffers go through it."""
        return self._ledger.record(
            "bounce buffers", "nvme_engine_buffers", nbytes, allocator="direct engine", address=address
        )

    def close(self) -> None:
        """Close the tier, if it is open, and its entries in the ledger. A later use opens a new one."""
        with self._lock:
            tier, self._tier = self._tier, None
            if tier is not None:
                self._buffers.closing(tier)
                tier.close()
            for entry in self._booked:
                self._ledger.close(entry)
            self._booked = []


@dataclass(eq=False)
class StoreUser:
    """An I/O handle that uses the store: the paths that it wrote, and whether its training is over (`idle`)."""

    paths: set[str] = field(default_factory=set)
    idle: bool = False


class SwapStore:
    """The swapped tensors of this process, by path. Thread-safe.

    The tensors that a handle wrote are erased when it is detached or collected. The tiers close (threads, descriptors,
    files) when no handle is left, or, after :meth:`retire`, when the trainings of all remaining handles are over.

    Args:
        folders: the ``nvme_path`` values; tensors under ``SWAP_FOLDER`` in one of them belong to the store, which keeps
            them in that folder.
        io: settings of the I/O engines.
        ledger: records the engines' own buffers, from their first use to ``close``.
        devices: raw devices of one formatted store, instead of the folders.
        kind: ``direct`` (one file or the devices, bypassing the page cache), or ``file`` (one file per tensor).
        require_direct: fail at the first transfer to a file system without O_DIRECT, instead of using the page cache.
        tiers: several paths instead of the folders.
    """

    def __init__(
        self,
        folders: Sequence[str | os.PathLike[str]],
        io: IoSettings,
        ledger: Ledger,
        *,
        devices: Sequence[str] = (),
        kind: str = "direct",
        require_direct: bool = False,
        tiers: TierOptions = NO_TIERS,
    ) -> None:
        distinct = list(dict.fromkeys(Path(folder).absolute() / SWAP_FOLDER for folder in folders))
        self._buffers = LongLivedBuffers()
        one = bool(devices) or bool(tiers)
        own = distinct[:1] if one else distinct
        places = [_Place(folder, kind, devices, io, ledger, self._buffers, require_direct, tiers) for folder in own]
        self._places = {f"{folder}{os.sep}": places[0 if one else i] for i, folder in enumerate(distinct)}
        self._place_of: dict[str | os.PathLike[str], _Place] = {}  # cache of earlier look-ups
        self._lock = threading.Lock()  # guards the users
        self._users: set[StoreUser] = set()
        self._lost: deque[StoreUser] = deque()
        self._retired = False

    def _place(self, path: str | os.PathLike[str]) -> _Place | None:
        """Return the place to which a path belongs, or None for a path outside of the store."""
        known = self._place_of.get(path)
        if known is not None:
            return known
        absolute = os.path.abspath(path)
        place = next((place for folder, place in self._places.items() if absolute.startswith(folder)), None)
        if place is not None and os.path.isabs(path):
            self._place_of[path] = place
        return place

    def holds(self, path: str | os.PathLike[str]) -> bool:
        """Return whether a tensor of this path belongs to the store."""
        return self._place(path) is not None

    def write(
        self, path: str, tensor: torch.Tensor, offset: int = 0, *, priority: int = WRITE, user: StoreUser | None = None
    ) -> Completion:
        """Write ``tensor`` (contiguous, on the CPU) under ``path``, which must belong to the store.

        Returns the completion of the transfer. Raises StorageError.
        """
        if user is not None:
            user.paths.add(path)
        return self._place(path).tier.write(path, tensor, offset=offset, priority=priority)

    def read(
        self, path: str, tensor: torch.Tensor, offset: int = 0, padding: int = 0, *, priority: int = PARAMETER_READ
    ) -> Completion:
        """Fill ``tensor`` from the tensor stored under ``path``; return the completion. Raises ValueError.

        If the stored tensor is shorter by fewer than ``padding`` bytes, the rest of ``tensor`` is left unchanged:
        DeepSpeed 0.16 writes a tensor without, and reads it with, the padding up to its alignment, which a file still
        has from an earlier write.
        """
        tier = self._place(path).tier
        there = (tier.size_of(path) or 0) - offset
        if there < tensor.nbytes < there + padding:
            tensor = tensor.view(-1)[: there // tensor.element_size()]
        return tier.read(path, tensor, offset=offset, priority=priority)

    def stage(self, path: str, target: Path) -> str | None:
        """Do :meth:`memascend.storage.tier.Tier.stage` for the tensor under ``path``."""
        place = self._place(path)
        return None if place is None or place.open_tier is None else place.open_tier.stage(path, target)

    def share(self, path: str, nbytes: int, handle: int, at: int) -> bool:
        """Do :meth:`memascend.storage.tier.Tier.share` for the tensor under ``path`` if it has at least ``nbytes``."""
        place = self._place(path)
        tier = None if place is None else place.open_tier
        return tier is not None and (tier.size_of(path) or 0) >= nbytes and tier.share(path, handle, at)

    def wait(self, transfers: Iterable[Completion]) -> None:
        """Wait until all ``transfers`` have ended, failed ones included; then raise the first StorageError, if any."""
        failure: StorageError | None = None
        for transfer in transfers:
            try:
                transfer.wait()
            except StorageError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def reserve(self, nvme_path: str | os.PathLike[str], more_bytes: int) -> None:
        """Reserve ``more_bytes`` in ``nvme_path``, so that a full disk is found now. Raises StorageError.

        Does nothing for a folder outside of the store, as a second engine of the process may have.
        """
        place = self._places.get(f"{Path(nvme_path).absolute() / SWAP_FOLDER}{os.sep}")
        if place is not None:
            place.tier.reserve(more_bytes)

    def paths_report(self) -> list[PathReport]:
        """Return a report on each of several paths; empty without `tiers`, and before the first write."""
        tiers = [place.open_tier for place in dict.fromkeys(self._places.values())]
        return [report for tier in tiers if isinstance(tier, MultiPathTier) for report in tier.report()]

    def observe_paths(self) -> None:
        """Let sub-groups follow the rates of their paths; called at the end of a step."""
        for place in dict.fromkeys(self._places.values()):
            if isinstance(place.open_tier, MultiPathTier):
                place.open_tier.observe()

    @property
    def paths(self) -> list[str]:
        """The files, folders or devices; empty before the first write."""
        tiers = [place.open_tier for place in dict.fromkeys(self._places.values())]
        return [path for tier in tiers if tier is not None for path in tier.paths]

    @property
    def direct(self) -> bool:
        """Whether all transfers bypass the page cache; False once a folder's file system has refused O_DIRECT."""
        tiers = [place.open_tier for place in dict.fromkeys(self._places.values())]
        return all(tier.direct for tier in tiers if tier is not None)

    @property
    def memory_alignment_bytes(self) -> int:
        """Alignment of a buffer's address, in bytes (at least 512), at which the devices need no copy.

        Raises StorageError or OSError.
        """
        asked = (place.memory_alignment_bytes() for place in dict.fromkeys(self._places.values()))
        return max(LEAST_ALIGNMENT_BYTES, *asked)

    @property
    def used_bytes(self) -> int:
        """Bytes that the tensors occupy, in whole units each; a growing file is preallocated slightly larger."""
        tiers = [place.open_tier for place in dict.fromkeys(self._places.values())]
        return sum(tier.used_bytes for tier in tiers if tier is not None)

    # -- buffers that live as long as a training run -------------------------------------------------------------------

    def register(self, tensor: torch.Tensor, user: StoreUser) -> None:
        """Pin a buffer of ``user`` for transfers, in tiers that can.

        The buffer is kept alive until :meth:`unregister`, or until the training of ``user`` is over; until then forked
        children do not inherit its memory.
        """
        if user in self._users:
            self._buffers.add(tensor, user)

    def unregister(self, tensor: torch.Tensor) -> None:
        """Unregister a buffer; on return no tier refers to its memory. No error if it was not registered."""
        self._buffers.remove(tensor)

    @property
    def registered_bytes(self) -> int:
        """Bytes of the buffers that at least one open tier has pinned."""
        return self._buffers.registered_bytes

    # -- users ---------------------------------------------------------------------------------------------------------

    def attach(self) -> StoreUser:
        """Add and return a new user, which stays until :meth:`detach`."""
        user = StoreUser()
        with self._lock:
            self._users.add(user)
        return user

    def detach(self, user: StoreUser) -> None:
        """Remove a user and erase its tensors. Idempotent."""
        with self._lock:
            if user not in self._users:
                return
            self._users.discard(user)
            self._buffers.remove_all_of(user)
            for path in user.paths:
                if (tier := self._place(path).open_tier) is not None:
                    tier.erase(path)
            self._close_if_unused()

    def lose(self, user: StoreUser) -> None:
        """Detach a user from a finalizer. Another thread does it, as the finalizer's thread may hold any lock."""
        self._lost.append(user)
        with contextlib.suppress(RuntimeError):  # at interpreter exit, where everything is closed anyway
            _thread.start_new_thread(self._detach_lost, ())

    def _detach_lost(self) -> None:
        """Detach the users that finalizers have lost since the last call."""
        while True:
            try:
                user = self._lost.popleft()
            except IndexError:
                return
            self.detach(user)

    def end_training(self, user: StoreUser) -> None:
        """Mark the training of this user as over; its tensors can still be read until :meth:`retire`."""
        with self._lock:
            user.idle = True
            self._buffers.remove_all_of(user)
            self._close_if_unused()

    def retire(self) -> None:
        """Declare that no new training will use the store, which then closes with the last one that does."""
        with self._lock:
            self._retired = True
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if not self._users or (self._retired and all(user.idle for user in self._users)):
            self.close()

    def close(self) -> None:
        """End all transfers and remove the files. A later write opens an empty store."""
        for place in self._places.values():
            place.close()
