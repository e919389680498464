"""The files of a state store: their sizes, how they are made, and how they are removed."""

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
from memascend.storage.freed_space import free_bytes, unlink
from memascend.storage.native import _C
from memascend.storage.shared_memory import control_file_bytes

FILE = "states"  # in the store's folder
CHUNK_BYTES = 16 << 10  # unit of space: half of it is lost with each tensor, on average
META_BYTES = 1 << 20  # space for the facts of a step
_FIXED_BYTES = 1 << 20  # superblocks, and what the store rounds up
_LOG_BYTES_PER_KEY = 1024  # of each half: a record takes some 150, and a step writes all of them
_ZEROS_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class StoreSpace:
    """What a store's file has space for: tensors of `sizes` bytes in so many `versions`, tensors of `single` bytes in
    one, and `slack` bytes more."""

    sizes: Sequence[int]
    versions: int = 2
    single: Sequence[int] = ()
    slack: int = 0

    @property
    def log_bytes(self) -> int:
        """Of each half of the store's log."""
        return in_chunks(max(1 << 20, _LOG_BYTES_PER_KEY * (len(self.sizes) + len(self.single) + 1)))

    @property
    def nbytes(self) -> int:
        """Of the file."""
        versioned, single = (sum(map(in_chunks, sizes)) for sizes in (self.sizes, self.single))
        fixed = _FIXED_BYTES + 2 * self.log_bytes + 2 * META_BYTES
        return fixed + self.versions * versioned + single + self.slack


def control_bytes(size: int) -> int:
    """Of the control file next to a store's file of `size` bytes, while it is open."""
    return control_file_bytes(size, CHUNK_BYTES)


def in_chunks(size: int) -> int:
    """What a tensor of `size` bytes takes."""
    return -(-size // CHUNK_BYTES) * CHUNK_BYTES


def holds_states(folder: str | os.PathLike[str]) -> bool:
    """Whether states were put into the folder."""
    return (Path(folder) / FILE).is_file()


def owner_of(folder: str | os.PathLike[str]) -> str | None:
    """What the states in the folder are of; None: there are none."""
    block = _C.storage_superblock(str(Path(folder) / FILE))
    return None if block is None else block["owner"]


def with_control_folder(folder: Path) -> DirectEngineConfig:
    """The store's shared memory is a file next to the store's own, and goes with it."""
    return DirectEngineConfig(control_folder=str(folder))


def allocate(path: Path, size: int, versions: int, released: int = 0) -> None:
    free = free_bytes(path.parent, size - released) + released
    if size > free:
        what = "two versions of all states" if versions == 2 else "one version of all states and its auxiliary data"
        raise StorageError("allocation", str(path), 0, size, free, errno.ENOSPC, f"{what} do not fit")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:  # all weights and moments: nobody else's to read
        if released:
            os.ftruncate(file.fileno(), size)
        else:
            take_space(file, path, size)


def take_space(file: BinaryIO, path: Path, size: int) -> None:
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise StorageError("allocation", str(path), 0, size, 0, error.errno, error.strerror or "") from error
        if os.fstat(file.fileno()).st_size < size:
            _fill_with_zeros(file, path, size)  # a file system that takes no space beforehand


def _fill_with_zeros(file: BinaryIO, path: Path, size: int) -> None:
    zeros = bytes(_ZEROS_BYTES)
    try:
        for begin in range(0, size, len(zeros)):
            file.write(zeros[: size - begin])
        file.flush()
    except OSError as error:
        raise StorageError("allocation", str(path), 0, size, 0, error.errno, error.strerror or "") from error


def remove(folder: str | os.PathLike[str], *, keep_folder: bool = False) -> None:
    """Remove a store's files, and the folder where nothing else is in it."""
    folder = Path(folder)
    unlink(folder / FILE)
    for path in folder.glob("memascend-*"):
        path.unlink(missing_ok=True)
    collect_tensor_files(folder)
    if not keep_folder:
        with contextlib.suppress(OSError):
            folder.rmdir()


def undo_creation(folder: Path, made: Sequence[Path]) -> None:
    remove(folder, keep_folder=True)
    with contextlib.suppress(OSError):  # somebody else has put something there
        for each in made:
            each.rmdir()
