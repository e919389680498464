"""Sizes derived from a model's tensors and from the machine, in DeepSpeed's order of counting."""

from __future__ import annotations

import subprocess
import sys

import pytest

from memascend.planner.derived_sizes import (
    cached_sub_group_buffers,
    cached_sub_groups_for,
    cached_sub_groups_in,
    cached_sub_groups_within,
    io_settings,
    largest_sub_group,
    optimizer_buffers,
    sub_group_size,
)

EMBEDDING, BLOCK = (
    545_000_000,
    [12_800_000, 3_600, 1_800_000, 1_800_000, 12_800_000, 67_900_000, 67_900_000, 67_900_000],
)
MODEL = [EMBEDDING, *(BLOCK * 28), 3_584, EMBEDDING]  # order and sizes of Qwen2.5-7B


def test_sub_group_closes_as_soon_as_it_is_large_enough():
    assert largest_sub_group([[4, 4, 4, 4]], 8) == 8
    assert largest_sub_group([[4, 7, 1]], 8) == 11
    assert largest_sub_group([[1, 1, 1], [100]], 1000) == 100
    assert largest_sub_group([[1, 1, 1]], 1000) == 3


@pytest.mark.parametrize("groups", [[MODEL], [MODEL[::2], MODEL[1::2]], [[7]], [[64, 64, 64]], [[1, 10, 100, 1000]]])
def test_no_sub_group_is_much_larger_than_the_largest_tensor(groups):
    largest = max(n for group in groups for n in group)
    size = sub_group_size(groups)
    assert largest_sub_group(groups, size) <= max(1.02 * largest, min(largest_sub_group(groups, 1), 2 * largest))


def test_sub_groups_are_as_large_as_largest_tensor_allows():
    assert sub_group_size([[64, 64, 64]]) == 64
    assert sub_group_size([MODEL]) > 30_000_000


def test_io_settings_follow_the_machine_unless_given(tmp_path):
    derived = io_settings({}, tmp_path)
    assert derived.block_bytes == 1 << 20
    assert 1 <= derived.queue_depth <= 32
    assert derived.workers >= 2
    said = io_settings({"aio": {"block_size": 1 << 18, "queue_depth": 3, "intra_op_parallelism": 5}}, tmp_path)
    assert (said.block_bytes, said.queue_depth, said.workers) == (1 << 18, 3, 5)


def test_each_pipelined_direction_adds_one_sub_group_of_optimizer_buffers():
    assert optimizer_buffers({}) == 4
    assert optimizer_buffers({"pipeline_read": True}) == 8
    assert optimizer_buffers({"pipeline_read": True, "pipeline_write": True}) == 12


def test_derived_sizes_need_neither_torch_nor_deepspeed():
    """The planner derives them where neither is installed."""
    program = "import sys, memascend.planner.derived_sizes; print(sorted({'torch', 'deepspeed'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_each_further_path_adds_two_cached_sub_groups():
    assert [cached_sub_groups_for(paths) for paths in (1, 2, 3)] == [3, 5, 7]


def test_more_host_memory_allows_more_cached_sub_groups():
    sizes = {"gradient_bytes": 1000, "buffer_bytes": 100, "sub_groups": 12, "swaps_gradients": False}
    cached = [cached_sub_groups_within(left, **sizes) for left in (0, 1000, 3000, 4000, 100_000)]
    assert cached == [3, 3, 5, 8, 12]
    assert cached_sub_groups_within(3000, **sizes | {"swaps_gradients": True}) == 3
    assert (cached_sub_group_buffers(False, 5), cached_sub_group_buffers(True, 5)) == (15, 21)
    assert (
        cached_sub_groups_in(15, False),
        cached_sub_groups_in(16, False),
        cached_sub_groups_in(21, True),
        cached_sub_groups_in(20, True),
    ) == (5, 5, 5, 4)
