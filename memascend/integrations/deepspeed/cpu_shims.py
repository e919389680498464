"""Shims that DeepSpeed's CPU accelerator needs to train correctly; the same for every system, listed in each record.

None of them concerns a GPU. Each function installs a shim and returns a function that restores the replaced code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Undo = Callable[[], None]


def clone_after_gather() -> Undo:
    """Clone each parameter gathered on a single rank, so that it does not alias the swap buffer.

    In ``NoGather(Coalesced)Handle`` ``.to(device)`` copies on a GPU but aliases the buffer on the CPU, which is reused
    while the parameter is read. Cloning restores the GPU's semantics. Without it stock DeepSpeed trains wrongly and
    reports no error.
    """
    from deepspeed.runtime.zero import partition_parameters as module

    stock_single, stock_many = module.NoGatherHandle.__init__, module.NoGatherCoalescedHandle.__init__

    def single(self: Any, param: Any) -> None:
        stock_single(self, param)
        param.data = param.data.clone()

    def many(self: Any, params: Any) -> None:
        stock_many(self, params)
        for param in params:
            param.data = param.data.clone()

    module.NoGatherHandle.__init__, module.NoGatherCoalescedHandle.__init__ = single, many

    def undo() -> None:
        module.NoGatherHandle.__init__, module.NoGatherCoalescedHandle.__init__ = stock_single, stock_many

    return undo


def keep_asked_dtype() -> Undo:
    """Make ``Init(dtype=...)`` use the requested dtype on a CPU without fp16.

    Stock ``Init`` then uses bfloat16 whatever is requested, because its ``dtype or fp16 if ... else bf16`` parses
    differently from how it reads. Swapped float32 weights were rounded by that, without an error.
    """
    from deepspeed.runtime.zero.partition_parameters import Init

    stock = Init._set_dtype

    def set_dtype(self: Any, ds_config: Any, dtype: torch.dtype | None) -> None:
        stock(self, ds_config, dtype)
        if dtype is not None:
            self.dtype = dtype

    Init._set_dtype = set_dtype

    def undo() -> None:
        Init._set_dtype = stock

    return undo


def allow_fp16_on_cpu(accelerator_class: type) -> Undo:
    """Allow fp16 on a CPU without AVX512-FP16, which DeepSpeed refuses although storage and semantics work there."""
    stock = accelerator_class.is_fp16_supported
    stock_dtypes = accelerator_class.supported_dtypes

    def supported_dtypes(self: Any) -> list[torch.dtype]:
        return list({*stock_dtypes(self), torch.float16})

    accelerator_class.is_fp16_supported = lambda self: True
    accelerator_class.supported_dtypes = supported_dtypes

    def undo() -> None:
        accelerator_class.is_fp16_supported = stock
        accelerator_class.supported_dtypes = stock_dtypes

    return undo
