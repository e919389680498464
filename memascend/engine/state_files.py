"""The files of a state store: their sizes, creation and removal."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from memascend.engine.mmap_tensors import collect_tensor_files
from memascend.storage.direct_engine import DirectEngineConfig
from memascend.storage.errors import StorageError
from memascend.storage.freed_space import allocate_space, free_bytes, unlink
from memascend.storage.native import _C
from memascend.storage.shared_memory import control_file_bytes

FILE = "states"  # in the store's folder
CHUNK_BYTES = 16 << 10  # unit of allocation; on average a tensor wastes half a chunk
META_BYTES = 1 << 20  # space for the facts of a step
_FIXED_BYTES = 1 << 20  # superblocks and rounding
_LOG_BYTES_PER_KEY = 1024  # in each half of the log: a record takes some 150 bytes, and a step writes one for each key
_ZEROS_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class StoreSpace:
    """The space in a store's file: `versions` versions of tensors of `sizes` bytes, one version of tensors of `single`
    bytes, and `slack` bytes more."""

    sizes: Sequence[int]
    versions: int = 2
    single: Sequence[int] = ()
    slack: int = 0

    @property
    def log_bytes(self) -> int:
        """Bytes of each half of the store's log."""
        return in_chunks(max(1 << 20, _LOG_BYTES_PER_KEY * (len(self.sizes) + len(self.single) + 1)))

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        versioned, single = (sum(map(in_chunks, sizes)) for sizes in (self.sizes, self.single))
        fixed = _FIXED_BYTES + 2 * self.log_bytes + 2 * META_BYTES
        return fixed + self.versions * versioned + single + self.slack


def control_bytes(size: int) -> int:
    """Return the bytes of the control file that exists next to a store's file of `size` bytes while it is open."""
    return control_file_bytes(size, CHUNK_BYTES)


def in_chunks(size: int) -> int:
    """Return the bytes that a tensor of `size` bytes takes in the file."""
    return -(-size // CHUNK_BYTES) * CHUNK_BYTES


def holds_states(folder: str | os.PathLike[str]) -> bool:
    """Return whether the folder contains states."""
    return (Path(folder) / FILE).is_file()


def owner_of(folder: str | os.PathLike[str]) -> str | None:
    """Return the owner string of the states in the folder (see `StateStore.create`), or None if there are none."""
    block = _C.storage_superblock(str(Path(folder) / FILE))
    return None if block is None else block["owner"]


def with_control_folder(folder: Path) -> DirectEngineConfig:
    """Return an engine configuration that keeps the store's shared memory in a file next to the store's own."""
    return DirectEngineConfig(control_folder=str(folder))


def allocate(path: Path, size: int, versions: int, released: int = 0) -> None:
    """Create a store's file, and allocate `size` bytes for it; if some are `released` later, only its size is set.
    Raises StorageError if `versions` versions do not fit on the disk, and FileExistsError."""
    free = free_bytes(path.parent, size - released) + released
    if size > free:
        what = "two versions of all states" if versions == 2 else "one version of all states and its auxiliary data"
        raise StorageError("allocation", str(path), 0, size, free, errno.ENOSPC, f"{what} do not fit")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:  # 0600: other users must not read the weights
        if released:
            os.ftruncate(file.fileno(), size)
        else:
            take_space(file, path, size)


def take_space(file: BinaryIO, path: Path, size: int) -> None:
    """Allocate the first `size` bytes of an open file; its contents stay. Raises StorageError."""
    try:
        allocate_space(file.fileno(), size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise StorageError("allocation", str(path), 0, size, 0, error.errno, error.strerror or "") from error
        if os.fstat(file.fileno()).st_size < size:
            _fill_with_zeros(file, path, size)  # the file system cannot allocate in advance


def _fill_with_zeros(file: BinaryIO, path: Path, size: int) -> None:
    """Write `size` zero bytes. Raises StorageError."""
    zeros = bytes(_ZEROS_BYTES)
    try:
        for begin in range(0, size, len(zeros)):
            file.write(zeros[: size - begin])
        file.flush()
    except OSError as error:
        raise StorageError("allocation", str(path), 0, size, 0, error.errno, error.strerror or "") from error


def remove(folder: str | os.PathLike[str], *, keep_folder: bool = False) -> None:
    """Remove a store's files, and the folder if it is empty then, unless `keep_folder`."""
    folder = Path(folder)
    unlink(folder / FILE)
    for path in folder.glob("memascend-*"):
        path.unlink(missing_ok=True)
    collect_tensor_files(folder)
    if not keep_folder:
        with contextlib.suppress(OSError):
            folder.rmdir()


def undo_creation(folder: Path, made: Sequence[Path]) -> None:
    """Remove a store's files, and the folders `made` for it as far as they are empty, in the given order."""
    remove(folder, keep_folder=True)
    with contextlib.suppress(OSError):  # the folder is not empty, since another program has written to it
        for each in made:
            each.rmdir()
