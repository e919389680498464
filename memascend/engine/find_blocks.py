"""Selection of the modules of a model that are streamed one at a time, where the user names none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from memascend.engine.errors import NotStreamable


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers of all lists of layers (ModuleList or Sequential) in the model, in the model's order.

    Only the outermost lists count: lists inside of a layer, such as its experts, are parts of the layer. But a list of
    different models that are lists of layers themselves (towers, the stages of a UNet) is searched. Lists of single
    modules that are small next to the largest list yield no blocks, nor do lists that share parameters with anything
    outside of them. Lists of one layer count only where there is no other. Raises NotStreamable if there is no list.
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
    """Return the layers of the one list whose children have the most parameters. Earlier versions of this library
    found no other blocks by themselves."""
    best: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            children = [child for child in module if next(child.parameters(), None) is not None]
            alike = isinstance(module, nn.ModuleList) or len({type(child) for child in children}) == 1
            if alike and len(children) > 1 and _numel(children) > _numel(best):
                best = children
    return best


def _lists_of_layers(module: nn.Module, least: int) -> list[list[nn.Module]]:
    """Return the outermost lists with at least `least` layers, in the model's order."""
    layers = _layers_of(module)
    if len(layers) >= least and not _are_lists_themselves(layers):
        return [layers]
    return [found for child in module.children() for found in _lists_of_layers(child, least)]


def _layers_of(module: nn.Module) -> list[nn.Module]:
    """Return a list's children with parameters; of a Sequential, those of the type with the most parameters."""
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
    """Return whether only their parts are called, or their types differ and each mostly consists of lists of layers."""
    if not all(map(is_called, layers)):
        return True
    if len({type(layer) for layer in layers}) == 1:
        return False
    inside = [[each for found in _lists_of_layers(layer, 2) for each in found] for layer in layers]
    return all(2 * _numel(found) > _numel([layer]) for found, layer in zip(inside, layers, strict=True))


def is_called(module: nn.Module) -> bool:
    """Return whether the module has a forward pass; a ModuleList or a ParameterList has none."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _has_parts(layers: Iterable[nn.Module]) -> bool:
    """Return whether any of the layers has a child with parameters."""
    return any(next(child.parameters(), None) is not None for layer in layers for child in layer.children())


def _is_apart(layers: Sequence[nn.Module], users: Mapping[nn.Parameter, int]) -> bool:
    """Return whether each parameter of the layers is used by only one module of the model."""
    return all(users[parameter] == 1 for layer in layers for parameter in layer.parameters())


def _numel(modules: Iterable[nn.Module]) -> int:
    """Return the number of elements of the modules' parameters, each counted once."""
    owned = {parameter for module in modules for parameter in module.parameters()}
    return sum(parameter.numel() for parameter in owned)
