"""A model whose weights are elsewhere: units of modules get them before they are needed, and give them back after.

Between its uses a parameter is a shape over one NaN, so that whatever touches it unseen shows.
"""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from memascend.engine.device import DeviceWeights
from memascend.engine.layout import Kind, Part, Unit, UnitParameters, make_layout
from memascend.engine.mmap_parameters import flat_values, forget, release
from memascend.engine.placeholder_parameters import placeholder_class
from memascend.engine.weights import WeightStream
from memascend.ops.rows import can_be_sliced
from memascend.storage.interrupts import whole

_CPU = torch.device("cpu")
_WITH_DLPACK = ("cpu", "cuda", "xpu")


class NotStreamable(ValueError):
    """What the engine cannot train, with the fix."""


# -- finding units -----------------------------------------------------------------------------------------------------


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of all lists of layers (ModuleList or Sequential) of the model, in its order. Raises NotStreamable.

    The outermost lists count: those inside of a layer, such as its experts, are parts of it. But a list of different
    models that are lists of layers themselves (towers, the stages of a UNet) is looked into. Small lists of single
    modules beside the largest one, and lists that share parameters with anything outside of them, stay whole. Lists of
    one layer count where there is no other.
    """
    lists = _lists_of_layers(model, 2) or _lists_of_layers(model, 1)
    largest = max(lists, key=_numel, default=[])
    if not largest:
        raise NotStreamable(
            f"{type(model).__name__} has no list of layers (torch.nn.ModuleList or Sequential) that could be streamed "
            "block by block: name the blocks (blocks=[module, ...])"
        )
    users = Counter(p for module in model.modules() for p in module.parameters(recurse=False))
    limit = max(_numel([layer]) for layer in largest)
    return [
        layer
        for layers in lists
        if layers is largest or ((_has_parts(layers) or _numel(layers) > limit) and _is_apart(layers, users))
        for layer in layers
    ]


def largest_list(model: nn.Module) -> list[nn.Module]:
    """The layers of the one list whose children hold most parameters: all that an earlier version of this library found
    by itself."""
    best: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            children = [child for child in module if next(child.parameters(), None) is not None]
            alike = isinstance(module, nn.ModuleList) or len({type(child) for child in children}) == 1
            if alike and len(children) > 1 and _numel(children) > _numel(best):
                best = children
    return best


def _lists_of_layers(module: nn.Module, least: int) -> list[list[nn.Module]]:
    layers = _layers_of(module)
    if len(layers) >= least and not _are_lists_themselves(layers):
        return [layers]
    return [found for child in module.children() for found in _lists_of_layers(child, least)]


def _layers_of(module: nn.Module) -> list[nn.Module]:
    """A list's children with parameters: of a Sequential those of one type, which hold most of it."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return []
    children = [child for child in module if next(child.parameters(), None) is not None]
    kinds: dict[type, list[nn.Module]] = {}
    for child in children:
        kinds.setdefault(type(child), []).append(child)
    if isinstance(module, nn.Sequential) and len(kinds) > 1:
        children = max(kinds.values(), key=_numel)
        children = children if _has_parts(children) else []
    return children


def _are_lists_themselves(layers: Sequence[nn.Module]) -> bool:
    """Whether only their parts are called; or they are of different types, each for the most part lists of layers."""
    if not all(map(_is_called, layers)):
        return True
    if len({type(layer) for layer in layers}) == 1:
        return False
    inside = [[each for found in _lists_of_layers(layer, 2) for each in found] for layer in layers]
    return all(2 * _numel(found) > _numel([layer]) for found, layer in zip(inside, layers, strict=True))


