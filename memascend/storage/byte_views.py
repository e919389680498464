"""Views of a tensor's memory as bytes."""

from __future__ import annotations

import torch


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the `n` bytes of a tensor as a uint8 tensor of shape (n,): a view if it is contiguous, else a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory as a memoryview; like `flat_bytes`, a view or a copy."""
    return memoryview(flat_bytes(tensor).numpy().data) if tensor.numel() else memoryview(b"")
