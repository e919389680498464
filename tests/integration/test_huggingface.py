"""Stock Trainer and Accelerate scripts under stock launchers: one key in the DeepSpeed JSON, and equal losses.

The reference is the same script with parameters and optimizer in host memory and without the key: DeepSpeed's own NVMe
path computes other losses with one rank on a CPU (evidence: memascend.integrations.deepspeed.cpu_shims).
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

pytestmark = pytest.mark.deepspeed

SCRIPTS = Path(__file__).parent / "scripts"
BIN = Path(sys.executable).parent
STEPS = 3
TRAINER_OPTIONS = (
    f"--max_steps={STEPS}",
    "--per_device_train_batch_size=2",
    "--learning_rate=1e-3",
    "--bf16",
    "--use_cpu",
    "--save_strategy=no",
    "--report_to=none",
    "--disable_tqdm=true",
)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


class Workbench:
    """Runs the scripts in its folder, each kind of run once, by one of the launchers in ``programs`` or by "none"."""

    def __init__(self, folder: Path, programs: Path = BIN) -> None:
        self.folder, self._programs, self._done = folder, programs, {}
        self.said: list[str] = []  # the output of each launched run, in order
        self.model = folder / "model"
        self._make_model()

    def _make_model(self) -> None:
        import torch
        import transformers

        config = transformers.Qwen2Config(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=256,
            use_cache=False,
        )
        torch.manual_seed(0)
        transformers.utils.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.to(torch.bfloat16).save_pretrained(self.model)

    def config(self, section: dict | None) -> Path:
        """Write a DeepSpeed JSON as in transformers' documentation, with `section` as its key "memascend"."""
        offload = {"device": "cpu"} if section is None else {"device": "nvme", "nvme_path": str(self.folder / "nvme")}
        settings = {
            "bf16": {"enabled": "auto"},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "betas": [0.9, 0.999]}},
            "zero_optimization": {
                "stage": 3,
                "offload_param": offload,
                "offload_optimizer": offload,
                "stage3_param_persistence_threshold": 0,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_max_reuse_distance": 0,
                "sub_group_size": 1_000_000_000,  # matters for clipping: the norm is summed by sub-groups
            },
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
        }
        if section is not None:
            settings["memascend"] = section
        path = self.folder / f"config{abs(hash(json.dumps(settings)))}.json"
        path.write_text(json.dumps(settings))
        return path

    def run(self, launcher: str, script: str, section: dict | None, *options: str, ranks: int = 1) -> list[dict]:
        """Run a script; return what each rank wrote."""
        key = (launcher, script, json.dumps(section), options, ranks)
        if key not in self._done:
            result = self.folder / f"result{len(self._done)}"
            arguments = [str(SCRIPTS / script), f"--model={self.model}", f"--result={result}"]
            arguments += [f"--deepspeed={self.config(section)}", *options]
            if script == "trainer_script.py":
                arguments += [*TRAINER_OPTIONS, f"--output_dir={self.folder / 'out'}"]
            self._launch([*self._launcher(launcher, ranks), *arguments])
            self._done[key] = [json.loads(Path(f"{result}.{rank}").read_text()) for rank in range(ranks)]
        return self._done[key]

    def _launcher(self, name: str, ranks: int) -> list[str]:
        if name == "none":
            return [sys.executable]
        if name == "torchrun":
            return [str(self._programs / "torchrun"), "--nproc_per_node", str(ranks), "--master_port", free_port()]
        return [str(self._programs / "deepspeed"), "--num_gpus", str(ranks), "--master_port", free_port()]

    def _launch(self, command: list[str]) -> None:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        environment = os.environ | {
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "LOCAL_SIZE": "2",
            "PATH": f"{self._programs}:{os.environ['PATH']}",
        }
        if command[0] == sys.executable:
            done = forked.run(
                command, cwd=self.folder, env=environment | alone | {"MASTER_PORT": free_port()}, timeout=240
            )
        else:
            done = subprocess.run(
                command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=240
            )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        self.said.append(done.stdout + done.stderr)


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("huggingface"))


