"""The arrangement of an arm: which parts it uses and where its data is stored.

The planner, the trainer and the figures all read it. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memascend.deprecation import warn_renamed
from memascend.suggestions import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """The parts and data placement of one arm.

    `label` names the arm's series in a figure. `parts` are the keywords of `memascend.enable` with which the arm
    trains. `states_on` says where weights and optimizer states are stored: `ssd`, `host` or `gpu`. With
    `weights_on_gpu`, the partitioned half-precision weights stay on the GPU wherever the states are.

    `pinned` is the rounding of memory that torch pins (gradients, activations, small parameters), `swapped` that of the
    swappers' buffers (the same up to DeepSpeed 0.19.3; later versions allocate the exact size). `pool` is `separate`
    (each buffer pinned by itself), `one_tensor` (DeepSpeed's literal layout) or `adaptive`. `overflow` is the overflow
    check: `chain` allocates temporaries, the others do not. `states` is the dtype of the states, whatever the user
    requests; `refuses_bf16_states` says why an arm cannot keep them in bf16; with `int8_states` it can keep 8-bit
    moments with bf16 weights. `direct`: swapped tensors go through the direct NVMe engine, which has bounce buffers.
    `derives_sizes`: sub-groups, buffers and I/O settings are derived from model and machine, as in the drop-in;
    otherwise they are those that the papers describe. `shown_beside`: comparisons of systems list this arm next to the
    default one. `runs` False: the arm is only planned and simulated. `over_paths`: optimizer states are spread over
    several paths, with some sub-groups in host memory; `turns_order`: updates alternate between ascending and
    descending order, so that those sub-groups stay there; `first_path`: only the first path is used. `pipelined`:
    DeepSpeed's optimizer reads the next sub-group and writes the previous one while it updates the current one.
    `optimizer_buffers`: the number of swap buffers that the arm's configuration sets; None: as the planner derives it.
    """

    label: str
    parts: Mapping[str, Any] = field(default_factory=dict)
    states_on: str = "ssd"
    weights_on_gpu: bool = False
    pinned: str = "power_of_two"
    swapped: str = "power_of_two"
    pool: str = "separate"
    overflow: str = "chain"
    whole_swap_out: bool = False  # DeepSpeed 0.16 sizes the swap-out buffer by the whole tensor, not the partition
    states: str | None = None
    swaps_gradients: bool = True  # False: the optimizer takes them from the flat buffer
    direct: bool = False
    derives_sizes: bool = False
    refuses_bf16_states: str = ""
    int8_states: bool = False
    shown_beside: bool = False
    over_paths: bool = False
    turns_order: bool = False
    first_path: bool = False
    pipelined: bool = False
    optimizer_buffers: int | None = None
    runs: bool = True
    placement: str | None = None  # of host buffers on NUMA nodes, as in a run's configuration; None: the run decides


_RENAMED = {"kept": "host", "swapped": "nvme"}  # deprecated values of the part `gradients`


def where_gradients_wait(parts: Mapping[str, Any], default: str = "nvme") -> Any:
    """Return the part `gradients` under its current name, `host` or `nvme`, or an unknown value as the user wrote it.

    A deprecated name causes a warning.
    """
    given = parts.get("gradients", default)
    if not isinstance(given, str) or given not in _RENAMED:
        return given
    warn_renamed(f"memascend.gradients: {given!r}", repr(_RENAMED[given]))
    return _RENAMED[given]


_PINNED = {"exact": "page_aligned", "power_of_two": "power_of_two"}
_POOLS = {"adaptive": "adaptive", "monolithic": "one_tensor", "monolithic_separate": "separate", "stock": "one_tensor"}


def arrangement_of_parts(parts: Mapping[str, Any], label: str = "", **others: Any) -> Arrangement:
    """Return the arrangement for any choice of parts in the section "memascend" of a DeepSpeed configuration.

    Missing parts take their defaults. A stock part behaves as in DeepSpeed 0.19.8: swap buffers have their exact size,
    and the overflow check is the isinf/isnan chain. `others` are fields of the arrangement that no part determines, or
    that override it. Raises ValueError for an unknown pool.
    """
    if parts.get("pool", "adaptive") not in _POOLS:
        hint = did_you_mean(parts["pool"], _POOLS)
        raise ValueError(f"memascend.pool: {parts['pool']!r} is unknown{hint}; choose one of {', '.join(_POOLS)}")
    if "gradients" in parts:
        parts = {**parts, "gradients": where_gradients_wait(parts)}
    pinned = _PINNED.get(parts.get("pinned", "exact"))
    overflow = parts.get("overflow", "fused")
    chosen = ", ".join(f"{name} {parts[name]}" for name, value in DEFAULTS.items() if parts.get(name, value) != value)
    fields: dict[str, Any] = {
        "label": label or (f"MemAscend ({chosen})" if chosen else "MemAscend"),
        "parts": dict(parts),
        "pinned": pinned or "power_of_two",
        "swapped": pinned or "page_aligned",
        "pool": _POOLS[parts.get("pool", "adaptive")],
        "overflow": "chain" if overflow == "stock" else overflow,
        "states": parts.get("optimizer_states"),
        "swaps_gradients": parts.get("gradients", "nvme") == "nvme",
        "direct": parts.get("aio", "direct") == "direct",
    }
    return Arrangement(**fields | others)


# Defaults of the parts that a section does not name.
DEFAULTS = {
    "pinned": "exact",
    "pool": "adaptive",
    "overflow": "fused",
    "aio": "direct",
    "optimizer_states": "fp32",
    "gradients": "nvme",
    "numerics": "exact",
}
