"""The library on DeepSpeed 0.16.7 with transformers 4.51, in a separate environment (``make deepspeed_016``).

The reference is this DeepSpeed's CPU offload, which uses no swap buffer: same losses, same master weights.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from test_huggingface import STEPS, Workbench
from trainings import ROOT, Job, train_all

from memascend.training.processes import free_port, remove_shared_buffers
from tests.one_rank import environment

PYTHON = ROOT / ".cache" / "envs" / "deepspeed_016" / "bin" / "python"
pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no environment with DeepSpeed 0.16.7; make deepspeed_016"),
]

HARD = {
    "micro_steps": 2,
    "overflow_at": 3,
    "freeze": ("layers.0.mlp",),
    "config": {"gradient_clipping": 0.5, "fp16": {"hysteresis": 1}},
}
MODELS = {
    "qwen": {},
    "llama": {"model": "llama3.1-8b"},
    "tied": {"model": "llama3.2-1b", "k": 16},
    "experts": {"model": "qwen3-30b-a3b", "model_config": {"num_experts": 8, "num_experts_per_tok": 2}},
    "hard": HARD,
}
ARMS = {
    "today_016": {"system": "zero_infinity", "arm": "today_016"},
    "as_published": {"system": "zero_infinity", "arm": "as_published"},
    "memascend": {},
    "files": {"arm": "memascend_on_files"},
    "direct_alone": {"arm": "direct_only"},
    "kept": {"arm": "memascend_kept_gradients"},
}
PAIRS = [("qwen", arm) for arm in ARMS] + [
    (model, arm) for model in MODELS if model != "qwen" for arm in ("memascend", "kept")
]


def training(model: str, name: str, **fields) -> Job:
    return Job(name=f"{model}-{name}", steps=6, **MODELS[model], **fields)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    jobs = [training(model, "reference", system="zero_offload", arm="today") for model in MODELS]
    jobs += [training(model, arm, **ARMS[arm]) for model, arm in PAIRS]
    jobs += [training("qwen", "fast", arm="memascend_fast"), training("hard", "fast", arm="memascend_fast")]
    return train_all(jobs, tmp_path_factory.mktemp("deepspeed_016"), python=PYTHON)


@pytest.mark.parametrize(("model", "arm"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_losses_and_master_weights_equal_the_cpu_offload_reference(results, model, arm):
    result, reference = results[f"{model}-{arm}"], results[f"{model}-reference"]
    for field in ("losses", "skipped", "scales", "weights_sha256"):
        assert result[field] == reference[field]
    assert len({loss for losses in result["losses"] for loss in losses}) >= 6


@pytest.mark.parametrize("model", ["qwen", "hard"])
def test_our_norm_and_adamw_give_close_losses(results, model):
    fast, reference = results[f"{model}-fast"], results[f"{model}-reference"]
    assert fast["skipped"] == reference["skipped"]
    for ours, theirs in zip(fast["losses"], reference["losses"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)


def test_two_ranks_equal_the_cpu_offload_reference(tmp_path):
    jobs = [training(model, "reference", system="zero_offload", arm="today") for model in ("qwen", "hard")]
    jobs += [training(model, "memascend") for model in ("qwen", "hard")]
    results = train_all(jobs, tmp_path, ranks=2, python=PYTHON)
    for model in ("qwen", "hard"):
        result, reference = results[f"{model}-memascend"], results[f"{model}-reference"]
        for field in ("losses", "skipped", "scales", "weights_sha256"):
            assert result[field] == reference[field]


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(PYTHON), "-c", code, *arguments]
    port = free_port()
    surroundings = environment(rank=0, ranks=1, port=port)
    try:
        return subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False, timeout=300)
    finally:
        remove_shared_buffers(port)


def test_bf16_states_are_refused_naming_a_version_that_works():
    done = run(
        "import memascend; memascend.enable({'bf16': {'enabled': True}, 'memascend': {'optimizer_states': 'bf16'},"
        " 'zero_optimization': {'stage': 3, 'offload_optimizer': {'device': 'cpu'}}})"
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("RuntimeError: memascend: DeepSpeed 0.16.7 breaks the bf16 states: ")
    assert last.endswith("; use DeepSpeed 0.19.8, or set memascend.optimizer_states to 'fp32'")


SCRIPT = """
import json, sys
import deepspeed, torch
from transformers import AutoConfig, AutoModelForCausalLM
torch.manual_seed(0)
config = json.loads(open(sys.argv[1]).read())
shape = AutoConfig.for_model("llama", vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=2)
with deepspeed.zero.Init(config_dict_or_path=config):
    model = AutoModelForCausalLM.from_config(shape)
engine, *_ = deepspeed.initialize(model=model, config=sys.argv[1], model_parameters=model.parameters())
losses = []
for step in range(4):
    ids = torch.arange(step, step + 16)[None]
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
print(json.dumps({"losses": losses, "ours": "MemAscend" in type(engine.optimizer).__name__,
                  "loaded": any(name.startswith("memascend.integrations.deepspeed") for name in sys.modules)}))
"""


def script_trains(folder: Path, **section) -> dict:
    """Run a script that knows nothing of memascend, with a DeepSpeed JSON to which ``section`` is added."""
    nvme = {"device": "nvme", "nvme_path": str(folder / "nvme")}
    on_cpu = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 1,  # the library derives it too; its choice may change the last bit
            "offload_param": nvme if section else on_cpu,
            "offload_optimizer": nvme if section else on_cpu,
        },
        **section,
    }
    path = folder / "ds.json"
    path.write_text(json.dumps(config))
    done = run(SCRIPT, str(path))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_json_key_alone_enables_memascend(tmp_path):
    stock, ours = script_trains(tmp_path), script_trains(tmp_path, memascend={"checkpointing": "offloaded"})
    assert (stock["ours"], stock["loaded"]) == (False, False)
    assert (ours["ours"], ours["loaded"]) == (True, True)
    assert ours["losses"] == stock["losses"]


def test_old_trainer_gives_equal_losses_with_the_key(tmp_path):
    bench = Workbench(tmp_path, PYTHON.parent)
    (reference,) = bench.run("torchrun", "trainer_script.py", None)
    (found,) = bench.run("deepspeed", "trainer_script.py", {})
    assert len(reference["losses"]) == STEPS
    assert (found["losses"], found["evaluation"]) == (reference["losses"], reference["evaluation"])
    assert "memascend.integrations.deepspeed.hooks" in found["modules"]
