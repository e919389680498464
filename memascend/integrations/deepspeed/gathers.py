"""Observation of DeepSpeed's gathers: which parameters are about to be gathered, and when the device has its copies.

A gather copies partitions from host buffers to the device. On an asynchronous device such a copy may still be reading
the buffer when DeepSpeed marks the parameter as available. Therefore an event is recorded after each copy, and a buffer
is reused only once its event has completed. A gather by any other way than those listed below
(in a changed DeepSpeed) records no event, and its buffers stay in use until DeepSpeed releases them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partition_parameters

# Functions that start copies on the current stream, with the position of the argument that has the parameters.
_COPYING = (
    ("NoGatherHandle", "__init__", 1),
    ("NoGatherCoalescedHandle", "__init__", 1),
    ("AllGatherHandle", "__init__", 2),
    ("AllGatherCoalescedHandle", "__init__", 2),
    ("AllReduceCoalescedHandle", "__init__", 2),
    ("Init", "_allgather_param", 1),
    ("Init", "_allgather_params_sequential", 1),
    ("Init", "_allgather_params_coalesced", 1),
)
_NAMES = ("param", "params", "param_list")


def watch_gathers() -> Callable[[], None]:
    """Notify swappers that have `gathering` and `gathered` of every gather; return a function that undoes it."""
    undo = [_wrap(partition_parameters.Init, "_ensure_availability_of_partitioned_params", _announced)]
    for class_name, method, place in _COPYING:
        owner = getattr(partition_parameters, class_name, None)
        if owner is not None and hasattr(owner, method):
            undo.append(_wrap(owner, method, _noted(place)))

    def restore() -> None:
        for step in reversed(undo):
            step()

    return restore


def _wrap(owner: type, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace a method by what ``change`` makes of it; return a function that restores it."""
    stock = getattr(owner, name)
    setattr(owner, name, change(stock))
    return lambda: setattr(owner, name, stock)


def _announced(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that makes partitions available, which DeepSpeed calls right before it gathers them."""

    def ensure(self: Any, params: Iterable[Any]) -> Any:
        """Mark the parameters as being gathered, so that none of them loses its buffer to another one of them."""
        params = list(params)
        swappers = {id(s): s for s in (getattr(p, "nvme_swapper", None) for p in params) if hasattr(s, "gathering")}
        for swapper in swappers.values():
            swapper.gathering = {p.ds_id for p in params}
        try:
            return stock(self, params)
        finally:
            for swapper in swappers.values():
                swapper.gathering = frozenset()

    return ensure


def _noted(place: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wrap a function that starts copies of the parameters in argument ``place``, so that an event follows them."""

    def change(stock: Callable[..., Any]) -> Callable[..., Any]:
        def gather(*args: Any, **kwargs: Any) -> Any:
            out = stock(*args, **kwargs)
            device = get_accelerator()
            if not device.is_synchronized_device():
                given = args[place] if len(args) > place else next(kwargs[n] for n in _NAMES if n in kwargs)
                _note(device, given if isinstance(given, list | tuple) else [given])
            return out

        return gather

    return change


def _note(device: Any, params: Iterable[Any]) -> None:
    """Record an event on the current stream and hand it to the swapper of each parameter."""
    swapped = [p for p in params if hasattr(getattr(p, "nvme_swapper", None), "gathered")]
    if not swapped:
        return
    event = device.Event()
    event.record(device.current_stream())
    for param in swapped:
        param.nvme_swapper.gathered(param, event)
