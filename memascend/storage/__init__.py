"""Moving tensors between host memory and files."""
