"""Checkpoints: one folder each, which is listed only if it is complete.

    checkpoints/step-00000500/
        model/        weights in safetensors, configuration and tokenizer: what from_pretrained loads
        state/        rank*.safetensors (master weights, moments, random state) and trainer.json; absent in checkpoints
                      that contain only weights
        manifest.json every file with its size and checksum

A checkpoint is built under another name, synced, and renamed, so that a crash while saving leaves earlier ones intact.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.storage.atomic_write import sync, write_atomically

if TYPE_CHECKING:
    from memascend.training.backends.protocol import Backend

MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
FORMAT = 1
_NAME = re.compile(r"step-(\d{8})")
_CHUNK_BYTES = 16 << 20
_PARTIAL, _REMOVED = ".partial-", ".removed-"


def file_checksum(path: Path) -> int:
    """Return the crc32 of a whole file."""
    value = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int
    manifest: dict[str, Any]

    @property
    def is_full(self) -> bool:
        """Whether a run can be resumed from it."""
        return bool(self.manifest.get("holds", "full") == "full")

    @property
    def model(self) -> Path:
        """Folder with weights, configuration and tokenizer, for `from_pretrained`."""
        return self.path / "model"

    @property
    def state(self) -> Path:
        """Folder with the states to resume from; absent in checkpoints that contain only weights."""
        return self.path / "state"

    def check(self, file: Path) -> None:
        """Compare a file's checksum with the manifest. Raises a ValueError that names file, expected and actual."""
        name = file.relative_to(self.path).as_posix()
        expected, got = self.manifest["files"][name]["crc32"], file_checksum(file)
        if expected != got:
            raise ValueError(
                f"the checkpoint {self.path} is damaged: {name} has checksum {got:08x}, expected {expected:08x}; move "
                "the folder away to continue from the previous one"
            )


def listed(folder: Path) -> tuple[list[Checkpoint], list[str]]:
    """Return the complete checkpoints, ordered by step, and a line for each checkpoint folder that is incomplete."""
    found, refused = [], []
    for path in sorted(folder.glob("step-*")) if folder.is_dir() else []:
        match = _NAME.fullmatch(path.name)
        if not match:
            continue
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            for name, entry in manifest["files"].items():
                size = (path / name).stat().st_size
                if size != entry["size"]:
                    raise ValueError(f"{name} has {size} bytes, expected {entry['size']}")
            found.append(Checkpoint(path, int(match.group(1)), manifest))
        except (OSError, ValueError, KeyError, TypeError) as error:
            refused.append(f"{path} is not a complete checkpoint ({error}); it is left alone and not used")
    return found, refused


def clean(folder: Path) -> None:
    """Remove folders that a crash left partially written or partially removed."""
    for path in [*folder.glob(f"{_PARTIAL}*"), *folder.glob(f"{_REMOVED}*")]:
        shutil.rmtree(path, ignore_errors=True)


def begin(folder: Path, step: int, *, full: bool = True) -> Path:
    """Return a new empty folder in which to build the checkpoint of `step`. Called by only one process."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_PARTIAL}step-{step:08d}"
    shutil.rmtree(path, ignore_errors=True)
    (path / "model").mkdir(parents=True)
    if full:
        (path / "state").mkdir(mode=0o700)  # only the owner may read master weights and moments
    return path


def write_weights(folder: Path, backend: Backend) -> int:
    """Write a backend's weights and persistent buffers to one safetensors file, tensor by tensor; return its crc32."""
    from memascend.storage.tensor_file import TensorFileWriter

    with TensorFileWriter(folder / WEIGHTS, backend.weight_layouts(), {"format": "pt"}) as writer:
        for key, tensor in backend.weights():
            writer.write(key, tensor)
    assert writer.checksum is not None, "no tensor of this file was shared"
    return writer.checksum


def commit(partial: Path, step: int, checksums: dict[str, int], facts: dict[str, Any]) -> Path:
    """Write the manifest of all files in `partial`, sync, rename the folder to its final name, and return that path.

    `checksums`: crc32 by relative name, for the files whose writer knows it; the others are computed from the files.
    """
    files = {}
    for path in sorted(partial.rglob("*")):
        if path.is_file():
            name = path.relative_to(partial).as_posix()
            if name not in checksums:
                sync(path)
            crc = checksums.get(name)
            files[name] = {"size": path.stat().st_size, "crc32": file_checksum(path) if crc is None else crc}
    manifest = {"format": FORMAT, "step": step, **facts, "files": files}
    write_atomically(partial / MANIFEST, json.dumps(manifest, indent=1))
    for folder in (partial / "model", partial / "state"):
        if folder.is_dir():
            sync(folder)
    final = partial.with_name(f"step-{step:08d}")
    if final.exists():  # an incomplete one of the same step: the run would have resumed from a complete one
        _remove(final)
    os.rename(partial, final)
    sync(final.parent)
    return final


def _remove(path: Path) -> None:
    """Remove a checkpoint: first rename it so that it is no longer listed, then delete its files."""
    hidden = path.with_name(f"{_REMOVED}{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(path, hidden)
    sync(path.parent)
    shutil.rmtree(hidden, ignore_errors=True)


def prune(folder: Path, keep: int) -> list[int]:
    """Remove all complete checkpoints except the newest `keep`; return the steps of those removed."""
    old = listed(folder)[0][:-keep]
    for checkpoint in old:
        _remove(checkpoint.path)
    return [checkpoint.step for checkpoint in old]


def point(link: Path, target: Path) -> None:
    """Make `link` a relative symlink to `target`, atomically. If `link` is a file or folder, leave it alone."""
    if link.exists() and not link.is_symlink():
        return
    temporary = link.with_name(f".{link.name}.partial")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    temporary.symlink_to(os.path.relpath(target, link.parent))
    os.replace(temporary, link)
