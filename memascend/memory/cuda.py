"""The only interface to CUDA: registers page-locked host memory with the driver, and unregisters it.

It only uses `torch.cuda.cudart()`: no CUDA toolkit is needed to build, and nothing here runs at import.
"""

from __future__ import annotations

import os
from typing import Any

import torch

_CUDA_SUCCESS = 0
_REGISTER_DEFAULT_FLAGS = 0

# The driver context belongs to the process that created it: a forked child must not undo its parent's registrations.
_registered: dict[int, tuple[int, int]] = {}  # address -> (bytes, process id)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def available() -> bool:
    """Return whether host memory can be registered, which needs a CUDA build of torch and a working device."""
    return torch.cuda.is_available()


def register(address: int, length_bytes: int) -> None:
    """Register [address, address + length_bytes) for direct transfers. Both must be multiples of the page size.

    Raises ValueError if the range is registered already, RuntimeError if the driver refuses.
    """
    if address in _registered:
        raise ValueError(f"host memory at {address:#x} is already registered with CUDA: unregister it first")
    code = int(_cudart().cudaHostRegister(address, length_bytes, _REGISTER_DEFAULT_FLAGS))
    if code != _CUDA_SUCCESS:
        raise RuntimeError(
            f"cudaHostRegister of {length_bytes} bytes at {address:#x} failed with code {code}: "
            "raise the locked-memory limit (ulimit -l) or allocate with register_cuda=False"
        )
    _registered[address] = (length_bytes, os.getpid())


def unregister(address: int) -> None:
    """Undo `register`. Does nothing in a forked child: the registration is the parent's.

    Raises ValueError for an address that is not registered, RuntimeError if the driver refuses.
    """
    if address not in _registered:
        raise ValueError(f"host memory at {address:#x} is not registered with CUDA")
    _, process = _registered[address]
    if process != os.getpid():
        return
    code = int(_cudart().cudaHostUnregister(address))
    if code != _CUDA_SUCCESS:
        raise RuntimeError(f"cudaHostUnregister of {address:#x} failed with code {code}")
    del _registered[address]
