"""Checkpoints: a folder each, complete or not listed.

    checkpoints/step-00000500/
        model/        weights in safetensors, configuration and tokenizer: what from_pretrained loads
        state/        rank*.safetensors (master weights, moments, random state) and trainer.json; not in one of
                      weights alone
        manifest.json every file with its size and checksum

It is built under another name, synced, and renamed: a crash while saving leaves the ones before as they were.
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
    """crc32 of a whole file."""
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
        """Whether a run can go on from it."""
        return bool(self.manifest.get("holds", "full") == "full")

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def state(self) -> Path:
        return self.path / "state"

    def check(self, file: Path) -> None:
        """Compare a file's checksum with the manifest; ValueError names file, expected and got."""
        name = file.relative_to(self.path).as_posix()
        expected, got = self.manifest["files"][name]["crc32"], file_checksum(file)
        if expected != got:
            raise ValueError(
                f"the checkpoint {self.path} is damaged: {name} has checksum {got:08x}, expected {expected:08x}; move "
                "the folder away to continue from the previous one"
            )


def listed(folder: Path) -> tuple[list[Checkpoint], list[str]]:
    """Complete checkpoints by step, and a line for each folder of that kind that is not complete."""
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
    """Remove what a crash left half written or half removed."""
    for path in [*folder.glob(f"{_PARTIAL}*"), *folder.glob(f"{_REMOVED}*")]:
        shutil.rmtree(path, ignore_errors=True)


def begin(folder: Path, step: int, *, full: bool = True) -> Path:
    """An empty folder to build the checkpoint of `step` in; only one process calls it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_PARTIAL}step-{step:08d}"
    shutil.rmtree(path, ignore_errors=True)
    (path / "model").mkdir(parents=True)
    if full:
        (path / "state").mkdir(mode=0o700)  # masters and moments are nobody else's to read
    return path


def write_weights(folder: Path, backend: Backend) -> int:
    """Weights and buffers of a backend's model in one safetensors file, tensor by tensor; its crc32."""
    from memascend.storage.tensor_file import TensorFileWriter

    with TensorFileWriter(folder / WEIGHTS, backend.weight_layouts(), {"format": "pt"}) as writer:
        for key, tensor in backend.weights():
            writer.write(key, tensor)
    assert writer.checksum is not None, "no tensor of this file was shared"
    return writer.checksum


def commit(partial: Path, step: int, checksums: dict[str, int], facts: dict[str, Any]) -> Path:
    """Write the manifest of all files in `partial`, sync, and rename it to its final name.

    `checksums` holds crc32 by relative name where the writer knows it; the rest is read.
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
    if final.exists():  # of the same step, incomplete, or it would have been resumed from
        _remove(final)
    os.rename(partial, final)
    sync(final.parent)
    return final


def _remove(path: Path) -> None:
    """First out of the list, then file by file."""
    hidden = path.with_name(f"{_REMOVED}{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(path, hidden)
    sync(path.parent)
    shutil.rmtree(hidden, ignore_errors=True)


def prune(folder: Path, keep: int) -> list[int]:
    """Remove all complete checkpoints but the newest `keep`; returns their steps."""
    old = listed(folder)[0][:-keep]
    for checkpoint in old:
        _remove(checkpoint.path)
    return [checkpoint.step for checkpoint in old]


def point(link: Path, target: Path) -> None:
    """Make `link` a relative link to `target`, in one instant. A folder or file of the user's there is left alone."""
    if link.exists() and not link.is_symlink():
        return
    temporary = link.with_name(f".{link.name}.partial")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    temporary.symlink_to(os.path.relpath(target, link.parent))
    os.replace(temporary, link)
