"""A model whose weights are elsewhere: units of modules get them before they are needed, and give them back after.

Between its uses a parameter is a shape over one NaN, so that whatever touches it unseen shows.
"""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from memascend.engine.device import DeviceWeights
from memascend.engine.errors import NotStreamable
from memascend.engine.layout import Unit
from memascend.engine.mmap_parameters import forget
from memascend.engine.model_units import ModelUnits
from memascend.engine.placeholder_parameters import placeholder_class
from memascend.engine.weights import WeightStream
from memascend.storage.interrupts import whole

_WITH_DLPACK = ("cpu", "cuda", "xpu")


class UnitWeights:
    """Which units are in memory, and who needs them: parameters are views of a slot while somebody does.

    Why `.data` is exchanged and the parameters stay: optimizers, hooks and tied modules refer to the objects. Why an
    empty parameter is one NaN: whatever reads it by mistake shows in the loss, and a view of one element has any shape
    without memory. Why uses are counted: modules nest, and a unit may be in use by forward, by backward and by an
    update at once. The last use of a thread to end makes the parameters empty again.

    In a forked child (a DataLoader's worker) all of them are empty: it did not get the slots, which a ring has pinned,
    nor the threads.
    """

    _all: ClassVar[weakref.WeakSet[UnitWeights]] = weakref.WeakSet()

    def __init__(self, units: ModelUnits, stream: WeightStream, on_device: DeviceWeights | None = None) -> None:
        self.units, self.stream, self.device, self._on_device = units, stream, units.device, on_device
        self._pid = os.getpid()
        self._all.add(self)
        self._uses: dict[str, int] = {}
        self._marks: dict[str, list[tuple[int, int]]] = {}  # of units in use, from when they came
        self._storages: dict[str, list[StorageWeakRef]] = {}  # of a unit's uses, by its key
        self._lent: dict[str, Unit] = {}  # with one use each, and empty parameters
        # Set by the engine: raises in a forked child, and where the values are of a step half done.
        self.require_usable: Callable[[], None] = lambda: None
        self.nothing = torch.full((), torch.nan, dtype=units.layout.weights, device=units.device)
        self._empty = {p: self.nothing.expand(p.shape) for p in units.names}
        self._classes: dict[nn.Parameter, tuple[type[nn.Parameter], type[nn.Parameter]]] = {}  # at work, and at rest

    def watch_rest(self) -> Callable[[], None]:
        """Parameters refuse from here on to be looked at while they are empty; returns the undo. Their classes are not
        to be changed meanwhile."""
        self._classes = {p: (type(p), placeholder_class(type(p))) for p in self._empty if p.numel()}

        def undo() -> None:
            for parameter, (at_work, _) in self._classes.items():
                parameter.__class__ = at_work
            self._classes = {}

        return undo

    @classmethod
    def leave_children_none(cls) -> None:
        """In a child, right after the fork."""
        for weights in list(cls._all):
            for used in [unit for unit in weights.units.layout.units if weights.is_in_use(unit)]:
                weights.empty(used)

    def require_own_process(self) -> None:
        """RuntimeError in a fork of the process that trains the model."""
        if self._pid != os.getpid():
            raise RuntimeError(
                f"the weights of a streamed model belong to the process that trains it ({self._pid}), and this is a "
                "fork of it, such as a DataLoader worker: use the model in that process, or set num_workers=0"
            )

    @whole
    def take(self, unit: Unit) -> None:
        """The unit's weights are in its parameters on return. Raises what `require_usable` raises."""
        self.require_usable()
        self._end_loans(unit)
        if unit.key in self._lent:
            del self._lent[unit.key]
        else:
            self._fetch(unit)
            self._uses[unit.key] = self._uses.get(unit.key, 0) + 1
        if self._uses[unit.key] == 1:
            values = self.values(unit)
            if self.device.type in _WITH_DLPACK:  # the same memory, as a storage of this use's own
                values = torch.from_dlpack(values)  # type: ignore[attr-defined]
                memory = StorageWeakRef(values.untyped_storage())  # type: ignore[no-untyped-call]
                self._views(unit).append(memory)
            for part, parameter in self.units.pairs(unit):
                if parameter in self._classes:
                    parameter.__class__ = self._classes[parameter][0]
                parameter.data = values[part.first : part.first + part.numel].view(part.shape)
            self._marks[unit.key] = self._mark(unit)

    def _mark(self, unit: Unit) -> list[tuple[int, int]]:
        """Memory and version of each parameter."""
        return [(parameter.data_ptr(), parameter._version) for _, parameter in self.units.pairs(unit)]

    def refusal_of_change(self, unit: Unit) -> NotStreamable | None:
        """Where a forward pass has written to the weights of a unit in use, or has put others in their place:
        what it has changed goes with their memory. Changes through `.data` in place are not seen."""
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
        (slot,) = self.stream.fetch([unit.key])
        if self._on_device is not None and not self.is_in_use(unit):
            try:
                self.stream.copying(unit.key, self._on_device.bring(unit.key, slot))
            except BaseException:
                self.stream.release(unit.key)
                raise

    def values(self, unit: Unit) -> torch.Tensor:
        """All of a unit in use, flat, on the device."""
        stream = self.stream if self._on_device is None else self._on_device
        return stream.tensor(unit.key)

    @whole
    def give_back(self, unit: Unit, *, lend: bool = False) -> None:
        """One use ends. With `lend` the last one's memory stays as it is while a tensor outside refers to it, such as
        a module's result that is a view of its parameter; the unit must have a slot of its own."""
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
        """Whether a tensor outside refers to the memory in which the unit's weights were, though nobody holds them.
        Unknown, and False, on devices without DLPack."""
        if self.is_in_use(unit) or not self._views(unit):
            return False
        gc.collect()  # what a circle of Python objects has kept
        return bool(self._views(unit))

    def _views(self, unit: Unit) -> list[StorageWeakRef]:
        """Storages of the unit's uses to which something refers."""
        storages = self._storages.setdefault(unit.key, [])
        storages[:] = [each for each in storages if not each.expired()]  # type: ignore[no-untyped-call]
        return storages

    def _end_loans(self, but: Unit) -> None:
        for unit in [unit for unit in self._lent.values() if unit.key != but.key and not self._views(unit)]:
            del self._lent[unit.key]
            self.give_back(unit)

    @whole
    def end_loans(self) -> None:
        """Before the stream is closed: what somebody still refers to of weights without a use is theirs no more."""
        for unit in list(self._lent.values()):
            del self._lent[unit.key]
            self.give_back(unit)

    def is_in_use(self, unit: Unit) -> bool:
        return bool(self._uses.get(unit.key))

    @whole
    def empty(self, unit: Unit) -> None:
        """Let go of the memory: shape and type stay, and all elements are one NaN."""
        for _, parameter in self.units.pairs(unit):
            self._empty_one(parameter, self._empty[parameter])

    def _empty_one(self, parameter: nn.Parameter, nothing: torch.Tensor) -> None:
        classes = self._classes.get(parameter)
        if classes is None:
            parameter.data = nothing
        elif type(parameter) is not classes[1]:  # else it is empty already
            parameter.data = nothing
            parameter.__class__ = classes[1]

    @whole
    def empty_all(self) -> None:
        """Of the whole model, sliced parameters among them."""
        for parameter, nothing in self._empty.items():
            forget(parameter)
            self._empty_one(parameter, nothing)

    @whole
    def abandon(self) -> None:
        """After an error: nobody needs anything. The stream's buffers go back by themselves."""
        self._lent.clear()
        for unit in self.units.layout.units:
            while self._uses.get(unit.key, 0) > 0:
                with contextlib.suppress(ValueError, KeyError):
                    self.give_back(unit)
            self.empty(unit)


os.register_at_fork(after_in_child=UnitWeights.leave_children_none)
