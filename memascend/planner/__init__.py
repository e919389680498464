"""What will fit, before a run: model specifications and host-memory plans.

Specifications need neither torch nor the extension; `plan` and `Plan` bring both in, on first use.
"""

from typing import TYPE_CHECKING, Any

from memascend.planner.spec import ModelSpec, TensorSpec, known_models, model_spec

if TYPE_CHECKING:
    from memascend.planner.footprint import Plan, plan

__all__ = ["ModelSpec", "Plan", "TensorSpec", "known_models", "model_spec", "plan"]


def __getattr__(name: str) -> Any:
    if name in ("Plan", "plan"):
        from memascend.planner import footprint

        return getattr(footprint, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
