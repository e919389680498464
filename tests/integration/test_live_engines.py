"""Engines that live on: after ``disable``, after a skipped step that is rolled back, and next to a second engine."""

from __future__ import annotations

import gc
import json

import pytest

from memascend.integrations.deepspeed.lasting import LastingChanges
from tests import one_rank

pytestmark = pytest.mark.deepspeed

SCRIPT = """
import copy, json, sys
from pathlib import Path

import deepspeed, torch
import memascend
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.swap_tensor import optimizer_utils
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from memascend.integrations.deepspeed.checkpoint import can_be_exact

if not can_be_exact():
    print(json.dumps(None))
    sys.exit()
torch.set_num_threads(1)
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
folder, out = Path(sys.argv[1]), {}
SIZE = 1024  # a sub-group's tensors, and its gradients, have 4 MiB: they go to NVMe

def configuration(name, dtype="fp16", optimizer=None, **section):
    nvme = {"device": "nvme", "nvme_path": str(folder / name)}
    return {
        "train_micro_batch_size_per_gpu": 1,
        dtype: {"enabled": True} | ({"initial_scale_power": 4, "hysteresis": 1} if dtype == "fp16" else {}),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "memory_efficient_linear": False,
            "offload_param": nvme,
            "offload_optimizer": nvme | (optimizer or {}),
        },
        "memascend": section,
    }

def engine(config, seed=0, **options):
    torch.manual_seed(seed)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE) for _ in range(3)))
    options.setdefault("model_parameters", model.parameters())
    return deepspeed.initialize(model=model, config=config, **options)[0]

def step(engine, factor=1.0):
    dtype = next(engine.module.parameters()).dtype
    batch = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(engine.global_steps)).to(dtype)
    loss = engine(batch).float().pow(2).mean()
    engine.backward(loss * factor)
    engine.step()
    return loss.item()

def steps(engine, count=2):
    return [step(engine) for _ in range(count)]

def places():
    return {
        "save": DeepSpeedEngine.save_checkpoint,
        "load": DeepSpeedEngine.load_checkpoint,
        "gather": partition_parameters.NoGatherHandle.__init__,
        "availability": partition_parameters.Init._ensure_availability_of_partitioned_params,
        "trace": PartitionedParameterCoordinator.record_parameters,
        "context": optimizer_utils.SwapTensorContext,
        "linear": torch.nn.functional.linear,
        "swapper": partition_parameters.AsyncPartitionedParameterSwapper,
    }

def changed():
    return sorted(name for name, place in places().items() if place is not stock[name])

stock = places()


def disabled_while_an_engine_lives():
    found = {}
    for name in ("enabled", "disabled"):
        config = configuration(name)
        memascend.enable(config)
        first = engine(config)
        found[name] = steps(first)
        if name == "disabled":
            memascend.disable()
            found["changed"] = changed()
            first.save_checkpoint(folder / "checkpoint")
        found[name] += steps(first)
        if name == "disabled":
            first.load_checkpoint(folder / "checkpoint")
            found["rolled_back"] = steps(first)
            other = configuration("other")
            memascend.enable(other)
            second = engine(other, seed=1)
            second.load_checkpoint(folder / "checkpoint")
            found["resumed"] = steps(second)
            second.destroy()
        memascend.disable()
        found["before_destroy"] = changed()
        first.destroy()
        memascend.disable()
        found["after_destroy"] = changed()
    return found


def disabled_before_the_first_moments_are_made():
    found = {}
    for name in ("enabled", "disabled"):
        config = configuration(f"bf16-{name}", dtype="bf16", optimizer_states="bf16")
        memascend.enable(config)
        first = engine(config)
        if name == "disabled":
            memascend.disable()
        found[name] = steps(first, 3)
        first.destroy()
        memascend.disable()
    found["after_destroy"] = changed()
    return found


def rolled_back_after_a_skipped_step():
    found = {}
    kinds = {
        "plain": {},
        "pipelined": {"optimizer": {"pipeline_read": True, "pipeline_write": True}},
        "host": {"gradients": "host"},
        "tiers": {"tiers": [str(folder / "a"), str(folder / "b")], "gradients": "nvme"},
    }
    for kind, options in kinds.items():
        config = configuration(f"skipped-{kind}", **options)
        memascend.enable(config)
        first = engine(config)
        step(first)
        first.save_checkpoint(folder / kind)
        whole = steps(first)
        step(first, factor=float("inf"))
        skipped = first.skipped_steps
        first.load_checkpoint(folder / kind)
        found[kind] = {"skipped": skipped, "whole": whole, "again": steps(first)}
        first.destroy()
        memascend.disable()
    return found


def second_engine_with_another_configuration():
    config = configuration("actor", dtype="bf16")
    in_memory = copy.deepcopy(config)
    del in_memory["zero_optimization"]["offload_param"], in_memory["zero_optimization"]["offload_optimizer"]
    del in_memory["optimizer"]
    found = {}
    memascend.enable(config)
    actor = engine(config)
    steps(actor, 1)
    own = configuration("second", dtype="bf16", optimizer={"buffer_count": 9})
    own["zero_optimization"]["sub_group_size"] = 3 * SIZE * SIZE
    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE, dtype=torch.bfloat16))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    critic = deepspeed.initialize(model=model, config=in_memory, optimizer=adamw)[0]
    second = engine(own)
    found["critic"] = len(set(steps(critic)))
    found["second"] = len(set(steps(second)))
    found["actor"] = len(set(steps(actor)))
    found["buffers"] = [each.optimizer.optimizer_swapper.swap_buffer_manager.count for each in (actor, second)]
    found["sub_groups"] = [len(each.optimizer.fp16_groups) for each in (actor, second)]
    for each in (actor, critic, second):
        each.destroy()
    memascend.disable()
    found["after_destroy"] = changed()
    return found


for scenario in sys.argv[2:]:
    out[scenario] = globals()[scenario]()
print(json.dumps(out))
"""


