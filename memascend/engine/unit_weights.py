"""Weights of a streamed model: the parameters of a unit refer to its slot while it is in use, and are empty otherwise.

An empty parameter is a view of a single NaN with the parameter's shape, so that an unnoticed use becomes visible.
"""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from memascend.engine.device import DeviceWeights
from memascend.engine.errors import NotStreamable
from memascend.engine.layout import Part, Piece, Unit
from memascend.engine.mmap_parameters import forget
from memascend.engine.model_units import ModelUnits
from memascend.engine.placeholder_parameters import placeholder_class
from memascend.engine.weights import WeightStream
from memascend.storage.interrupts import whole

_WITH_DLPACK = ("cpu", "cuda", "xpu")
_OWN_REFERENCES = 2  # C++ references to a parameter whose gradient has come: Python's, and its AccumulateGrad's


@dataclass
class _Span:
    """Parts of a unit whose weights share a storage while the unit is in use: those of one piece, one that is cut into
    several pieces, or all frozen ones. Updates of other pieces leave that memory alone."""

    pairs: list[tuple[Part, nn.Parameter]] = field(default_factory=list)
    storage: StorageWeakRef | None = None  # of the use in progress, or of the last one
    references: int = 0  # to that storage, when only the parameters refer to it

    def count(self) -> int:
        """Return the number of references to the storage."""
        return 0 if self.storage is None else torch._C._storage_Use_Count(self.storage.cdata)

    def of(self, unit: torch.Tensor) -> torch.Tensor:
        """Return the elements of the span, with gaps, of a unit's weights, as a view."""
        first, last = self.pairs[0][0], self.pairs[-1][0]
        return unit[first.first : last.first + last.numel]


def _use_count(parameter: nn.Parameter) -> int:
    """Return the number of C++ references to a parameter, which a node has that saves the parameter itself."""
    count: int = parameter._use_count()  # type: ignore[attr-defined]
    return count


def _spans(unit: Unit, pairs: list[tuple[Part, nn.Parameter]]) -> list[_Span]:
    """Return the spans of a unit with these parameters."""
    begins = {piece.runs[0].part.key for piece in unit.pieces}
    spans: list[_Span] = []
    for part, parameter in pairs:
        if not spans or part.key in begins or (spans[-1].pairs[-1][0].trained and not part.trained):
            spans.append(_Span())
        spans[-1].pairs.append((part, parameter))
    return spans


