"""Order of data, learning rate, packing, and a run's output: all depend on the step alone."""

import dataclasses
import io
import json
import shutil
from unittest import mock

import numpy as np
import pytest

from memascend.integrations.text import Documents, Encoder, go_on, load_tokenizer, train_tokenizer
from memascend.training import data, preflight
from memascend.training.config import TrainConfig
from memascend.training.progress import Progress, StepRecord, byte_count, duration, read_metrics
from memascend.training.schedule import learning_rate, sequence_numbers


def test_every_epoch_shows_each_sequence_once_in_its_own_order():
    order = sequence_numbers(0, 30, sequences=10, seed=3)
    epochs = [order[i : i + 10] for i in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert sequence_numbers(7, 9, sequences=10, seed=3) == order[7:16]
    assert sequence_numbers(0, 10, sequences=10, seed=4) != order[:10]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_learning_rate_follows_its_named_schedule(schedule):
    rates = [learning_rate(s, peak=1.0, steps=100, warmup=10, schedule=schedule) for s in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (n + 1) for n in range(10)])
    falling = rates[10:]
    assert falling[0] == 1.0
    assert falling == sorted(falling, reverse=True)
    assert falling[45] == pytest.approx(1.0 if schedule == "constant" else 0.5)
    assert 0 < rates[-1] <= 1.0


def test_warmup_has_a_default_that_fits_even_one_step():
    assert learning_rate(0, peak=1.0, steps=100, warmup=None, schedule="linear") == pytest.approx(1 / 3)
    assert learning_rate(0, peak=1.0, steps=1, warmup=None, schedule="linear") == 1.0
    assert learning_rate(0, peak=1.0, steps=5, warmup=0, schedule="linear") == 1.0


def text_folder(tmp_path):
    folder = tmp_path / "text"
    (folder / "sub").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "a.py").write_text("def f():\n    return 1\n" * 50)
    (folder / "sub" / "b.py").write_text("größe = 2\n" * 50)
    (folder / "c.md").write_text("words and words\n" * 50)
    (folder / ".git" / "d.py").write_text("hidden")
    (folder / "e.bin").write_bytes(b"\xff\xfe\x00")
    (folder / "rows.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "other": 1}\n')
    return folder


def documents(*sources, **options):
    settings = {"pattern": "*", "field": "text", "subset": None, "split": "train"} | options
    return Documents([str(source) for source in sources], **settings)


def test_documents_come_from_files_folders_and_json_lines(tmp_path):
    folder = text_folder(tmp_path)
    assert len(list(documents(folder, pattern="*.py"))) == 2
    assert list(documents(folder / "rows.jsonl")) == ["one", "two"]
    everything = documents(folder)
    assert len(list(everything)) == 5
    assert everything.skipped == [str(folder / "e.bin")]


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("/nowhere/at/all", {}, "there is no file or folder /nowhere/at/all"),
        ("{folder}", {"pattern": "*.tex"}, "holds no file that matches '\\*.tex'"),
        ("{folder}/rows.jsonl", {"field": "body"}, "line 1: not a JSON object with the field 'body'"),
    ],
)
def test_missing_text_gives_an_error_that_names_it(tmp_path, source, options, said):
    folder = text_folder(tmp_path)
    with pytest.raises(ValueError, match=said):
        list(documents(source.format(folder=folder), **options))


def test_lone_surrogate_is_refused_with_its_line_number(tmp_path):
    (tmp_path / "half.jsonl").write_text('{"text": "a"}\n{"text": "\\ud800"}\n')
    with pytest.raises(ValueError, match=r"half\.jsonl, line 2: half of a surrogate pair"):
        list(documents(tmp_path / "half.jsonl"))


def test_tokenizer_trained_on_a_text_reproduces_the_text(tmp_path):
    folder = text_folder(tmp_path)
    texts = documents(folder, pattern="*.py")
    train_tokenizer(texts, 300, tmp_path / "tokenizer")
    encode = Encoder(tmp_path / "tokenizer")
    assert encode.size <= 300
    original = list(texts)
    from transformers import AutoTokenizer

    reader = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    for text, ids in zip(original, encode(original)):
        assert ids[-1:] == encode.end
        assert reader.decode(ids[:-1]) == text
    with pytest.raises(ValueError, match="too small for a byte tokenizer"):
        train_tokenizer(texts, 100, tmp_path / "other")


