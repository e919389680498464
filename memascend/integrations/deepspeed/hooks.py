"""``enable`` and ``disable``: all changes to DeepSpeed, found by name and signature, and undone in reverse order.

The main hooks; `compat` lists all of them, with their signatures and the versions on which they were tried:

====================  ==============================================================  =========================
part                  place                                                           stability
====================  ==============================================================  =========================
I/O module            ``OpBuilder._loaded_ops["async_io"]``                           semi-private
pinned allocation     ``deepspeed.accelerator.set_accelerator``                       public
parameter swapper     ``partition_parameters.AsyncPartitionedParameterSwapper``       module global
overflow check, norm  ``stage3.DeepSpeedZeroOptimizer_Stage3``                        module global
bf16 states           ``swap_tensor.optimizer_utils.SwapTensorContext``               module global
====================  ==============================================================  =========================
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from memascend.integrations.configuration import read_configuration
from memascend.integrations.conventions import is_logging_rank
from memascend.integrations.memory_options import applying_options
from memascend.memory.budget import HostBudget
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator, PowerOfTwoPinnedAllocator
from memascend.ops.half_linear import fp16_products_in_fp32
from memascend.storage.write_budget import WriteMeter

from . import bf16_states, cpu_shims
from .aio import AioModule, IoCounters, MeteredAioModule, PinModule
from .auto_settings import DerivedSettings
from .banner import nothing_offloaded
from .compat import CPU_HOOKS, DEFERRED_CONVERSION_HOOKS, HOOKS, check_hooks, has_hooks, untried_version_warning
from .config import STOCK, EnableOptions, Parts, enable_options, switched_off, validate_deepspeed_config
from .lasting import changes
from .swap_store import SwapStore
from .tier_options import TierOptions


@dataclass
class Enabled:
    """The state of memascend in this process.

    ``ledger`` lists every host buffer, ``io`` counts the bytes that the swappers moved, ``store`` has their tensors.
    Every rank has the ``warnings``; rank 0 (environment variable RANK, 0 if not set) logs them.
    """

    parts: Parts
    ledger: Ledger
    io: IoCounters
    store: SwapStore | None = None
    shims: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)


log = logging.getLogger("memascend")
_active: Enabled | None = None
_warned_about: set[str] = set()  # DeepSpeed versions for which this process has logged its warnings


def enable(
    ds_config: dict[str, Any] | str | os.PathLike[str], *, ledger: Ledger | None = None, **options: Any
) -> Enabled:
    """Put MemAscend's parts into DeepSpeed. Call before ``deepspeed.zero.Init`` and ``deepspeed.initialize``.

    Args:
        ds_config: the DeepSpeed configuration in any form that DeepSpeed takes (dict, path, JSON in base64), which is
            not changed. Its section ``"memascend"`` chooses parts; ``{"enabled": false}`` leaves DeepSpeed unchanged.
        ledger: the ledger to record buffers in; a new one by default.
        options: any key of the section (see :class:`Parts`, :class:`MemoryOptions`), which it overrides, and the
            other fields of :class:`EnableOptions`. None leaves the choice to the section.
    Raises:
        ValueError: for an invalid configuration, in one line that names the key and the fix.
        TypeError: for an unknown keyword.
        RuntimeError: if memascend is already enabled, or a hook is missing or has changed.
    """
    global _active
    if _active is not None:
        raise RuntimeError("memascend is already enabled; call memascend.disable() first")
    config = read_configuration(ds_config)
    if config is None:
        raise ValueError(
            "memascend.enable takes the DeepSpeed configuration as a dict, a path or JSON in base64, got "
            f"{ds_config!r}, which is neither; check that the file exists and is JSON"
        )
    if switched_off(config, options.get("enabled")):
        _active = Enabled(parts=STOCK, ledger=ledger or Ledger(), io=IoCounters())
        return _active
    chosen = enable_options(config, options)
    validate_deepspeed_config(config, chosen)
    if chosen.parts.optimizer_states == "bf16":
        config = bf16_states.with_bf16_states(config)
    else:
        bf16_states.refuse_contradictions(config)
    state = Enabled(parts=chosen.parts, ledger=ledger or Ledger(), io=IoCounters())
    changes.begin()
    try:
        _install(state, config, chosen)
    except BaseException:
        _roll_back(state)
        raise
    _active = state
    return state


def disable() -> None:
    """Undo :func:`enable`. Engines built in the meantime keep their parts until they are destroyed or collected.

    As long as there are any, the :mod:`.lasting` changes to DeepSpeed stay, which these engines need for each step and
    checkpoint.
    """
    global _active
    if _active is not None:
        _roll_back(_active)
        _active = None


def active() -> Enabled | None:
    """Return what is enabled now, or None."""
    return _active


def _roll_back(state: Enabled) -> None:
    """Undo the changes made so far, the last one first."""
    while state._undo:
        state._undo.pop()()
    changes.end()


def _install(state: Enabled, ds_config: dict[str, Any], options: EnableOptions) -> None:
    """Make all changes to DeepSpeed.

    The common hooks are checked before anything is replaced. The optimizer's class is replaced before the swappers,
    whose sizes it derives.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    parts = options.parts
    on_cpu = get_accelerator().device_name() == "cpu"
    if options.host_memory is not None:
        _replace(state, state.ledger, "budget", HostBudget.of_machine(options.host_memory))
    check_hooks(HOOKS + CPU_HOOKS if on_cpu else HOOKS)
    swaps_gradients = _swaps_gradients(parts)  # inspects DeepSpeed, so it must come before any replacement
    derived = _derived_settings(state, ds_config, options, swaps_gradients)
    _warn(state, ds_config, derived, deepspeed.__version__)
    if parts.optimizer_states == "bf16":
        _install_bf16_states(state)
    if on_cpu:
        _install_cpu_shims(state, ds_config, options.gather_clone)
    allocator = _allocator(parts, state.ledger)
    if options.memory:
        # Every engine passes through the constructor, even if a script has imported `initialize` by name before; it is
        # better to fail before that, while there is no half-made engine.
        with_options = applying_options(options.memory, allocator, _nvme_folder(ds_config))
        for owner, name in ((deepspeed, "initialize"), (deepspeed.DeepSpeedEngine, "__init__")):
            _replace(state, owner, name, with_options(getattr(owner, name)))
    _install_optimizer(state, options, derived, allocator)
    if options.minimum_swap_bytes is not None:
        state.shims.append(f"minimum-swap-bytes={options.minimum_swap_bytes}")
    if allocator is None:
        _install_stock(state, options.minimum_swap_bytes)
    else:
        _install_swappers(state, ds_config, options, derived, allocator, grows=not swaps_gradients)


