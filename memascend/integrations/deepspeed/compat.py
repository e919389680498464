"""All places of DeepSpeed that we replace or call by name, with the signatures that we rely on.

They are found by name and signature, never by line. If DeepSpeed has changed one of them, a one-line error names the
place and our part that breaks. The warning for untried versions refers to this list as the places that were checked.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

TRIED_VERSIONS = ("0.16.7", "0.19.8")

_PASSED_ON = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
_ZERO = "deepspeed.runtime.zero"
_SWAP = "deepspeed.runtime.swap_tensor"


@dataclass(frozen=True)
class Hook:
    """A requirement that ``path`` in ``module`` is callable and begins with the arguments ``leading``.

    The arguments ``named`` may be at any position. With ``leading`` None, ``path`` only has to exist. ``part`` names
    our part that depends on it.
    """

    part: str
    module: str
    path: str
    leading: tuple[str, ...] | None
    named: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The full dotted name, as errors show it."""
        return f"{self.module}.{self.path}"


def _swapper(method: str, *arguments: str) -> Hook:
    path = f"AsyncPartitionedParameterSwapper.{method}"
    return Hook("parameter pool", f"{_SWAP}.partitioned_param_swapper", path, ("self", *arguments))


def _trace(method: str, *arguments: str) -> Hook:
    path = f"PartitionedParameterCoordinator.{method}"
    return Hook("parameter pool", f"{_ZERO}.partitioned_param_coordinator", path, ("self", *arguments))


def _stage3(part: str, method: str, *arguments: str, named: tuple[str, ...] = ()) -> Hook:
    path = f"DeepSpeedZeroOptimizer_Stage3.{method}"
    return Hook(part, f"{_ZERO}.stage3", path, ("self", *arguments), named)


HOOKS: tuple[Hook, ...] = (
    Hook("memory options", "deepspeed", "initialize", ("args", "model"), ("config", "config_params")),
    Hook("memory options", "deepspeed", "DeepSpeedEngine.__init__", ("self", "args", "model")),
    Hook("the key in the JSON", "deepspeed", "zero.Init.__init__", ("self",), ("config_dict_or_path", "config")),
    Hook("I/O engine", "deepspeed.ops.op_builder.builder", "OpBuilder._loaded_ops", None),
    Hook("I/O engine", f"{_SWAP}.utils", "swap_in_tensors", ("swap_handle", "tensor_buffers", "swap_paths")),
    Hook("I/O engine", f"{_SWAP}.utils", "swap_out_tensors", ("swap_handle", "tensor_buffers", "swap_paths")),
    Hook("pinned memory", "deepspeed.accelerator", "set_accelerator", ("accel_obj",)),
    Hook("pinned memory", "deepspeed.accelerator.abstract_accelerator", "DeepSpeedAccelerator.pin_memory", None),
    Hook("pinned memory", "deepspeed.accelerator.abstract_accelerator", "DeepSpeedAccelerator.is_pinned", None),
    Hook("parameter pool", f"{_ZERO}.partition_parameters", "AsyncPartitionedParameterSwapper", None),
    _swapper("__init__", "ds_config", "model_dtype"),
    _swapper("_configure_aio", "ds_config"),
    _swapper("swappable_tensor", "param", "numel"),
    _swapper("available_swap_in_buffers"),
    _swapper("get_buffer", "param", "numel"),
    _swapper("swap_in", "params", "async_op", "swap_in_buffers"),
    _swapper("_swap_out", "params", "async_op"),
    _swapper("synchronize_writes"),
    _swapper("swap_out_partitioned_params", "dst_fp16_params", "src_fp32_params"),
    _swapper("swap_into_buffer", "param", "dest_buffer"),
    _swapper("remove_partition_and_release_buffers", "params"),
    _swapper("reserve_available_buffers"),
    _swapper("release_reserved_buffers"),
    _swapper("reserve_partitioned_swap_space", "partition_num_elems"),
    _swapper("synchronize_reads"),
    _swapper("_get_swap_paths", "params", "must_exist"),
    _swapper("get_path", "param", "must_exist"),
    _swapper("_io_aligned_numel", "numel"),
    _trace("trace_prologue", "sub_module"),
    _trace("record_parameters", "sub_module"),
    _trace("_invalidate_trace"),
    _trace("is_complete_trace"),
    Hook("parameter pool", f"{_ZERO}.partitioned_param_coordinator", "iter_params", ("module", "recurse")),
    Hook("parameter pool", f"{_ZERO}.partitioned_param_coordinator", "z3_leaf_module", ("model",)),
    _stage3("parameter pool", "_partition_all_parameters"),
    _stage3("parameter pool", "initialize_ds_offload", "module"),
    Hook(
        "parameter pool",
        f"{_ZERO}.partition_parameters",
        "Init._ensure_availability_of_partitioned_params",
        ("self", "params"),
    ),
    _stage3(
        "derived settings",
        "__init__",
        "module",
        "init_optimizer",
        named=("sub_group_size", "offload_param_config", "offload_optimizer_config", "aio_config", "ds_config"),
    ),
    _stage3("overflow check", "has_overflow", "partition_gradients"),
    _stage3("overflow check", "_model_parallel_all_reduce", "tensor", "op"),
    _stage3("optimizer swapper", "_configure_tensor_swapping", "offload_optimizer_config", "aio_config"),
    _stage3("gradient buffer", "_setup_for_real_optimizer"),
    _stage3("first step", "_prepare_sub_group", "sub_group_id", "timer_names"),
    _stage3("end of training", "destroy"),
)

