"""Optimizer buffers of one path without a buffer for the gradient, used when gradients are read in the flat buffer.

A sub-group that needs its gradient in a swap buffer after all (:mod:`.deferred_grad_conversion` says when) gets an
additional buffer, which is kept, because the next step needs it again.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.swap_tensor.utils import SwapBufferManager

from memascend.planner.derived_sizes import STATES


class GrowingBuffers(SwapBufferManager):
    """Replacement of ``optimizer_utils.SwapBufferManager`` that can grow; ``count`` is the initial number of buffers.

    With pipelined reads and writes three sub-groups are in flight, and each may need one additional buffer.
    """

    def allocate(self, num_elems: int, count: int, dtype: torch.dtype) -> list[torch.Tensor] | None:
        """Return ``count`` free buffers, allocating missing ones within the limit; None if there are too few."""
        missing = count - len(self.free_buffer_index)
        if missing > 0 and len(self.all_buffers) + missing <= self.count + self.count // STATES:
            like: Any = torch.empty(0, dtype=self.dtype)
            for _ in range(missing):
                self.all_buffers.append(self.aio_handle.new_cpu_locked_tensor(self.num_elems, like).zero_())
                self.free_buffer_index.append(len(self.all_buffers) - 1)
        return super().allocate(num_elems, count, dtype)
