"""`parameter.grad` of a streamed model: as in torch where a gradient exists, else an error of one line.

The gradients of a streamed model leave memory as they arrive. torch's attribute would be None, and code that looks for
gradients (clipping, logging, a loss scaler) would silently skip the parameter. This module therefore replaces the
attribute. It does not replace the functions that read it, since they may have been imported under any name before the
model was streamed:

- gradients that are used as they arrive: reading the attribute raises an error that names the option to let them wait;
- gradients that wait on the tier: a `WaitingGradient`, whose 2-norm is known and which can be multiplied by a number.
  That is what torch.nn.utils.clip_grad_norm_, get_total_norm and clip_grads_with_norm_ need, on all parameters or some.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from memascend.engine.errors import NotStreamable
from memascend.engine.placeholder_parameters import placeholders_allowed

_SOURCE = "_memascend_gradient"  # attribute of a parameter: the engine, and its name there
_STOCK = torch.Tensor.grad


class GradientSource(Protocol):
    """The engine as its parameters' gradients call it. Methods raise RuntimeError when they cannot be called now."""

    def gradient_waits(self, name: str) -> bool:
        """Return whether a complete gradient of the current step is on the tier; False if none has arrived."""

    def gradient_norm(self, name: str) -> float:
        """Return the 2-norm of a waiting gradient, including the factors that it was scaled by."""

    def scale_gradient(self, name: str, factor: float) -> None:
        """Multiply a waiting gradient by `factor`."""

    def forget_gradient(self, name: str) -> None:
        """Discard a gradient, as setting `.grad` to None does."""

    def give_values(self, parameter: nn.Parameter) -> bool:
        """Give a parameter its values in a use outside of its own module's forward; return False if that cannot be."""


def stored_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient that autograd has stored in the parameter."""
    return _STOCK.__get__(parameter)


def forget_gradient(parameter: nn.Parameter) -> None:
    """Drop the gradient that autograd has stored in the parameter."""
    _STOCK.__set__(parameter, None)


@contextlib.contextmanager
def stored_gradients_alone() -> Iterator[None]:
    """Return a context for functions of torch that visit each parameter's `grad`, without those on the tier."""
    token = placeholders_allowed.set(True)
    try:
        yield
    finally:
        placeholders_allowed.reset(token)


class WaitingGradient(torch.Tensor):
    """A gradient on the tier, with the shape, dtype and device of the parameter but no values.

    It supports 2-norms (fp32, without the loss scale) and in-place multiplication and division by a number. Everything
    else raises NotStreamable.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, name: str, source: GradientSource) -> WaitingGradient:
        made = torch.Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)
        made._name, made._source = name, source
        return made

    def __repr__(self, **_: Any) -> str:
        return f"WaitingGradient({self._name!r}, {tuple(self.shape)}, on the SSD)"

    def _norm(self, order: float = 2, dim: Any = None, *_: Any, **__: Any) -> torch.Tensor:
        """Return the 2-norm as a 0-d fp32 tensor. Raises NotStreamable for another order, or for single dimensions."""
        if order != 2 or dim is not None:
            raise NotStreamable(
                f"the gradient of {self._name} is on the SSD, and only its overall 2-norm is known: clip by that "
                "(norm_type=2.0)"
            )
        return torch.tensor(self._source.gradient_norm(self._name), dtype=torch.float32, device=self.device)

    def _scaled(self, factor: Any) -> WaitingGradient:
        """Multiply the gradient by a number. Raises NotStreamable for a tensor of several elements."""
        if isinstance(factor, torch.Tensor) and factor.numel() != 1:
            raise NotStreamable(f"the gradient of {self._name} is on the SSD: it can only be multiplied by a number")
        self._source.scale_gradient(self._name, float(factor))
        return self

    def numpy(self, *_: Any, **__: Any) -> Any:
        """Raise NotStreamable, as `tolist` and `__array__` do: there are no values in memory."""
        raise self._refusal("numpy()")

    tolist = __array__ = numpy

    def _refusal(self, what: str) -> NotStreamable:
        """Return the error for an operation that a waiting gradient does not support."""
        if what.startswith("_amp_"):
            return no_scaler()
        return NotStreamable(
            f"the gradient of {self._name} waits on the SSD, where {what} is not done: there are its 2-norm and its "
            "product with a number, which is what clip_grad_norm_ takes"
        )

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first, rest, operator = args[0], args[1:], function.overloadpacket
        aten = torch.ops.aten
        if isinstance(first, cls):
            if operator is aten.linalg_vector_norm:
                return first._norm(*rest)
            if operator is aten.mul_:
                return first._scaled(*rest)
            if operator is aten.div_ and len(rest) == 1:
                return first._scaled(1.0 / float(rest[0]))
            if operator is aten.detach:
                return first
        found = next(each for each in _flat([*args, *(kwargs or {}).values()]) if isinstance(each, cls))
        raise found._refusal(operator.__name__)


def _flat(args: Any) -> list[Any]:
    return [each for arg in args for each in (_flat(arg) if isinstance(arg, list | tuple) else [arg])]


class _OfAStreamedModel:
    """Mixin for the class of a parameter while its model is streamed."""

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient that autograd has stored, a `WaitingGradient` for one on the tier, or None. Raises RuntimeError
        as `gradient_waits` does. Assigning anything but None or the same gradient raises NotStreamable."""
        stored, (source, name) = stored_gradient(self), getattr(self, _SOURCE, (None, ""))
        engine = source() if source is not None else None
        if stored is not None or engine is None or placeholders_allowed.get() or not engine.gradient_waits(name):
            return stored
        return WaitingGradient(self.detach(), name, engine)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        source, name = getattr(self, _SOURCE, (None, ""))
        engine = source() if source is not None else None
        if engine is not None:
            if isinstance(value, WaitingGradient) and value._name == name:  # p.grad *= 0.5
                return
            if value is not None:
                raise NotStreamable(
                    f"the gradient of {name} cannot be set: a streamed model is only updated with the gradients of "
                    "backward()"
                )
            engine.forget_gradient(name)
        _STOCK.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _gets_values(self) -> bool:
        """Return whether the parameter, which is at rest, gets its values (`placeholder_parameters`)."""
        source, _ = getattr(self, _SOURCE, (None, ""))
        engine = source() if source is not None else None
        return engine is not None and engine.give_values(self)

    def _refuse(self, what: str) -> NotStreamable:
        """Return the error for an operation on the parameter outside of its module's forward pass."""
        if what in ("grad", "backward"):
            return NotStreamable(
                f"torch.autograd.grad(loss, parameters) and backward(inputs=...) do not reach a streamed parameter "
                f"({getattr(self, _SOURCE, (None, ''))[1]}): call loss.backward() without inputs, and look at "
                "p.grad.norm() before step() (wait=True when the optimizer is made)"
            )
        return NotStreamable(
            f"{what} of {getattr(self, _SOURCE, (None, 'a parameter'))[1]} outside of its module's forward pass: its "
            "values are on the SSD then: take them from state_dict(), the model's or the module's, or from "
            "session.engine.read_weights()"
        )

    def __deepcopy__(self, _: Any) -> Any:
        raise no_copy()

    def __reduce_ex__(self, _: Any) -> Any:
        raise no_copy()