CPU_HOOKS: tuple[Hook, ...] = (
    Hook("gather on the CPU", f"{_ZERO}.partition_parameters", "NoGatherHandle.__init__", ("self", "param")),
    Hook("gather on the CPU", f"{_ZERO}.partition_parameters", "NoGatherCoalescedHandle.__init__", ("self", "params")),
    Hook("types on the CPU", f"{_ZERO}.partition_parameters", "Init._set_dtype", ("self", "ds_config", "dtype")),
)


_ENGINE = "deepspeed.runtime.engine"
_UTILS = f"{_SWAP}.optimizer_utils"


def _engine(method: str, *arguments: str) -> Hook:
    return Hook("checkpoints", _ENGINE, f"DeepSpeedEngine.{method}", ("self", *arguments))


# Checked if swapped tensors are contexts (0.17 and later); in earlier versions checkpoints stay DeepSpeed's own.
CHECKPOINT_HOOKS: tuple[Hook, ...] = (
    _engine("save_checkpoint", "save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters"),
    _engine(
        "load_checkpoint",
        "load_dir",
        "tag",
        "load_module_strict",
        "load_optimizer_states",
        "load_lr_scheduler_states",
        "load_module_only",
        "custom_load_fn",
    ),
    _engine("zero_nvme_offload_optimizer"),
    _engine("load_module_state_dict", "checkpoint"),
    _engine("_get_param_fragment_func", "param"),
    _stage3("checkpoints", "_rigid_state_dict"),
    _stage3("checkpoints", "_rigid_load_state_dict", "state_dict", "load_optimizer_states"),
    _stage3("checkpoints", "_reassign_or_swap_out_partitioned_parameters", "sub_group_id"),
    _stage3("checkpoints", "_swappable_optimizer_subgroup", "sub_group_id"),
    _stage3("checkpoints", "_set_fp32_optimizer_param_groups"),
    _stage3("unused parameters", "_writeback_swap_state", "sub_group_id", "write_opt_state", "write_gradients"),
    _stage3("checkpoints", "_clear_fp32_optimizer_param_groups"),
    Hook("checkpoints", _UTILS, "OptimizerStateSwapInfo.add_state_tensors", ("self", "tensor_list")),
    Hook("checkpoints", f"{_SWAP}.utils", "SwapBufferManager.allocate", ("self", "num_elems", "count", "dtype")),
)

BF16_HOOKS: tuple[Hook, ...] = (
    Hook("bf16 states", "deepspeed.runtime.config", "DeepSpeedConfig.__init__", ("self", "config")),
    _stage3("bf16 states", "__init__", "module", named=("bf16_optimizer_states",)),
    Hook("bf16 states", _UTILS, "SwapTensorContext.__init__", ("self", "tensor", "swap_folder")),
    Hook("bf16 states", _UTILS, "SwapTensorContext.release_memory", ("self",)),
)

