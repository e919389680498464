"""Access to the tier parameter by parameter: weights and states are read, and states are replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memascend.engine.layout import Kind, Layout, Run, Unit, numel_of_state
from memascend.engine.mmap_tensors import TensorFile
from memascend.engine.unit_weights import UnitWeights
from memascend.engine.weights import WeightStream
from memascend.storage.interrupts import uninterrupted, whole

StatesOf = Callable[[str], Mapping[str, torch.Tensor] | None]


class TierContents:
    """The weights and states of one model on the tier, accessed through the slots of training. Not thread-safe.

    `folder`: where files are created whose memory sliced parameters are read into. `require_completed_step`: is called
    once before each parameter that is read, and raises if updates of the current step have begun, or in a forked child.
    """

    def __init__(
        self,
        layout: Layout,
        weights: UnitWeights,
        states: WeightStream | None,
        folder: Path,
        require_completed_step: Callable[[], None],
    ) -> None:
        self._layout, self._weights, self._states, self._folder = layout, weights, states, folder
        self.require_completed_step = require_completed_step

    @property
    def _state_stream(self) -> WeightStream:
        assert self._states is not None  # the model trains something
        return self._states

    def read_states(self, name: str) -> dict[str, torch.Tensor]:
        """Return a trained parameter's states by name, as flat tensors in memory of their own.

        The names are torch's and "master", which is a copy of the weights where these are their own masters. 8-bit
        moments are uint8 codes, next to "scales" of two bytes per block of 32:
        `memascend.ops.adamw8.decode_moments` decodes them.
        """
        self.require_completed_step()
        layout, keys = self._layout, dict.fromkeys(("master", *self._layout.state_names))
        numel = sum(part.numel for unit in layout.units for part in unit.parts if part.name == name)
        found = {key: torch.empty(numel_of_state(key, numel), dtype=layout.dtype_of(key)) for key in keys}
        for values, run, key in self._state_runs(name):
            found[key][_in_parameter(run, key)].copy_(values)
        return found

    def write_states(self, states_of: StatesOf, written: Callable[[], None]) -> None:
        """Replace states on the tier; weights are those given as "weights", or else follow their masters.

        `states_of(name)` returns some of a parameter's states, flat, in the form of `read_states`, or None to leave
        them as they are. It is called in the order of the tier, one parameter after the other, and its result is
        released before the next call. Each tensor on the tier is written once; `written` is called after each unit that
        was changed.
        """
        name, states = None, None
        for unit in self._layout.units:
            changed, slot = False, None
            for piece in unit.pieces:
                slots = None
                for run, places in self._layout.state_places(piece):
                    if run.part.name != name:
                        name, states = run.part.name, None
                        states = states_of(name)
                    if not states:
                        continue
                    slot = self._weights.stream.fetch([unit.key])[0] if slot is None else slot
                    slots = self._state_stream.fetch([piece.key])[0] if slots is None else slots
                    for values, key in self._values(run, places, slot, slots):
                        if key in states:
                            values.copy_(states[key].reshape(-1)[_in_parameter(run, key)])
                    weights = states.get("weights", states.get("master"))
                    if weights is not None and not self._layout.own_masters:
                        run.of(slot).copy_(weights.reshape(-1)[_in_parameter(run, "master")].to(slot.dtype))
                    changed = True
                if slots is not None:
                    self._state_stream.write(piece.key).wait()
                    self._state_stream.release(piece.key)
            if slot is not None:
                self._weights.stream.write(unit.key).wait()
                self._weights.stream.release(unit.key)
            if changed:
                written()

    def _values(
        self, run: Run, places: Mapping[str, slice], slot: torch.Tensor, states: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, str]]:
        """Yield (elements of the run, name of the state) for each of its states."""
        if self._layout.own_masters:
            yield run.of(slot), "master"
        for key, place in places.items():
            yield states[place], key

    def _state_runs(self, name: str) -> Iterator[tuple[torch.Tensor, Run, str]]:
        """Yield (values, run, name of the state) for each run and state of a parameter."""
        for unit in self._layout.units:
            pieces = [
                (piece, *each)
                for piece in unit.pieces
                for each in self._layout.state_places(piece)
                if each[0].part.name == name
            ]
            if not pieces:
                continue
            (slot,) = self._weights.stream.fetch([unit.key])
            for piece, run, places in pieces:
                (states,) = self._state_stream.fetch([piece.key])
                for values, key in self._values(run, places, slot, states):
                    yield values, run, key
                self._state_stream.release(piece.key)
            self._weights.stream.release(unit.key)

    def read_weights(self, order: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, values) of every parameter, or of those in `order`.

        The values are in host memory, and valid until the next ones are requested. The units' own order is cheapest:
        a unit is read whenever it is not the same as the previous one. Raises what `require_completed_step` raises.
        """
        places: dict[str, list[tuple[Unit, int]]] = {}
        for unit in self._layout.units:
            for number, part in enumerate(unit.parts):
                places.setdefault(part.name, []).append((unit, number))
        stream = self._weights.stream
        current: Unit | None = None
        try:
            for name in places if order is None else order:
                self.require_completed_step()  # a step may have begun, or the process forked, since the previous one
                unit, number = places[name][0]
                if unit.kind is Kind.SLICE:
                    yield name, self._joined([unit for unit, _ in places[name]])
                    continue
                if unit is not current:
                    with uninterrupted:  # a unit in use is released exactly once
                        if current is not None:
                            before, current = current, None
                            stream.release(before.key)
                        (slot,) = stream.fetch([unit.key])
                        current = unit
                part = unit.parts[number]
                yield name, slot[part.first : part.first + part.numel].view(part.shape)
        finally:
            if current is not None:
                stream.release(current.key)

    def fill_state_dict(
        self, module: nn.Module, state: dict[str, Any], prefix: str = "", *, recurse: bool = True
    ) -> None:
        """Put a module's weights into its state_dict(), in the memory of a file.

        A tied weight is one tensor under two names. `module`: the model or any part of it; `recurse`: whether the
        weights of its children are included. Raises what `read_weights` raises.
        """
        names = self._weights.units.names
        keys: dict[str, list[str]] = {}
        for name, parameter in module.named_parameters(recurse=recurse, remove_duplicate=False):
            if prefix + name in state and parameter in names:
                keys.setdefault(names[parameter], []).append(prefix + name)
        if not keys:
            return
        parts = [part.name for unit in self._layout.units for part in unit.parts]
        wanted = [name for name in dict.fromkeys(parts) if name in keys]
        shapes = {name: parameter.shape for parameter, name in names.items()}
        sizes = [shapes[name].numel() * self._layout.weights.itemsize for name in wanted]
        file: TensorFile | None = None  # created once the first read is known to be allowed
        for name, values in self.read_weights(wanted):
            file = file or TensorFile(self._folder, sizes)
            copy = file.put(values)
            for key in keys[name]:
                state[key] = copy

    @whole
    def _joined(self, slices: Sequence[Unit]) -> torch.Tensor:
        """Return a sliced parameter in the memory of a file, which the kernel can reclaim."""
        parts = [unit.parts[0] for unit in slices]
        file = TensorFile(self._folder, [sum(part.numel for part in parts) * self._layout.weights.itemsize])
        whole = file.allocate(self._layout.weights, (sum(part.shape[0] for part in parts), parts[0].shape[1]))
        for unit, part in zip(slices, parts, strict=True):
            (slot,) = self._weights.stream.fetch([unit.key])
            whole.view(-1)[part.offset : part.offset + part.numel].copy_(slot[: part.numel])
            self._weights.stream.release(unit.key)
        return whole


def _in_parameter(run: Run, state: str) -> slice:
    """Return where a run's elements of a state are among those of the whole parameter."""
    begin = run.part.offset + run.begin
    first = numel_of_state(state, begin)
    return slice(first, first + numel_of_state(state, run.numel))
