"""`memascend train` with speculative clipping: the bits of training in memory, resumes, and its messages."""

import pytest
import torch

from memascend.memory.ledger import Ledger
from memascend.training import random_state
from memascend.training.backends.streaming import StreamingBackend
from tests.integration.test_lohan import MODEL, assert_equal, in_memory, streamed

STEPS, CLIP = 50, 4.0
DROPPING = {"attention_dropout": 0.1}


def batch(step, number=0):
    """Return a batch that is a single word in some steps: their gradient norm is
    several times that of others, which is below 2.1."""
    if step % 7 == 1 and step > 7:
        return torch.full((2, 16), step + number)
    return torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(100 * step + number))


def train(backend, first, last):
    count = backend._config.accumulate
    made = []
    for step in range(first, last):
        loss, norm = backend.step([batch(step, number) for number in range(count)], 1e-4)
        made.append((float(loss), norm if norm is None else float(norm)))
        backend.keep({"step": step + 1, "random": random_state.as_json()})
    return made


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        pytest.param(DROPPING, {}, marks=pytest.mark.slow),
        (MODEL, {"accumulate": 2, "accumulation": "auto", "states": "bf16", "gradients": "bf16"}),
        pytest.param(MODEL, {"dtype": "fp16"}, marks=pytest.mark.slow),
        pytest.param(DROPPING, {"accumulate": 2}, marks=pytest.mark.slow),
        pytest.param(MODEL, {"states": "int8", "tie_word_embeddings": True}, marks=pytest.mark.slow),
    ],
    ids=["dropout", "vertical", "fp16", "horizontal", "8 bits"],
)
def test_speculated_steps_including_repeated_ones_match_training_in_memory(tmp_path, model, changes):
    tied = {"tie_word_embeddings": changes.pop("tie_word_embeddings", False)}
    ours = streamed(tmp_path, model=model | tied, clip=CLIP, **changes)
    theirs = in_memory(model | tied, clip=CLIP, **changes)
    theirs.keep = lambda facts: None
    both = []
    for backend in (ours, theirs):
        torch.manual_seed(11)
        both.append((train(backend, 0, STEPS), torch.rand(1)))
    assert both[0] == both[1]
    facts = ours.facts()["clipping"]
    assert facts["done_again"] >= 5
    assert facts["speculated_steps"] > 40
    assert_equal(ours, theirs)
    ours.close()


def test_resumed_run_speculates_from_its_first_step(tmp_path):
    """It speculates from its first step on; a new run lets the first two steps wait."""
    ours = streamed(tmp_path, clip=CLIP)
    made = train(ours, 0, 5)
    assert [ours.facts()["clipping"]["speculated_steps"], ours.engine.speculation.done_again] == [3, 0]
    ours.engine.close()
    again = StreamingBackend(ours._config, ours._settings, Ledger())
    again.go_on(MODEL)
    made += train(again, 5, 9)
    assert again.facts()["clipping"]["speculated_steps"] == 4
    assert again.facts()["clipping"]["done_again"] == 1
    theirs = in_memory(clip=CLIP)
    theirs.keep = lambda facts: None
    assert made == train(theirs, 0, 9)
    assert_equal(again, theirs)
    again.close()


def test_remark_says_whether_gradients_wait_for_their_norm(tmp_path):
    ours = streamed(tmp_path, clip=CLIP)
    said = []
    for step in range(4):
        train(ours, step, step + 1)
        said.append(ours.remark() or "")
    assert "gradients wait for their norm: 50% of the steps are expected to be clipped" in said[0]
    assert "gradients are used before their norm is known" in said[2]
    assert not any("gradients" in said[step] for step in (1, 3))
    ours.close()


def test_one_state_version_never_speculates_and_says_nothing(tmp_path):
    ours = streamed(tmp_path, clip=CLIP)
    ours.close()
    settings = {**ours._settings, "folder": str(tmp_path / "one"), "versions": 1}
    one = StreamingBackend(ours._config, settings, Ledger())
    torch.manual_seed(3)
    one.build(MODEL)
    train(one, 0, 4)
    assert one.engine.speculation.speculated == 0
    assert "clipping" not in one.facts()
    assert "gradients" not in one.remark().replace("with saved gradients", "")
    one.close()