def test_trainer_with_key_gives_equal_losses_under_deepspeed_launcher(bench):
    (reference,) = bench.run("none", "trainer_script.py", None)
    (found,) = bench.run("deepspeed", "trainer_script.py", {})
    assert len(reference["losses"]) == STEPS
    assert found["losses"] == reference["losses"]
    assert found["evaluation"] == reference["evaluation"]
    assert [text.count("memascend is on") for text in bench.said] == [0, 1]
    assert "memascend.integrations.deepspeed.hooks" in found["modules"]
    assert "memascend.integrations.deepspeed.hooks" not in reference["modules"]


@pytest.mark.slow
def test_accelerate_gives_equal_losses_with_the_key_under_torchrun(bench):
    (reference,) = bench.run("torchrun", "accelerate_script.py", None)
    (found,) = bench.run("torchrun", "accelerate_script.py", {})
    assert len(reference["losses"]) == STEPS
    assert found["losses"] == reference["losses"]
    assert "memascend.integrations.deepspeed.hooks" in found["modules"]


@pytest.mark.slow  # test_activation_options.py tests each without a Trainer
def test_memory_options_in_the_key_reach_the_trainers_model(bench):
    (reference,) = bench.run("torchrun", "trainer_script.py", None)
    section = {"loss": "chunked", "checkpointing": "offloaded", "attention": "sdpa"}
    (found,) = bench.run("torchrun", "trainer_script.py", section)
    assert found["losses"] == pytest.approx(reference["losses"], rel=2e-3)  # bf16 gradients, rounded at other places
    assert found["losses"][0] == pytest.approx(reference["losses"][0], rel=1e-6)
    assert "memascend.integrations.head_loss" in found["modules"]
    assert "OffloadedCheckpoint" in found["checkpoint"]


@pytest.mark.slow  # test_activation_key.py tests the key without a Trainer
def test_trainer_offloads_activations_to_ssd_with_equal_losses(bench):
    (reference,) = bench.run("none", "trainer_script.py", None)
    section = {"checkpointing": "ssd", "activations": {"amount": "all", "minimum_bytes": 1024, "reserve_bytes": 0}}
    (found,) = bench.run("none", "trainer_script.py", section)
    assert found["losses"] == reference["losses"]
    assert found["evaluation"] == reference["evaluation"]
    assert "memascend.activation.cache" in found["modules"]
    assert found["activations_written"] > 0


# test_swap_models.py has the quick cases.
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_model_initialised_by_trainer_script_trains_as_in_memory(bench, kind, ranks):
    option = f"--initialise={kind}"
    reference = bench.run("torchrun", "trainer_script.py", None, option, ranks=ranks)
    found = bench.run("torchrun", "trainer_script.py", {}, option, ranks=ranks)
    assert [rank["losses"] for rank in found] == [rank["losses"] for rank in reference]
    assert len(set(found[0]["losses"])) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_two_ranks_give_equal_losses(bench, launcher):
    reference = bench.run("torchrun", "trainer_script.py", None, ranks=2)
    found = bench.run(launcher, "trainer_script.py", {}, ranks=2)
    assert [rank["losses"] for rank in found] == [rank["losses"] for rank in reference]
    assert all("memascend.integrations.deepspeed.hooks" in rank["modules"] for rank in found)


@pytest.mark.slow
def test_trainers_checkpointing_and_accumulation_work_with_offloading(bench):
    options = ("--gradient_checkpointing", "--gradient_accumulation_steps=2")
    (reference,) = bench.run("torchrun", "trainer_script.py", None, *options)
    (found,) = bench.run("torchrun", "trainer_script.py", {"checkpointing": "offloaded"}, *options)
    assert found["losses"] == reference["losses"]
    assert "OffloadedCheckpoint" in found["checkpoint"]
    assert "OffloadedCheckpoint" not in reference["checkpoint"]
