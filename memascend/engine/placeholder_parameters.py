"""Placeholders: streamed parameters that are not in use, which raise an error when their values are read.

Their memory is a single NaN, so that `p.norm()`, an average over `p.data` or `parameters_to_vector(...)` would silently
return NaN. So a parameter has another class while it is not in use, one whose `__torch_function__` torch calls for
every function with such an argument. In use it has its own class again, so that forward and backward passes cost
nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_OF_TYPE_AND_SHAPE = {
    *("__hash__", "_is_view", "_is_zerotensor", "data_ptr", "dim", "element_size", "get_device", "has_names"),
    *("ndimension", "nelement", "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_"),
    *("retain_grad", "size", "storage_offset", "stride", "untyped_storage"),
}
_SET_DATA = torch.Tensor.data.__set__
_PROPERTIES = ("__get__", "__set__", "__delete__")

# Set inside of torch functions that go through all parameters and whose results are handled separately.
placeholders_allowed = ContextVar("placeholders_allowed", default=False)


class Placeholder:
    """Mixin for the class of a tensor over the NaN. `_refuse` returns the error, with the tensor's name. `_gets_values`
    gives the tensor its values if a forward pass of the model uses it outside of its module's forward, and returns
    whether it did."""

    _refuse: Callable[..., Exception]
    _gets_values: Callable[[], bool]

    @classmethod
    def __torch_function__(
        cls, function: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function.__name__
        if function == _SET_DATA and not placeholders_allowed.get():
            raise args[0]._refuse("an assignment to data")
        moves = name in _PROPERTIES or name == "detach"  # an error is raised when the result is used
        if not (moves or _takes_no_value(name, args) or placeholders_allowed.get() or _is_watched()):
            tensors = [each for each in _flat([*args, *(kwargs or {}).values()]) if isinstance(each, Placeholder)]
            if _changes(name) or not all(each._gets_values() for each in tensors):
                raise tensors[0]._refuse(name)
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **(kwargs or {}))
            if moves and name != "__set__" and type(found) is torch.Tensor and _is_the_same(found, args[0]):
                found = found.as_subclass(_View)
                found._of = args[0]
        return found

    def __repr__(self, **_: Any) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype}, on the SSD)"


class _View(Placeholder, torch.Tensor):
    """The result of `p.data` or `p.detach()` of a parameter that is not in use."""

    def _gets_values(self) -> bool:
        return False

    def _refuse(self, what: str) -> Exception:
        return self._of._refuse(what)


def _takes_no_value(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether a function uses only the type and the shape of its arguments."""
    if name in _OF_TYPE_AND_SHAPE or name.startswith(("is_", "new_")) or name.endswith("_like"):
        return True
    return name == "type" and len(args) == 1


def _changes(name: str) -> bool:
    """Return whether a function changes its argument in place; such a change would be lost."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or (name.startswith("__i") and name not in ("__int__", "__index__"))


def _is_watched() -> bool:
    """Return whether a first forward pass is being observed (`outside_use`), which gives values to parameters that are
    used outside of their module."""
    return any(getattr(mode, "gives_values", False) for mode in _get_current_dispatch_mode_stack())


def _is_the_same(found: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether `found` is a strided tensor with elements over the storage of `tensor`."""
    strided = found.layout == tensor.layout == torch.strided
    return strided and found.numel() and found.untyped_storage()._cdata == tensor.untyped_storage()._cdata


def _flat(args: Any) -> list[Any]:
    return [each for arg in args for each in (_flat(arg) if isinstance(arg, list | tuple) else [arg])]


@functools.cache
def placeholder_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the class that a parameter of class `kind` has while it is not in use."""
    return type(kind.__name__, (Placeholder, kind), {"__module__": kind.__module__})
