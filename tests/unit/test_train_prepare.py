"""Before the ranks start: what cannot work is one line that names the fix; otherwise tokens and sizes are prepared."""

import json

import numpy as np
import pytest

from memascend.planner import model_spec
from memascend.training import children, preparation
from memascend.training.config import complete
from memascend.training.folder import RunFolder
from memascend.training.prepare import prepare
from tests.train_runs import text_folder


def prepared(tmp_path, **changes):
    values = {"model": "llama3.2-1b", "twin": 32, "data": [str(tmp_path / "text")], "files": "*.py", "context": 64}
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir(exist_ok=True)
    return prepare(complete(values | changes), folder), folder


def test_non_causal_model_is_refused_with_its_type(tmp_path, text):
    (tmp_path / "t5").mkdir()
    config = {"model_type": "t5", "d_model": 32, "num_layers": 2, "num_heads": 2, "d_ff": 64, "vocab_size": 512}
    (tmp_path / "t5" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="a model of type 't5' is not a causal language model") as refused:
        prepared(tmp_path, model=str(tmp_path / "t5"), twin=1, random_weights=True)
    assert len(str(refused.value)) < 200


@pytest.fixture
def text(tmp_path):
    return text_folder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model": "qwen9-1b", "twin": 1},
            "no folder qwen9-1b, and the hub cannot be reached for a model of that name",
        ),
        ({"model": "/nowhere", "twin": 1}, "there is no folder /nowhere"),
        ({"model": "/nowhere", "random_weights": True}, "there is no /nowhere: name a model's folder"),
        ({"data": ["/nowhere"]}, "there is no file or folder /nowhere"),
        (
            {"data": ["nobody/no-such-dataset"]},
            "there is no file or folder nobody/no-such-dataset; taken as",
        ),
        ({"context": 2_000_000}, "the model takes at most 131072 tokens per sequence, not 2000000"),
        ({"batch": 100_000, "accumulate": 2}, "one step takes 200000"),
        ({"tokenizer": "/nowhere"}, "--tokenizer: there is no folder /nowhere; name a folder with a tokenizer$"),
        ({"tokenizer": "qwen9-1b"}, "--tokenizer: no folder qwen9-1b, and the hub .*; name a folder with a tokenizer$"),
        ({"twin": 128}, "has no twin at k = 128"),
        (
            {"checkpointing": "ssd", "activations": "offload:9,keep:9"},
            "'activations': offload:9,keep:9 covers 18 blocks and the model has 16; cover all of them",
        ),
        ({"model": "qwen3-30b-a3b", "twin": 64}, "divided by 64 are 12 wide, .* use a smaller --twin"),
    ],
)
def test_impossible_configuration_gives_a_one_line_error(tmp_path, text, changes, said):
    with pytest.raises(ValueError, match=said) as refused:
        prepared(tmp_path, **changes)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run" / "prepared.json").exists()


def test_tokens_sizes_and_plan_are_what_the_ranks_need(tmp_path, text):
    facts, folder = prepared(tmp_path)
    assert facts == json.loads(folder.prepared.read_text())
    assert facts["parameters"] == model_spec("llama3.2-1b").twin(32).parameters
    tokens = np.fromfile(folder.data / "train.tokens", dtype="<u4")
    assert len(tokens) == facts["train_tokens"]
    assert tokens.max() < 128256 // 32
    assert facts["train_sequences"] == len(tokens) // 64
    assert facts["planned_host_bytes"] > 4 * facts["parameters"]  # the gradient buffer alone
    assert "one was trained on the text" in facts["notes"][0]


def test_preparing_again_gives_the_same_tokens(tmp_path, text):
    first = prepared(tmp_path)[1].data / "train.tokens"
    before = first.read_bytes()
    prepared(tmp_path)
    assert first.read_bytes() == before


def test_preparing_again_keeps_the_text_and_refuses_another(tmp_path, text):
    _, folder = prepared(tmp_path)
    files = {path: path.read_bytes() for path in (*folder.data.iterdir(), *folder.tokenizer.iterdir(), folder.text)}
    folder.prepared.unlink()
    source = text / "heapq.py"
    whole = source.read_bytes()
    source.write_bytes(whole.replace(b"heap", b"pile"))
    with pytest.raises(
        ValueError, match=r"the text is not the one that this run was trained on .*: restore the files of"
    ):
        prepared(tmp_path)
    assert not folder.prepared.exists()
    assert {path: path.read_bytes() for path in files} == files
    assert not folder.partial_text.exists()
    source.write_bytes(whole)
    prepared(tmp_path)
    assert {path: path.read_bytes() for path in files} == files


def test_tokens_changed_in_place_are_refused(tmp_path, text):
    _, folder = prepared(tmp_path)
    preparation.prepare(folder, children.Stopping())
    tokens = folder.data / "train.tokens"
    whole = tokens.read_bytes()
    tokens.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(ValueError, match=r"train\.tokens has changed since it was prepared .*: restore it, or remove"):
        preparation.prepare(folder, children.Stopping())
    folder.text.write_text("{")
    with pytest.raises(ValueError, match=r"text\.json is damaged .*: restore it, or remove it so that --resume uses"):
        preparation.prepare(folder, children.Stopping())
