"""What cannot be saved or loaded is one line, and the training continues; the second engine of a process loads too."""

from __future__ import annotations

import json

import pytest

from tests import one_rank

pytestmark = pytest.mark.deepspeed

SCRIPT = """
import json, resource, shutil, signal, sys
from pathlib import Path

import deepspeed, torch
import memascend
from memascend.integrations.deepspeed.checkpoint import can_be_exact

if not can_be_exact():
    print(json.dumps(None))
    sys.exit()
torch.set_num_threads(1)
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
folder = Path(sys.argv[1])
nvme = {"device": "nvme", "nvme_path": str(folder / "nvme")}
config = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
}
batch = torch.randn(2, 1024, dtype=torch.bfloat16)

def engine(seed):
    torch.manual_seed(seed)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(2)))
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

def step(engine):
    loss = engine(batch).float().pow(2).mean()
    engine.backward(loss)
    engine.step()
    return loss.item()

def refusal(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except (OSError, ValueError) as error:
        return str(error)

memascend.enable(config)
first, out = engine(0), {}
step(first)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, resource.RLIM_INFINITY))  # a master weight has 4 MiB
out["full"] = refusal(first.save_checkpoint, folder / "full")
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, resource.RLIM_INFINITY))  # too little for torch.save
out["full_for_torch"] = refusal(first.save_checkpoint, folder / "full")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
out["left"] = [path.name for path in (folder / "full").iterdir()]
(folder / "full" / "file").write_text("of the user")
out["a_file"] = refusal(first.save_checkpoint, folder / "full", tag="file")
out["above"] = refusal(first.save_checkpoint, folder / "full", tag="..")
first.save_checkpoint(folder / "saved", tag="one")
(folder / "saved" / "one" / "tokenizer.json").write_text("a tokenizer")
first.save_checkpoint(folder / "saved", tag="one")
out["beside"] = (folder / "saved" / "one" / "tokenizer.json").read_text()
(folder / "nested" / "epoch1" / ".best.memascend-partial").mkdir(parents=True)  # left by a killed save
first.save_checkpoint(folder / "nested", tag="epoch1/best")
out["nested"] = sorted(path.name for path in (folder / "nested" / "epoch1").iterdir())
out["unknown_tag"] = refusal(first.load_checkpoint, folder / "saved", tag="two")
out["whole"] = [step(first) for _ in range(2)]
second = engine(1)
second.load_checkpoint(folder / "saved")
out["resumed"] = [step(second) for _ in range(2)]
[states] = (folder / "saved" / "one").glob("*_optim_states.pt")
shutil.copy(states, states.with_name(states.name.replace("rank_0", "rank_1")))
out["two_ranks"] = refusal(second.load_checkpoint, folder / "saved")
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    done = one_rank.run(["-c", SCRIPT, tmp_path_factory.mktemp("mistakes")])
    results = json.loads(done.stdout.strip().splitlines()[-1])
    if results is None:
        pytest.skip("DeepSpeed 0.17 and later have checkpoints of ours")
    return results


def test_checkpoint_without_space_fails_in_one_line_leaving_nothing(found):
    assert "/full cannot be written (File too large), and nothing of global_step1 was kept; free space" in found["full"]
    assert "/full cannot be written (torch.save could not write a file), and nothing of" in found["full_for_torch"]
    assert "\n" not in found["full"] + found["full_for_torch"]
    assert found["left"] == []


def test_saving_neither_replaces_a_file_nor_removes_files_of_others(found):
    assert "/full cannot be written (" in found["a_file"]
    assert "/full/file is a file), and nothing of file was kept; free space, or name another folder" in found["a_file"]
    assert "tag '..' does not name a folder in" in found["above"]
    assert found["beside"] == "a tokenizer"
    assert found["nested"] == ["best"]


def test_training_continues_after_errors_and_second_engine_resumes_exactly(found):
    assert len(set(found["whole"])) == 2
    assert found["resumed"] == found["whole"]


def test_missing_tag_is_reported_with_the_existing_ones(found):
    assert "/saved has no checkpoint 'two'; it holds one" in found["unknown_tag"]


def test_a_checkpoint_of_another_number_of_ranks_is_refused(found):
    assert "was saved by 2 ranks, this training has 1; start it with 2" in found["two_ranks"]
