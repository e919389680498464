"""Registry of the state stores that this process has open: a folder can be opened only once at a time."""

from __future__ import annotations

import gc
import os
import time
import weakref
from pathlib import Path
from typing import Protocol

import torch

_DROPPED_S = 5.0  # how long to wait for a dropped store, which is freed when its last update is done


class OpenStore(Protocol):
    """A store between its opening and its `close`. `opened_by`: the id of the process that opened it."""

    folder: Path
    opened_by: int


_open: weakref.WeakSet[OpenStore] = weakref.WeakSet()
add, discard = _open.add, _open.discard


def require_not_open(folder: str | os.PathLike[str]) -> None:
    """Raise ValueError if this process has a store in the folder open. A store that was dropped without `close` does
    not count: it is collected first, for which this waits some seconds at most."""
    deadline = time.monotonic() + _DROPPED_S
    while is_open(folder):
        _let_go_of_failed_backward()
        gc.collect()  # a dropped store is part of cycles (model, hooks, engine), and alive while an update runs
        if time.monotonic() > deadline:
            raise ValueError(in_use(folder))
        time.sleep(0.05)


def is_open(folder: str | os.PathLike[str]) -> bool:
    """Return whether this process has a store in the folder open."""
    where = Path(folder).resolve()
    return any(store.opened_by == os.getpid() and where == store.folder.resolve() for store in list(_open))


def in_use(folder: str | os.PathLike[str]) -> str:
    """Return the error message for a folder that is in use."""
    return (
        f"{folder} is in use by this process: close the other session first (its close()), or let go of it, its "
        "optimizer and its model"
    )


def _let_go_of_failed_backward() -> None:
    """Run a trivial backward pass, since autograd keeps the rest of a failed one until the thread's next begins."""
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones((), requires_grad=True).clone().backward()  # type: ignore[no-untyped-call]