def played(folder, scenario):
    results = json.loads(one_rank.run(["-c", SCRIPT, folder, scenario]).stdout.strip().splitlines()[-1])
    if results is None:
        pytest.skip("DeepSpeed 0.17 and later have checkpoints of ours")
    return results[scenario]


def test_engine_keeps_its_parts_after_disable(tmp_path):
    found = played(tmp_path, "disabled_while_an_engine_lives")
    assert found["disabled"] == found["enabled"]
    assert found["changed"] == ["availability", "gather", "linear", "load", "save", "trace"]
    assert found["rolled_back"] == found["resumed"] == found["enabled"][2:]
    assert found["before_destroy"] == found["changed"]
    assert found["after_destroy"] == []


def test_bf16_moments_made_after_disable_train_as_before(tmp_path):
    found = played(tmp_path, "disabled_before_the_first_moments_are_made")
    assert found["disabled"] == found["enabled"]
    assert found["after_destroy"] == []


def test_running_engine_loads_a_checkpoint_after_a_skipped_step(tmp_path):
    for kind, found in played(tmp_path, "rolled_back_after_a_skipped_step").items():
        assert found["skipped"] == 1, kind
        assert found["again"] == found["whole"], kind


def test_second_engine_is_built_by_its_own_configuration(tmp_path):
    found = played(tmp_path, "second_engine_with_another_configuration")
    assert (found["critic"], found["second"], found["actor"]) == (2, 2, 2)
    assert found["buffers"] == [4, 9]
    assert found["sub_groups"] == [4, 2]
    assert found["after_destroy"] == []


class User:
    """Stands for an engine's optimizer."""


def test_lasting_changes_go_with_the_last_collected_user():
    changes, made = LastingChanges(), []

    def change(name):
        made.append(name)
        return lambda: made.remove(name)

    changes.begin()
    changes.make("a", lambda: change("a"))
    changes.make("b", lambda: change("b"))
    destroyed, collected = User(), User()
    changes.add_user(destroyed)
    changes.add_user(collected)
    changes.end()
    assert made == ["a", "b"]
    changes.remove_user(destroyed)
    changes.remove_user(destroyed)
    changes.begin()
    changes.make("b", lambda: change("b again"))
    del collected
    gc.collect()
    assert made == ["a", "b"]  # the second `enable` has them too
    changes.end()
    assert made == []


def test_lasting_changes_are_undone_last_first():
    changes, undone = LastingChanges(), []
    changes.begin()
    for name in "abc":
        changes.make(name, lambda name=name: lambda: undone.append(name))
    changes.end()
    assert undone == ["c", "b", "a"]
