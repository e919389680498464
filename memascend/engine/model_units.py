"""The units of a model: the modules and parameters that are in memory together.

`units_of` finds them for a new store, `units_of_store` as an earlier run has stored them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memascend.engine.device import device_of
from memascend.engine.errors import NotStreamable
from memascend.engine.find_blocks import find_blocks, is_called, largest_list
from memascend.engine.layout import Kind, Layout, Part, Unit, UnitParameters, make_layout
from memascend.engine.mmap_parameters import flat_values, release
from memascend.engine.options import EngineOptions
from memascend.ops.rows import can_be_sliced

_CPU = torch.device("cpu")


class ModelUnits:
    """Units of a model, with their modules, parameters and layout. `device`: the one that computes.

    Raises NotStreamable for a model that cannot be streamed.
    """

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
        dtype = _streamable_dtype(model, self.names, states)
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
        """Return (part, parameter) for each part that is a whole parameter: all of a unit's, or none of a slice's."""
        return list(zip(unit.parts, self.parameters.get(unit.key, ()), strict=unit.kind is not Kind.SLICE))

    def values(self, unit: Unit) -> list[tuple[Part, torch.Tensor]]:
        """Return (part, flat values) of a unit, from the parameters or the files that they wait in."""
        flat = [(part, flat_values(self._by_name[part.name])) for part in unit.parts]
        return [(part, each[part.offset : part.offset + part.numel]) for part, each in flat]

    def moved(self, part: Part) -> None:
        """Release the space of a part's values, which have been moved, if they waited in a file."""
        release(self._by_name[part.name], part.offset, part.numel)

    def matrix(self, key: str) -> nn.Parameter:
        """Return the parameter that is cut into the slices of `key`."""
        return self._by_name[self.matrices[key][0].parts[0].name]

    def _describe(
        self, key: str, kind: Kind, parameters: Iterable[nn.Parameter], rows_of: nn.Parameter | None = None
    ) -> UnitParameters:
        """Return the parameters of a unit for the layout, each once."""
        # A parameter without elements has nothing to stream and nothing to train.
        each = [(self.names[p], tuple(p.shape), p.requires_grad) for p in dict.fromkeys(parameters) if p.numel()]
        return UnitParameters(
            key=key, kind=kind, parameters=each, rows_of=None if rows_of is None else self.names[rows_of]
        )

    def _block(self, module: nn.Module, module_names: dict[nn.Module, str]) -> UnitParameters:
        """Return the unit of a block. Raises NotStreamable for a module that is not in the model, has no forward pass,
        or shares a parameter with another block."""
        if module not in module_names:
            raise NotStreamable(f"a block ({type(module).__name__}) is not part of the model")
        if not is_called(module):
            raise NotStreamable(
                f"the block {module_names[module]} ({type(module).__name__}) has no forward pass: name its children"
            )
        key = _key(module, module_names)
        if key in self.modules:  # the same layer, used several times
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
        """Yield units for the modules outside of the blocks with parameters of their own; those that share one are one
        unit. A module without a forward pass, such as a ParameterList, belongs to the module around it."""
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
            rows_of: Any = group[0].weight if sliceable else None
            yield self._describe(key, Kind.LOOKED_UP if looked_up else Kind.RESIDENT, parameters, rows_of)


def _streamable_dtype(model: nn.Module, names: Mapping[nn.Parameter, str], states: torch.dtype) -> torch.dtype:
    """Return the dtype of all parameters. Raises NotStreamable for what cannot be trained with states of this dtype."""
    dtypes = {parameter.dtype for parameter in names}
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
    if any(parameter.is_meta for parameter in names):
        raise NotStreamable("the model is on the meta device: give its parameters values first")
    if made := next((name for parameter, name in names.items() if parameter.is_inference()), None):
        raise NotStreamable(f"{made} was created in inference mode: create the model outside of torch.inference_mode()")
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True and any(map(_is_trained, module.parameters(recurse=False))):
            raise NotStreamable(f"the gradient of {name}.weight is sparse: make it with sparse=False")
    return dtype


