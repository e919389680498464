"""The workload that a user's DeepSpeed configuration describes: values that it leaves out are derived as in a run.

`enable` and DeepSpeed check a configuration in full. This module only reads what a plan needs, and refuses what cannot
be planned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memascend.arrangements import DEFAULTS, Arrangement, arrangement_of_parts, where_gradients_wait
from memascend.memory.budget import parse_bytes
from memascend.planner.derived_sizes import given, io_settings, optimizer_buffers
from memascend.planner.options import MODEL_OPTIONS, Stack
from memascend.planner.pool import SWAP_THRESHOLD_BYTES
from memascend.planner.spec import ModelSpec
from memascend.planner.workload import SwapSizes, Workload
from memascend.suggestions import did_you_mean, refuse_misspelled
from memascend.systems import arrangement

SECTION = "memascend"
# All keys of the section, as in memascend/integrations/deepspeed/config.py (not imported, since it needs DeepSpeed).
SECTION_KEYS = (
    "pinned", "pool", "overflow", "aio", "optimizer_states", "gradients", "numerics", "attention", "loss",
    "checkpointing", "activations", "tiers", "tier_placement", "tier_rehome", "tier_exclusive", "sub_group_order",
    "write_budget", "write_budget_stops", "blocks_in_flight", "devices", "host_memory", "require_direct", "placement",
    "prestage_checkpoints", "enabled",
)  # fmt: skip
# A section that selects these parts, and no other values than the defaults for the rest, leaves DeepSpeed as it is.
_STOCK = DEFAULTS | dict.fromkeys(("pinned", "pool", "overflow", "aio"), "stock")
# DeepSpeed's defaults, for runs in which our code does not derive them (zero/config.py, zero/offload_config.py).
_STOCK_SUB_GROUP_SIZE, _STOCK_OPTIMIZER_BUFFERS = 1_000_000_000, 4
_STOCK_POOL_BUFFERS, _STOCK_POOL_NUMEL = 5, 100_000_000
# The options of a plain Hugging Face model, if neither configuration nor command line sets them.
_AS_THE_MODEL_HAS_IT = {"attention": "auto", "loss": "plain", "checkpointing": "none"}
_DTYPES = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """Values given on the command line (None: not given), which the configuration must not contradict."""

    dtype: str | None = None
    batch: int | None = None
    accumulation: int | None = None
    attention: str | None = None
    loss: str | None = None
    checkpointing: str | None = None


def read_config(path: Path) -> dict[str, Any]:
    """Return the configuration in a JSON file. Raises a one-line ValueError if it cannot be read."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the DeepSpeed configuration {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"the DeepSpeed configuration {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"the DeepSpeed configuration {path} is not a JSON object")
    return config


