"""What the user leaves out is derived; what the user set is kept, and warned about where it hurts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from memascend.integrations.deepspeed.derived import (
    DerivedSettings,
    io_settings,
    largest_sub_group,
    sub_group_size,
)

EMBEDDING, BLOCK = (
    545_000_000,
    [12_800_000, 3_600, 1_800_000, 1_800_000, 12_800_000, 67_900_000, 67_900_000, 67_900_000],
)
MODEL = [EMBEDDING, *(BLOCK * 28), 3_584, EMBEDDING]  # Qwen2.5-7B's order and sizes


def offloaded(**optimizer):
    return {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": "/"},
            "offload_optimizer": {"device": "nvme", "nvme_path": "/"} | optimizer,
        }
    }


def parameter(numel, trains=True):
    return SimpleNamespace(partition_numel=lambda: numel, requires_grad=trains)


def torch_optimizer(*groups):
    return SimpleNamespace(param_groups=[{"params": [parameter(n) for n in group]} for group in groups])


def arguments():
    param = SimpleNamespace(max_in_cpu=int(1e9))
    return {
        "sub_group_size": int(1e9),
        "offload_param_config": param,
        "offload_optimizer_config": SimpleNamespace(buffer_count=4),
    }


def test_a_sub_group_closes_as_soon_as_it_is_large_enough():
    assert largest_sub_group([[4, 4, 4, 4]], 8) == 8
    assert largest_sub_group([[4, 7, 1]], 8) == 11
    assert largest_sub_group([[1, 1, 1], [100]], 1000) == 100
    assert largest_sub_group([[1, 1, 1]], 1000) == 3


@pytest.mark.parametrize("groups", [[MODEL], [MODEL[::2], MODEL[1::2]], [[7]], [[64, 64, 64]], [[1, 10, 100, 1000]]])
def test_no_sub_group_is_much_larger_than_the_largest_tensor(groups):
    largest = max(n for group in groups for n in group)
    size = sub_group_size(groups)
    assert largest_sub_group(groups, size) <= max(1.02 * largest, min(largest_sub_group(groups, 1), 2 * largest))


def test_sub_groups_are_as_large_as_that_allows():
    assert sub_group_size([[64, 64, 64]]) == 64
    assert sub_group_size([MODEL]) > 30_000_000


def test_what_is_left_out_is_filled_in_and_said_in_one_line():
    derived, kwargs = DerivedSettings(offloaded(pipeline_read=True)), arguments()
    derived.fill_stage3(torch_optimizer([100, 200], [300]), kwargs)
    assert kwargs["sub_group_size"] == sub_group_size([[100, 200], [300]])
    assert kwargs["offload_param_config"].max_in_cpu == 0
    assert kwargs["offload_optimizer_config"].buffer_count == 8
    line = derived.line(pool_bytes=3 << 20)
    assert "\n" not in line
    for said in ("sub_group_size", "max_in_cpu 0", "buffer_count 8", "3.0 MiB", "1024 KiB"):
        assert said in line


def test_what_the_user_set_is_kept():
    config = offloaded(buffer_count=5)
    config["zero_optimization"] |= {"sub_group_size": 1e9}
    config["zero_optimization"]["offload_param"]["max_in_cpu"] = 1e9
    derived, kwargs = DerivedSettings(config), arguments()
    derived.fill_stage3(torch_optimizer([100]), kwargs)
    assert kwargs["sub_group_size"] == int(1e9)
    assert kwargs["offload_param_config"].max_in_cpu == int(1e9)
    assert kwargs["offload_optimizer_config"].buffer_count == 4  # as DeepSpeed read it
    assert derived.chosen == {}


def test_auto_is_left_out():
    config = offloaded(buffer_count="auto")
    config["zero_optimization"]["sub_group_size"] = "auto"
    derived, kwargs = DerivedSettings(config), arguments()
    derived.fill_stage3(torch_optimizer([100]), kwargs)
    assert set(derived.chosen) == {"sub_group_size", "max_in_cpu", "buffer_count"}


def test_too_few_optimizer_buffers_are_warned_about():
    [warning] = DerivedSettings(offloaded(buffer_count=8, pipeline_read=True, pipeline_write=True)).warnings()
    assert "buffer_count=8" in warning
    assert "12" in warning
    assert DerivedSettings(offloaded(buffer_count=4)).warnings() == []


def test_io_follows_the_machine_unless_the_user_said_how(tmp_path):
    derived = io_settings({}, tmp_path)
    assert derived.block_bytes == 1 << 20
    assert 1 <= derived.queue_depth <= 32
    assert derived.workers >= 2
    said = io_settings({"aio": {"block_size": 1 << 18, "queue_depth": 3, "intra_op_parallelism": 5}}, tmp_path)
    assert (said.block_bytes, said.queue_depth, said.workers) == (1 << 18, 3, 5)


def test_nothing_is_derived_for_what_is_not_on_nvme():
    derived, kwargs = DerivedSettings({"zero_optimization": {"stage": 3}}), arguments()
    derived.fill_stage3(torch_optimizer([100]), kwargs)
    assert derived.chosen == {}
