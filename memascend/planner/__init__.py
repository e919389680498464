"""What will fit, before a run: model specifications and host-memory plans."""

from memascend.planner.spec import ModelSpec, TensorSpec, known_models, model_spec

__all__ = ["ModelSpec", "TensorSpec", "known_models", "model_spec"]