# Moments are created in swap buffers if swapped tensors are contexts (0.17 and later).
FIRST_STEP_HOOKS: tuple[Hook, ...] = (
    _stage3("first step", "_swappable_optimizer_subgroup", "sub_group_id"),
    Hook("first step", _UTILS, "OptimizerSwapper._update_param_state_info", ("self", "swap_info", "parameter")),
    Hook("first step", _UTILS, "OptimizerSwapper._io_aligned_numel", ("self", "numel")),
    Hook("first step", _UTILS, "SwapTensorContext.set_buffers", ("self", "compute_buffer", "swap_buffer")),
    Hook("first step", f"{_SWAP}.utils", "SwapBufferManager.allocate", ("self", "num_elems", "count", "dtype")),
)

_SWAP_OUT_GRADIENTS = ("self", "parameter", "gradient_offsets", "gradient_tensors")
UNUSED_PARAMETER_HOOKS: tuple[Hook, ...] = (
    *(
        Hook("unused parameters", f"{_SWAP}.{module}", f"{swapper}.swap_out_gradients", _SWAP_OUT_GRADIENTS)
        for module, swapper in (
            ("partitioned_optimizer_swapper", "PartitionedOptimizerSwapper"),
            ("pipelined_optimizer_swapper", "PipelinedOptimizerSwapper"),
        )
    ),
    Hook("unused parameters", _UTILS, "OptimizerStateSwapInfo.has_gradients", ("self",)),
    Hook("unused parameters", _UTILS, "OptimizerStateSwapInfo.get_or_create_gradient_paths", ("self", "offsets")),
    Hook("unused parameters", _UTILS, "OptimizerStateSwapInfo.read_unswapped_gradients", ("self", "dest_buffer")),
    Hook("unused parameters", _UTILS, "OptimizerStateSwapInfo.release_unswapped_gradients", ("self",)),
    Hook(
        "unused parameters", _UTILS, "OptimizerSwapper._adjust_for_misaligned_lengths", ("self", "tensors", "offsets")
    ),
    _stage3("unused parameters", "_optimizer_states_and_gradient_swap_in", "sub_group_id"),
    _stage3("unused parameters", "_prepare_sub_group", "sub_group_id", "timer_names"),
    _stage3("unused parameters", "unscale_and_clip_grads", "sub_group_id", "total_norm"),
    _stage3("unused parameters", "step", "closure"),
)
HOST_GRADIENT_HOOKS: tuple[Hook, ...] = (
    _stage3("host gradients", "partition_grads", "params_to_release", "grad_partitions"),
)

DEFERRED_CONVERSION_HOOKS: tuple[Hook, ...] = (
    _stage3(
        "delayed conversion",
        "_offload_grad_partition_at_boundary",
        "param",
        "grad_buffer",
        "offload_fp32_gradients",
        "offload_fp32_offsets",
    ),
    _stage3("delayed conversion", "_optimizer_step", "sub_group_id"),
)

_PARTITIONED = f"{_SWAP}.partitioned_optimizer_swapper"
ORDERED_HOOKS: tuple[Hook, ...] = (
    _stage3("several paths", "step", "closure"),
    _stage3("several paths", "_prepare_sub_group", "sub_group_id", "timer_names"),
    _stage3("several paths", "unscale_and_clip_grads", "sub_group_id", "total_norm"),
    _stage3("several paths", "_optimizer_step", "sub_group_id"),
    _stage3("several paths", "_reassign_or_swap_out_partitioned_parameters", "sub_group_id"),
    _stage3("several paths", "_release_sub_group", "sub_group_id", "timer_names"),
    Hook("several paths", f"{_ZERO}.stage3", "PartitionedOptimizerSwapper", None),
    Hook("several paths", f"{_ZERO}.stage3", "PipelinedOptimizerSwapper", None),
    *(
        Hook("several paths", _PARTITIONED, f"PartitionedOptimizerSwapper.{name}", ("self", *arguments))
        for name, *arguments in (
            ("swap_in_optimizer_state", "parameter", "async_parameter"),
            ("swap_out_optimizer_state", "parameter", "async_swap"),
            ("release_swap_buffers", "parameter"),
            ("writeback_optimizer_state_and_gradients", "parameter", "write_opt_state", "write_gradients"),
            ("_swap_in_pinned_gradients", "aio_handle", "parameter", "gradient_tensor"),
            ("flush_gradients",),
        )
    ),
    Hook("several paths", _UTILS, "SwapTensorContext.set_buffers", ("self", "compute_buffer", "swap_buffer")),
    Hook("several paths", _UTILS, "OptimizerStateSwapInfo.get_swap_gradient_buffers", ("self", "swap_buffer")),
    Hook("several paths", f"{_SWAP}.utils", "SwapBufferManager.allocate", ("self", "num_elems", "count", "dtype")),
)

