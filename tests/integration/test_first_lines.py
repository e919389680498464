"""What a plain script prints: one line that memascend is on, a warning if it has nothing to do, and how to start it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

pytestmark = pytest.mark.deepspeed

LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
SCRIPT = """
import sys, torch, deepspeed
config = sys.argv[1]
if not torch.distributed.is_initialized():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
with deepspeed.zero.Init(config_dict_or_path=config):
    model = torch.nn.Linear(1024, 1024)
deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
"""
NOT_LAUNCHED = """
import sys, torch, deepspeed
deepspeed.initialize(model=torch.nn.Linear(8, 8), config=sys.argv[1])
"""


def run(folder, script, offload, environment):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "memascend": {},
    }
    (folder / "ds.json").write_text(json.dumps(config))
    (folder / "train.py").write_text(script)
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    command = [sys.executable, "train.py", "ds.json"]
    return forked.run(command, cwd=folder, env=clean | {"DS_ACCELERATOR": "cpu"} | environment, timeout=200)


def ours(done) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("memascend")]


def test_plain_script_prints_one_line_with_settings_and_folder(tmp_path):
    done = run(tmp_path, SCRIPT, {"device": "nvme", "nvme_path": str(tmp_path / "nvme")}, LAUNCHED)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = ours(done)
    assert line.startswith("memascend is on: pinned exact, pool adaptive (")
    assert "MiB), overflow fused, aio direct; derived from model and machine: sub_group_size 1,048,576, " in line
    assert line.endswith(f"; swap files in {tmp_path / 'nvme'}")


def test_a_configuration_that_offloads_nothing_is_warned_about(tmp_path):
    done = run(tmp_path, SCRIPT, {"device": "none"}, LAUNCHED)
    assert done.returncode == 0, done.stderr[-3000:]
    warning, line = ours(done)
    assert warning.startswith("memascend: nothing is offloaded, so memascend saves no memory here: ")
    assert line == "memascend is on: pinned exact, pool adaptive, overflow fused, aio direct"


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is not None, reason="mpi4py is installed: DeepSpeed asks it")
def test_script_without_a_launcher_is_told_to_use_one(tmp_path):
    done = run(tmp_path, NOT_LAUNCHED, {"device": "cpu"}, {})
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("RuntimeError: memascend: this process was started without a launcher (RANK, WORLD_SIZE, ")
    assert last.endswith("start it with: torchrun --nproc_per_node 1 train.py")


def test_json_mistake_is_the_last_line_without_deepspeed_traceback(tmp_path):
    script = NOT_LAUNCHED.replace("deepspeed.init", "open('ds.json', 'a').write('}'); deepspeed.init")
    done = run(tmp_path, script, {"device": "cpu"}, {})
    assert done.returncode == 1
    assert "ds.json, line 1, column " in done.stderr.strip().splitlines()[-1]
    assert "deepspeed/" not in done.stderr


@pytest.mark.slow
def test_first_run_tutorial_script_trains_as_written(tmp_path):
    page = (Path(__file__).parents[2] / "docs/tutorials/first-run.md").read_text()
    (tmp_path / "train.py").write_text(page.split("```python\n")[1].split("```")[0])
    command = [str(Path(sys.executable).parent / "torchrun"), "--nproc_per_node", "1", "train.py"]
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=clean | {"DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(ours(done)) == 1
    assert done.stdout.count("'loss': ") == 3
