"""Exact and atomic ``engine.save_checkpoint`` and ``load_checkpoint``, with stock names, files and arguments.

Hooks: the two methods of ``DeepSpeedEngine``. A checkpoint is written to a staging folder in the same directory, made
durable and renamed, and ``latest`` is replaced last, so that a crash at any instant leaves the previous checkpoint
intact. Files that are not a checkpoint's own stay in its folder, as with stock DeepSpeed. :mod:`.swapped_states` saves
the states of an optimizer on NVMe that stock DeepSpeed forgets.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from memascend.integrations.conventions import announce
from memascend.storage.atomic_write import sync, write_atomically

from .compat import CHECKPOINT_HOOKS, check_hooks
from .swapped_states import ExactCheckpoints, read_frozen, write_frozen

_OFFLOADED = "offloaded_tensors"  # DeepSpeed's folder of swap files in a checkpoint
_PARTIAL = ".memascend-partial"
_COMPLETE, _OTHERS = f"complete{_PARTIAL}", f"others{_PARTIAL}"  # in a staging folder
# DeepSpeed's names of what is in the folder of a checkpoint; the prefixes are those of ZeRO, experts and pipelines.
_OWN = re.compile(
    rf"{_OFFLOADED}|layer_\d+.*-model_states\.pt|"
    r"((bf16_|fp16_)?zero_pp_rank_\d+_|expp_rank_\d+_|(layer_\d+_)?expert_\d+_)?mp_rank_\d+_?(model|optim)_states\.pt"
)
# in the RuntimeError, which has no errno, of torch.save on a full disk
_TORCH_WRITER = "inline_container", "PytorchStreamWriter", "iostream error"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fs.h


def can_be_exact() -> bool:
    """Return whether this DeepSpeed keeps swapped tensors in a form that we can save (0.17 and later).

    Must be called before DeepSpeed's classes are replaced. Raises RuntimeError if it does, but a hook has changed.
    """
    from deepspeed.runtime.swap_tensor import optimizer_utils

    if not hasattr(optimizer_utils, "SwapTensorContext"):
        return False
    check_hooks(CHECKPOINT_HOOKS)
    return True


def install_checkpoints() -> Callable[[], None]:
    """Replace both methods of the engine class; return a function that restores them."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    stock_save, stock_load = DeepSpeedEngine.save_checkpoint, DeepSpeedEngine.load_checkpoint

    def save_checkpoint(
        self: Any,
        save_dir: str | os.PathLike[str],
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        options = (client_state or {}, save_latest, exclude_frozen_parameters)
        return _save(stock_save, self, save_dir, tag, *options)

    def load_checkpoint(
        self: Any,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., None] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        options = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        return _load(stock_load, self, load_dir, tag, options, custom_load_fn)

    DeepSpeedEngine.save_checkpoint, DeepSpeedEngine.load_checkpoint = save_checkpoint, load_checkpoint

    def undo() -> None:
        DeepSpeedEngine.save_checkpoint, DeepSpeedEngine.load_checkpoint = stock_save, stock_load

    return undo


def _save(
    stock_save: Callable[..., bool],
    engine: Any,
    save_dir: str | os.PathLike[str],
    tag: Any,
    client_state: dict[str, Any],
    save_latest: bool,
    exclude_frozen_parameters: bool,
) -> bool:
    """Implement ``save_checkpoint`` of an engine; `stock_save` is DeepSpeed's own.

    Raises OSError, naming the folder, if the checkpoint cannot be written; nothing of it is kept then.
    """
    if not save_dir or not isinstance(engine.optimizer, ExactCheckpoints):
        return stock_save(engine, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
    _refuse_decoupled(engine)
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    _require_below(save_dir, tag)
    try:
        with _staged(engine, Path(save_dir), tag, save_latest) as staging, _with_frozen_from_nvme(engine):
            with _swapping_left_to_us(engine):
                stock_save(engine, str(staging), tag, client_state, False, exclude_frozen_parameters)
            if engine.zero_nvme_offload_optimizer():
                _export(engine, tag, _rank_folder(engine, staging / tag))
    except OSError as error:
        raise _unwritable(save_dir, tag, error.errno, error.strerror or str(error)) from error
    except RuntimeError as error:
        if not any(name in str(error) for name in _TORCH_WRITER):
            raise
        raise _unwritable(save_dir, tag, errno.EIO, "torch.save could not write a file") from error
    return True


def _unwritable(save_dir: str | os.PathLike[str], tag: str, code: int | None, reason: str) -> OSError:
    return OSError(
        code,
        f"save_checkpoint: {save_dir} cannot be written ({reason}), and nothing of {tag} was kept; free space, or name "
        "another folder",
    )


def _load(
    stock_load: Callable[..., Any],
    engine: Any,
    load_dir: str | os.PathLike[str],
    tag: str | None,
    options: tuple[bool, bool, bool, bool],
    custom_load_fn: Callable[..., None] | None,
) -> tuple[str | None, dict[str, Any] | None]:
    """Implement ``load_checkpoint`` of an engine; `stock_load` is DeepSpeed's own.

    `options`: load_module_strict, load_optimizer_states, load_lr_scheduler_states and load_module_only.
    """
    if not isinstance(engine.optimizer, ExactCheckpoints) or engine.load_universal_checkpoint():
        return stock_load(engine, load_dir, tag, *options, custom_load_fn)
    tag = _latest(Path(load_dir)) if tag is None else str(tag)
    if tag is None:
        return stock_load(engine, load_dir, tag, *options, custom_load_fn)  # warns, and returns (None, None)
    folder = Path(load_dir) / tag
    _finish_replacement(_place(load_dir, tag))
    _require_ranks(engine, folder)
    swapped = engine.zero_nvme_offload_optimizer()
    _, load_optimizer_states, _, load_module_only = options
    if swapped and (load_module_only or not load_optimizer_states):
        raise ValueError(
            "load_checkpoint: weights cannot be loaded alone from a checkpoint with a swapped optimizer, since "
            "they are derived from its master weights; load all of it, or a file of save_16bit_model"
        )
    engine.optimizer.settle_states()  # a skipped step leaves its gradients in the swap buffers
    engine.optimizer.swapped_checkpoint = _rank_folder(engine, folder) if swapped else None
    with _swapping_left_to_us(engine), _with_frozen_to_nvme(engine):
        return stock_load(engine, load_dir, tag, *options, custom_load_fn)


def _export(engine: Any, tag: str, folder: Path) -> None:
    """Save this rank's swapped states to ``folder`` and announce the bytes, the way and the time."""
    begun, optimizer = time.monotonic(), engine.optimizer
    copies = not optimizer.settings.prestage_checkpoints
    done = optimizer.export_swapped_states(folder, copies=copies)
    announce(f"memascend: checkpoint {tag}: swapped states {done}, {time.monotonic() - begun:.2f} s")
    if done.copied_bytes and not copies and not vars(optimizer).get("_copies_announced"):
        optimizer._copies_announced = True
        announce(
            "memascend: a checkpoint references, and does not copy, what lies on its own file system, if that has "
            "reflinks (XFS, Btrfs) or with aio 'file'"
        )


def _refuse_decoupled(engine: Any) -> None:
    if engine.checkpoint_engine.is_decoupled():
        raise ValueError(
            "save_checkpoint: a decoupled checkpoint writer may still be writing when the checkpoint is put in its "
            "place; set checkpoint.writer.decoupled to false"
        )


def _require_below(save_dir: str | os.PathLike[str], tag: str) -> None:
    """Raise ValueError for a tag such as ``.`` or ``../best``, whose folder would not be one in ``save_dir``."""
    if os.path.isabs(tag) or os.path.normpath(tag).split(os.sep)[0] in (os.curdir, os.pardir):
        raise ValueError(
            f"save_checkpoint: tag {tag!r} does not name a folder in {save_dir}; use a name such as 'best'"
        )


def _require_ranks(engine: Any, folder: Path) -> None:
    """Raise ValueError, in one line, if ``folder`` is no checkpoint or one of another number of ranks."""
    from deepspeed import comm as dist

    if not folder.is_dir():
        there = sorted(path.parent.name for path in folder.parent.glob("*/*_model_states.pt"))
        known = f"it holds {', '.join(dict.fromkeys(there))}" if there else "it holds none"
        raise ValueError(f"load_checkpoint: {folder.parent} has no checkpoint {folder.name!r}; {known}")
    if engine.use_node_local_storage():
        return  # each node has its own ranks' files
    saved = len(list(folder.glob("*zero_pp_rank_*_optim_states.pt")))
    ranks = dist.get_world_size()
    if saved not in (0, ranks):  # for 0, DeepSpeed's own error names the missing file
        raise ValueError(
            f"load_checkpoint: {folder} was saved by {saved} ranks, this training has {ranks}; start it with {saved}"
        )


def _rank_folder(engine: Any, checkpoint: Path) -> Path:
    """Return the folder for the swapped tensors of this rank, where stock DeepSpeed puts them too."""
    from deepspeed.checkpoint.ds_to_universal import dp_index_to_str

    rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
    return checkpoint / _OFFLOADED / f"rank{dp_index_to_str(rank)}"


def _latest(folder: Path) -> str | None:
    """Return the tag in the file ``latest``, or None without such a file."""
    try:
        return (folder / "latest").read_text().strip() or None
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _replaced(target: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of this one object inside the context."""
    for name, value in attributes.items():
        target.__dict__[name] = value
    try:
        yield
    finally:
        for name in attributes:
            del target.__dict__[name]


def _swapping_left_to_us(engine: Any) -> contextlib.AbstractContextManager[None]:
    """Make DeepSpeed treat the optimizer as one in memory, so that it does not copy the swap folder."""
    return _replaced(engine, zero_nvme_offload_optimizer=lambda: False)


def _with_frozen_from_nvme(engine: Any) -> contextlib.AbstractContextManager[None]:
    """Save frozen parameters that are on NVMe with their values; stock DeepSpeed saves empty tensors."""

    def fragment(param: Any) -> Any:
        return read_frozen(param) if hasattr(param, "ds_tensor") else param.detach().cpu()

    return _replaced(engine, _get_param_fragment_func=fragment)


def _with_frozen_to_nvme(engine: Any) -> contextlib.AbstractContextManager[None]:
    """Load frozen parameters into their partitions on NVMe; stock DeepSpeed can only load those in memory."""
    from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS

    stock = engine.load_module_state_dict

    def load_module_state_dict(checkpoint: dict[str, Any], **options: Any) -> None:
        fragments = checkpoint.get(FROZEN_PARAM_FRAGMENTS) or {}
        stock(checkpoint={**checkpoint, FROZEN_PARAM_FRAGMENTS: None}, **options)
        for param in engine.module.parameters():
            name = engine.param_names.get(param)
            if name in fragments:
                write_frozen(param, fragments[name]) if hasattr(param, "ds_tensor") else param.data.copy_(
                    fragments[name]
                )

    return _replaced(engine, load_module_state_dict=load_module_state_dict)


# -- a folder that appears atomically ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _staged(engine: Any, save_dir: Path, tag: str, save_latest: bool) -> Iterator[Path]:
    """Yield a folder to save into; on success its ``tag`` is moved into ``save_dir`` atomically. Collective."""
    from deepspeed import comm as dist

    leads = (engine.local_rank if engine.use_node_local_storage() else engine.global_rank) == 0
    place = _place(save_dir, tag)
    if place.exists() and not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{place} is a file")
    staging = _staging(place)
    if leads:
        for folder in dict.fromkeys((save_dir, place.parent)):
            for left_over in folder.glob(f".*{_PARTIAL}"):
                _finish_replacement(folder / left_over.name[1 : -len(_PARTIAL)])
                shutil.rmtree(left_over, ignore_errors=True)
        staging.mkdir(parents=True)
    dist.barrier()
    try:
        yield staging
    except BaseException:
        if leads:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    dist.barrier()
    if leads:
        _commit(staging, save_dir, tag, save_latest)
    dist.barrier()


def _place(save_dir: str | os.PathLike[str], tag: str) -> Path:
    """Return the folder of a checkpoint; of a link its target, next to which it must be staged."""
    place = Path(save_dir) / tag
    return place.resolve() if place.is_symlink() else place


def _staging(place: Path) -> Path:
    return place.parent / f".{place.name}{_PARTIAL}"


def _commit(staging: Path, save_dir: Path, tag: str, save_latest: bool) -> None:
    """Make the staged checkpoint durable and move it into place; ``latest`` is replaced last.

    What else was in the folder of that name, such as a tokenizer, is moved over to the new one. It is listed before, so
    that `_finish_replacement` can still do that after a crash.
    """
    _make_durable(staging)
    for path in staging.iterdir():
        if path.name != Path(tag).parts[0]:  # the script that DeepSpeed puts next to its checkpoints
            shutil.move(path, save_dir / path.name)  # by a copy if a link leads to another file system
    place, complete, aside = _place(save_dir, tag), staging / _COMPLETE, staging / "replaced"
    os.rename(staging / tag, complete)
    if place.is_dir():
        shutil.copymode(place, complete)
    if others := _others(place, complete):
        (staging / _OTHERS).write_text(json.dumps(others))
        sync(staging / _OTHERS)
        sync(staging)
    _put_in_place(complete, place, aside)
    for old in (complete, aside):
        _move(_others(old, place), old, place)  # including what was made after the listing
    sync(place)
    sync(save_dir)
    if save_latest:
        write_atomically(save_dir / "latest", tag)
    shutil.rmtree(staging, ignore_errors=True)


def _put_in_place(new: Path, place: Path, aside: Path) -> None:
    """Rename ``new`` to ``place``; an existing ``place`` is exchanged with it, or else first renamed to ``aside``."""
    if not place.exists():
        os.rename(new, place)
        return
    if not _exchanged(new, place):
        os.rename(place, aside)
        os.rename(new, place)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two names atomically; return False if the kernel or the file system does not support it."""
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    return call is not None and call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0


def _finish_replacement(place: Path) -> None:
    """Undo or finish a replacement of ``place`` that a crash has cut off.

    Between the two renames on a file system without exchange, the old checkpoint is restored. After them, the files
    that are not a checkpoint's own are moved over to the new one.
    """
    staging = _staging(place)
    aside = staging / "replaced"
    if aside.exists() and not place.exists():
        with contextlib.suppress(FileNotFoundError):  # another rank was faster
            os.rename(aside, place)
    try:
        others = json.loads((staging / _OTHERS).read_text())
    except (FileNotFoundError, ValueError):  # nothing to move, or cut off before anything was replaced
        return
    if place.is_dir():
        for old in (staging / _COMPLETE, aside):
            _move(others, old, place)


def _others(old: Path, new: Path) -> list[str]:
    """Return the names in a checkpoint's folder (if it exists) that are not its own and not in the new one."""
    names = os.listdir(old) if old.is_dir() else []
    return [name for name in names if not _OWN.fullmatch(name) and not os.path.lexists(new / name)]


def _move(names: Iterable[str], old: Path, new: Path) -> None:
    """Move entries, as far as they exist, from one folder to another, where an existing file is newer and stays."""
    for name in names:
        source, target = old / name, new / name
        with contextlib.suppress(FileNotFoundError):  # it was moved already, or another rank was faster
            if not os.path.lexists(target):
                os.rename(source, target)
            elif target.is_dir() and source.is_dir() and not source.is_symlink():
                _move(os.listdir(source), source, target)


def _make_durable(folder: Path) -> None:
    """Sync every file and folder below ``folder``, contents before the folders that name them."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(parent) / name)
        sync(Path(parent))
