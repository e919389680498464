"""Kernels on host tensors."""
