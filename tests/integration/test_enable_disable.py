"""enable() validates before it touches anything, and disable() gives stock DeepSpeed back."""

from __future__ import annotations

import os
import sys

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytestmark = pytest.mark.deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 3, "memory_efficient_linear": False, "offload_param": {"device": "cpu"}},
}


def places():
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import partition_parameters, stage3

    return {
        "swapper": partition_parameters.AsyncPartitionedParameterSwapper,
        "optimizer": stage3.DeepSpeedZeroOptimizer_Stage3,
        "op": OpBuilder._loaded_ops.get("async_io"),
        "pin op": getattr(sys, "_deepspeed_pin_memory_op_module", None),
        "accelerator": get_accelerator(),
        "linear": torch.nn.functional.linear,
        "gather": partition_parameters.NoGatherHandle.__init__,
        "fp16": type(get_accelerator()).is_fp16_supported,
        "save": DeepSpeedEngine.save_checkpoint,
        "load": DeepSpeedEngine.load_checkpoint,
    }


def test_disable_restores_every_hook():
    import memascend

    before = places()
    memascend.enable(CONFIG)
    assert places()["optimizer"] is not before["optimizer"]
    assert places()["linear"] is not before["linear"]
    memascend.disable()
    assert places() == before


def test_a_buffer_of_one_handle_is_pinned_for_every_other():
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder

    import memascend

    memascend.enable(CONFIG)
    try:
        pin, aio = PinMemoryBuilder().load().pin_handle(), AsyncIOBuilder().load().aio_handle()
        for maker in (pin, aio):
            buffer = maker.new_cpu_locked_tensor(4096, torch.empty(0))
            assert pin.is_pinned(buffer)
            assert aio.is_pinned(buffer[1024:])
        assert not pin.is_pinned(torch.empty(4096))
    finally:
        memascend.disable()


def test_enabling_twice_is_refused():
    import memascend

    memascend.enable(CONFIG)
    try:
        with pytest.raises(RuntimeError, match="already"):
            memascend.enable(CONFIG)
    finally:
        memascend.disable()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"zero_optimization": {"stage": 2}}, "stage 3"),
        ({"memascend": {"poool": "adaptive"}}, "poool"),
        ({"memascend": {"pool": "huge"}}, "huge"),
        ({"memascend": {"pinned": "stock"}}, "no sense"),
        ({"memascend": {"aio": "memascend"}}, "file"),
        ({"memascend": {"devices": "/dev/nvme1n1"}}, "list of paths"),
        ({"memascend": {"devices": ["/dev/nvme1n1"], "aio": "file"}}, "makes no sense"),
        ({"memascend": {"devices": ["/dev/no-such-device"]}}, "there is no"),
        ({"memascend": {"devices": ["/proc/version"]}}, "holds no store"),
        ({"memascend": {"blocks_in_flight": 0}}, "at least 1"),
        ({"memascend": {"blocks_in_flight": True}}, "at least 1"),
        ({"memascend": "adaptive"}, "section"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/proc/memascend"}}},
            "nvme_path",
        ),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "nvme_path"),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_param": {"device": "nvme", "nvme_path": "x"},
                    "offload_optimizer": {"device": "cpu", "fast_init": True},
                }
            },
            "fast_init",
        ),
        ({"zero_optimization": {"stage": 3}}, "memory_efficient_linear"),
        ({"memascend": {"Pool": "adaptive"}}, "did you mean pool"),
        ({"memascend": {1: "adaptive", "a": 2}}, "unknown key 1 "),
        ({"memascend": {"pool": ["adaptive"]}}, "memascend.pool.*choose one of"),
        ({"memascend": {"overflow": False}}, "memascend.overflow.*choose one of"),
        ({"memascend": {"attention": {}}}, "memascend.attention.*choose one of"),
        ({"memascend": {"blocks_in_flight": "2"}}, "at least 1, got '2'"),
        ({"memascend": {"enabled": 0}}, "true or false"),
        ({"memascend": {"numerics": "fast", "overflow": "chain"}}, "set overflow to 'fused'"),
        ({"memascend": {"devices": False}}, "list of paths"),
        ({"memascend": {"devices": [""]}}, "there is no ''"),
        ({"memascend": {"devices": ["/proc"]}}, '"memascend.devices": /proc is neither'),
        ({"memascend": {"devices": ["/proc/version", "/proc/version"]}}, "name each device once"),
        ({"memascend": {"optimizer_states": "bf16"}}, "set fp16.enabled to false"),
        ({"fp16": True}, '"fp16" .* must be a section such as {"enabled": true}, got True'),
        ({"zero_optimization": 3}, '"zero_optimization" .* {"stage": 3}, got 3'),
        ({"zero_optimization": {"stage": 3, "offload_param": "nvme"}}, '"zero_optimization.offload_param" .* section'),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "ssd"}}},
            "offload_optimizer.device: 'ssd'",
        ),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "NVMe"}}}, "one of none, cpu, nvme"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": ["/tmp"]}}},
            "offload_param.nvme_path must be the path",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "max_in_cpu": "1e9"}}},
            "offload_param.max_in_cpu must be a whole number of at least 0, got '1e9'",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "buffer_count": 4.5}}},
            "offload_optimizer.buffer_count must be a whole number of at least 1, got 4.5",
        ),
        ({"aio": "fast"}, '"aio" .* section'),
        ({"aio": {"block_size": "1M"}}, "aio.block_size must be a whole number of at least 1, got '1M'"),
        ({"aio": {"block_size": 1000}}, "multiple of 4096 bytes, got 1000"),
        ({"aio": {"queue_depth": 0}}, "aio.queue_depth must be a whole number from 1 to 1024, got 0"),
        ({"aio": {"intra_op_parallelism": True}}, "aio.intra_op_parallelism must be .* got True"),
        ({"optimizer": "AdamW"}, '"optimizer" .* {"type": "AdamW"}'),
        ({"optimizer": {"type": "AdamW", "params": [1]}}, '"optimizer.params" .* section'),
    ],
)
def test_bad_configurations_are_refused_in_one_line_and_change_nothing(change, message):
    import memascend

    before = places()
    with pytest.raises(ValueError, match=message) as caught:
        memascend.enable(CONFIG | change)
    assert "\n" not in str(caught.value)
    assert places() == before


