"""The output folder and the swap folder of a run: who uses them, and the removal of what dead runs left.

A folder is in use while its lock file is locked (flock). The kernel releases the locks of a dead process, so no pid has
to be trusted. All processes of a run share the lock; a process that gets it exclusively is looking at the folder of a
dead run.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memascend.storage.hosts import is_of_another_host, marks
from memascend.storage.names import SCRATCH_PREFIX
from memascend.training.config import SAVED_AS

LOCK = "run.lock"
TOKEN_BYTES = 4  # size of one token in the token files
OWNER = "owner.json"
SWAP_PREFIX = "memascend-swap-"
MIB = 1 << 20


class InUse(Exception):
    """Raised when another process has the lock; the message is the content of the lock file."""


class RunInUse(ValueError):
    """Raised when another process has locked the run's folder; the message says which."""


class Lock:
    """A flock on `folder/run.lock`, exclusive if `alone`, else shared; released by `close` or when the process ends.

    The constructor raises InUse if another process has the lock.
    """

    def __init__(self, folder: Path, *, alone: bool) -> None:
        self._path = folder / LOCK
        self._handle = self._locked(alone)
        while not self._is_of_the_file():  # its previous owner removed the file meanwhile
            os.close(self._handle)
            self._handle = self._locked(alone)

    def _locked(self, alone: bool) -> int:
        """Open and lock the file; return the descriptor. Raises InUse with what the owner wrote into it."""
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError:
            said = _said(handle)
            os.close(handle)
            raise InUse(said or "a process that is starting") from None
        return handle

    def _is_of_the_file(self) -> bool:
        """Return whether the locked file still has this name; a lock on a removed file protects nothing."""
        try:
            return os.path.samestat(os.fstat(self._handle), os.stat(self._path))
        except FileNotFoundError:
            return False

    def line(self) -> str:
        """Return the line that the current or last owner wrote into the lock file."""
        return _said(self._handle)

    def say(self, text: str) -> None:
        """Write a line for other processes that find the folder locked."""
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, text.encode(), 0)

    def close(self) -> None:
        """Release the lock; the file and its text stay."""
        os.close(self._handle)

    def remove(self) -> None:
        """Delete the lock file while the lock is owned, since afterwards it may belong to another process.

        The lock must still be closed.
        """
        self._path.unlink(missing_ok=True)


def _said(handle: int) -> str:
    """Return the text of a lock file, at most 200 bytes."""
    return os.pread(handle, 200, 0).decode("utf-8", "replace").strip()


def missing_folders(folder: Path) -> list[Path]:
    """Return those of `folder` and its parents that do not exist, deepest first."""
    return list(itertools.takewhile(lambda each: not each.exists(), (folder, *folder.parents)))


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of `folders` that are empty, in the given order."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    root: Path

    @property
    def config(self) -> Path:
        """The run's configuration, as YAML."""
        return self.root / SAVED_AS

    @property
    def metrics(self) -> Path:
        """One JSON object per step, evaluation and checkpoint."""
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        """Link to the newest checkpoint's weights, in the layout of `from_pretrained`."""
        return self.root / "model"

    @property
    def data(self) -> Path:
        """Folder of the token files."""
        return self.root / "data"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer"

    @property
    def partial_text(self) -> Path:
        """Temporary folder that becomes `tokenizer` and `data`; remains if the preparation was interrupted."""
        return self.root / ".text.partial"

    @property
    def text(self) -> Path:
        """Size and checksum of each token file, as the run's first steps read them.

        It outlives `prepared`, so that a run is never resumed with a different text.
        """
        return self.root / "text.json"

    @property
    def prepared(self) -> Path:
        """Result of the preparation. It is the last file written, so it exists only if the preparation is complete."""
        return self.root / "prepared.json"

    @property
    def logs(self) -> Path:
        """Folder of the ranks' outputs."""
        return self.root / "logs"

    @property
    def report(self) -> Path:
        """The report's path without its suffix (`.md` and `.json`)."""
        return self.root / "report"

    def open(self, *, resume: bool) -> Lock:
        """Create the folder, or take over that of an earlier run; return its lock, which is exclusive.

        Raises ValueError if the folder is not empty and `resume` is off, if there is no run to resume, if it is in use
        (RunInUse), or if it cannot be written.
        """
        found = sorted(path.name for path in self.root.iterdir()) if self.root.is_dir() else []
        if self.root.exists() and not self.root.is_dir():
            raise ValueError(f"{self.root} is a file; name a folder with --output")
        if self.root.is_symlink() and not self.root.exists():
            raise ValueError(f"{self.root} is a link to {self.root.readlink()}, which does not exist; make that folder")
        if resume and SAVED_AS not in found and {"checkpoints", "prepared.json", "metrics.jsonl"} & set(found):
            raise ValueError(f"{self.config} is missing: restore it to continue, or start again in another --output")
        if resume and SAVED_AS not in found:
            raise ValueError(f"nothing to resume: {self.root} holds no run; name the run's folder with --output")
        if not resume and set(found) - {LOCK, "logs", f".{SAVED_AS}.partial"}:  # what a refused or killed call leaves
            go_on = "continue it with --resume, or " if SAVED_AS in found else ""
            raise ValueError(f"{self.root} exists and is not empty; {go_on}name another folder with --output")
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            lock = Lock(self.root, alone=True)
        except InUse as user:
            raise RunInUse(f"{self.root} is in use by {user}; wait for it, or name another folder") from None
        except OSError as error:
            raise ValueError(f"cannot write into {self.root}: {error.strerror}; name a folder with --output") from None
        return lock

    @contextlib.contextmanager
    def held(self, *, resume: bool) -> Iterator[Lock]:
        """Keep the folder open (see `open`) for the duration of the block.

        If the block fails, what this call created and is not needed is removed again: the lock file, if there is no run
        to resume, and empty folders.
        """
        made, was_locked = missing_folders(self.root), (self.root / LOCK).exists()
        try:
            lock = self.open(resume=resume)
            try:
                yield lock
            except BaseException:
                if not was_locked and not self.config.exists():
                    lock.remove()
                raise
            finally:
                lock.close()
        except BaseException:
            remove_empty(made)
            raise


