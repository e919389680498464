"""The only rooms that import DeepSpeed and transformers."""
