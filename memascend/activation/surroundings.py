"""Queries of the process that a cache runs in: calls in progress, the device, its free memory."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch


def calls_itself(module: torch.nn.Module) -> bool:
    """Return whether the current forward pass is nested inside another one of the same module, on this thread."""
    frame: FrameType | None = sys._getframe()
    calls = 0
    while frame is not None and calls < 2:
        code = frame.f_code
        calls += code is torch.nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls > 1


def device_in_use() -> str:
    """Return the type of torch's current accelerator, or "cpu" if there is none available."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator is not None else "cpu"


def device_named(device: str) -> str:
    """Return the type of a device such as "cuda". Raises ValueError, in one line, if torch knows no such device."""
    try:
        return torch.device(device).type
    except RuntimeError:
        raise ValueError(
            f"activations: device {device!r} is unknown to torch; use 'cuda' or 'cpu', or omit it"
        ) from None


def free_device_bytes(device: str) -> int | None:
    """Return the free bytes of the current device of this type ("cpu": of the machine), or None if unknown."""
    if device == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    module = torch.get_device_module(device)
    return int(module.mem_get_info()[0]) if hasattr(module, "mem_get_info") else None