def _swaps_gradients(parts: Parts) -> bool:
    """Return whether an update needs a swap buffer for gradients: they go over NVMe, or DeepSpeed is too old to convert
    them from the flat buffer."""
    return parts.gradients == "nvme" or not has_hooks(DEFERRED_CONVERSION_HOOKS)


def _derived_settings(
    state: Enabled, ds_config: dict[str, Any], options: EnableOptions, swaps_gradients: bool
) -> DerivedSettings | None:
    """Return the derived settings, or None for stock DeepSpeed, which keeps its own."""
    if state.parts == STOCK:
        return None
    derived = DerivedSettings(ds_config, tiers=options.paths.tiers, swaps_gradients=swaps_gradients)
    if (budget := state.ledger.budget) is not None:
        derived.host_left = lambda: budget.limit_bytes - sum(state.ledger.in_use().values())
    return derived


def _warn(state: Enabled, ds_config: dict[str, Any], derived: DerivedSettings | None, version: str) -> None:
    """Collect the warnings on every rank and log them on one; that of an untried DeepSpeed only once per process."""
    untried = untried_version_warning(version)
    state.warnings += [untried] if untried else []
    if derived is not None:
        nothing = nothing_offloaded(ds_config)
        state.warnings += [*([nothing] if nothing else []), *derived.warnings()]
    for warning in state.warnings:
        if is_logging_rank() and (warning is not untried or version not in _warned_about):
            log.warning("memascend: %s", warning)
    _warned_about.add(version)


def _install_optimizer(state: Enabled, options: EnableOptions, derived: DerivedSettings | None, allocator: Any) -> None:
    """Replace the class of the ZeRO-3 optimizer, and the methods for its checkpoints."""
    from deepspeed.runtime.zero import stage3

    from .checkpoint import can_be_exact, install_checkpoints
    from .optimizer import checked_optimizer_class
    from .stage3_settings import Stage3Settings

    exact_checkpoints = derived is not None and can_be_exact()
    settings = Stage3Settings(
        parts=options.parts,
        minimum_swap_bytes=options.minimum_swap_bytes,
        derived=derived,
        allocator=allocator if options.parts.pinned == "exact" else None,
        exact_checkpoints=exact_checkpoints,
        tiers=options.paths,
        **(_around_update(state, options.paths) if options.paths else {}),
        placement=options.placement,
        prestage_checkpoints=options.prestage_checkpoints,
    )
    optimizer_class = checked_optimizer_class(stage3.DeepSpeedZeroOptimizer_Stage3, settings)
    _replace(state, stage3, "DeepSpeedZeroOptimizer_Stage3", optimizer_class)
    if exact_checkpoints:
        changes.make("checkpoints", install_checkpoints)