FAST_HOOKS: tuple[Hook, ...] = (
    _stage3("fast numerics", "_constant_buffered_norm2", "input", "buffer_size"),
    _stage3("fast numerics", "reset_cpu_buffers"),
    _stage3("fast numerics", "unscale_and_clip_grads", "sub_group_id", "total_norm"),
    _stage3("fast numerics", "_optimizer_step", "sub_group_id"),
)

PLACED_HOOKS: tuple[Hook, ...] = (
    _stage3("placement", "_create_fp32_partitions"),
    _stage3("placement", "initialize_optimizer_states"),
    _stage3("placement", "_swappable_optimizer_subgroup", "sub_group_id"),
    _stage3("placement", "__init__", "module", named=("offload_optimizer_config", "gradient_accumulation_dtype")),
)


def check_hooks(
    hooks: tuple[Hook, ...] = HOOKS,
    *,
    tried: tuple[str, ...] = TRIED_VERSIONS,
    otherwise: str = "switch memascend off",
) -> None:
    """Raise RuntimeError, in one line, for the first hook that is missing or has other arguments.

    ``tried``: the versions that have these hooks; ``otherwise``: advice for users who cannot change DeepSpeed.
    """
    for hook in hooks:
        problem = _problem(hook)
        if problem:
            import deepspeed

            others = " or ".join(version for version in tried if version != deepspeed.__version__)
            raise RuntimeError(
                f"memascend: DeepSpeed {deepspeed.__version__} breaks the {hook.part}: {hook.place} {problem}; "
                f"use DeepSpeed {others}, or {otherwise}"
            )


def has_hooks(hooks: tuple[Hook, ...]) -> bool:
    """Return whether this DeepSpeed has all the hooks, with the expected arguments."""
    return not any(map(_problem, hooks))


def _problem(hook: Hook) -> str | None:
    """Return, as the end of a sentence, why a hook does not fit this DeepSpeed, or None if it does."""
    try:
        found: Any = importlib.import_module(hook.module)
    except ImportError:
        return "cannot be imported"
    for name in hook.path.split("."):
        found = getattr(found, name, None)
        if found is None:
            return "is not there"
    if hook.leading is None:
        return None
    if not callable(found):
        return "is not callable"
    parameters = inspect.signature(found).parameters
    if {p.kind for p in parameters.values()} == _PASSED_ON:
        return None  # it exists, but a decorator (DeepSpeed's instrument_w_nvtx) hides its arguments
    arguments = list(parameters)
    if arguments[: len(hook.leading)] != list(hook.leading):
        return f"has the arguments ({', '.join(arguments)}), expected ({', '.join(hook.leading)}, ...)"
    missing = [name for name in hook.named if name not in arguments]
    return f"has no argument {missing[0]!r}" if missing else None


def untried_version_warning(version: str) -> str | None:
    """Return the warning for an untried version, naming what was checked, or None for a tried one."""
    if version in TRIED_VERSIONS:
        return None
    parts = ", ".join(dict.fromkeys(hook.part for hook in HOOKS))
    return (
        f"DeepSpeed {version} has not been tried with memascend (tried: {', '.join(TRIED_VERSIONS)}); the "
        f"{len(HOOKS)} places that it hooks into were found with the expected arguments ({parts})"
    )
