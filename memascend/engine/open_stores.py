"""Which state stores this process has open: a folder is opened once, and a store that was dropped is waited for."""

from __future__ import annotations

import gc
import os
import time
import weakref
from pathlib import Path
from typing import Protocol

import torch

_DROPPED_S = 5.0  # a store that was dropped is let go of when its last update is done


class OpenStore(Protocol):
    """A store from its opening to its `close`. `opened_by`: the process."""

    folder: Path
    opened_by: int


_open: weakref.WeakSet[OpenStore] = weakref.WeakSet()
add, discard = _open.add, _open.discard


def require_not_open(folder: str | os.PathLike[str]) -> None:
    """ValueError where this process has a store in the folder open; one that was dropped without `close` is none."""
    deadline = time.monotonic() + _DROPPED_S
    while is_open(folder):
        _let_go_of_failed_backward()
        gc.collect()  # a dropped one is part of cycles (model, hooks, engine), and held while an update is at work
        if time.monotonic() > deadline:
            raise ValueError(in_use(folder))
        time.sleep(0.05)


def is_open(folder: str | os.PathLike[str]) -> bool:
    where = Path(folder).resolve()
    return any(store.opened_by == os.getpid() and where == store.folder.resolve() for store in list(_open))


def in_use(folder: str | os.PathLike[str]) -> str:
    """The line that says so."""
    return (
        f"{folder} is in use by this process: close the other session first (its close()), or let go of it, its "
        "optimizer and its model"
    )


def _let_go_of_failed_backward() -> None:
    """Autograd holds what a failed backward pass has not come to, until the next pass of the thread begins."""
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones((), requires_grad=True).clone().backward()  # type: ignore[no-untyped-call]
