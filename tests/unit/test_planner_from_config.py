"""`memascend plan --ds-config` plans the run of a DeepSpeed configuration; omitted values are derived as in a run."""

import json
import re

import pytest

from memascend.cli import main
from memascend.planner import Workload, model_spec, plan
from memascend.planner.derived_sizes import sub_group_size
from memascend.planner.from_config import SECTION_KEYS, CommandLine, workload_of
from memascend.planner.options import Stack

SPEC = model_spec("qwen2.5-7b")
SMALLEST = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "/swap"},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/swap"},
    },
    "memascend": {},
}


def configured(**keys):
    """Return the smallest configuration with additional or changed keys; a dotted key is inside a section."""
    config = json.loads(json.dumps(SMALLEST))
    for key, value in keys.items():
        *sections, last = key.split("__")
        inner = config
        for name in sections:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return config


def test_smallest_section_plans_the_drop_in():
    work = workload_of(configured(), SPEC, ranks=2, context=1024)
    partitions = [-(-tensor.numel // 2) for tensor in SPEC.tensors()]
    assert work.sub_group_size == sub_group_size([partitions])
    assert work.optimizer_buffers == 4
    assert (work.dtype, work.states, work.gradients) == ("bf16", "fp32", "bf16")  # DeepSpeed's default
    assert (work.system, work.arrangement.label, work.arrangement.direct) == ("memascend", "MemAscend", True)
    assert work.stack == Stack(attention="auto", loss="plain", checkpointing="none")


def test_plan_without_a_configuration_has_the_same_components():
    """Except for the stack, and for the gradient buffer, which `train` keeps in fp32."""
    stack = Stack(attention="auto", loss="plain", checkpointing="none")
    config = configured(data_types__grad_accum_dtype="fp32")
    plain = plan(Workload(spec=SPEC, dtype="bf16", stack=stack, sizes=workload_of(config, SPEC).sizes))
    assert plan(workload_of(config, SPEC)).components() == plain.components()


def test_values_set_by_the_user_are_kept():
    config = configured(
        zero_optimization__sub_group_size=1e9,
        zero_optimization__offload_optimizer__buffer_count=7,
        memascend={"pool": "monolithic", "pinned": "power_of_two", "optimizer_states": "bf16", "blocks_in_flight": 2,
                   "checkpointing": "offloaded", "host_memory": "64GiB", "gradients": "host", "aio": "file"},
        zero_optimization__offload_param__buffer_size=600_000_000,
        zero_optimization__offload_param__buffer_count=12,
        train_micro_batch_size_per_gpu=3,
        gradient_accumulation_steps=4,
    )  # fmt: skip
    work = workload_of(config, SPEC)
    assert (work.sub_group_size, work.optimizer_buffers, work.blocks_in_flight) == (10**9, 7, 2)
    assert (work.batch, work.accumulation, work.kept_states, work.host_memory) == (3, 4, "bf16", 64 << 30)
    assert work.offloads_checkpoints
    assert not work.arrangement.swaps_gradients
    assert plan(work).requested_bytes("parameter_pool") == 12 * 2 * 600_000_000
    assert plan(work).requested_bytes("nvme_engine_buffers") == 0


def test_auto_values_are_derived_or_taken_from_options():
    config = configured(
        zero_optimization__sub_group_size="auto", train_micro_batch_size_per_gpu="auto", bf16={"enabled": "auto"}
    )
    work = workload_of(config, SPEC, command_line=CommandLine(dtype="fp16", batch=5))
    assert (work.dtype, work.gradients, work.batch) == ("fp16", "fp16", 5)
    assert work.sub_group_size == workload_of(configured(), SPEC).sub_group_size


def test_the_third_batch_size_follows_from_the_other_two():
    assert (
        workload_of(configured(train_batch_size=48, train_micro_batch_size_per_gpu=4), SPEC, ranks=2).accumulation == 6
    )
    assert workload_of(configured(train_batch_size=48, gradient_accumulation_steps=3), SPEC, ranks=2).batch == 8


def test_configuration_without_the_section_plans_stock_deepspeed():
    config = configured(memascend={"enabled": False})
    work = workload_of(config, SPEC)
    assert (work.system, work.arm, work.sub_group_size, work.optimizer_buffers) == ("zero_infinity", "today", 10**9, 4)
    assert plan(work).requested_bytes("parameter_pool") == 5 * 2 * 10**8
    del config["memascend"]
    for name in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][name] = {"device": "cpu"}
    assert workload_of(config, SPEC).system == "zero_offload"


def test_pipelined_buffers_and_two_drives_are_counted():
    config = configured(zero_optimization__offload_optimizer__pipeline_read=True)
    config["zero_optimization"]["offload_optimizer"]["nvme_path"] = "/other"
    work = workload_of(config, SPEC)
    assert work.optimizer_buffers == 8
    assert work.sizes.engines == 2


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"zero_optimization__stage": 2}, "a plan needs ZeRO stage 3, got zero_optimization.stage=2"),
        ({"bf16": {}}, "enables neither bf16 nor fp16"),
        ({"fp16": {"enabled": True}}, "both true"),
        (
            {"zero_optimization__offload_param": {"device": "cpu"}},
            "both on 'nvme' or both on 'cpu', got 'cpu' and 'nvme'",
        ),
        ({"zero_optimization__offload_param__max_in_cpu": 1e9}, "max_in_cpu=1e+09 keeps parameters in memory"),
        ({"train_micro_batch_size_per_gpu": 0}, "must be a whole number of at least 1, got 0"),
        ({"memascend": {"pool": "adaptiv"}}, "memascend.pool: 'adaptiv' is unknown"),
        ({"memascend": {"host_memory": "24G"}}, "host_memory"),
        ({"memascend": []}, '"memascend" in the DeepSpeed configuration must be a section'),
        ({"data_types__grad_accum_dtype": "int8"}, "unknown dtype 'int8' of the gradients"),
        ({"data_types__grad_accum_dtype": [1]}, "unknown dtype '[1]' of the gradients"),
        ({"memascend": {"blocks_in_flight": "x"}}, "memascend.blocks_in_flight must be a whole number of at least 1"),
        ({"memascend": {"hots_memory": "4GiB"}}, "unknown key 'hots_memory' (did you mean host_memory?)"),
        ({"memasend": {"host_memory": "4GiB"}}, "'memasend' in the DeepSpeed configuration would be ignored"),
        ({"zero_optimization__offload_param": {"device": ["nvme"]}}, "offload_param.device must be a word"),
        ({"zero_optimization__sub_group_size": -5}, "zero_optimization.sub_group_size must be a whole number"),
        ({"zero_optimization__offload_param__buffer_count": 0}, "offload_param.buffer_count must be a whole number"),
        ({"aio": {"block_size": "1M"}}, "aio.block_size must be a whole number of at least 1, got '1M'"),
        ({"aio": 5}, '"aio" in the DeepSpeed configuration must be a section'),
        (
            {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 5},
            "train_batch_size 7 is not train_micro_batch_size_per_gpu 2 x gradient_accumulation_steps 5 x 1 GPUs",
        ),
    ],
)
def test_unplannable_configurations_are_refused_in_one_line(keys, words):
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        workload_of(configured(**keys), SPEC)
    assert "\n" not in str(caught.value)


