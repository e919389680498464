"""The overflow check for gradients outside host memory.

DeepSpeed keeps them on the accelerator unless it offloads the optimizer. No accelerator is needed: memory of the device
"meta" is not host memory either.
"""

from __future__ import annotations

import math

import pytest
import torch

from memascend.ops.overflow import has_overflow

pytestmark = pytest.mark.deepspeed


@pytest.fixture
def local_overflow():
    from memascend.integrations.deepspeed.optimizer import local_overflow

    return local_overflow


@pytest.mark.parametrize("largest", [1.0, math.inf, math.nan])
def test_gradients_on_a_device_get_one_aminmax(local_overflow, monkeypatch, largest):
    reduced = []

    def aminmax(tensor):
        reduced.append(tensor)
        return torch.tensor(0.0), torch.tensor(largest)

    monkeypatch.setattr(torch, "aminmax", aminmax)
    gradients = torch.empty(1000, dtype=torch.float16, device="meta")
    with pytest.raises(ValueError):
        has_overflow(gradients)
    assert local_overflow("fused", gradients) is not math.isfinite(largest)
    assert len(reduced) == 1
    assert reduced[0] is gradients


def test_gradients_in_host_memory_get_the_fused_check(local_overflow, monkeypatch):
    monkeypatch.setattr(torch, "aminmax", None)
    assert local_overflow("fused", torch.tensor([1.0, math.inf]))
    assert not local_overflow("fused", torch.tensor([1.0, 2.0]))
