"""enable() validates before it changes anything, and disable() restores stock DeepSpeed."""

from __future__ import annotations

import os
import sys
import tempfile
import types

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytestmark = pytest.mark.deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 3, "memory_efficient_linear": False, "offload_param": {"device": "cpu"}},
}


def places():
    import deepspeed
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
        "engine": DeepSpeedEngine.__init__,
        "initialize": deepspeed.initialize,
    }


def test_disable_restores_every_hook():
    import memascend

    before = places()
    memascend.enable(CONFIG, loss="plain")
    assert places()["optimizer"] is not before["optimizer"]
    assert places()["linear"] is not before["linear"]
    assert places()["engine"] is not before["engine"]
    memascend.disable()
    assert places() == before


def test_buffer_of_one_handle_counts_as_pinned_for_all():
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


def test_builders_of_an_editable_installation_get_our_ops(monkeypatch):
    """Accelerators take the builders of the source tree's own package `op_builder` if it is on the path."""
    import memascend

    tree, builder = types.ModuleType("op_builder"), types.ModuleType("op_builder.builder")
    tree.__deepspeed__ = True
    builder.OpBuilder = type("OpBuilder", (), {"_loaded_ops": {}})
    monkeypatch.setitem(sys.modules, "op_builder", tree)
    monkeypatch.setitem(sys.modules, "op_builder.builder", builder)
    memascend.enable(CONFIG)
    try:
        assert builder.OpBuilder._loaded_ops["async_io"] is places()["op"] is not None
    finally:
        memascend.disable()
    assert builder.OpBuilder._loaded_ops == {}


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
        ({"memascend": {"pinned": "stock"}}, "cannot be combined with aio"),
        ({"memascend": {"aio": "memascend"}}, "file"),
        ({"memascend": {"devices": "/dev/nvme1n1"}}, "list of paths"),
        ({"memascend": {"devices": ["/dev/nvme1n1"], "aio": "file"}}, "cannot be combined with aio"),
        ({"memascend": {"devices": ["/dev/no-such-device"]}}, "there is no"),
        ({"memascend": {"devices": ["/proc/version"]}}, "holds no store"),
        ({"memascend": {"blocks_in_flight": 0}}, "at least 1"),
        ({"memascend": {"blocks_in_flight": True}}, "at least 1"),
        ({"memascend": {"blocks_in_flight": 2, "pool": "stock"}}, "blocks_in_flight has no effect with pool='stock'"),
        ({"memascend": "adaptive"}, "section"),
        ({"memasend": {"host_memory": "1GiB"}}, "would be ignored .did you mean memascend"),
        ({"Memascend": {"enabled": False}}, "would be ignored .did you mean memascend"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/proc/memascend"}}},
            "nvme_path",
        ),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "nvme_path"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nowhere/x"}}},
            "offload_param.nvme_path: /nowhere/x cannot be created, since /nowhere does not exist",
        ),
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
        ({"memascend": {"require_direct": 1}}, 'require_direct" must be true or false, got 1'),
        (
            {"memascend": {"require_direct": True, "aio": "stock", "pinned": "stock", "pool": "stock"}},
            "require_direct has no effect with aio='stock'",
        ),
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


def test_missing_configuration_file_is_named():
    import memascend

    with pytest.raises(ValueError, match=r"JSON in base64, got 'ds\.json', which is neither; check that the file"):
        memascend.enable("ds.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"zero_optimization": {"stage": 3},,\n "memascend": {}}', r"ds\.json, line 1, column 36: .*a comma or a"),
        ('{"zero_optimization": {"stage": 3},\n "memascend": {}\n', r"ds\.json ends too early: .* not closed"),
        ('{"memascend": {}, "a": 1, "a": 2}', r"ds\.json: Duplicate keys .*; remove one of the two"),
    ],
)
def test_json_mistake_is_reported_in_one_line_with_position(tmp_path, text, message):
    import memascend

    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        memascend.enable(tmp_path / "ds.json")
    assert "\n" not in str(caught.value)


def test_devices_without_anything_on_nvme_are_refused(tmp_path):
    import memascend
    from memascend.storage.commands import preallocate
    from memascend.storage.native import _C

    store = str(tmp_path / "store")
    preallocate(store, 1 << 24, written=False)
    _C.storage_format([store], "tests", [], 4096, 16384)
    with pytest.raises(ValueError, match=r"but nothing is: set zero_optimization\.offload_param\.device"):
        memascend.enable(CONFIG | {"memascend": {"devices": [store]}})


@pytest.fixture
def in_memory():
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no writable /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield folder


def nvme_config(folder, section):
    offload = {"device": "nvme", "nvme_path": str(folder)}
    zero = CONFIG["zero_optimization"] | {"offload_param": offload}
    return CONFIG | {"zero_optimization": zero, "memascend": section}


