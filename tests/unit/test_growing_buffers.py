"""Optimizer buffers that start without one for the gradient grow by one for each sub-group in flight, and no more."""

import pytest
import torch

pytestmark = pytest.mark.deepspeed

NUMEL = 16


class Handle:
    def new_cpu_locked_tensor(self, numel, like):
        return torch.empty(numel, dtype=like.dtype)

    def free_cpu_locked_tensor(self, tensor):
        pass


@pytest.fixture
def made(monkeypatch):
    from deepspeed.runtime.swap_tensor import utils

    from memascend.integrations.deepspeed.growing_buffers import GrowingBuffers

    monkeypatch.setattr(utils.dist, "get_rank", lambda: 1)  # rank 0 prints
    return lambda count: GrowingBuffers(num_elems=NUMEL, count=count, dtype=torch.float32, aio_handle=Handle())


def taken(buffers, count):
    return buffers.allocate(NUMEL, count, torch.float32)


@pytest.mark.parametrize("sub_groups", [1, 2, 3])
def test_each_sub_group_in_flight_may_add_one_gradient_buffer(made, sub_groups):
    buffers = made(3 * sub_groups)
    groups = [taken(buffers, 4) for _ in range(sub_groups)]
    assert len({buffer.data_ptr() for group in groups for buffer in group}) == 4 * sub_groups
    assert taken(buffers, 4) is None
    buffers.free(groups[0])
    assert len(taken(buffers, 3)) == 3
    assert len(buffers.all_buffers) == 4 * sub_groups


def test_no_buffer_is_added_while_no_gradient_needs_one(made):
    buffers = made(9)
    for _ in range(3):
        groups = [taken(buffers, 3) for _ in range(3)]
        for group in groups:
            buffers.free(group)
    assert len(buffers.all_buffers) == 9
