"""MLP-Offload on DeepSpeed: several paths without RAID, exclusive I/O, cache-friendly order, delayed gradients."""

from __future__ import annotations

import os
from typing import Any

from memascend.arrangements import Arrangement, arrangement_of_parts
from memascend.baselines.mlp_offload.footprint import update_over_paths
from memascend.baselines.mlp_offload.schedule import schedule
from memascend.baselines.protocol import DeepSpeedSystem, RunSpec, Sizes, nvme_offload, zero3_config
from memascend.planner.derived_sizes import cached_sub_group_buffers, cached_sub_groups_for

_PARTS = {"pinned": "exact", "pool": "adaptive", "overflow": "fused", "aio": "direct"}
_STOCK = {"pinned": "stock", "pool": "stock", "overflow": "stock", "aio": "stock"}
_PATHS = ("path0", "path1")
# In the harness, all arms get the same number of buffers, so that they use the same host memory: as many as both paths
# need if gradients stay in host memory. Swapped gradients occupy some of them, so that three sub-groups fit instead of
# five; DeepSpeed's pipeline uses twelve buffers.
_BUFFERS = cached_sub_group_buffers(False, cached_sub_groups_for(len(_PATHS)))


def _arm(variant: str, *, turns: bool = True, keeps: bool = True, exclusive: bool = True, **others: Any) -> Arrangement:
    """Return an arm, which lacks a part of MLP-Offload for each flag that is false. `turns`: alternate the order of the
    update; `keeps`: leave gradients in host memory; `exclusive`: one process at a time on a path; `keys`: more keys of
    the section."""
    parts: dict[str, Any] = {
        **_PARTS,
        "gradients": "host" if keeps else "nvme",
        "sub_group_order": "alternating" if turns else "ascending",
        "tier_exclusive": exclusive,
        **others.pop("keys", {}),
    }
    label = f"MLP-Offload ({variant})" if variant else "MLP-Offload"
    fields: dict[str, Any] = {"derives_sizes": True, "over_paths": True, "turns_order": turns, "weights_on_gpu": True}
    return arrangement_of_parts(parts, label, **fields | others)


_ARMS = {
    "mlp_offload": _arm(""),
    "as_published": _arm("as published", keys={"tier_placement": "as_published"}),
    "by_hand": _arm("2:1 by hand", keys={"tier_placement": [2, 1]}),
    "free": _arm("processes share the paths as it comes", exclusive=False),
    "in_files": _arm("a file for each tensor", first_path=True, keys={"aio": "file"}),
    "zero3": arrangement_of_parts(
        _STOCK,
        "DeepSpeed ZeRO-3 (pipelined)",
        weights_on_gpu=True,
        optimizer_buffers=_BUFFERS,
        refuses_bf16_states="stock DeepSpeed fails",
    ),
    "caching": _arm("caching", keeps=False, exclusive=False, first_path=True),
    "skip_gradients": _arm("caching, gradients kept", exclusive=False, first_path=True),
    "exclusive": _arm("first path alone", first_path=True),
    "multi_path_only": _arm("several paths only", turns=False, keeps=False, exclusive=False),
    "gradients_only": _arm("gradients kept only", turns=False, exclusive=False, first_path=True),
    "exclusive_only": _arm("one process at a time only", turns=False, keeps=False, first_path=True),
    "caching_only_all_paths": _arm("several paths and caching", keeps=False, exclusive=False),
    "weights_on_paths": _arm("weights on the paths too", weights_on_gpu=False),
}


def _configure(run: RunSpec, sizes: Sizes, nvme_path: str) -> dict[str, Any]:
    """Return the DeepSpeed configuration with two folders in `nvme_path` as paths; a user's `tiers` replace them."""
    param, optimizer = nvme_offload(run, sizes, nvme_path)
    if _ARMS[run.arm].weights_on_gpu:
        param = {"device": "none"}
    if run.arm == "zero3":
        optimizer |= {"pipeline_read": True, "pipeline_write": True}
    optimizer["buffer_count"] = _BUFFERS
    config = zero3_config(run, param, optimizer)
    config["data_types"]["grad_accum_dtype"] = run.dtype  # half precision until the update (3.2)
    if run.arm == "zero3":
        return config
    tiers = [os.path.join(nvme_path, name) for name in _PATHS]
    return config | {"memascend": {"tiers": tiers[:1] if _ARMS[run.arm].first_path else tiers}}


SYSTEM = DeepSpeedSystem(
    name="mlp_offload", arms=_ARMS, configure=_configure, buffers=update_over_paths, tasks=schedule
)
