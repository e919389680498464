"""Gradient checkpointing with checkpoints in host memory (MemAscend II-C4, V-B).

`torch.utils.checkpoint` saves the inputs of a block as autograd's saved tensors, in both of its variants. Hooks around
the call copy the block's hidden states to a host slot, and copy them back when the backward pass recomputes the block.
Recomputation, RNG state, autocast and errors remain torch's own, so gradients are bit for bit those of plain
checkpointing. While one checkpoint is used, the preceding one is prefetched.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

from memascend.activation.saved import Version
from memascend.activation.store import CheckpointStore
from memascend.activation.transfer import Arrival, Transfer, transfer_for

log = logging.getLogger("memascend")

HIDDEN_ARGUMENT = "hidden_states"  # the name of the input in every decoder layer of transformers


class _Offloaded:
    """A checkpoint in host memory; autograd holds it, and its slot is free again when autograd releases it."""

    def __init__(
        self, hidden: torch.Tensor, store: CheckpointStore, transfer: Transfer, previous: _Offloaded | None
    ) -> None:
        self._slot = store.lease(hidden.numel(), hidden.dtype)
        stride = torch.empty_like(hidden, device="meta").stride()  # its own stride if dense, else that of a dense copy
        self._host = self._slot.view(hidden.size(), stride, hidden.dtype)
        self._transfer = transfer
        self._previous = weakref.ref(previous) if previous is not None else lambda: None
        self._arrival: Arrival | None = None
        self._version = Version(hidden) if transfer.prefetches else None
        transfer.offload(hidden, self._host, self._slot)

    def prefetch(self) -> None:
        """Start copying the hidden states back to the device, unless that was done."""
        if self._arrival is None:
            self._arrival = self._transfer.fetch(self._host, self._slot)

    def bring_back(self) -> torch.Tensor:
        """Return the hidden states on their device, as a new tensor each time, and start prefetching the predecessor.

        Raises ActivationError if they were changed in place after they had been saved, perhaps during the copy.
        """
        if self._version is not None:
            self._version.check(f"the checkpoint of a block, {tuple(self._host.shape)} of {self._host.dtype},")
        self.prefetch()
        arrival, self._arrival = self._arrival, None
        previous = self._previous()
        if previous is not None and self._transfer.prefetches:
            previous.prefetch()
        return self._transfer.finish(arrival)


class OffloadedCheckpoint:
    """A replacement for `torch.utils.checkpoint.checkpoint`: `self(function, hidden_states, *args, **kwargs)`.

    The device memory of the first argument is freed once nothing else holds it. `plain` is torch's function, or a
    partial of it with options (`use_reentrant`, `preserve_rng_state`, …).
    """

    def __init__(self, store: CheckpointStore, plain: Callable[..., Any] | None = None) -> None:
        if plain is None:
            plain = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        inner = plain.func if isinstance(plain, functools.partial) else plain
        if inner is not torch.utils.checkpoint.checkpoint:
            raise ValueError(
                f"offloaded checkpointing wraps torch.utils.checkpoint.checkpoint, got {inner!r}: remove the other "
                "checkpointing (such as offload in activation_checkpointing_kwargs)"
            )
        self.store = store
        self.plain = plain
        self._last: weakref.ref[_Offloaded] | None = None
        self._warned = False

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `function` as torch's `checkpoint` does, with its hidden states in host memory until backward. Without
        gradients, or without hidden states as the first argument, nothing is offloaded."""
        if not torch.is_grad_enabled():
            return self.plain(function, *args, **kwargs)
        function, args = _hidden_first(function, args)
        hidden = args[0] if args else None
        if not (isinstance(hidden, torch.Tensor) and hidden.is_floating_point() and hidden.numel()):
            self._warn_of(hidden)
            return self.plain(function, *args, **kwargs)
        with torch.autograd.graph.saved_tensors_hooks(self._pack_only(hidden), _unpack):
            return self.plain(function, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedCheckpoint:
        return self  # a copy of a model offloads to the same store

    def _pack_only(self, hidden: torch.Tensor) -> Callable[[torch.Tensor], Any]:
        """Return a pack hook that offloads only `hidden`: masks and rotary tables are shared by all blocks."""
        # The hooks live as long as the checkpoint and must not keep the tensor alive.
        address, shape, offloaded = hidden.data_ptr(), hidden.shape, None

        def pack(tensor: torch.Tensor) -> Any:
            nonlocal offloaded
            if tensor.data_ptr() != address or tensor.shape != shape:
                return tensor
            if offloaded is None or (found := offloaded()) is None:
                previous = self._last() if self._last is not None else None
                found = _Offloaded(tensor, self.store, transfer_for(tensor.device), previous)
                self._last = offloaded = weakref.ref(found)
            return found

        return pack

    def _warn_of(self, hidden: Any) -> None:
        """Log, once, that a checkpoint stays on the device since the first argument is not hidden states."""
        if not self._warned:
            self._warned = True
            found = "nothing" if hidden is None else type(hidden).__name__
            log.warning(
                "memascend: a checkpointed block got %s instead of hidden states as its first argument; its "
                "checkpoint stays on the device",
                found,
            )


def _unpack(packed: Any) -> torch.Tensor:
    return packed.bring_back() if isinstance(packed, _Offloaded) else packed


def _hidden_first(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Make hidden states the first argument if transformers has bound them as a keyword argument in a partial."""
    if args or not isinstance(function, functools.partial) or HIDDEN_ARGUMENT not in function.keywords:
        return function, args
    others = {name: value for name, value in function.keywords.items() if name != HIDDEN_ARGUMENT}
    bound = functools.partial(function.func, *function.args, **others)
    return lambda hidden: bound(**{HIDDEN_ARGUMENT: hidden}), (function.keywords[HIDDEN_ARGUMENT],)


def offload_checkpoints(
    model: torch.nn.Module, store: CheckpointStore, **checkpoint_options: Any
) -> Callable[[], None]:
    """Enable gradient checkpointing of a transformers model with checkpoints in `store`; return a function to undo it.

    `checkpoint_options` go to `torch.utils.checkpoint.checkpoint` (`use_reentrant`: default False). If checkpointing is
    already enabled, it keeps its options. Later calls of `gradient_checkpointing_enable` or
    `activation_checkpointing_enable`, such as the Trainer's, are offloaded too.
    Call this before or after `deepspeed.initialize`; every rank has its own store. Raises ValueError for a model
    without the transformers checkpointing interface, RuntimeError if its checkpoints are already offloaded.
    """
    owner = next((m for m in model.modules() if hasattr(type(m), "_set_gradient_checkpointing")), None)
    if owner is None or not getattr(owner, "supports_gradient_checkpointing", False):
        raise ValueError(
            f"{type(model).__name__} does not support transformers' gradient checkpointing: use checkpointing 'none', "
            "or wrap its blocks with memascend.activation.OffloadedCheckpoint"
        )
    if "_set_gradient_checkpointing" in vars(owner):
        raise RuntimeError(f"checkpoints of this {type(owner).__name__} are already offloaded: undo that first")
    stock = owner._set_gradient_checkpointing

    @functools.wraps(stock)
    def set_offloaded(enable: bool = True, gradient_checkpointing_func: Any = None, **options: Any) -> None:
        if not enable:
            return stock(enable=False, **options)
        stock(
            enable=True, gradient_checkpointing_func=OffloadedCheckpoint(store, gradient_checkpointing_func), **options
        )
        store.blocks = checkpointed_blocks(owner)

    on_before = any(getattr(module, "gradient_checkpointing", False) for module in owner.modules())
    owner._set_gradient_checkpointing = set_offloaded
    try:
        if on_before:
            _replace_functions(owner, lambda plain: OffloadedCheckpoint(store, plain))
            store.blocks = checkpointed_blocks(owner)
        else:
            switch_on(owner, {"use_reentrant": False} | checkpoint_options)
    except BaseException:
        del owner._set_gradient_checkpointing
        raise

    def undo() -> None:
        del owner._set_gradient_checkpointing
        _replace_functions(owner, lambda f: f.plain if isinstance(f, OffloadedCheckpoint) else f)
        if not on_before:
            stock(enable=False)
        store.close()

    return undo


def checkpointed_blocks(model: torch.nn.Module) -> int:
    """Return the number of checkpoints that one forward pass of a transformers model makes."""
    switches = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    layers = [m for m in switches if not hasattr(m, "_set_gradient_checkpointing")]
    # Up to 4.51 the model itself loops over its layers and has the only switch.
    return len(layers) or model.config.get_text_config().num_hidden_layers


def _replace_functions(model: torch.nn.Module, new: Callable[[Any], Any]) -> None:
    """Replace each block's checkpoint function by `new(function)`; which blocks are checkpointed does not change."""
    made: dict[int, tuple[Any, Any]] = {}  # blocks share a function, and continue to share one
    for module in model.modules():
        if (function := getattr(module, "_gradient_checkpointing_func", None)) is not None:
            if id(function) not in made:
                made[id(function)] = function, new(function)
            module._gradient_checkpointing_func = made[id(function)][1]


def switch_on(model: Any, options: dict[str, Any]) -> None:
    """Enable a transformers model's own gradient checkpointing with options for torch's function."""
    # The method was renamed in transformers 5, where the old name warns.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)