class UnitWeights:
    """Counts the uses of each unit; its parameters are views of a slot while there is any.

    Why `.data` is replaced and not the parameter: optimizers, hooks and tied modules refer to the parameter objects.
    Why an empty parameter is one NaN: reading it by mistake shows in the loss, and a view of one element can have any
    shape without taking memory. Why uses are counted: modules nest, and forward, backward and an update may use a unit
    at the same time. The end of the last use makes the parameters empty again.

    In a forked child (a DataLoader's worker) all parameters are empty: the child has neither the slots, which are
    pinned by a ring, nor the threads.
    """

    _all: ClassVar[weakref.WeakSet[UnitWeights]] = weakref.WeakSet()

    def __init__(self, units: ModelUnits, stream: WeightStream, on_device: DeviceWeights | None = None) -> None:
        self.units, self.stream, self.device, self._on_device = units, stream, units.device, on_device
        self._pid = os.getpid()
        self._all.add(self)
        self._uses: dict[str, int] = {}
        self._marks: dict[str, list[tuple[int, int]]] = {}  # `_mark` of units in use, as of their first use
        self._storages: dict[str, list[StorageWeakRef]] = {}  # storages of a unit's uses, by its key
        self._spans = {unit.key: _spans(unit, units.pairs(unit)) for unit in units.layout.units}
        self._lent: dict[str, Unit] = {}  # units whose memory is still referred to: one use each, parameters empty
        # Set by the engine: raises in a forked child, and where the weights are those of a step half done.
        self.require_usable: Callable[[], None] = lambda: None
        self.nothing = torch.full((), torch.nan, dtype=units.layout.weights, device=units.device)
        self._empty = {p: self.nothing.expand(p.shape) for p in units.names}
        # Each parameter's class while it is in use, and while it is empty.
        self._classes: dict[nn.Parameter, tuple[type[nn.Parameter], type[nn.Parameter]]] = {}

    def watch_rest(self) -> Callable[[], None]:
        """Make empty parameters raise an error when their values are read (`placeholder_parameters`), and return a
        function that undoes it. Their classes must not be changed in between."""
        self._classes = {p: (type(p), placeholder_class(type(p))) for p in self._empty if p.numel()}

        def undo() -> None:
            for parameter, (at_work, _) in self._classes.items():
                parameter.__class__ = at_work
            self._classes = {}

        return undo

    @classmethod
    def leave_children_none(cls) -> None:
        """Empty all parameters in a forked child, right after the fork."""
        for weights in list(cls._all):
            for used in [unit for unit in weights.units.layout.units if weights.is_in_use(unit)]:
                weights.empty(used)

    def require_own_process(self) -> None:
        """Raise RuntimeError in a fork of the process that trains the model."""
        if self._pid != os.getpid():
            raise RuntimeError(
                f"the weights of a streamed model belong to the process that trains it ({self._pid}), and this is a "
                "fork of it, such as a DataLoader worker: use the model in that process, or set num_workers=0"
            )

    @whole
    def take(self, unit: Unit) -> None:
        """Begin a use of the unit: its parameters have their weights on return. Raises what `require_usable` raises."""
        self.require_usable()
        self._end_loans(unit)
        if unit.key in self._lent:
            del self._lent[unit.key]
        else:
            self._fetch(unit)
            self._uses[unit.key] = self._uses.get(unit.key, 0) + 1
        if self._uses[unit.key] == 1:
            for span in self._spans[unit.key]:
                self._fill(unit, span)
                span.references = span.count()
            self._marks[unit.key] = self._mark(unit)

    def _fill(self, unit: Unit, span: _Span) -> None:
        """Let the parameters of a span refer to their weights."""
        values, begin = span.of(self.values(unit)), span.pairs[0][0].first
        if self.device.type in _WITH_DLPACK:  # a separate storage over the same memory, for this use
            values = torch.from_dlpack(values)  # type: ignore[attr-defined]
            span.storage = StorageWeakRef(values.untyped_storage())  # type: ignore[no-untyped-call]
            self._views(unit).append(span.storage)
        for part, parameter in span.pairs:
            if parameter in self._classes:
                parameter.__class__ = self._classes[parameter][0]
            parameter.data = values[part.first - begin : part.first - begin + part.numel].view(part.shape)

    def _mark(self, unit: Unit) -> list[tuple[int, int]]:
        """Return (address, version) of each parameter of the unit."""
        return [(parameter.data_ptr(), parameter._version) for _, parameter in self.units.pairs(unit)]

    def refusal_of_change(self, unit: Unit) -> NotStreamable | None:
        """Return an error if a forward pass has written to the weights of a unit in use or replaced them, since such
        changes are lost with the unit's memory; otherwise None. In-place changes through `.data` are not detected."""
        was, now = self._marks[unit.key], self._mark(unit)
        if was == now:
            return None
        changed = next(parameter for n, (_, parameter) in enumerate(self.units.pairs(unit)) if was[n] != now[n])
        return NotStreamable(
            f"{self.units.names[changed]} is changed in the forward pass of its module, and the weights of a streamed "
            "model change with the optimizer's step alone: compute with a changed copy, as F.linear(x, "
            "normalize(weight)), or use a parametrization (torch.nn.utils.parametrize)"
        )

    def _fetch(self, unit: Unit) -> None:
        """Fetch a unit's host slot, and start its copy to an accelerator unless the unit is in use already."""
        (slot,) = self.stream.fetch([unit.key])
        if self._on_device is not None and not self.is_in_use(unit):
            try:
                self.stream.copying(unit.key, self._on_device.bring(unit.key, slot))
            except BaseException:
                self.stream.release(unit.key)
                raise

    def values(self, unit: Unit) -> torch.Tensor:
        """Return all weights of a unit in use as a flat tensor on the device, a view of its slot."""
        stream = self.stream if self._on_device is None else self._on_device
        return stream.tensor(unit.key)

    @whole
    def give_back(self, unit: Unit, *, lend: bool = False) -> None:
        """End a use. With `lend`, the memory of the last use is kept while a tensor elsewhere refers to it, such as a
        module's result that is a view of its parameter; the unit must have a slot of its own."""
        self._uses[unit.key] -= 1
        if not self._uses[unit.key]:
            self.empty(unit)
            if lend and self._views(unit):
                self._uses[unit.key], self._lent[unit.key] = 1, unit
                return
            if self._on_device is not None:
                self._on_device.give_back(unit.key)
        self.stream.release(unit.key)

    def is_referred_to(self, unit: Unit) -> bool:
        """Return whether a tensor elsewhere still refers to the memory of the unit's weights, although it is not in
        use. Always False on devices without DLPack, where this is unknown."""
        if self.is_in_use(unit) or not self._views(unit):
            return False
        gc.collect()  # the reference may be part of a cycle of unreachable objects
        return bool(self._views(unit))

    def is_shared(self, unit: Unit, piece: Piece) -> bool:
        """Return whether anything but its parameters refers to the memory of a piece's weights, of which the gradients
        have come: autograd does for a use without a gradient (`weight.detach()`) whose backward is still to come. On an
        accelerator always False, since an update does not change its copies."""
        if self._on_device is not None or not self.is_in_use(unit):
            return False
        spans = self._spans[unit.key]
        if len(self._views(unit)) > len(spans):  # of an earlier use
            return True
        own = piece.runs[0].part
        for span in spans:
            if any(part is own for part, _ in span.pairs):
                return span.count() > span.references or any(_use_count(p) > _OWN_REFERENCES for _, p in span.pairs)
        return False  # a slice, whose memory autograd never has

    def is_copied(self, unit: Unit) -> bool:
        """Return whether the unit's weights are in use as a copy, on an accelerator, that updates do not change."""
        return self._on_device is not None and self.is_in_use(unit)

    def _views(self, unit: Unit) -> list[StorageWeakRef]:
        """Return the storages of the unit's uses that are still referred to."""
        storages = self._storages.setdefault(unit.key, [])
        storages[:] = [each for each in storages if not each.expired()]  # type: ignore[no-untyped-call]
        return storages

    def _end_loans(self, but: Unit) -> None:
        """Give back lent units whose memory nothing refers to any more, except `but`."""
        for unit in [unit for unit in self._lent.values() if unit.key != but.key and not self._views(unit)]:
            del self._lent[unit.key]
            self.give_back(unit)

    @whole
    def end_loans(self) -> None:
        """End the uses of all lent units, before the stream is closed, even if tensors still refer to their memory."""
        for unit in list(self._lent.values()):
            del self._lent[unit.key]
            self.give_back(unit)

    def is_in_use(self, unit: Unit) -> bool:
        return bool(self._uses.get(unit.key))

    @whole
    def empty(self, unit: Unit) -> None:
        """Make the unit's parameters empty: shape and dtype stay, and all elements are views of one NaN."""
        for _, parameter in self.units.pairs(unit):
            self._empty_one(parameter, self._empty[parameter])

    def _empty_one(self, parameter: nn.Parameter, nothing: torch.Tensor) -> None:
        """Let a parameter refer to `nothing`, with the class of a placeholder if those are in force."""
        classes = self._classes.get(parameter)
        if classes is None:
            parameter.data = nothing
        elif type(parameter) is not classes[1]:  # else it is empty already
            parameter.data = nothing
            parameter.__class__ = classes[1]

    @whole
    def empty_all(self) -> None:
        """Make all parameters of the model empty, including sliced ones."""
        for parameter, nothing in self._empty.items():
            forget(parameter)
            self._empty_one(parameter, nothing)

    @whole
    def abandon(self) -> None:
        """End all uses after an error, and make all parameters empty. The stream takes its buffers back by itself."""
        self._lent.clear()
        for unit in self.units.layout.units:
            while self._uses.get(unit.key, 0) > 0:
                with contextlib.suppress(ValueError, KeyError):
                    self.give_back(unit)
            self.empty(unit)


os.register_at_fork(after_in_child=UnitWeights.leave_children_none)