def _install_swappers(
    state: Enabled,
    ds_config: dict[str, Any],
    options: EnableOptions,
    derived: DerivedSettings,
    allocator: Any,
    *,
    grows: bool,
) -> None:
    """Replace the swappers of parameters and optimizer states by ones with our engines and our allocator.

    `grows`: the buffers of one path include none for gradients; one is added when a sub-group needs it.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import partition_parameters, stage3

    from .accelerator import pinning_accelerator
    from .gathers import watch_gathers
    from .param_swapper import pooled_swapper_class
    from .traces import give_up_outdated_traces

    parts, minimum_swap_bytes = options.parts, options.minimum_swap_bytes
    swapper = (
        _scaled_swapper_class(partition_parameters, minimum_swap_bytes)
        if parts.pool == "stock"
        else pooled_swapper_class(parts.pool, allocator, options.blocks_in_flight, minimum_swap_bytes)
    )
    _replace(state, partition_parameters, "AsyncPartitionedParameterSwapper", swapper)
    if parts.pool != "stock":
        changes.make("gathers", watch_gathers)
        changes.make("traces", give_up_outdated_traces)
    state.store = _swap_store(state, ds_config, derived, options)
    if options.paths:
        _install_cached_swapper(state, stage3, options.paths)
    elif grows:
        _install_growing_buffers(state)
    derived.reserve = state.store and state.store.reserve
    _replace_loaded_op(state, AioModule(allocator, state.io, derived.io, state.store))
    _replace_pin_module(state, PinModule(allocator))
    _replace_accelerator(state, pinning_accelerator(get_accelerator(), allocator))


def _install_stock(state: Enabled, minimum_swap_bytes: int | None) -> None:
    """Instrument stock DeepSpeed (counters, ledger) and scale its swap limit (twins), without replacing its parts."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.runtime.zero import partition_parameters

    from .accelerator import watching_accelerator

    scaled = _scaled_swapper_class(partition_parameters, minimum_swap_bytes)
    _replace(state, partition_parameters, "AsyncPartitionedParameterSwapper", scaled)
    _replace_loaded_op(state, MeteredAioModule(AsyncIOBuilder().load(verbose=False), state.ledger, state.io))
    state.shims.append("aligned-reads")
    _replace_accelerator(state, watching_accelerator(get_accelerator(), state.ledger))


def _scaled_swapper_class(partition_parameters: Any, minimum_swap_bytes: int | None) -> type:
    """Return DeepSpeed's own swapper class, with the twin's limit below which tensors stay in memory."""

    class ScaledSwapper(partition_parameters.AsyncPartitionedParameterSwapper):
        def _configure_aio(self, ds_config: Any) -> None:
            super()._configure_aio(ds_config)
            if minimum_swap_bytes is not None:
                self.min_aio_bytes = minimum_swap_bytes
            changes.add_user(self)

    return ScaledSwapper


def _install_cpu_shims(state: Enabled, ds_config: dict[str, Any], gather_clone: bool) -> None:
    """Install the shims without which DeepSpeed trains wrongly or not at all on a CPU, and list them in the state."""
    from deepspeed.accelerator import get_accelerator

    if gather_clone:
        changes.make("clone after gather", cpu_shims.clone_after_gather)
        state.shims.append("gather-clone")
    state._undo.append(cpu_shims.keep_asked_dtype())
    state.shims.append("dtype-as-asked")
    if (ds_config.get("fp16") or {}).get("enabled"):
        state._undo.append(cpu_shims.allow_fp16_on_cpu(type(get_accelerator())))
        changes.make("fp16 products in fp32", fp16_products_in_fp32)
        state.shims += ["fp16-allowed-on-cpu", "fp16-products-in-fp32"]
        zero = ds_config.get("zero_optimization") or {}
        if zero.get("memory_efficient_linear", True):
            raise ValueError(
                "fp16 on the CPU needs zero_optimization.memory_efficient_linear=false, or DeepSpeed replaces "
                "the linear layer whose products are computed in fp32; set it to false"
            )


def _install_bf16_states(state: Enabled) -> None:
    changes.make("dtype of swapped tensors", bf16_states.keep_dtype_of_swapped_tensors)
    state._undo.append(bf16_states.write_bf16_states())


def _around_update(state: Enabled, paths: TierOptions) -> dict[str, Callable[[], None]]:
    """Return the callbacks around an update: sub-groups follow their paths' rates, and writes count against the budget.

    An exceeded budget stops training before the next update, when DeepSpeed's counters and scheduler have completed the
    last one.
    """
    budget = paths.budget()
    meter = None if budget is None else WriteMeter(budget, paths.tiers)

    def end_of_update() -> None:
        if state.store is None:
            return
        state.store.observe_paths()
        if meter is not None:
            for line in meter.count((each.name, each.bytes_written) for each in state.store.paths_report()):
                log.warning("memascend: %s", line)

    hooks: dict[str, Callable[[], None]] = {"end_of_update": end_of_update}
    return hooks if meter is None else hooks | {"before_update": meter.require_within}