def workload_of(
    config: Mapping[str, Any],
    spec: ModelSpec,
    *,
    ranks: int = 1,
    context: int = 4096,
    command_line: CommandLine | None = None,
) -> Workload:
    """Return the workload of `config` (a dict as DeepSpeed takes it) on `ranks` GPUs of one machine.

    `context`: tokens per sequence. `command_line`: values given there. With a section "memascend" the workload is
    MemAscend's, with the parts that the section selects; without one, or if all of them are DeepSpeed's own, it is
    today's DeepSpeed.

    Raises a one-line ValueError for what cannot be planned: ZeRO stages below 3, fp32, parameters kept in memory by
    max_in_cpu, parameters and optimizer in different places.
    """
    command_line = command_line or CommandLine()
    refuse_misspelled(config, SECTION)
    zero, section = _section(config, "zero_optimization"), _section(config, SECTION)
    ours = SECTION in config and section.get("enabled", True) is not False
    section = section if ours else {}
    if unknown := [key for key in section if key not in SECTION_KEYS]:
        raise ValueError(f'"{SECTION}": unknown key {unknown[0]!r}{did_you_mean(unknown[0], SECTION_KEYS)}')
    tiers = section.get("tiers")
    ours = ours and (bool(tiers) or {name: section.get(name, value) for name, value in DEFAULTS.items()} != _STOCK)
    system, arm = _over_paths(zero) if tiers else _system(zero, ours)
    bf16 = {**_section(config, "bfloat16"), **_section(config, "bf16")}
    states = (
        "bf16" if section.get("optimizer_states") == "bf16" or bf16.get("bf16_optimizer_states") is True else "fp32"
    )
    dtype = "bf16" if states == "bf16" else _dtype(config, bf16, command_line)
    batch, accumulation = _batch(config, ranks, command_line)
    budget = section.get("host_memory")
    options: dict[str, Any] = {name: _option(section, name, command_line) for name in MODEL_OPTIONS}
    return Workload(
        spec=spec,
        system=system,
        arm=arm,
        dtype=dtype,
        states=states,
        gradients=_gradients(config, dtype),
        stack=Stack(**options),
        ranks=ranks,
        batch=batch,
        context=context,
        accumulation=accumulation,
        blocks_in_flight=_size(section, "blocks_in_flight", f"{SECTION}.") or 1,
        sizes=_sizes(config, zero, system, ours),
        parts=_parts(section, arrangement(system, arm)) if ours else None,
        host_memory=None if budget is None else parse_bytes(budget, f'"{SECTION}.host_memory"'),
    )


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a section as a dict, empty if it is missing. Raises ValueError if it is no section."""
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f'"{name}" in the DeepSpeed configuration must be a section, got {value!r}')
    return dict(value or {})


def _device(zero: Mapping[str, Any], name: str) -> str | None:
    """Return the device of an offload section, or None. Raises ValueError if it is no text."""
    device = _section(zero, name).get("device")
    if device is not None and not isinstance(device, str):
        raise ValueError(f"zero_optimization.{name}.device must be a word such as 'nvme', got {device!r}")
    return device


def _size(section: Any, key: str, where: str, least: int = 1) -> int | None:
    """Return the whole number `key`, at least `least`, or None if the section leaves it out. Raises ValueError."""
    if not given(section, key):
        return None
    value = section[key]
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())  # 1e9
    if not whole or isinstance(value, bool) or value < least:
        raise ValueError(f"{where}{key} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def _system(zero: Mapping[str, Any], ours: bool) -> tuple[str, str | None]:
    """Return the system and arm of a run without tiers. `ours`: whether parts of ours are used. Raises ValueError."""
    if zero.get("stage") != 3:
        raise ValueError(f"a plan needs ZeRO stage 3, got zero_optimization.stage={zero.get('stage')!r}")
    param, optimizer = (_device(zero, name) for name in ("offload_param", "offload_optimizer"))
    places = {param, optimizer}
    if places == {"nvme"}:
        kept = _size(_section(zero, "offload_param"), "max_in_cpu", "zero_optimization.offload_param.", least=0)
        if kept:
            raise ValueError(
                f"zero_optimization.offload_param.max_in_cpu={kept:g} keeps parameters in memory that a "
                "plan does not count: set it to 0, or leave it out"
            )
        return ("memascend", None) if ours else ("zero_infinity", "today")
    if places == {"cpu"}:
        return "zero_offload", None
    if optimizer == "nvme" and param in ("none", None) and not ours:
        return "mlp_offload", "zero3"
    raise ValueError(
        "a plan knows offload_param and offload_optimizer both on 'nvme' or both on 'cpu', got "
        + " and ".join(sorted(repr(place) for place in places))
    )


def _over_paths(zero: Mapping[str, Any]) -> tuple[str, str]:
    """Return the system and arm of a run over several paths.

    The optimizer states are on the paths, and the weights either too or on the device.
    """
    if zero.get("stage") != 3:
        raise ValueError(f"a plan needs ZeRO stage 3, got zero_optimization.stage={zero.get('stage')!r}")
    param, optimizer = (_device(zero, name) for name in ("offload_param", "offload_optimizer"))
    if optimizer != "nvme" or param not in ("nvme", "none", None):
        raise ValueError(
            "a plan over several tiers knows offload_optimizer on 'nvme' and offload_param on 'nvme' or 'none', got "
            f"{optimizer!r} and {param!r}"
        )
    return "mlp_offload", "weights_on_paths" if param == "nvme" else "mlp_offload"


def _parts(section: Mapping[str, Any], arm: Arrangement) -> Arrangement:
    """Return the parts that the section selects, as the drop-in reads it; the data is where the arm keeps it.

    With several tiers, gradients stay in host memory unless the section says otherwise.
    """
    tiers = section.get("tiers") or []
    if not tiers:
        return arrangement_of_parts(section, derives_sizes=True, states_on=arm.states_on)
    if not isinstance(tiers, list | tuple) or not all(isinstance(path, str) and path for path in tiers):
        raise ValueError(f'"{SECTION}.tiers" must be a list of paths such as ["/mnt/a", "/mnt/b"], got {tiers!r}')
    placed = section.get("tier_placement")
    if isinstance(placed, list | tuple) and len(placed) != len(tiers):
        raise ValueError(
            f'"{SECTION}.tier_placement" must name a number for each of {len(tiers)} paths, got {placed!r}'
        )
    turns = section.get("sub_group_order", "alternating") == "alternating"
    named = {"gradients": "host", **section}
    label = f"MemAscend over {len(tiers)} path{'s' if len(tiers) > 1 else ''}"
    more = {"derives_sizes": True, "over_paths": True, "turns_order": turns}
    return arrangement_of_parts(named, label, weights_on_gpu=arm.weights_on_gpu, **more)


def _dtype(config: Mapping[str, Any], bf16: Mapping[str, Any], command_line: CommandLine) -> str:
    """Return the dtype of the model from fp16.enabled, bf16.enabled or the command line. Raises ValueError."""
    on = [
        name for name, section in (("fp16", _section(config, "fp16")), ("bf16", bf16)) if section.get("enabled") is True
    ]
    if len(on) > 1:
        raise ValueError("fp16.enabled and bf16.enabled are both true: choose one")
    if on and command_line.dtype not in (None, on[0]):
        raise ValueError(f"the configuration says {on[0]}, the command line {command_line.dtype}: leave --dtype out")
    if not on and command_line.dtype is None:
        raise ValueError('the configuration enables neither bf16 nor fp16: set "bf16": {"enabled": true}, or --dtype')
    return on[0] if on else str(command_line.dtype)


def _gradients(config: Mapping[str, Any], dtype: str) -> str:
    """Return the dtype of the gradient buffer; DeepSpeed's default is the dtype of the model."""
    named = _section(config, "data_types").get("grad_accum_dtype")
    return dtype if named in (None, "auto") else _DTYPES.get(str(named), str(named))