def test_a_path_in_place_of_the_configuration_is_refused_with_the_mend():
    import memascend

    with pytest.raises(ValueError, match=r"as a dict, got 'ds\.json'; read the file with json\.load"):
        memascend.enable("ds.json")


def test_devices_without_anything_on_nvme_are_refused(tmp_path):
    import memascend
    from memascend.storage.commands import preallocate
    from memascend.storage.native import _C

    store = str(tmp_path / "store")
    preallocate(store, 1 << 24, written=False)
    _C.storage_format([store], "tests", [], 4096, 16384)
    with pytest.raises(ValueError, match=r"and nothing is: set zero_optimization\.offload_param\.device"):
        memascend.enable(CONFIG | {"memascend": {"devices": [store]}})


def test_numbers_that_our_engines_do_not_take_are_left_to_deepspeeds_own():
    import memascend

    stock = {"pinned": "stock", "aio": "stock", "pool": "stock"}
    memascend.enable(CONFIG | {"memascend": stock, "aio": {"block_size": 1000}})
    memascend.disable()


def test_a_pinned_tensor_of_the_accelerator_is_pinned_and_exact():
    import torch
    from deepspeed.accelerator import get_accelerator

    import memascend

    state = memascend.enable(CONFIG)
    try:
        pinned = get_accelerator().pin_memory(torch.arange(5000, dtype=torch.float32))
        assert get_accelerator().is_pinned(pinned)
        assert pinned.data_ptr() % 4096 == 0
        assert torch.equal(pinned, torch.arange(5000, dtype=torch.float32))
        [entry] = state.ledger.live()
        assert entry.reserved_bytes - 5000 * 4 <= 4095
    finally:
        memascend.disable()


@pytest.mark.parametrize(
    ("offload", "message"),
    [({"max_in_cpu": 1e9}, "max_in_cpu=1e+09"), ({}, None), ({"max_in_cpu": 0}, None)],
)
def test_parameters_that_stay_in_memory_because_the_user_said_so_are_warned_about(tmp_path, offload, message):
    import memascend

    offload = {"device": "nvme", "nvme_path": str(tmp_path)} | offload
    config = CONFIG | {"zero_optimization": CONFIG["zero_optimization"] | {"offload_param": offload}}
    try:
        warnings = memascend.enable(config).warnings
        assert [message in w for w in warnings] == ([True] if message else [])
    finally:
        memascend.disable()


def test_a_configuration_that_switches_memascend_off_leaves_deepspeed_alone():
    import memascend

    before = places()
    memascend.enable(CONFIG | {"memascend": {"enabled": False}})
    try:
        assert places() == before
    finally:
        memascend.disable()


def test_pinned_memory_can_be_left_out():
    import memascend

    state = memascend.enable(CONFIG | {"memascend": {"pinned": "stock", "aio": "stock", "pool": "stock"}})
    try:
        assert state.parts.overflow == "fused"
    finally:
        memascend.disable()
