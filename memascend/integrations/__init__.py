"""The only packages that import DeepSpeed and transformers."""
