"""`memascend train` with vertical accumulation: a transformers model, the bits of training in memory, and a resume."""

import json

import pytest
import torch

from memascend.memory.ledger import Ledger
from memascend.training.backends.streaming import StreamingBackend
from memascend.training.config import TrainConfig
from memascend.training.systems import check
from tests.integration.test_lohan import MODEL, assert_equal, in_memory, streamed
from tests.train_runs import losses, options_for, text_folder
from tests.train_runs import train as command

COUNT = 4
# The texts differ, so that the labels of one micro-batch are not those of another.
BATCHES = [torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(n)) for n in range(3 * COUNT)]


def steps(backend, first, last):
    return [
        tuple(map(float, backend.step(BATCHES[COUNT * step : COUNT * (step + 1)], 1e-3))) for step in range(first, last)
    ]


@pytest.mark.parametrize(
    ("dtype", "clip", "loss"),
    [
        ("bf16", 0.5, "chunked"),
        ("fp32", 0.0, "plain"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                ("bf16", 0.0, "chunked"),
                ("bf16", 0.0, "plain"),
                ("bf16", 0.5, "plain"),
                ("fp16", 0.5, "chunked"),
                ("fp16", 0.5, "plain"),
                ("fp32", 0.0, "chunked"),
            ]
        ),
    ],
)
def test_weights_states_losses_and_norms_equal_training_in_memory(tmp_path, dtype, clip, loss):
    changes = {"accumulate": COUNT, "dtype": dtype, "clip": clip, "loss": loss}
    ours, theirs = streamed(tmp_path, accumulation="auto", **changes), in_memory(**changes)
    assert steps(ours, 0, 3) == steps(theirs, 0, 3)
    assert ours.facts()["accumulation"]["order"] == "vertical"
    assert_equal(ours, theirs)
    ours.close()


@pytest.mark.parametrize("before", ["auto", "horizontal"])
def test_run_resumes_exactly_in_the_other_accumulation_order(tmp_path, before):
    after = {"auto": "horizontal", "horizontal": "auto"}[before]
    theirs = in_memory(accumulate=COUNT)
    ours = streamed(tmp_path, accumulate=COUNT, accumulation=before)
    found = steps(ours, 0, 2)
    ours.keep({"step": 2})
    ours.engine.close()
    config = TrainConfig(**{**ours._config.as_dict(), "accumulation": after})
    again = StreamingBackend(config, ours._settings, Ledger())
    again.go_on(MODEL)
    assert found + steps(again, 2, 3) == steps(theirs, 0, 3)
    assert_equal(again, theirs)
    again.close()


def test_dropout_falls_back_to_horizontal_accumulation(tmp_path):
    dropping = {"attention_dropout": 0.1}
    ours, theirs = (
        streamed(tmp_path, model=dropping, accumulate=COUNT, accumulation="auto"),
        in_memory(dropping, accumulate=COUNT),
    )
    both = []
    for backend in (ours, theirs):
        torch.manual_seed(11)
        both.append(steps(backend, 0, 3))
    assert both[0] == both[1]
    assert ours.facts()["accumulation"]["order"] == "horizontal"
    assert "random numbers" in ours.facts()["accumulation"]["why"]
    ours.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"system": "memascend"}, "system 'memascend' only supports horizontal accumulation"),
        ({"system": "lohan", "checkpointing": "ssd"}, "is not done with results of blocks on the SSD"),
        ({"system": "lohan", "arm": "as_published"}, "is not done with results of blocks on the SSD"),
    ],
)
def test_unsupported_vertical_options_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as refused:
        check(TrainConfig(model="m", data=["d"], accumulation="vertical", **changes))
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_command_resumes_in_the_other_order_with_equal_losses(tmp_path):
    text = text_folder(tmp_path)
    more = ["--accumulate", "8", "--steps", "4", "--save-every", "2"]
    runs = {order: tmp_path / order for order in ("vertical", "horizontal")}
    written = {}
    for order, run in runs.items():
        done = command(run, *options_for(text, "lohan", *more, "--accumulation", order))
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads((run / "report.json").read_text())["accumulation"]["order"] == order
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        (last,) = (row for row in rows if row["kind"] == "step" and row["step"] == 4)
        written[order] = last["read_bytes"] + last["written_bytes"]
    assert losses(runs["vertical"]) == losses(runs["horizontal"])
    assert written["vertical"] < 0.6 * written["horizontal"]
    for order, run in runs.items():
        other = next(each for each in runs if each != order)
        done = command(run, "--resume", "--steps", "6", "--accumulation", other)
        assert done.returncode == 0, done.stdout + done.stderr
    assert losses(runs["vertical"]) == losses(runs["horizontal"])