# -- swap folders ------------------------------------------------------------------------------------------------------


@dataclass
class SwapFolder:
    """A folder for the swap files of one run; removed by `remove`, or by a later run if this one dies."""

    path: Path
    lock: Lock
    made: list[Path]  # parent folders that did not exist before, deepest first

    @classmethod
    def make(cls, parent: Path, output: Path) -> SwapFolder:
        """Create a locked swap folder in `parent` for the run in `output`. Raises OSError."""
        made = missing_folders(parent)
        path = parent / f"{SWAP_PREFIX}{uuid.uuid4().hex[:12]}"
        parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
        lock = Lock(path, alone=False)
        (path / OWNER).write_text(json.dumps({"pid": os.getpid(), "output": str(output), "marks": marks()}))
        return cls(path, lock, made)

    def remove(self) -> None:
        """Release the lock and delete the folder with all files; `made` is left to the caller."""
        self.lock.close()
        shutil.rmtree(self.path, ignore_errors=True)


def _is_ours(path: Path) -> bool:
    """Return whether the file was made by DeepSpeed's swappers, our engines or this module."""
    return path.name in (LOCK, OWNER) or path.suffix == ".swp" or path.name.startswith(SCRATCH_PREFIX)


def collect_dead(parent: Path, mine: Path | None = None, patience: float = 60) -> list[str]:
    """Remove the swap files of dead runs in `parent`; return one line per folder that says what was done.

    Only folders called memascend-swap-* are considered that contain our owner file and are not locked, and only our own
    files in them are removed. `mine`: an output folder that the caller has locked. A swap folder of that run can only
    be locked by ranks that are dying with their parent, which takes a while if they are large: they are waited for, at
    most `patience` seconds in all.
    """
    lines = []
    deadline = time.monotonic() + patience
    for folder in sorted(parent.glob(f"{SWAP_PREFIX}*")) if parent.is_dir() else []:
        if folder.is_symlink() or not (folder / OWNER).is_file() or not (folder / LOCK).is_file():
            continue
        owner = _owner(folder)
        if is_of_another_host(owner.get("marks", ())):  # its locks may not be visible here
            continue
        is_mine = mine is not None and owner.get("output") == str(mine)
        try:
            lock = _lock_by(folder, deadline if is_mine else 0)
        except (InUse, OSError):
            if is_mine:
                lines.append(f"left {folder}: processes of the dead run {mine} still hold it")
            continue
        try:
            lines.append(_collect(folder))
        finally:
            lock.close()
    return lines


def _owner(folder: Path) -> dict[str, Any]:
    """Return the facts in a swap folder's owner file; empty if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        owner: dict[str, Any] = json.loads((folder / OWNER).read_text())
        return owner
    return {}


def _lock_by(folder: Path, deadline: float) -> Lock:
    """Acquire the exclusive lock: try at least once, and until `deadline`. Raises InUse."""
    while True:
        try:
            return Lock(folder, alone=True)
        except InUse:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.05)


def _collect(folder: Path) -> str:
    """Delete our files in the swap folder of a dead run; return a line about it. The caller has the exclusive lock."""
    owner = _owner(folder)
    files = [path for path in folder.rglob("*") if path.is_file() or path.is_symlink()]
    foreign = [path for path in files if path.is_symlink() or not _is_ours(path)]
    size = sum(path.stat().st_blocks * 512 for path in files if path not in foreign)
    for path in files:
        if path not in foreign:
            path.unlink(missing_ok=True)
    for path in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        with contextlib.suppress(OSError):
            path.rmdir()
    with contextlib.suppress(OSError):
        folder.rmdir()
    of = f"of the dead run {owner.get('output', '?')} (pid {owner.get('pid', '?')})"
    left = f"; left {len(foreign)} files that are not ours, such as {foreign[0]}" if foreign else ""
    return f"removed {size / MIB:,.0f} MiB of swap files {of} from {folder}{left}"
