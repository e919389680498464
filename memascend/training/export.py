"""`memascend export`: the newest weights of a run as a folder that `from_pretrained` loads."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from memascend.storage.atomic_write import sync
from memascend.training import checkpoint
from memascend.training.checkpoint import Checkpoint
from memascend.training.folder import RunFolder, RunInUse, missing_folders, remove_empty
from memascend.training.kept import kept_backend, kept_source, require_run
from memascend.training.preparation import read_prepared
from memascend.training.progress import byte_count

if TYPE_CHECKING:
    import torch

    from memascend.storage.tensor_file import TensorLayout
    from memascend.training.backends.streaming import StreamingBackend

SHARD_BYTES = 50 * 10**9  # as transformers' save_pretrained
_MARK = ".memascend-export"  # marks a partial folder, so that the next export may remove one that was interrupted
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LISTED_AGAIN = 10  # attempts to list checkpoints while a run replaces its only one
INDEX = f"{checkpoint.WEIGHTS}.index.json"


def export(run: Path, target: Path, shard_bytes: int = SHARD_BYTES, *, from_checkpoint: bool = False) -> str:
    """Write the newest weights of a run into the new folder `target`; return a line that says which step they are from.

    `target` appears complete or not at all, even after a power failure. Each file of weights has at most `shard_bytes`
    of tensors, or a single larger tensor; several files get an index. `from_checkpoint`: export the newest checkpoint,
    which is possible while the run trains. Otherwise a step whose update was interrupted is completed first.

    Raises a one-line ValueError if `run` is not a run, is training or has no weights yet, if `target` exists and is not
    an empty folder or is inside the run's folder, or if the disk is full; OSError if writing fails otherwise. After an
    error nothing is left behind.
    """
    folder = RunFolder(run)
    require_run(folder)
    target = Path(os.path.abspath(target))
    partial = _require_target(run, target)
    made = missing_folders(target.parent)
    with contextlib.ExitStack() as ends:
        if not from_checkpoint:
            _hold(folder, ends)
        begun = False
        try:
            ends.enter_context(_begun(partial, target))
            begun = True
            if from_checkpoint:
                step = _write_checkpoint(folder, partial, shard_bytes)
            else:
                step = _write(folder, partial, shard_bytes)
            written = list(partial.iterdir())
            nbytes = sum(path.stat().st_size for path in written)
            for path in (*written, partial):
                sync(path)
            if target.exists():
                target.rmdir()
            os.rename(partial, target)
            (target / _MARK).unlink()
            sync(target.parent)
        except BaseException as error:
            if begun:
                shutil.rmtree(partial, ignore_errors=True)
            remove_empty(made)
            if isinstance(error, OSError) and error.errno in _DISK_FULL:
                raise ValueError(
                    f"cannot write {target}: {error.strerror}; free space, or name a folder on another drive"
                ) from error
            raise
    return f"step {step} of {run}: {byte_count(nbytes)} in {target}, for from_pretrained"


def _require_target(run: Path, target: Path) -> Path:
    """Return the partial folder that the export is written to first. Raises ValueError if it must not be written."""
    if target.resolve().is_relative_to(run.resolve()):
        raise ValueError(f"{target} is in the run's own folder: name one outside of {run}")
    if os.path.lexists(target) and (target.is_symlink() or not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder: name a new one")
    partial = target.with_name(f".{target.name}.partial")
    is_foreign = partial.is_dir() and not (partial / _MARK).exists() and any(partial.iterdir())
    if is_foreign or partial.is_symlink() or (partial.exists() and not partial.is_dir()):
        raise ValueError(
            f"{partial} exists but was not left by an export: move it, or name a folder other than {target.name}"
        )
    return partial


@contextlib.contextmanager
def _begun(partial: Path, target: Path) -> Iterator[None]:
    """Create an empty `partial` that contains the mark file, locked until the end.

    Raises ValueError if another export is writing there, or if the folder cannot be created.
    """
    busy = f"another export is writing {target}: wait for it, or name another folder"
    with contextlib.ExitStack() as ends:
        try:
            with contextlib.suppress(FileNotFoundError):  # locks the leftovers of an interrupted export, if any
                ends.enter_context(_locked(partial / _MARK, "rb"))
            shutil.rmtree(partial, ignore_errors=True)
            try:
                partial.mkdir(parents=True)
            except FileNotFoundError as error:  # as in /proc
                raise ValueError(_not_writable(target, error)) from None
            ends.enter_context(_locked(partial / _MARK, "xb"))
        except (BlockingIOError, FileExistsError, FileNotFoundError):  # the latter two if both began at the same time
            raise ValueError(busy) from None
        except OSError as error:
            if error.errno in _DISK_FULL:
                raise
            raise ValueError(_not_writable(target, error)) from None
        yield


def _not_writable(target: Path, error: OSError) -> str:
    return f"{target} cannot be created ({error.strerror}); name a folder that you can write to"


@contextlib.contextmanager
def _locked(path: Path, mode: str) -> Iterator[None]:
    """Open and lock a file. Raises BlockingIOError if another process or another call has locked it."""
    with path.open(mode) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _hold(folder: RunFolder, ends: contextlib.ExitStack) -> None:
    """Lock the run's folder until `ends` closes. Raises ValueError if it is training, with what can be exported."""
    try:
        ends.enter_context(folder.held(resume=True))
    except RunInUse as in_use:
        if _newest_checkpoint(folder) is None:
            raise
        raise ValueError(f"{in_use}, or export its newest checkpoint with --from-checkpoint") from None