def _is_called(module: nn.Module) -> bool:
    """Whether it has a forward pass: a ModuleList or a ParameterList has none."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _has_parts(layers: Iterable[nn.Module]) -> bool:
    """Whether any of them is more than one module with parameters of its own."""
    return any(next(child.parameters(), None) is not None for layer in layers for child in layer.children())


def _is_apart(layers: Sequence[nn.Module], users: Mapping[nn.Parameter, int]) -> bool:
    """Whether each parameter of the layers is used by one module of the model."""
    return all(users[parameter] == 1 for layer in layers for parameter in layer.parameters())


def _numel(modules: Iterable[nn.Module]) -> int:
    owned = {parameter for module in modules for parameter in module.parameters()}
    return sum(parameter.numel() for parameter in owned)


class ModelUnits:
    """Units of a model, their modules and parameters. `layout` is made from them. `device`: what computes."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module] | None = None,
        *,
        states: torch.dtype = torch.float32,
        piece_elements: int | None = None,
        aligned: bool = True,
        device: torch.device = _CPU,
    ) -> None:
        self.model, self.device = model, device
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        module_names = {module: name for name, module in model.named_modules()}
        dtypes = {parameter.dtype for parameter in self.names}
        if len(dtypes) != 1:
            found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "none"
            raise NotStreamable(
                f"the parameters are of several types ({found}): convert the model to one, model.to(...); adapters of "
                "peft have the model's with get_peft_model(..., autocast_adapter_dtype=False)"
            )
        (dtype,) = dtypes
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise NotStreamable(
                f"{dtype} weights cannot be streamed: convert the model, model.to(torch.float32) or to 16 bits"
            )
        if dtype == torch.float32 and states == torch.bfloat16:
            raise NotStreamable(
                f"float32 weights need float32 states, not {states}: convert the model (model.to(torch.bfloat16)), or "
                "leave states out"
            )
        if states == torch.int8 and dtype != torch.bfloat16:
            raise NotStreamable(
                "torch.int8 states need bfloat16 weights, which are rounded stochastically and have no other master, "
                f"but these are {str(dtype).removeprefix('torch.')}: convert the model, model.to(torch.bfloat16), or "
                "leave states out"
            )
        if any(parameter.is_meta for parameter in self.names):
            raise NotStreamable("the model is on the meta device: give its parameters values first")
        if made := next((name for parameter, name in self.names.items() if parameter.is_inference()), None):
            raise NotStreamable(
                f"{made} was created in inference mode: create the model outside of torch.inference_mode()"
            )
        for name, module in model.named_modules():
            if getattr(module, "sparse", False) is True and any(map(_is_trained, module.parameters(recurse=False))):
                raise NotStreamable(f"the gradient of {name}.weight is sparse: make it with sparse=False")
        self.blocks = list(blocks) if blocks is not None else find_blocks(model)
        self.modules: dict[str, list[nn.Module]] = {}
        self.parameters: dict[str, list[nn.Parameter]] = {}
        units = [self._block(module, module_names) for module in self.blocks]
        units = [*units, *self._others(module_names)]
        order = [(name, parameter.numel()) for parameter, name in self.names.items() if _is_trained(parameter)]
        self.layout = make_layout(
            [unit for unit in units if unit.parameters],
            order,
            weights=dtype,
            states=states,
            piece_elements=piece_elements,
            aligned=aligned,
        )
        by_name = {name: parameter for parameter, name in self.names.items()}
        whole = [unit for unit in self.layout.units if unit.kind is not Kind.SLICE]
        self.parameters = {unit.key: [by_name[part.name] for part in unit.parts] for unit in whole}
        self.matrices: dict[str, list[Unit]] = {}  # slices, by the key of their modules
        for unit in self.layout.units:
            if unit.kind is Kind.SLICE:
                self.matrices.setdefault(unit.matrix, []).append(unit)
        self._by_name = by_name

    def pairs(self, unit: Unit) -> list[tuple[Part, nn.Parameter]]:
        """Parts that are whole parameters: all of a unit's, or none of a slice's."""
        return list(zip(unit.parts, self.parameters.get(unit.key, ()), strict=unit.kind is not Kind.SLICE))

    def values(self, unit: Unit) -> list[tuple[Part, torch.Tensor]]:
        """What is in the parameters or waits for them, flat; of a model that has its values."""
        flat = [(part, flat_values(self._by_name[part.name])) for part in unit.parts]
        return [(part, each[part.offset : part.offset + part.numel]) for part, each in flat]

    def moved(self, part: Part) -> None:
        """Give back what its values took, where they waited in a file."""
        release(self._by_name[part.name], part.offset, part.numel)

    def matrix(self, key: str) -> nn.Parameter:
        """That is cut into slices."""
        return self._by_name[self.matrices[key][0].parts[0].name]

    def _describe(
        self, key: str, kind: Kind, parameters: Iterable[nn.Parameter], rows_of: nn.Parameter | None = None
    ) -> UnitParameters:
        # A parameter of no elements has nothing to stream and nothing to train.
        each = [(self.names[p], tuple(p.shape), p.requires_grad) for p in dict.fromkeys(parameters) if p.numel()]
        return UnitParameters(key=key, kind=kind, parameters=each, rows_of=self.names.get(rows_of))

    def _block(self, module: nn.Module, module_names: dict[nn.Module, str]) -> UnitParameters:
        if module not in module_names:
            raise NotStreamable(f"a block ({type(module).__name__}) is not part of the model")
        if not _is_called(module):
            raise NotStreamable(
                f"the block {module_names[module]} ({type(module).__name__}) has no forward pass: name its children"
            )
        key = _key(module, module_names)
        if key in self.modules:  # the same layer over and over
            return UnitParameters(key=key, kind=Kind.BLOCK, parameters=[])
        for parameter in module.parameters():
            other = next((k for k, owned in self.parameters.items() if any(parameter is p for p in owned)), None)
            if other is not None:
                raise NotStreamable(
                    f"{self.names[parameter]} is shared by the blocks {other} and {key}, which cannot be streamed "
                    "apart: name a block that holds both (blocks=[...])"
                )
        self.modules[key], self.parameters[key] = [module], list(module.parameters())
        return self._describe(key, Kind.BLOCK, module.parameters())

    def _others(self, module_names: dict[nn.Module, str]) -> Iterator[UnitParameters]:
        """Modules outside of the blocks with parameters of their own; those that share one are one unit. What has no
        forward pass, such as a ParameterList, is at work in the module around it."""
        inside = {module for block in self.blocks for module in block.modules()}
        of_blocks = {parameter for block in self.blocks for parameter in block.parameters()}
        owners: dict[nn.Parameter, list[nn.Module]] = {}
        for module in module_names:
            for parameter in module.parameters(recurse=False):
                if module in inside:
                    continue
                if parameter in of_blocks:
                    raise NotStreamable(
                        f"{self.names[parameter]} is used inside of a block and outside of it, by "
                        f"{module_names[module] or 'the model'}: name blocks that hold both (blocks=[...])"
                    )
                owner = _called_around(module, module_names, self.model)
                if owner not in owners.setdefault(parameter, []):
                    owners[parameter].append(owner)
        for group in _connected(owners):
            parameters = [p for p in owners if any(module in group for module in owners[p])]
            key = _key(group[0], module_names)
            alone = len(group) == 1 and type(group[0]) is nn.Embedding
            looked_up = alone and not group[0].sparse and group[0].max_norm is None
            self.modules[key] = group
            sliceable = all(can_be_sliced(module) for module in group) and len({m.weight for m in group}) == 1
            rows_of = group[0].weight if sliceable else None
            yield self._describe(key, Kind.LOOKED_UP if looked_up else Kind.HELD, parameters, rows_of)