def _install_cached_swapper(state: Enabled, stage3: Any, paths: TierOptions) -> None:
    """Replace both optimizer swappers by the one for several paths."""
    from .cached_subgroup_swapper import CachedSubGroupSwapper

    choice = {
        "swaps_gradients": state.parts.gradients == "nvme",
        "keeps": paths.sub_group_order == "alternating",
    }
    swapper = type("MemAscendCachedSubGroupSwapper", (CachedSubGroupSwapper,), choice)
    for name in ("PartitionedOptimizerSwapper", "PipelinedOptimizerSwapper"):
        _replace(state, stage3, name, swapper)


def _install_growing_buffers(state: Enabled) -> None:
    from deepspeed.runtime.swap_tensor import optimizer_utils

    from .growing_buffers import GrowingBuffers

    _replace(state, optimizer_utils, "SwapBufferManager", GrowingBuffers)


def _allocator(parts: Parts, ledger: Ledger) -> Any:
    if parts.pinned == "stock":
        return None
    return (PowerOfTwoPinnedAllocator if parts.pinned == "power_of_two" else PageAlignedPinnedAllocator)(ledger=ledger)


def _swap_store(
    state: Enabled, ds_config: dict[str, Any], derived: DerivedSettings, options: EnableOptions
) -> SwapStore | None:
    """Return the store of swapped tensors, or None if DeepNVMe stays or nothing goes to NVMe."""
    folders = _nvme_folders(ds_config)
    if state.parts.aio == "stock" or not folders:
        return None
    store = SwapStore(
        folders,
        derived.io,
        state.ledger,
        devices=options.devices,
        kind=options.parts.aio,
        require_direct=options.require_direct,
        tiers=options.paths,
    )
    state._undo.append(store.retire)
    return store


def _nvme_folders(ds_config: dict[str, Any]) -> list[str]:
    """Return the ``nvme_path`` of the parameters and of the optimizer, as far as they are offloaded to NVMe."""
    zero = ds_config.get("zero_optimization") or {}
    offloads = [zero.get(name) or {} for name in ("offload_param", "offload_optimizer")]
    return [str(offload["nvme_path"]) for offload in offloads if offload.get("device") == "nvme"]


def _nvme_folder(ds_config: dict[str, Any]) -> str | None:
    return next(iter(_nvme_folders(ds_config)), None)


_MISSING = object()


def _replace(state: Enabled, module: Any, name: str, value: Any) -> None:
    """Set an attribute of a module until `disable`."""
    stock = getattr(module, name)
    setattr(module, name, value)
    state._undo.append(lambda: setattr(module, name, stock))


def _replace_loaded_op(state: Enabled, module: Any) -> None:
    """Make DeepSpeed's op builders return ``module`` as their loaded ``async_io`` until `disable`."""
    for builder in _op_builders():
        loaded = builder._loaded_ops
        stock = loaded.get("async_io", _MISSING)
        loaded["async_io"] = module
        state._undo.append(lambda loaded=loaded, stock=stock: _put_back(loaded, stock))


def _put_back(loaded: dict[str, Any], stock: Any) -> None:
    if stock is _MISSING:
        loaded.pop("async_io", None)
    else:
        loaded["async_io"] = stock


def _op_builders() -> list[Any]:
    """Return DeepSpeed's base classes of op builders, which have the loaded ops: two in an editable installation.

    With a source tree on the path, accelerators use the builders of its package ``op_builder``.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder

    try:
        from op_builder import __deepspeed__  # noqa: F401 - another package of this name has no such attribute
        from op_builder.builder import OpBuilder as OfSourceTree
    except ImportError:
        return [OpBuilder]
    return [OpBuilder, OfSourceTree]


def _replace_pin_module(state: Enabled, module: Any) -> None:
    """Replace DeepSpeed's pin_memory op, which is an attribute of ``sys``; releases before 0.19.4 have no such op."""
    try:
        from deepspeed.ops.op_builder.pin_memory_load import _SYS_CACHE_ATTR as name
    except ImportError:
        return
    stock = getattr(sys, name, None)
    setattr(sys, name, module)
    state._undo.append(lambda: delattr(sys, name) if stock is None else setattr(sys, name, stock))


def _replace_accelerator(state: Enabled, accelerator: Any) -> None:
    from deepspeed.accelerator import get_accelerator, set_accelerator

    stock = get_accelerator()
    set_accelerator(accelerator)
    state._undo.append(lambda: set_accelerator(stock))