@pytest.mark.parametrize("aio", ["direct", "file"])
def test_file_system_without_required_o_direct_is_refused(in_memory, aio):
    import memascend

    before = places()
    with pytest.raises(ValueError, match=r"offload_param\.nvme_path: the file system of .* refuses O_DIRECT") as caught:
        memascend.enable(nvme_config(in_memory, {"require_direct": True, "aio": aio}))
    assert "\n" not in str(caught.value)
    assert places() == before
    assert os.listdir(in_memory) == []
    memascend.enable(nvme_config(in_memory, {"require_direct": False, "aio": aio}))
    memascend.disable()


@pytest.mark.parametrize("aio", ["direct", "file"])
def test_engines_refuse_transfers_without_required_o_direct(in_memory, monkeypatch, aio):
    """This matters if the kernel refuses O_DIRECT once they transfer."""
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    import memascend
    from memascend.integrations.deepspeed import config
    from memascend.storage.folders import DirectLimits

    monkeypatch.setattr(config, "direct_limits", lambda folder: DirectLimits(True, 512))
    memascend.enable(nvme_config(in_memory, {"require_direct": True, "aio": aio}))
    try:
        handle = AsyncIOBuilder().load().aio_handle()
        with pytest.raises((RuntimeError, OSError), match="refuses O_DIRECT"):
            handle.sync_pwrite(torch.zeros(10_000), f"{in_memory}/zero_stage_3/0.swp")
        handle.close()
    finally:
        memascend.disable()


def test_odd_block_size_is_accepted_with_deepspeeds_own_engine():
    import memascend

    stock = {"pinned": "stock", "aio": "stock", "pool": "stock"}
    memascend.enable(CONFIG | {"memascend": stock, "aio": {"block_size": 1000}})
    memascend.disable()


def test_accelerator_pins_tensors_with_page_alignment_and_exact_size():
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
def test_parameters_kept_in_memory_by_the_user_cause_a_warning(tmp_path, offload, message):
    import memascend

    offload = {"device": "nvme", "nvme_path": str(tmp_path)} | offload
    config = CONFIG | {"zero_optimization": CONFIG["zero_optimization"] | {"offload_param": offload}}
    try:
        warnings = memascend.enable(config).warnings
        assert [message in w for w in warnings] == ([True] if message else [])
    finally:
        memascend.disable()


@pytest.mark.parametrize(
    ("section", "keywords", "off"),
    [({"enabled": False}, {}, True), ({}, {"enabled": False}, True), ({"enabled": False}, {"enabled": True}, False)],
)
def test_disabled_configuration_leaves_deepspeed_unchanged(section, keywords, off):
    import memascend

    before = places()
    memascend.enable(CONFIG | {"memascend": section}, **keywords)
    try:
        assert (places() == before) == off
    finally:
        memascend.disable()


def test_pinned_memory_can_be_left_out():
    import memascend

    state = memascend.enable(CONFIG | {"memascend": {"pinned": "stock", "aio": "stock", "pool": "stock"}})
    try:
        assert state.parts.overflow == "fused"
    finally:
        memascend.disable()


def test_budget_applies_from_enable_to_disable(monkeypatch):
    import torch
    from deepspeed.ops.op_builder import PinMemoryBuilder

    import memascend
    from memascend.memory.budget import HostBudgetExceeded
    from memascend.memory.ledger import Ledger

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    ledger = Ledger()
    memascend.enable(CONFIG | {"memascend": {"host_memory": "2MiB"}}, ledger=ledger)
    try:
        pin = PinMemoryBuilder().load().pin_handle()
        kept = pin.new_cpu_locked_tensor(1 << 19, torch.empty(0, dtype=torch.uint8))
        with pytest.raises(HostBudgetExceeded, match=r"budget of 1\.00 MiB \(this rank's share of 2\.00 MiB\)"):
            pin.new_cpu_locked_tensor(1 << 20, torch.empty(0, dtype=torch.uint8))
        assert kept.numel() == 1 << 19
    finally:
        memascend.disable()
    assert ledger.budget is None


@pytest.mark.parametrize("amount", ["24G", 0, "much", True])
def test_invalid_budget_is_refused_naming_its_key(amount):
    import memascend

    with pytest.raises(ValueError, match=r'^"memascend\.host_memory": .* write 24GiB'):
        memascend.enable(CONFIG | {"memascend": {"host_memory": amount}})
    assert memascend.integrations.deepspeed.active() is None


def test_training_beyond_its_budget_fails_naming_the_requester(tmp_path):
    from trainings import Job, train_all

    job = Job(name="x", config={"memascend": {"host_memory": "3MiB"}}, steps=1)
    with pytest.raises(AssertionError, match=r"HostBudgetExceeded: \w+ asks for .* of the budget of 3\.00 MiB; in use"):
        train_all([job], tmp_path)
