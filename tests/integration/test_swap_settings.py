"""Settings that the user leaves out are derived; those that the user set are kept, with a warning if they do harm."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from memascend.integrations.deepspeed.auto_settings import DerivedSettings
from memascend.integrations.deepspeed.banner import enabled_line
from memascend.integrations.deepspeed.config import Parts, enable_options
from memascend.integrations.deepspeed.hooks import _swaps_gradients
from memascend.planner import model_spec
from memascend.planner.derived_sizes import cached_sub_group_buffers, sub_group_size
from memascend.planner.from_config import workload_of
from memascend.planner.step import step_of


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


def test_omitted_settings_are_derived_and_reported_in_one_line():
    derived, kwargs = DerivedSettings(offloaded(pipeline_read=True)), arguments()
    derived.fill_stage3(torch_optimizer([100, 200], [300]), kwargs)
    assert kwargs["sub_group_size"] == sub_group_size([[100, 200], [300]])
    assert kwargs["offload_param_config"].max_in_cpu == 0
    assert kwargs["offload_optimizer_config"].buffer_count == 8
    line = enabled_line(Parts(), derived, pool_bytes=3 << 20)
    assert "\n" not in line
    for said in ("sub_group_size", "max_in_cpu 0", "buffer_count 8", "3.0 MiB", "1024 KiB"):
        assert said in line


def test_only_deepspeeds_adamw_needs_no_buffer_for_kept_gradients(monkeypatch):
    counts = []
    for adamw in (object, type(torch_optimizer([100]))):
        monkeypatch.setattr("memascend.integrations.deepspeed.auto_settings.DeepSpeedCPUAdam", adamw)
        derived, kwargs = DerivedSettings(offloaded(pipeline_read=True), swaps_gradients=False), arguments()
        derived.fill_stage3(torch_optimizer([100]), kwargs)
        counts.append(kwargs["offload_optimizer_config"].buffer_count)
    assert counts == [8, 6]


def test_settings_of_the_user_are_kept():
    config = offloaded(buffer_count=5)
    config["zero_optimization"] |= {"sub_group_size": 1e9}
    config["zero_optimization"]["offload_param"]["max_in_cpu"] = 1e9
    derived, kwargs = DerivedSettings(config), arguments()
    derived.fill_stage3(torch_optimizer([100]), kwargs)
    assert kwargs["sub_group_size"] == int(1e9)
    assert kwargs["offload_param_config"].max_in_cpu == int(1e9)
    assert kwargs["offload_optimizer_config"].buffer_count == 4  # as DeepSpeed read it
    assert derived.chosen == {}


def test_auto_counts_as_omitted():
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


def test_small_host_budget_for_busy_paths_is_reported_and_obeyed(monkeypatch):
    config, said = offloaded(), []
    config["zero_optimization"]["sub_group_size"] = 100
    monkeypatch.setattr("memascend.integrations.deepspeed.auto_settings.announce", said.append)
    counts = {}
    for left in (8000, 10**6):  # gradients take 2000, the states of a sub-group 1200, and a fifth is left free
        derived, kwargs = DerivedSettings(config, tiers=("/a", "/b"), swaps_gradients=False), arguments()
        derived.host_left, kwargs["sub_group_size"] = (lambda left=left: left), 100
        derived.fill_stage3(torch_optimizer([100] * 10), kwargs)
        counts[left] = kwargs["offload_optimizer_config"].buffer_count
    (line,) = said
    assert "host_memory has room for 4 sub-groups where 2 tiers are busy with 5" in line
    assert counts == {8000: cached_sub_group_buffers(False, 4), 10**6: cached_sub_group_buffers(False, 10)}


def test_no_settings_are_derived_without_nvme_offload():
    derived, kwargs = DerivedSettings({"zero_optimization": {"stage": 3}}), arguments()
    derived.fill_stage3(torch_optimizer([100]), kwargs)
    assert derived.chosen == {}


def test_second_engine_has_the_settings_of_its_own_configuration():
    """An actor on NVMe, then a trained critic in host memory, then an engine on NVMe with sizes of the user."""
    derived, reserved = DerivedSettings(offloaded()), []
    derived.reserve = lambda folder, nbytes: reserved.append((folder, nbytes))

    derived.fill_stage3(torch_optimizer([100]), arguments() | {"ds_config": offloaded()})
    assert set(derived.chosen) == {"sub_group_size", "max_in_cpu", "buffer_count"}

    in_memory = {"ds_config": {"zero_optimization": {"stage": 3}}, "sub_group_size": int(1e9)}
    in_memory |= {"offload_param_config": None, "offload_optimizer_config": None}
    derived.fill_stage3(torch_optimizer([200]), in_memory)
    assert in_memory["sub_group_size"] == int(1e9)
    assert (derived.chosen, derived.folders) == ({}, [])

    own = offloaded(buffer_count=7, nvme_path="/other")
    own["zero_optimization"] |= {"sub_group_size": 50}
    own["zero_optimization"]["offload_param"]["max_in_cpu"] = 10
    kwargs = arguments() | {"ds_config": own, "sub_group_size": 50}
    derived.fill_stage3(torch_optimizer([300]), kwargs)
    assert kwargs["sub_group_size"] == 50
    assert kwargs["offload_optimizer_config"].buffer_count == 4  # as DeepSpeed read it
    assert (derived.chosen, derived.folders) == ({}, ["/", "/other"])

    assert reserved == [("/", 100 * 16), ("/other", 300 * 16)]


def test_engine_on_nvme_after_an_enable_without_nvme_gets_derived_settings(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(offloaded()))
    derived = DerivedSettings({"zero_optimization": {"stage": 3}})
    for given in (offloaded(), str(tmp_path / "ds.json")):
        kwargs = arguments() | {"ds_config": given}
        derived.fill_stage3(torch_optimizer([100, 200]), kwargs)
        assert kwargs["sub_group_size"] == sub_group_size([[100, 200]])
        assert kwargs["offload_param_config"].max_in_cpu == 0


@pytest.mark.parametrize(
    ("section", "state_bytes"),
    [
        ({}, 16),
        ({"gradients": "host"}, 12),
        ({"tiers": ["/a", "/b"]}, 12),
        ({"tiers": ["/a", "/b"], "gradients": "nvme"}, 16),
        ({"optimizer_states": "bf16"}, 8),
        ({"optimizer_states": "bf16", "gradients": "host"}, 6),
    ],
)
def test_states_reserve_the_bytes_that_the_plan_says(section, state_bytes):
    config = offloaded() | {"bf16": {"enabled": True}, "memascend": section}
    work = workload_of(config, model_spec("qwen2.5-7b"), ranks=1, context=2048)
    stored, options = step_of(work).stored_bytes, enable_options(config, {})
    swaps_gradients = _swaps_gradients(options.parts)
    derived, reserved = DerivedSettings(config, tiers=options.paths.tiers, swaps_gradients=swaps_gradients), []
    derived.reserve = lambda folder, nbytes: reserved.append(nbytes)
    bf16 = {"bf16_optimizer_states": options.parts.optimizer_states == "bf16"}
    derived.fill_stage3(torch_optimizer(work.partitions()), arguments() | {"ds_config": config} | bf16)
    assert reserved == [state_bytes * sum(work.partitions())]
    assert reserved == [stored["master weights and moments"] + stored.get("gradients", 0)]
