"""What an arm of a system puts where: the parts of a run as the planner, the trainer and the figures see them.

No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memascend.deprecation import warn_renamed
from memascend.suggestions import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Which parts stand where in an arm.

    `label` is the series of a figure. `parts` are the keywords of `memascend.enable` with which the arm trains.
    `states_on`: where weights and optimizer states wait: `ssd`, `host` or `gpu`. `weights_on_gpu`: the half-precision
    weights, partitioned, stay on the GPU wherever the states are.

    `pinned` rounds what torch pins (gradients, activations, small parameters), `swapped` what the swappers hold (the
    same through DeepSpeed 0.19.3; later ones allocate exactly there). `pool` is `separate` (each buffer pinned by
    itself), `one_tensor` (DeepSpeed's literal layout) or `adaptive`. `overflow`: the chain leaves temporaries, the
    others none. `states`: what the arm keeps its states in, whatever is asked for; `refuses_bf16_states` says why an
    arm cannot keep them in bf16; `int8_states`: it can keep 8-bit moments beside bf16 weights. `direct`: swapped
    tensors are in the direct NVMe engine, which has bounce buffers.
    `derives_sizes`: sub-groups, buffers and I/O settings follow from model and machine, as the drop-in's do; otherwise
    they are what the papers describe. `shown_beside`: listed next to the default arm where systems are compared; `runs`
    False: planned and simulated alone. `over_paths`: optimizer states lie on several paths, some sub-groups in host
    memory; `turns_order`: the update goes up and down in turn, so that those stay there; `first_path`: all others idle.
    `pipelined`: DeepSpeed's optimizer reads the next sub-group and writes the last one while it updates one.
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
    runs: bool = True
    placement: str | None = None  # of host buffers on NUMA nodes, as the key of a run; None: as the run says


_RENAMED = {"kept": "host", "swapped": "nvme"}  # values of the part `gradients` that are deprecated


def where_gradients_wait(parts: Mapping[str, Any], default: str = "nvme") -> Any:
    """The part `gradients`, by its name of now: `host` or `nvme`, or what a user has written in their place."""
    given = parts.get("gradients", default)
    if not isinstance(given, str) or given not in _RENAMED:
        return given
    warn_renamed(f"memascend.gradients: {given!r}", repr(_RENAMED[given]))
    return _RENAMED[given]


_PINNED = {"exact": "page_aligned", "power_of_two": "power_of_two"}
_POOLS = {"adaptive": "adaptive", "monolithic": "one_tensor", "monolithic_separate": "separate", "stock": "one_tensor"}


def arrangement_of_parts(parts: Mapping[str, Any], label: str = "", **others: Any) -> Arrangement:
    """Of any choice of parts of the section "memascend" in a DeepSpeed configuration; what is left out is the default.

    What a stock part does is DeepSpeed 0.19.8's: swap buffers of their exact size, the isinf/isnan chain. `others` are
    fields of the arrangement that no part says, or says otherwise.
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


# The parts where a section names none.
DEFAULTS = {
    "pinned": "exact",
    "pool": "adaptive",
    "overflow": "fused",
    "aio": "direct",
    "optimizer_states": "fp32",
    "gradients": "nvme",
    "numerics": "exact",
}
