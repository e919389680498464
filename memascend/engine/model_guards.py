"""Methods of a streamed model besides forward: they work where that is possible, and else raise a one-line error.

A streamed model's parameters are empty between uses, so that torch's own methods would save, copy or convert NaN. Until
`close`, each module with streamed parameters of its own or in its submodules has these methods instead of its class's:

- `state_dict` has the values, for any module: `model.layers[0].state_dict()`, `model.model.save_pretrained(...)`;
- `zero_grad` discards the step's gradients;
- `to`, `half`, `cuda` and the like work as usual where they change nothing, and are refused otherwise;
- `load_state_dict`, copies and pickles are refused.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from memascend.engine.contents import TierContents
from memascend.engine.errors import NotStreamable
from memascend.engine.gradient_views import no_copy, source_of, stored_gradients_alone

_CLOSED = "_memascend_closed"  # attribute of a model that was left empty: functions that remove, and raise, refusals


class GradientHolder(Protocol):
    """The engine as `zero_grad` calls it."""

    def forget_gradients_of(self, names: set[str], *, set_to_none: bool) -> None:
        """Discard gradients of the current step. Raises RuntimeError if only some of those that arrived are named."""


class ModelGuards:
    """Replaces methods of one engine's model until `close`. Not thread-safe."""

    def __init__(
        self, model: nn.Module, names: Mapping[nn.Parameter, str], contents: TierContents, holder: GradientHolder
    ) -> None:
        reopened(model)
        self._names, self._contents, self._holder = names, contents, holder
        self._saving: nn.Module | None = None  # the module whose state_dict was called; those of its parts belong to it
        self._undo: list[Callable[[], None]] = []
        for module in model.modules():
            if any(parameter in names for parameter in module.parameters()):
                self._guard(module)

    def close(self) -> None:
        """Restore all methods. Idempotent."""
        while self._undo:
            self._undo.pop()()

    def _guard(self, module: nn.Module) -> None:
        """Replace a module's methods, and register the hooks of its state dict."""
        saved = module.register_state_dict_post_hook(functools.partial(self._fill))
        loaded = module.register_load_state_dict_pre_hook(self._refuse_to_load)
        self._undo += [saved.remove, loaded.remove]
        for name, method in (
            ("state_dict", self._state_dict(module, module.state_dict)),
            ("_apply", self._apply(module, module._apply)),
            ("zero_grad", self._zero_grad(module)),
            ("__deepcopy__", _refuse_copies),
            ("__reduce_ex__", _refuse_copies),
        ):
            self._undo.append(_put(module, name, method))

    def _zero_grad(self, module: nn.Module) -> Callable[..., None]:
        """Return the method that replaces the module's `zero_grad`."""

        def zero_grad(set_to_none: bool = True) -> None:
            self._holder.forget_gradients_of(set(self._below(module).values()), set_to_none=set_to_none)

        return zero_grad

    def _below(self, module: nn.Module) -> dict[nn.Parameter, str]:
        """Return the streamed parameters of a module and its submodules, with their names in the model."""
        return {parameter: self._names[parameter] for parameter in module.parameters() if parameter in self._names}

    def _state_dict(self, module: nn.Module, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that replaces `state_dict` and calls `stock`, noting which module it was called for."""

        def state_dict(*args: Any, **options: Any) -> Any:
            if self._saving is not None:
                return stock(*args, **options)
            self._saving = module
            try:
                return stock(*args, **options)
            finally:
                self._saving = None

        return state_dict

    def _fill(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Fill in the values, at the end of the module's own part of torch's `state_dict`."""
        if self._saving is module:
            self._contents.fill_state_dict(module, state, prefix)
        elif self._saving is None:  # torch.nn.Module.state_dict(module) calls each part by itself
            self._contents.fill_state_dict(module, state, prefix, recurse=False)

    def _refuse_to_load(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """Raise NotStreamable if the state dict has a value for a streamed parameter."""
        for name, parameter in module.named_parameters():
            if parameter in self._names and prefix + name in state:
                raise NotStreamable(
                    f"{self._names[parameter]} is on the SSD, where load_state_dict cannot set it: load weights before "
                    "the optimizer is created, and start in a new folder"
                )

    def _apply(self, module: nn.Module, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that replaces `_apply`. It tries the function on an empty tensor for each streamed
        parameter, and raises NotStreamable if the dtype or the device would change."""

        def apply(function: Callable[[torch.Tensor], torch.Tensor], *args: Any, **options: Any) -> Any:
            for parameter, name in self._below(module).items():
                probe = torch.zeros((0,) * parameter.dim(), dtype=parameter.dtype, device=parameter.device)
                made = function(probe)
                if (made.dtype, made.device) != (probe.dtype, probe.device):
                    raise NotStreamable(
                        f"{name} is {_kind(probe)} on the SSD and cannot become {_kind(made)} there: convert the model "
                        "before the optimizer is created (the compute device is set by hook(model, device=...))"
                    )
            with stored_gradients_alone():
                return stock(function, *args, **options)

        return apply


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} for {tensor.device}"


def _refuse_copies(*_: Any) -> Any:
    raise no_copy()


def _put(module: nn.Module, name: str, method: Any) -> Callable[[], None]:
    """Set an attribute of the instance. Return the undo function, which leaves a later assignment alone."""
    own, had = vars(module), name in vars(module)
    before = own.get(name)
    own[name] = method

    def undo() -> None:
        if own.get(name) is method:
            del own[name]
            if had:
                own[name] = before

    return undo


def _copied(module: nn.Module, memo: dict[int, Any]) -> Any:
    """Return a deep copy of a module whose refusals have just been removed."""
    return copy.deepcopy(module, memo)


def left_empty(model: nn.Module, nothing: torch.Tensor, folder: Path) -> None:
    """Refuse saving, calling, converting or copying a model, or a part of it, whose closed engine left it empty.

    The refusals last as long as any parameter is empty, that is, has the memory of `nothing`.
    """

    def refuse(*_: Any) -> None:
        place = nothing.untyped_storage().data_ptr()
        if not any(p.untyped_storage().data_ptr() == place for p in model.parameters()):  # others were loaded
            reopened(model)
            return
        others = "load others (load_state_dict(..., assign=True))"
        if not folder.exists():
            raise RuntimeError(f"this model's weights were in {folder}, which was removed: {others}")
        raise RuntimeError(
            f"this model's weights are in {folder}, which was closed: open it again (streaming({str(folder)!r}, "
            f"resume=True)), or {others}"
        )

    def guarded(stock: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **options: Any) -> Any:
            refuse()
            return stock(*args, **options)

        return method

    undo: list[Callable[[], None]] = []
    for module in model.modules():
        if next(module.parameters(), None) is None:  # may be shared with another model, as in transformers
            continue
        undo += [module.register_state_dict_pre_hook(refuse).remove, module.register_forward_pre_hook(refuse).remove]
        for name, stock in (
            ("_apply", module._apply),
            ("__deepcopy__", getattr(module, "__deepcopy__", None) or functools.partial(_copied, module)),
            ("__reduce_ex__", module.__reduce_ex__),
        ):
            undo.append(_put(module, name, guarded(stock)))

    def take_away() -> None:
        while undo:
            undo.pop()()

    vars(model)[_CLOSED] = take_away, refuse


def reopened(model: nn.Module) -> None:
    """Remove the refusals of `left_empty`."""
    take_away, _ = vars(model).pop(_CLOSED, (None, None))
    if take_away is not None:
        take_away()


def require_not_streamed(model: nn.Module) -> None:
    """Raise RuntimeError if an engine has the weights of the model, or of a part of it."""
    engine = next((engine for p in model.parameters() if (engine := source_of(p)) is not None), None)
    if engine is not None:
        raise RuntimeError(
            f"this model's weights are already in {engine.state_store.folder}: close that session first and open it "
            "again with resume=True, or create a new model"
        )


def require_own_memory(model: nn.Module) -> None:
    """Raise NotStreamable if two parameters, or a parameter and a buffer or another tensor of a module, share memory.

    The engine moves each of them separately, so that a change to one would no longer show in the other. Parameters that
    stand for values in files have a single element as memory, and are ignored.
    """
    found: dict[int, tuple[torch.Tensor, str, bool]] = {}
    for prefix, module in model.named_modules():
        named = [(name, each, True) for name, each in module._parameters.items()]
        named += [(name, each, False) for name, each in module._buffers.items()]
        named += [(name, each, False) for name, each in vars(module).items() if isinstance(each, torch.Tensor)]
        for name, tensor, is_parameter in named:
            if (
                tensor is not None
                and tensor.layout == torch.strided
                and tensor.numel() > 1
                and _has_all_elements(tensor)
            ):
                found.setdefault(id(tensor), (tensor, f"{prefix}.{name}" if prefix else name, is_parameter))
    reached: dict[bool, tuple[int, str]] = {True: (0, ""), False: (0, "")}  # by parameters, and by others
    for begin, end, name, is_parameter in sorted((*_extent(t), name, of) for t, name, of in found.values()):
        for other in (True, False) if is_parameter else (True,):
            if begin < reached[other][0]:
                raise NotStreamable(
                    f"{name} and {reached[other][1]} share memory, but each parameter of a streamed model is moved "
                    "separately: use one nn.Parameter for both (head.weight = embedding.weight, not .data), or make "
                    f"one of them a copy (.clone()){_instead_of_spectral_norm(name, reached[other][1])}"
                )
        reached[is_parameter] = max(reached[is_parameter], (end, name))


def _instead_of_spectral_norm(*names: str) -> str:
    """Return the replacement for torch's old function, whose memory cannot be divided; "" for other names."""
    if not any(name.endswith("_orig") for name in names):
        return ""
    return "; in place of torch.nn.utils.spectral_norm use torch.nn.utils.parametrizations.spectral_norm"


def _has_all_elements(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has memory for each element, unlike a meta or an expanded tensor."""
    return not tensor.is_meta and tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte and after the last one."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def require_python_modules(model: nn.Module) -> None:
    """Raise NotStreamable if a part of the model was compiled by TorchScript, which takes no hooks."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise NotStreamable(
                f"{name or 'the model'} is a module of TorchScript, which cannot be streamed: use the module that "
                "torch.jit.script or trace was given"
            )


def require_values(model: nn.Module) -> None:
    """Raise RuntimeError if the model, or a part of it, was left empty by an engine that is closed."""
    for module in list(model.modules()):
        _, refuse = vars(module).get(_CLOSED, (None, None))
        if refuse is not None:
            refuse()