def _key(module: nn.Module, module_names: dict[nn.Module, str]) -> str:
    """Of a module's unit: its name, and of the model itself one that no other has."""
    root = "model" if "model" not in module_names.values() else "(model)"
    return module_names[module] or root


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.numel() > 0


def _called_around(module: nn.Module, module_names: dict[nn.Module, str], model: nn.Module) -> nn.Module:
    """The module itself, or the nearest one around it that has a forward pass."""
    name = module_names[module]
    while name and not _is_called(module):
        name = name.rpartition(".")[0]
        module = model.get_submodule(name)
    return module


def _connected(owners: dict[nn.Parameter, list[nn.Module]]) -> list[list[nn.Module]]:
    """Modules in groups that share no parameter, in the model's order."""
    groups: list[list[nn.Module]] = []
    for modules in owners.values():
        joined = [group for group in groups if any(module in group for module in modules)]
        merged = [module for group in joined for module in group]
        merged += [module for module in modules if module not in merged]
        groups = [group for group in groups if group not in joined] + [merged]
    return groups


# -- weights in and out ------------------------------------------------------------------------------------------------


class UnitWeights:
    """Which units are in memory, and who needs them: parameters are views of a slot while somebody does.

    A thread's uses are counted by unit; the last one to end makes the parameters empty again. In a forked child
    (a DataLoader's worker) all of them are empty: it did not get the slots, which a ring has pinned, nor the threads.
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
        self._classes: dict[nn.Parameter, tuple[type, type]] = {}  # at work, and at rest

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
            for held in [unit for unit in weights.units.layout.units if weights.is_held(unit)]:
                weights.empty(held)

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
                values = torch.from_dlpack(values)
                self._views(unit).append(StorageWeakRef(values.untyped_storage()))
            for part, parameter in self.units.pairs(unit):
                if parameter in self._classes:
                    parameter.__class__ = self._classes[parameter][0]
                parameter.data = values[part.first : part.first + part.numel].view(part.shape)
            self._marks[unit.key] = self._mark(unit)

    def _mark(self, unit: Unit) -> list[tuple[int, int]]:
        """Memory and version of each parameter."""
        return [(parameter.data_ptr(), parameter._version) for _, parameter in self.units.pairs(unit)]

    def refusal_of_change(self, unit: Unit) -> NotStreamable | None:
        """Where a forward pass has written to the weights of a unit that is held, or has put others in their place:
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
        if self._on_device is not None and not self.is_held(unit):
            try:
                self.stream.copying(unit.key, self._on_device.bring(unit.key, slot))
            except BaseException:
                self.stream.release(unit.key)
                raise

    def values(self, unit: Unit) -> torch.Tensor:
        """All of a unit that is held, flat, on the device."""
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
        if self.is_held(unit) or not self._views(unit):
            return False
        gc.collect()  # what a circle of Python objects has kept
        return bool(self._views(unit))

    def _views(self, unit: Unit) -> list[StorageWeakRef]:
        """Storages of the unit's uses to which something refers."""
        storages = self._storages.setdefault(unit.key, [])
        storages[:] = [each for each in storages if not each.expired()]
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

    def is_held(self, unit: Unit) -> bool:
        return bool(self._uses.get(unit.key))

    @whole
    def empty(self, unit: Unit) -> None:
        """Let go of the memory: shape and type stay, and all elements are one NaN."""
        for _, parameter in self.units.pairs(unit):
            self._empty_one(parameter, self._empty[parameter])

    def _empty_one(self, parameter: nn.Parameter, nothing: torch.Tensor) -> None:
        at_work, rests = self._classes.get(parameter, (None, None))
        if at_work is None:
            parameter.data = nothing
        elif type(parameter) is not rests:  # else it is empty already
            parameter.data = nothing
            parameter.__class__ = rests

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