def test_section_keys_are_those_of_enable():
    from memascend.integrations.deepspeed import config

    assert set(SECTION_KEYS) == set(config._KEYS)


def test_the_command_plans_a_configuration_file(capsys, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(configured(train_micro_batch_size_per_gpu=2)))
    arguments = ["plan", "--model", "qwen2.5-7b", "--ds-config", str(path)]
    assert main([*arguments, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["batch"], made["dtype"], made["gradients"], made["checkpointing"]) == (2, "bf16", "bf16", "none")
    assert sum(entry["owner"] == "optimizer_buffers" for entry in made["ledger"]) == 4
    for more, words in (
        (["--batch", "3"], "the configuration says train_micro_batch_size_per_gpu 2, the command line 3"),
        (["--dtype", "fp16"], "leave --dtype out"),
        (["--states", "bf16"], "--states and --ds-config exclude one another"),
        (["--accumulation", "vertical"], "--accumulation and --ds-config exclude one another"),
    ):
        assert main([*arguments, *more]) == 2
        assert words in capsys.readouterr().err
    path.write_text(json.dumps(configured(memascend={"host_memory": "4GiB"})))
    assert main(arguments) == 2
    assert 'more than the "host_memory" of 4.00 GiB' in (refused := capsys.readouterr().err)
    assert "--system" not in refused
    path.write_text("{")
    assert main(arguments) == 2
    assert "is not JSON" in capsys.readouterr().err