def _batch(config: Mapping[str, Any], ranks: int, command_line: CommandLine) -> tuple[int, int]:
    """Return (sequences per GPU, batches per step), derived from those of DeepSpeed's three numbers that are given.

    Raises ValueError if the three contradict one another.
    """
    whole = _count(config, "train_batch_size", None, "")
    batch = _count(config, "train_micro_batch_size_per_gpu", command_line.batch, "--batch")
    steps = _count(config, "gradient_accumulation_steps", command_line.accumulation, "--accumulate")
    if whole and not batch:
        batch = max(1, whole // ranks // (steps or 1))
    batch = batch or 1
    if whole and not steps:
        steps = max(1, whole // ranks // batch)
    steps = steps or 1
    if whole and whole != batch * steps * ranks:
        raise ValueError(
            f"train_batch_size {whole} is not train_micro_batch_size_per_gpu {batch} x gradient_accumulation_steps "
            f"{steps} x {ranks} GPUs: leave one of them out"
        )
    return batch, steps


def _count(config: Mapping[str, Any], key: str, said: int | None, flag: str) -> int | None:
    """Return a positive whole number from the configuration or the command line (`said`). Raises ValueError if they
    differ."""
    if not given(config, key):
        return said
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} must be a whole number of at least 1, got {value!r}")
    if said not in (None, value):
        raise ValueError(f"the configuration says {key} {value}, the command line {said}: leave {flag} out")
    return value


def _option(section: Mapping[str, Any], name: str, command_line: CommandLine) -> str:
    """Return a memory option from the section or the command line. Raises ValueError if they differ."""
    said = getattr(command_line, name)
    value = section.get(name)
    if value is not None and said not in (None, value):
        raise ValueError(f"the configuration says {name} '{value}', the command line '{said}': leave --{name} out")
    return value or said or _AS_THE_MODEL_HAS_IT[name]


def _sizes(config: Mapping[str, Any], zero: Mapping[str, Any], system: str, ours: bool) -> SwapSizes:
    """Return the sizes that the configuration sets.

    What it leaves out is DeepSpeed's default, or None if it swaps with parts of ours.
    """
    ours = ours and system != "zero_offload"
    param, optimizer = _section(zero, "offload_param"), _section(zero, "offload_optimizer")

    def size(section: Mapping[str, Any], key: str, stock: int, where: str = "") -> int | None:
        named = _size(section, key, f"zero_optimization.{where}")
        return named if named is not None else None if ours else stock

    swaps_gradients = where_gradients_wait(_section(config, SECTION)) == "nvme"
    derived: int | None = optimizer_buffers(optimizer, swaps_gradients) if ours else _STOCK_OPTIMIZER_BUFFERS
    if ours and system == "mlp_offload":
        derived = None  # depends on how many sub-groups stay in host memory
    folders = {str(section["nvme_path"]) for section in (param, optimizer) if section.get("nvme_path")}
    block = _size(_section(config, "aio"), "block_size", "aio.") or SWAP_THRESHOLD_BYTES
    return SwapSizes(
        sub_group_size=size(zero, "sub_group_size", _STOCK_SUB_GROUP_SIZE),
        optimizer_buffers=_size(optimizer, "buffer_count", "zero_optimization.offload_optimizer.") or derived,
        pool_numel=size(param, "buffer_size", _STOCK_POOL_NUMEL, "offload_param."),
        pool_buffers=size(param, "buffer_count", _STOCK_POOL_BUFFERS, "offload_param."),
        swap_threshold_bytes=max(SWAP_THRESHOLD_BYTES, block),
        io=io_settings(config, next(iter(folders), None)),
        engines=max(1, len(folders)),
    )