def no_scaler() -> NotStreamable:
    """Return the error for a loss scaler of torch."""
    return NotStreamable(
        "a GradScaler cannot scale a streamed model's gradients: leave it out, and for weights of float16 let the "
        "engine take the scale out (session.engine.scale = 1024.0, then (1024.0 * loss).backward()); it leaves out a "
        "step whose gradients are infinite or NaN (optimizer.norm is None then)"
    )


def no_copy() -> NotStreamable:
    """Return the error for copying or pickling a streamed model."""
    return NotStreamable(
        "a streamed model cannot be copied or pickled, since its weights are on the SSD: take its state_dict(), and "
        "load that into another model"
    )


@functools.cache
def _watched(kind: type) -> type:
    """Return the class that a parameter of class `kind` has while its model is streamed."""
    return type(kind.__name__, (_OfAStreamedModel, kind), {"__module__": kind.__module__})


def watch_gradients(parameters: Mapping[nn.Parameter, str], source: GradientSource) -> Callable[[], None]:
    """Let the parameters' `grad` ask `source`, which is referenced weakly, by their names. Return the undo function."""
    proxy = weakref.ref(source)
    for parameter, name in parameters.items():
        if not isinstance(parameter, _OfAStreamedModel):
            parameter.__class__ = _watched(type(parameter))
        setattr(parameter, _SOURCE, (proxy, name))

    def undo() -> None:
        for parameter in parameters:
            if getattr(parameter, _SOURCE, (None,))[0] is proxy:
                delattr(parameter, _SOURCE)
                parameter.__class__ = type(parameter).__mro__[2]

    return undo


def source_of(parameter: torch.Tensor) -> GradientSource | None:
    """Return the engine that streams the parameter now, or None."""
    source, _ = getattr(parameter, _SOURCE, (None, ""))
    return source() if source is not None else None


class StepGradients:
    """State of the gradients behind one engine's `grad` attributes, and the factors that a loop applied to them."""

    def __init__(self) -> None:
        self.factors: dict[str, float] = {}  # by name, in the current step
        self.whole: frozenset[str] = frozenset()  # names of those that arrived in the passes that have ended
        self.spent: frozenset[str] = frozenset()  # names: used by the last step and not discarded by zero_grad
        self.zeroed: frozenset[str] = frozenset()  # names: set to zero by zero_grad(set_to_none=False)

    def forget(self, arrived: Collection[str], *, set_to_none: bool, of: Collection[str] | None = None) -> None:
        """Discard gradients as `zero_grad` does. `arrived`: names with one in this step. `of`: only these names."""
        had = self.spent | frozenset(arrived) | self.zeroed
        names = had if of is None else had & frozenset(of)
        self.spent -= names
        self.zeroed = self.zeroed - names if set_to_none else self.zeroed | names

    def begin_pass(self, *, first: bool) -> None:
        """Begin a backward pass; the `first` one of a step resets the factors."""
        self.spent = frozenset()
        if first:
            self.factors, self.whole = {}, frozenset()

    def multiply(self, name: str, factor: float) -> None:
        """Apply a factor of the training loop to a gradient of this step."""
        self.factors[name] = self.factors.get(name, 1.0) * factor

    def norm(self, name: str, sum_of_squares: float, scale: float) -> float:
        """Return the 2-norm of a gradient from its sum of squares, without the loss scale and with its factors."""
        return math.sqrt(sum_of_squares) / scale * abs(self.factors.get(name, 1.0))