def _newest_checkpoint(folder: RunFolder) -> Checkpoint | None:
    found = [each for each in checkpoint.listed(folder.checkpoints)[0] if (each.model / checkpoint.WEIGHTS).exists()]
    return found[-1] if found else None


def _write_checkpoint(folder: RunFolder, partial: Path, shard_bytes: int) -> int:
    """Export the newest checkpoint; return its step.

    All of its files are opened before any is read, because a training run may remove the checkpoint meanwhile.
    """
    tried: Checkpoint | None = None
    for _ in range(_LISTED_AGAIN):
        newest = _newest_checkpoint(folder)
        if newest is None:  # or the run removed the only listed one, and has a newer one by now
            continue
        with contextlib.ExitStack() as ends:
            try:
                paths = [path for path in sorted(newest.model.iterdir()) if not path.is_dir()]
                files = {path.name: ends.enter_context(path.open("rb")) for path in paths}
            except FileNotFoundError as error:
                if tried is not None and tried.step == newest.step:
                    raise ValueError(f"{error.filename} is missing: restore it, or remove {newest.path}") from None
                tried = newest
                continue
            _require_space(partial, sum(os.fstat(file.fileno()).st_size for file in files.values()))
            _copy({name: Path(f"/proc/self/fd/{file.fileno()}") for name, file in files.items()}, partial, shard_bytes)
        return newest.step
    raise ValueError(f"{folder.root} has no checkpoint with weights yet: wait for one, or omit --from-checkpoint")


def _write(folder: RunFolder, partial: Path, shard_bytes: int) -> int:
    """Export the states on the SSD or the newest checkpoint, whichever is later; return its step."""
    newest = _newest_checkpoint(folder)
    backend = kept_backend(folder)
    kept = backend.kept_step() if backend is not None else None
    if backend is None or kept is None or (newest is not None and newest.step >= kept):
        if newest is None:
            if read_prepared(folder) is None and any(folder.root.glob("memascend-states-*")):
                raise ValueError(
                    f"{folder.prepared} is missing: run memascend train --output {folder.root} --resume first"
                )
            raise ValueError(f"{folder.root} has no weights yet: no step is kept, and there is no checkpoint")
        return _write_checkpoint(folder, partial, shard_bytes)
    if kept == 0:
        raise ValueError(f"{folder.root} has no weights yet: no step of it was completed")
    return _from_states(backend, folder, partial, shard_bytes)


def _copy(files: dict[str, Path], partial: Path, shard_bytes: int) -> None:
    """Copy the files of a checkpoint, given by name. The weights come last, since loaders refuse a folder without."""
    from memascend.storage.tensor_file import TensorFileReader, TensorLayout, tensor_spans

    weights = files[checkpoint.WEIGHTS]
    for name, path in files.items():  # copytree raises an error without a number where the disk is full
        if path != weights:
            shutil.copy(path, partial / name)
    layouts = [TensorLayout(name, dtype, shape) for name, (dtype, shape, _, _) in tensor_spans(weights).items()]
    if len(_shards(layouts, shard_bytes)) == 1:
        shutil.copy(weights, partial / checkpoint.WEIGHTS)
        return
    with TensorFileReader(weights) as reader:
        _write_weights(partial, layouts, ((layout.name, reader.read(layout.name)) for layout in layouts), shard_bytes)


def _shards(layouts: list[TensorLayout], shard_bytes: int) -> list[list[TensorLayout]]:
    """Split the tensors into consecutive shards of at most `shard_bytes`; a larger tensor gets a shard of its own."""
    shards: list[list[TensorLayout]] = [[]]
    size = 0
    for layout in layouts:
        if shards[-1] and size + layout.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(layout)
        size += layout.nbytes
    return shards


def _write_weights(
    partial: Path, layouts: list[TensorLayout], tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int
) -> None:
    """Write the weights in one or more files; if several, their index is written last.

    `tensors` are (name, tensor) pairs in the order of `layouts`.
    """
    from memascend.storage.tensor_file import TensorFileWriter

    shards, following = _shards(layouts, shard_bytes), iter(tensors)
    names = [checkpoint.WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        with TensorFileWriter(partial / name, shard, {"format": "pt"}) as writer:
            for _ in shard:
                writer.write(*next(following))
    if next(following, None) is not None:
        raise RuntimeError("more tensors than the files have room for")
    if len(shards) > 1:
        whole = {"total_size": sum(layout.nbytes for layout in layouts)}
        where = {layout.name: name for name, shard in zip(names, shards, strict=True) for layout in shard}
        (partial / INDEX).write_text(json.dumps({"metadata": whole, "weight_map": where}, indent=2, sort_keys=True))


def _from_states(backend: StreamingBackend, folder: RunFolder, partial: Path, shard_bytes: int) -> int:
    """Export the weights of the states on the SSD; return their step."""
    from memascend.integrations.pretrained import save_configuration

    step = backend.open_kept(kept_source(folder))
    try:
        _require_space(partial, sum(layout.nbytes for layout in backend.weight_layouts()))
        save_configuration(backend.model, partial, folder.tokenizer)
        with contextlib.closing(backend.weights()) as weights:  # must be closed before the engine, also after an error
            _write_weights(partial, backend.weight_layouts(), weights, shard_bytes)
    finally:
        backend.close_kept()
    return step


def _require_space(folder: Path, needed: int) -> None:
    """Raise ValueError, with the missing bytes, if the file system of `folder` has less than `needed` bytes free."""
    if needed > (free := shutil.disk_usage(folder).free):
        raise ValueError(
            f"{folder.parent} has {byte_count(free)} free, and the weights take {byte_count(needed)}: "
            f"{byte_count(needed - free)} are missing; name a folder on another drive"
        )
