"""DeepNVMe's own `aio_handle`, as a baseline for measurements."""

from __future__ import annotations

from typing import Any


def deepnvme_handle(block_bytes: int, depth: int, workers: int = 1) -> Any:
    """Return a stock handle with overlapped submission, its best documented setting.

    Raises ImportError if DeepNVMe cannot be loaded.
    """
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        module = AsyncIOBuilder().load(verbose=False)
    except (ImportError, RuntimeError) as error:
        raise ImportError(f"DeepNVMe cannot be loaded: {error}") from error
    return module.aio_handle(block_bytes, depth, False, True, workers)
