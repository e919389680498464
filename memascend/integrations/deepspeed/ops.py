"""DeepSpeed's C++ ops: those that it would compile on first use, and settings that its builder cannot parse."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import MutableMapping
from pathlib import Path

import torch
from torch.utils import cpp_extension

NEEDED = ("async_io", "cpu_adam")  # the ops that training with states on an SSD loads
ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"


def not_compiled() -> list[str]:
    """Return the NEEDED ops that are compiled neither by set-up nor by an earlier use for this process's accelerator.

    Preinstalled ops are built for one accelerator (``make setup``: the CPU); for another one DeepSpeed compiles them on
    first use and keeps them in torch's folder of extensions.
    """
    return [name for name in _loaded_by_torch() if not kept(name)]


def _loaded_by_torch() -> list[str]:
    """Return the NEEDED ops that are not preinstalled for this process's accelerator."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import accelerator_name, installed_ops

    here = accelerator_name == get_accelerator()._name
    return [name for name in NEEDED if not (here and installed_ops.get(name))]


def kept(name: str) -> bool:
    """Return whether an earlier use compiled the op with this Python and CUDA; only looks into torch's folder."""
    return (_folder(name) / f"{name}.so").is_file()


def refuse_abandoned_locks() -> None:
    """Raise ValueError for the lock of a killed compilation, for which torch would wait silently and forever."""
    for name in _loaded_by_torch():
        if lock := abandoned_lock(name):
            raise ValueError(
                f"DeepSpeed's op {name} cannot be loaded: torch waits for {lock}, which no process of this machine has "
                f"open, as after a compile that was killed; unless another machine is compiling it, rm {lock}"
            )


def abandoned_lock(name: str) -> Path | None:
    """Return the lock in the folder of an op if no process of this machine has it open, else None."""
    lock = _folder(name) / "lock"
    return lock if lock.exists() and not _is_open(lock) and lock.exists() else None


def _is_open(path: Path) -> bool:
    """Return whether a process that we may inspect has the file open: those of the same user, or all for root."""
    place = str(path.resolve())
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(descriptor) == place:
                return True
    return False


def _folder(name: str) -> Path:
    """Return the folder in which torch keeps the compiled files of an op."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is None:
        cuda = torch.version.cuda
        accelerator = f"cu{cuda.replace('.', '')}" if cuda else "cpu"
        python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
        root = str(Path(cpp_extension.get_default_build_root(), f"{python}_{accelerator}"))
    return Path(root, name)


def readable_architectures(environment: MutableMapping[str, str] = os.environ) -> None:
    """Remove the letters of architectures such as 9.0a from TORCH_CUDA_ARCH_LIST, in place.

    Container images for one GPU set them; DeepSpeed's builder (0.19.8) raises ValueError for them. Its ops use no
    instructions of the architecture-specific sets.
    """
    if ARCHITECTURES in environment:
        environment[ARCHITECTURES] = re.sub(r"(\d+\.\d+)[af]\b", r"\1", environment[ARCHITECTURES])
