"""Planning before a run: model specifications and predictions of the host memory that it needs.

Specifications and workloads need neither torch nor the extension; `plan` and `Plan` import both on first use.
"""

from typing import TYPE_CHECKING, Any

from memascend.planner.spec import ModelSpec, known_models, model_spec
from memascend.planner.tensors import TensorSpec
from memascend.planner.workload import SwapSizes, Workload

if TYPE_CHECKING:
    from memascend.planner.footprint import Plan, plan
    from memascend.planner.host_budget import HostMemoryTooSmall, require_host_memory

__all__ = [
    "HostMemoryTooSmall",
    "ModelSpec",
    "Plan",
    "SwapSizes",
    "TensorSpec",
    "Workload",
    "known_models",
    "model_spec",
    "plan",
    "require_host_memory",
]


def __getattr__(name: str) -> Any:
    """Import the names that need torch on first use."""
    if name in ("Plan", "plan"):
        from memascend.planner import footprint

        return getattr(footprint, name)
    if name in ("HostMemoryTooSmall", "require_host_memory"):
        from memascend.planner import host_budget

        return getattr(host_budget, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
