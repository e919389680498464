"""From a run's keys to DeepSpeed's configuration, for any named system."""

import dataclasses
import importlib.metadata
import subprocess
import sys

import pytest

from memascend import systems as found
from memascend.training import systems
from memascend.training.config import TrainConfig

PREPARED = {"context": 128, "largest_tensor": 1000, "parameters": 50_000, "pool_buffers": 9}
CONFIG = TrainConfig(model="m", data=["d"], accumulate=4, batch=2, ranks=2, clip=0.5, beta2=0.95, learning_rate=1e-4)


def setup(**changes):
    """Return (DeepSpeed configuration, parts) of a run."""
    settings = systems.setup(dataclasses.replace(CONFIG, **changes), PREPARED, "run", "/swap").settings
    return settings["deepspeed_config"], settings["parts"]


def test_the_library_finds_the_systems_by_entry_point():
    points = importlib.metadata.entry_points(group=found.GROUP)
    assert [point.value for point in points] == ["memascend.baselines.protocol"]
    assert "memascend" in found.provider().system_names()


def test_missing_entry_point_error_names_the_fix(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    with pytest.raises(ValueError, match=r"no systems are installed .* make setup"):
        found.provider.__wrapped__()


@pytest.mark.parametrize("name", ["memascend", "zero_infinity", "zero_offload"])
def test_the_keys_of_a_run_reach_every_system(name):
    config, _ = setup(system=name)
    assert config["train_batch_size"] == 16
    assert config["gradient_accumulation_steps"] == 4
    assert config["gradient_clipping"] == 0.5
    assert config["optimizer"]["params"]["betas"] == [0.9, 0.95]
    assert config["optimizer"]["params"]["lr"] == 1e-4
    assert config["bf16"]["enabled"]
    assert config["zero_optimization"]["reduce_bucket_size"] <= PREPARED["parameters"]
    config = dataclasses.replace(CONFIG, system=name)
    assert systems.setup(config, PREPARED, "run", "/swap").swaps == (name != "zero_offload")


def test_every_arm_that_is_offered_can_be_configured():
    for name in ("memascend", "zero_infinity", "zero_offload"):
        for arm in (arm for arm, parts in found.load(name).arms.items() if parts.runs):
            config, parts = setup(system=name, arm=arm)
            assert config["zero_optimization"]["stage"] == 3
            assert "pinned" in parts


def test_bf16_states_require_system_memascend_and_dtype_bf16():
    assert setup(states="bf16")[1]["optimizer_states"] == "bf16"
    for changes in ({"system": "zero_offload"}, {"dtype": "fp16"}):
        with pytest.raises(ValueError, match="states 'bf16' are a part of memascend and need dtype bf16"):
            systems.check(dataclasses.replace(CONFIG, states="bf16", **changes))


def test_gradients_accumulate_in_the_requested_type():
    assert setup()[0]["data_types"]["grad_accum_dtype"] == "fp32"
    assert setup(gradients="bf16")[0]["data_types"]["grad_accum_dtype"] == "bf16"
    with pytest.raises(ValueError, match="gradients 'bf16' need dtype bf16"):
        systems.check(dataclasses.replace(CONFIG, gradients="bf16", dtype="fp16"))


def test_parent_process_imports_neither_torch_nor_deepspeed():
    """The parent lives as long as the ranks do, in the same memory."""
    code = (
        "import sys, memascend.cli, memascend.training.launch; from memascend import systems; "
        "[systems.load(name) for name in systems.names()];"
        "print([name for name in ('torch', 'deepspeed', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_the_direct_engine_accepts_devices(tmp_path):
    device = tmp_path / "device"
    device.write_bytes(b"")
    assert setup(devices=[str(device)])[0]["memascend"] == {"devices": [str(device)]}
    assert "memascend" not in setup()[0]
    systems.check(dataclasses.replace(CONFIG, devices=[str(device)]))
    for changes in ({"system": "zero_infinity"}, {"arm": "memascend_on_files"}):
        with pytest.raises(ValueError, match="devices are for the direct NVMe engine, which"):
            systems.check(dataclasses.replace(CONFIG, devices=[str(device)], **changes))
    with pytest.raises(ValueError, match="there is no device /dev/nowhere"):
        systems.check(dataclasses.replace(CONFIG, devices=["/dev/nowhere"]))


def test_ssdtrain_arm_determines_how_activations_are_kept():
    words = {"ssdtrain": "ssd", "hybrid": "ssd", "keep": "none", "recompute": "plain"}
    run = {"system": "ssdtrain", "ranks": 1}
    for arm, checkpointing in words.items():
        config = dataclasses.replace(CONFIG, arm=arm, checkpointing=checkpointing, **run)
        systems.check(config)
        made = systems.setup(config, PREPARED, "run", "/swap")
        assert made.swaps == (checkpointing == "ssd")
        assert made.settings.get("activations_folder") == ("/swap" if checkpointing == "ssd" else None)
    with pytest.raises(ValueError, match="offloads what the SSD takes in time, not 'all': leave --activations out"):
        systems.check(dataclasses.replace(CONFIG, arm="hybrid", checkpointing="ssd", activations="all", **run))
    with pytest.raises(ValueError, match="'ssdtrain' trains with checkpointing 'ssd', not 'offloaded': set --checkp"):
        systems.check(dataclasses.replace(CONFIG, **run))


def test_user_keys_override_the_defaults_of_an_arm():
    wanted = {"model": "m", "data": ["d"], "system": "ssdtrain"}
    assert systems.with_defaults(wanted)["checkpointing"] == "ssd"
    assert systems.with_defaults({**wanted, "arm": "recompute"})["checkpointing"] == "plain"
    assert systems.with_defaults({**wanted, "checkpointing": "none"})["checkpointing"] == "none"
    assert systems.with_defaults({"model": "m"}) == {"model": "m"}


def test_only_lohan_keeps_state_versions_and_others_refuse_them():
    alone = dataclasses.replace(CONFIG, ranks=1, state_versions="one", system="lohan")
    systems.check(alone)
    for word, versions in {"auto": None, "one": 1, "two": 2, "checkpoint": 1}.items():
        chosen = dataclasses.replace(alone, state_versions=word)
        settings = systems.setup(chosen, PREPARED, "run", "/swap").settings
        assert settings["versions"] == versions
        assert settings["redo"] == (word != "checkpoint")
    for name in ("memascend", "zero_offload", "in_memory"):
        with pytest.raises(ValueError, match=f"state_versions 'one': system '{name}' keeps no versions"):
            systems.check(dataclasses.replace(alone, system=name))