def _key(module: nn.Module, module_names: dict[nn.Module, str]) -> str:
    """Return the key of a module's unit: its name or, for the model itself, a name that no other module has."""
    root = "model" if "model" not in module_names.values() else "(model)"
    return module_names[module] or root


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.numel() > 0


def _called_around(module: nn.Module, module_names: dict[nn.Module, str], model: nn.Module) -> nn.Module:
    """Return the module itself, or the nearest one around it that has a forward pass."""
    name = module_names[module]
    while name and not is_called(module):
        name = name.rpartition(".")[0]
        module = model.get_submodule(name)
    return module


def _connected(owners: dict[nn.Parameter, list[nn.Module]]) -> list[list[nn.Module]]:
    """Return the modules in groups, in the model's order, such that no parameter is shared between groups."""
    groups: list[list[nn.Module]] = []
    for modules in owners.values():
        joined = [group for group in groups if any(module in group for module in modules)]
        merged = [module for group in joined for module in group]
        merged += [module for module in modules if module not in merged]
        groups = [group for group in groups if group not in joined] + [merged]
    return groups


def units_of(
    model: nn.Module, blocks: Sequence[nn.Module] | None, options: EngineOptions, aligned: bool = True
) -> ModelUnits:
    """Return the units of a model for a new store, and move the model's buffers to the device that computes. `aligned`:
    see `make_layout`. Raises NotStreamable, and ValueError for a device that cannot compute."""
    device, elements = device_of(model.parameters(), options.device), options.piece_elements
    units = ModelUnits(model, blocks, states=options.states, piece_elements=elements, aligned=aligned, device=device)
    for buffer in model.buffers():  # small, and part of no unit
        buffer.data = buffer.data.to(device)
    return units


def units_of_store(
    model: nn.Module, blocks: Sequence[nn.Module] | None, options: EngineOptions, is_kept: Callable[[Layout], bool]
) -> ModelUnits:
    """Return the units as the store has them. A store of an earlier version of this library may cut them differently,
    have other blocks, store frozen weights together with the trained ones, or have no gaps. `is_kept` says whether
    the store has a layout. If it has none of them, the units of a new store are returned."""
    units = units_of(model, blocks, options)
    if _is_or_was(units, is_kept):
        return units
    for chosen in [blocks] if blocks is not None else [None, largest_list(model)]:
        by_blocks = units_of(model, chosen, options)
        cut = [options.piece_elements]
        if options.piece_elements is None:
            cut.append(by_blocks.layout.earlier_piece_elements)
        for elements, aligned in itertools.product(cut, (True, False)):
            found = units_of(model, chosen, replace(options, piece_elements=elements), aligned)
            if _is_or_was(found, is_kept):
                return found
    return units


def _is_or_was(units: ModelUnits, is_kept: Callable[[Layout], bool]) -> bool:
    """Return whether a store has these units, in which case they get the store's layout."""
    for layout in (units.layout, replace(units.layout, splits=False)):
        if is_kept(layout):
            units.layout = layout
            return True
    return False


def whole_in_memory(layout: Layout) -> str:
    """Return a sentence on what is in memory as a whole while a step needs it, with its size; "" if nothing is."""
    sizes = {
        unit.key: unit.numel * layout.weights.itemsize
        for unit in layout.units
        if unit.kind in (Kind.RESIDENT, Kind.LOOKED_UP)
    }
    if not sizes:
        return ""
    named = sorted(sizes, key=sizes.__getitem__, reverse=True)
    others = f" and {len(named) - 3} more" if len(named) > 3 else ""
    blocks = sum(unit.kind is Kind.BLOCK for unit in layout.units)
    return (
        f"{blocks} blocks are streamed; {', '.join(named[:3])}{others} are in memory as a whole while a step needs "
        f"them, {sum(sizes.values()) / 2**20:.1f} MiB"
    )