def test_no_tokenizer_is_loaded_from_a_folder_without_one(tmp_path):
    """transformers 5 makes one from the configuration alone, which has no words: every text became no token."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}')
    assert load_tokenizer(tmp_path, tmp_path / "out") is False
    assert not (tmp_path / "out").exists()


def test_packing_drops_only_the_tail_and_separates_evaluation_documents(tmp_path):
    texts = [chr(97 + n) * (n + 1) for n in range(200)]
    counts = data.write_tokens(
        tmp_path, texts, lambda batch: [[*map(ord, text), 0] for text in batch], seed=1, eval_share=0.2
    )
    train = np.fromfile(tmp_path / "train.tokens", dtype="<u4")
    evaluation = np.fromfile(tmp_path / "eval.tokens", dtype="<u4")
    assert counts["train_tokens"] == len(train)
    assert counts["train_documents"] + counts["eval_documents"] == 200
    assert 15 < counts["eval_documents"] < 70
    assert len(train) + len(evaluation) == sum(len(text) + 1 for text in texts)
    assert set(train) & set(evaluation) == {0}
    sequences = data.Sequences(tmp_path / "train.tokens", 64)
    assert len(sequences) == len(train) // 64
    rows = sequences.rows(range(len(sequences)))
    assert rows.dtype == np.int64
    assert np.array_equal(rows.reshape(-1), train[: rows.size])


def test_a_single_document_is_evaluated_on_its_end(tmp_path):
    data.write_tokens(tmp_path, ["x" * 999], lambda batch: [list(range(1000))], seed=0, eval_share=0)
    data.move_tail(tmp_path, 100)
    assert np.fromfile(tmp_path / "eval.tokens", dtype="<u4").tolist() == list(range(900, 1000))
    assert len(np.fromfile(tmp_path / "train.tokens", dtype="<u4")) == 900


def record(step, **changes):
    fields = {
        "step": step, "loss": 2.5, "learning_rate": 1e-5, "grad_norm": 1.25, "loss_scale": None, "skipped": False,
        "tokens": 4096, "seconds": 2.0, "host_peak_bytes": 3 << 30, "device_peak_bytes": 0, "read_bytes": 5 << 20,
        "written_bytes": 0,
    }  # fmt: skip
    return StepRecord(**(fields | changes))


def shown(tmp_path, *, terminal, log_every=1, steps=40):
    out = io.StringIO()
    progress = Progress(out, tmp_path / "m.jsonl", terminal=terminal, steps=steps, log_every=log_every)
    for step in range(1, steps + 1):
        progress.step(record(step, grad_norm=None if step == 2 else 1.25, skipped=step == 2))
    progress.passing("saving ...")
    progress.evaluation(steps, 2.25, 8, 1.0)
    progress.close()
    return out.getvalue()


def test_log_consists_of_plain_lines_without_control_characters(tmp_path):
    text = shown(tmp_path, terminal=False)
    assert all(character.isprintable() or character == "\n" for character in text)
    lines = text.splitlines()
    assert len(lines) == 40 + 2 + 1  # steps, two headers, evaluation
    assert len({len(line) for line in lines[:-1]}) == 1
    assert "overflow" in lines[2]
    assert "2,048" in lines[1]
    assert "3.0 GiB" in lines[1]
    assert "0:01:18" in lines[1]


def test_time_left_includes_future_evaluations(tmp_path):
    def lefts(**more):
        out = io.StringIO()
        progress = Progress(out, tmp_path / "m.jsonl", terminal=False, steps=6, log_every=1, **more)
        for step in range(1, 7):
            progress.step(record(step, seconds=3.0))
            if step == 4:
                progress.evaluation(step, 2.25, 8, 60.0)
        progress.close()
        return [line.split()[-1] for line in out.getvalue().splitlines() if "/6 " in line]

    assert lefts() == [f"0:00:{left:02d}" for left in (15, 12, 9, 6, 3, 0)]
    # 8 batches of an evaluation for one of a step: 8 s before the first evaluation, then the 60 s that it took.
    assert lefts(eval_batches=8) == [f"0:00:{left:02d}" for left in (23, 20, 17, 14)] + ["0:01:03", "0:01:00"]
    assert lefts(eval_batches=8, eval_every=4)[:4] == [f"0:00:{left:02d}" for left in (31, 28, 25, 22)]
    assert lefts(eval_batches=8, eval_every=4)[4:] == ["0:01:03", "0:01:00"]


def test_a_log_says_once_how_long_an_evaluation_takes(tmp_path):
    def said(terminal, seconds):
        out = io.StringIO()
        progress = Progress(out, tmp_path / "m.jsonl", terminal=terminal, steps=1, log_every=1)
        for done in range(1, 5):
            progress.evaluating(done, 4, done * seconds)
        progress.evaluation(1, 2.25, 4, 4 * seconds)
        progress.close()
        return out.getvalue()

    assert said(False, 1.0).count("evaluating") == 0
    assert said(False, 60.0).splitlines()[0] == "evaluating 4 sequences, about 0:04:00"
    assert said(False, 60.0).count("evaluating") == 1
    assert "evaluating: 3 of 4 sequences, 0:01:00 left" in said(True, 60.0)


def test_terminal_overwrites_steps_between_printed_lines(tmp_path):
    text = shown(tmp_path, terminal=True, log_every=10)
    assert text.count("\n") == 1 + 1 + 4 + 1  # header, first step, every tenth, evaluation
    assert "\r" in text


def test_metrics_record_every_loss_to_the_last_bit(tmp_path):
    progress = Progress(io.StringIO(), tmp_path / "m.jsonl", terminal=False, steps=3, log_every=2)
    losses = [0.1 + 0.2, 1 / 3, float(np.float32(1 / 3))]
    for step, loss in enumerate(losses, 1):
        progress.step(record(step, loss=loss))
    progress.close()
    assert [row["loss"] for row in read_metrics(tmp_path / "m.jsonl")] == losses
    assert json.loads((tmp_path / "m.jsonl").read_text().splitlines()[0])["kind"] == "step"


class Gone(io.StringIO):
    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


def test_closed_output_pipe_does_not_stop_the_metrics(tmp_path):
    progress = Progress(Gone(), tmp_path / "m.jsonl", terminal=True, steps=3, log_every=2)
    for step in (1, 2, 3):
        progress.step(record(step))
    progress.close()
    assert len(read_metrics(tmp_path / "m.jsonl")) == 3


def test_sizes_and_times_read_well():
    assert [byte_count(size) for size in (0, 512, 1 << 20, 1536 << 20, 200 << 30)] == [
        "0", "512 B", "1.0 MiB", "1.5 GiB", "200 GiB",
    ]  # fmt: skip
    assert [duration(s) for s in (0.4, 61, 3661, 200_000)] == ["0:00:00", "0:01:01", "1:01:01", "2 d 07 h"]


def test_too_little_memory_or_disk_is_refused_before_the_start(tmp_path):
    config = TrainConfig(model="m", data=["d"])
    prepared = {"planned_host_bytes": 1 << 50, "planned_components": {"pool": 1 << 49}, "parameters": 10}
    with pytest.raises(ValueError, match=r"needs 1048576 GiB of host memory .* are missing; largest part: pool"):
        preflight.check(config, prepared, tmp_path, None)
    with pytest.raises(ValueError, match=r"GiB of checkpoints and .* GiB of swap files: .* are missing"):
        preflight.check(config, prepared | {"planned_host_bytes": None, "parameters": 10**15}, tmp_path, tmp_path)
    preflight.check(config, prepared | {"planned_host_bytes": 1}, tmp_path, tmp_path)
    free = shutil.disk_usage(tmp_path).free
    fits, too_much = ({"planned_host_bytes": 1, "planned_swap_bytes": size} for size in (free // 2, free))
    preflight.check(config, prepared | fits, tmp_path, tmp_path)
    with pytest.raises(ValueError, match=r"of swap files: .* are missing; free space, or use another"):
        preflight.check(config, prepared | too_much, tmp_path, tmp_path)
    small = {"planned_host_bytes": 1, "planned_swap_bytes": 8 << 20}
    full = mock.patch.object(preflight.shutil, "disk_usage", return_value=mock.Mock(free=7 << 20))
    with full, pytest.raises(ValueError, match=r" and 9\.2 MiB of swap files: "):
        preflight.check(config, prepared | small, tmp_path, tmp_path)
    either = small | {"planned_swap_bytes": 28 << 20, "least_swap_bytes": 18 << 20}
    for free, needed in ((20 << 20, None), (17 << 20, r" and 19\.4 MiB of swap files: ")):
        with mock.patch.object(preflight.shutil, "disk_usage", return_value=mock.Mock(free=free)):
            if needed is None:
                preflight.check(config, prepared | either, tmp_path, tmp_path)
                continue
            with pytest.raises(ValueError, match=needed):
                preflight.check(config, prepared | either, tmp_path, tmp_path)
    device = tmp_path / "device"
    device.write_bytes(bytes(4096))
    devices = dataclasses.replace(config, devices=[str(device)])
    with pytest.raises(ValueError, match=r"this run swaps 19.1 MiB; name more or larger --devices"):
        preflight.check(devices, prepared | {"planned_host_bytes": 1, "parameters": 10**6}, tmp_path, tmp_path)


def test_unloadable_tokenizer_is_refused_when_continuing_a_text(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ValueError, match=f"the tokenizer in {tmp_path} cannot be loaded: "):
        go_on(None, tmp_path, "a", 1, None)
