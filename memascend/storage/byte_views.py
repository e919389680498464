"""A tensor's memory as bytes."""

from __future__ import annotations

import torch


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Of `n` bytes: (n,) of uint8. Of a contiguous tensor its own memory, of any other a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def byte_view(tensor: torch.Tensor) -> memoryview:
    """As `flat_bytes`, of a tensor in host memory."""
    return memoryview(flat_bytes(tensor).numpy().data) if tensor.numel() else memoryview(b"")
