"""Files of a run: tensors one by one, checkpoints that are complete or not listed, swap folders of killed runs."""

import json
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from memascend.storage.tensor_file import TensorFileReader, TensorFileWriter, TensorLayout, tensor_spans
from memascend.storage.tensor_folder import TensorFolder
from memascend.storage.tensor_parts import TensorPartsWriter
from memascend.training import checkpoint, children, preparation, report
from memascend.training.folder import OWNER, Lock, RunFolder, SwapFolder, collect_dead
from memascend.training.progress import add_cut_off_step, read_metrics, rewind_metrics

TENSORS = {
    "bf16": torch.arange(7, dtype=torch.bfloat16).reshape(7, 1),
    "fp32": torch.randn(3, 5),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4, dtype=torch.float16),
    "transposed": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
    "bytes": torch.arange(11, dtype=torch.uint8),
}


def layouts():
    return [TensorLayout(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()]


def written(path):
    with TensorFileWriter(path, layouts(), {"format": "pt"}) as writer:
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
    return writer


def test_safetensors_library_reads_a_file_written_tensor_by_tensor(tmp_path):
    written(tmp_path / "t.safetensors")
    loaded = load_file(tmp_path / "t.safetensors")
    assert set(loaded) == set(TENSORS)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


def test_file_of_float8_weights_is_read_but_no_model_to_train(tmp_path):
    path, values = tmp_path / "model.safetensors", torch.randn(6).to(torch.float8_e4m3fn)
    with TensorFileWriter(path, [TensorLayout("w", values.dtype, (6,))]) as writer:
        writer.write("w", values)
    assert tensor_spans(path)["w"][0] == values.dtype
    with pytest.raises(ValueError, match="w is F8_E4M3, which cannot be trained: use 16- or 32-bit weights"):
        TensorFolder(tmp_path)


def test_checksum_covers_the_whole_file(tmp_path):
    path = tmp_path / "t.safetensors"
    writer = written(path)
    assert writer.checksum == zlib.crc32(path.read_bytes()) == checkpoint.file_checksum(path)
    assert writer.size == path.stat().st_size


def test_aligned_tensors_begin_at_whole_blocks_and_padding_is_hidden(tmp_path):
    path = tmp_path / "t.safetensors"
    with TensorFileWriter(path, layouts(), aligned=True) as writer:
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
    assert (writer.checksum, writer.size) == (zlib.crc32(path.read_bytes()), path.stat().st_size)
    assert writer.size % 4096 == 0
    assert all(begin % 4096 == 0 for name, (_, _, begin, _) in tensor_spans(path).items() if name in TENSORS)
    loaded = load_file(path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    with TensorFileReader(path) as reader:
        assert reader.names == list(TENSORS)
        assert torch.equal(reader.read("fp32"), TENSORS["fp32"])


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("kind", [TensorFileWriter, TensorPartsWriter])
def test_tensors_whose_names_end_in_padding_are_written_and_read(tmp_path, kind, aligned):
    tensors = {
        "x": torch.arange(5.0),
        "x.padding": torch.arange(7.0),
        "x.padding.padding": torch.arange(4096, dtype=torch.uint8),
        "layer.padding": torch.arange(3.0),
        "whole": torch.zeros(1024),
        "whole.padding": torch.arange(9, dtype=torch.uint8),
    }
    path = tmp_path / "t.safetensors"
    layouts = [TensorLayout(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    with kind(path, layouts, aligned=aligned) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    loaded = load_file(path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    with TensorFileReader(path) as reader:
        assert reader.names == list(tensors)
        assert all(torch.equal(reader.read(name), tensor) for name, tensor in tensors.items())


def test_a_tensor_is_read_into_given_or_new_memory(tmp_path):
    written(tmp_path / "t.safetensors")
    with TensorFileReader(tmp_path / "t.safetensors") as reader:
        target = torch.zeros(3, 5)
        reader.read_into("fp32", target)
        assert torch.equal(target, TENSORS["fp32"])
        assert torch.equal(reader.read("bf16"), TENSORS["bf16"])
        with pytest.raises(ValueError, match=r"fp32 is F32 of \[3, 5\], expected F16 of 15 elements"):
            reader.read_into("fp32", torch.zeros(15, dtype=torch.float16))
        with pytest.raises(ValueError, match="holds no tensor other"):
            reader.read("other")


def test_missing_or_mismatched_tensors_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"0 of 6 tensors were written"), TensorFileWriter(tmp_path / "a", layouts()):
        pass
    with (
        pytest.raises(ValueError, match="expected TensorLayout"),
        TensorFileWriter(tmp_path / "b", layouts()) as writer,
    ):
        writer.write("fp32", TENSORS["fp32"])


def test_truncated_file_raises_an_error(tmp_path):
    path = tmp_path / "t.safetensors"
    written(path)
    os.truncate(path, path.stat().st_size - 5)
    with TensorFileReader(path) as reader, pytest.raises(ValueError, match="ends inside bytes: 6 of 11 bytes"):
        reader.read("bytes")


def make_checkpoint(folder, step):
    partial = checkpoint.begin(folder, step)
    (partial / "model" / "weights").write_bytes(b"w" * step)
    (partial / "state" / "trainer.json").write_text(json.dumps({"step": step}))
    return checkpoint.commit(partial, step, {}, {"ranks": 1})


def test_checkpoints_are_listed_by_step_and_the_oldest_removed(tmp_path):
    for step in (30, 4, 200):
        make_checkpoint(tmp_path, step)
    assert [c.step for c in checkpoint.listed(tmp_path)[0]] == [4, 30, 200]
    assert checkpoint.prune(tmp_path, 2) == [4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000030", "step-00000200"]


def test_a_checkpoint_with_a_short_file_is_not_listed(tmp_path):
    make_checkpoint(tmp_path, 1)
    os.truncate(make_checkpoint(tmp_path, 2) / "model" / "weights", 1)
    found, refused = checkpoint.listed(tmp_path)
    assert [c.step for c in found] == [1]
    assert "model/weights has 1 bytes, expected 2" in refused[0]


def test_changed_byte_is_detected_by_the_checksum(tmp_path):
    path = make_checkpoint(tmp_path, 3)
    (path / "model" / "weights").write_bytes(b"wxw")
    found = checkpoint.listed(tmp_path)[0][0]
    found.check(path / "state" / "trainer.json")
    with pytest.raises(ValueError, match=r"is damaged: model/weights has checksum [0-9a-f]{8}, expected [0-9a-f]{8}"):
        found.check(path / "model" / "weights")


SAVE_FOR_EVER = """
import sys
from pathlib import Path
from memascend.training import checkpoint
folder, step = Path(sys.argv[1]), int(sys.argv[2])
while True:
    step += 1
    partial = checkpoint.begin(folder, step)
    (partial / "model" / "weights").write_bytes(b"w" * 100_000)
    (partial / "state" / "trainer.json").write_text("{}")
    checkpoint.commit(partial, step, {}, {"ranks": 1})
    checkpoint.prune(folder, 2)
    print(step, flush=True)
"""


def test_kill_while_saving_leaves_earlier_checkpoints_intact(tmp_path):
    import random

    last, rng = 0, random.Random(1)
    for _ in range(12):
        with subprocess.Popen(
            [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path), str(last)], stdout=subprocess.PIPE, text=True
        ) as child:
            for _ in range(rng.randrange(1, 6)):
                last = int(child.stdout.readline())
            # somewhere inside the next saves, by the clock of this process's own random work
            sum(range(rng.randrange(400_000)))
            child.send_signal(signal.SIGKILL)
            last = max([last, *map(int, child.stdout.read().split())])
        found, refused = checkpoint.listed(tmp_path)
        assert refused == []
        assert found[-1].step in (last, last + 1)
        for one in found:
            one.check(one.model / "weights")
        last = found[-1].step
        checkpoint.clean(tmp_path)
        assert not list(tmp_path.glob(".*"))


def test_link_to_newest_weights_moves_and_never_replaces_a_folder(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    link = tmp_path / "model"
    for name in ("a", "b"):
        checkpoint.point(link, tmp_path / name)
        assert link.resolve() == tmp_path / name
    link.unlink()
    link.mkdir()
    checkpoint.point(link, tmp_path / "a")
    assert not link.is_symlink()


# -- folders -----------------------------------------------------------------------------------------------------------


def test_an_existing_folder_needs_resume_or_another_name(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists and is not empty; name another folder"):
        RunFolder(tmp_path).open(resume=False)
    (tmp_path / "config.yaml").write_text("model: m")
    with pytest.raises(ValueError, match="continue it with --resume, or name another folder"):
        RunFolder(tmp_path).open(resume=False)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_half_written_configuration_does_not_block_a_new_run(tmp_path):
    (tmp_path / ".config.yaml.partial").write_text("model: ")
    (tmp_path / "run.lock").touch()
    RunFolder(tmp_path).open(resume=False).close()


def test_resume_of_a_missing_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing to resume"):
        RunFolder(tmp_path / "none").open(resume=True)
    assert not (tmp_path / "none").exists()


def test_folder_in_use_is_refused_until_its_lock_is_released(tmp_path):
    lock = RunFolder(tmp_path / "run").open(resume=False)
    lock.say(f"pid {os.getpid()}")
    with pytest.raises(ValueError, match=f"is in use by pid {os.getpid()}"):
        RunFolder(tmp_path / "run").open(resume=False)
    lock.close()
    RunFolder(tmp_path / "run").open(resume=False).close()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_failed_call_removes_its_lock_and_new_folders(tmp_path):
    with pytest.raises(KeyError), RunFolder(tmp_path / "new" / "run").held(resume=False):
        raise KeyError
    assert names(tmp_path) == []


def test_failed_call_leaves_existing_files_and_folders(tmp_path):
    (tmp_path / "logs").mkdir()
    with pytest.raises(KeyError), RunFolder(tmp_path).held(resume=False):
        raise KeyError
    assert names(tmp_path) == ["logs"]
    (tmp_path / "run.lock").write_text("pid 1, port 2")
    with pytest.raises(KeyError), RunFolder(tmp_path).held(resume=False):
        raise KeyError
    assert names(tmp_path) == ["logs", "run.lock"]


def test_resumable_run_keeps_its_lock_file(tmp_path):
    def train():
        with RunFolder(tmp_path).held(resume=False):
            (tmp_path / "config.yaml").write_text("model: m")
            raise KeyError

    with pytest.raises(KeyError):
        train()
    assert names(tmp_path) == ["config.yaml", "run.lock"]


def test_waiting_lock_is_not_taken_on_a_removed_file(tmp_path, monkeypatch):
    """The file is opened before its holder removes it, and locked afterwards:
    another process could lock the next file of that name."""
    from memascend.training import folder

    holder = Lock(tmp_path, alone=True)
    flock, calls = folder.fcntl.flock, []

    def after_the_removal(handle, operation):
        if not calls:
            holder.remove()
            holder.close()
        calls.append(handle)
        flock(handle, operation)

    monkeypatch.setattr(folder.fcntl, "flock", after_the_removal)
    lock = Lock(tmp_path, alone=True)
    assert len(calls) == 2
    with pytest.raises(folder.InUse):
        Lock(tmp_path, alone=True)
    lock.close()


SWAP_AND_DIE = """
import os, signal, sys
from pathlib import Path
from memascend.training.folder import SwapFolder
swap = SwapFolder.make(Path(sys.argv[1]), Path("/the/run"))
files = swap.path / "zero_stage_3" / "rank0"
files.mkdir(parents=True)
(files / "p.tensor.swp").write_bytes(b"x" * 3_000_000)
print(swap.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def dead_swap_folder(parent):
    """Return a swap folder whose process was killed."""
    done = subprocess.run(
        [sys.executable, "-c", SWAP_AND_DIE, str(parent)], capture_output=True, text=True, check=False
    )
    return type(parent)(done.stdout.strip())


def test_swap_files_of_a_dead_run_are_removed_and_reported(tmp_path):
    folder = dead_swap_folder(tmp_path)
    [line] = collect_dead(tmp_path)
    assert "removed 3 MiB of swap files of the dead run /the/run" in line
    assert not folder.exists()


def test_swap_files_of_a_living_run_stay(tmp_path):
    swap = SwapFolder.make(tmp_path, tmp_path / "run")
    rank = Lock(swap.path, alone=False)  # a rank that outlives its parent
    (swap.path / "p.swp").write_bytes(b"x")
    assert collect_dead(tmp_path) == []
    swap.lock.close()
    assert collect_dead(tmp_path) == []
    assert (swap.path / "p.swp").exists()
    rank.close()
    assert len(collect_dead(tmp_path)) == 1


HOLD_A_SWAP_FOLDER = """
import sys, time
from pathlib import Path
from memascend.training.folder import Lock
lock = Lock(Path(sys.argv[1]), alone=False)
print(flush=True)
time.sleep(float(sys.argv[2]))
"""


def test_only_its_own_run_waits_for_dying_ranks(tmp_path):
    """If a run is killed and resumed at once, its ranks release their swap files only when they have exited."""
    folder = dead_swap_folder(tmp_path)
    rank = [sys.executable, "-c", HOLD_A_SWAP_FOLDER, str(folder), "2"]
    with subprocess.Popen(rank, stdout=subprocess.PIPE) as dying:
        assert dying.stdout.readline() == b"\n"
        assert collect_dead(tmp_path) == collect_dead(tmp_path, Path("/another/run")) == []
        [line] = collect_dead(tmp_path, Path("/the/run"), patience=0)
        assert line == f"left {folder}: processes of the dead run /the/run still hold it"
        assert folder.exists()
        assert "removed 3 MiB of swap files" in collect_dead(tmp_path, Path("/the/run"))[0]
    assert not folder.exists()


def test_foreign_files_are_never_removed(tmp_path):
    folder = dead_swap_folder(tmp_path)
    (folder / "thesis.txt").write_text("mine")
    (folder / "link.swp").symlink_to(tmp_path)
    other = tmp_path / "memascend-swap-by-hand"
    other.mkdir()
    (other / "a.swp").write_text("no owner file")
    stranger = tmp_path / "zero_stage_3"
    stranger.mkdir()
    [line] = collect_dead(tmp_path)
    assert "left 2 files that are not ours" in line
    assert (folder / "thesis.txt").read_text() == "mine"
    assert (folder / "link.swp").is_symlink()
    assert (other / "a.swp").exists()
    assert stranger.exists()
    assert not (folder / OWNER).exists()


def test_metrics_rewind_to_the_checkpoint_and_skip_a_truncated_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"kind": "step", "step": n, "loss": 1 / n} for n in (1, 2, 3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "step", "st')
    assert read_metrics(path) == rows
    assert rewind_metrics(path, 1) == 2
    assert read_metrics(path) == rows[:1]


def test_row_without_valid_seconds_is_ignored(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"kind": "step", "step": 1, "seconds": {x}}}\n' for x in ("Infinity", "NaN", "-1", "2")))
    assert [row["seconds"] for row in read_metrics(path)] == [2]


def test_missing_or_damaged_run_file_is_named_with_its_fix(tmp_path):
    folder = RunFolder(tmp_path)
    folder.data.mkdir()
    folder.prepared.write_text('{"train_tokens": 2, "eval_tokens": 0}')
    (folder.data / "train.tokens").write_bytes(bytes(8))
    with pytest.raises(ValueError, match=r"eval\.tokens is missing: restore it, or remove .*prepared\.json"):
        preparation.prepare(folder, children.Stopping())
    (folder.data / "eval.tokens").touch()
    with pytest.raises(ValueError, match=r"/tokenizer is missing: restore it, or remove .*prepared\.json"):
        preparation.prepare(folder, children.Stopping())
    folder.tokenizer.mkdir()
    (folder.tokenizer / "tokenizer.json").write_text("{}")
    preparation.prepare(folder, children.Stopping())
    (folder.tokenizer / "tokenizer.json").write_text("")
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged .*: restore it, or remove"):
        preparation.prepare(folder, children.Stopping())
    (folder.data / "train.tokens").write_bytes(bytes(7))  # other text, without an error
    with pytest.raises(ValueError, match=r"train\.tokens has 7 bytes, 8 were prepared: restore it, or remove"):
        preparation.prepare(folder, children.Stopping())
    for damaged in (b"", b'{"context": ', b"\xff\xfe"):
        folder.prepared.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"prepared\.json is damaged .*--resume prepares"):
            preparation.read_prepared(folder)
    folder.metrics.write_bytes(b'{"step": 1}\n\xff\xfe')
    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged"):
        read_metrics(folder.metrics)


def test_interrupted_step_has_one_row_and_no_part_in_medians(tmp_path):
    path, known = tmp_path / "metrics.jsonl", {"tokens": 64, "learning_rate": 1e-3, "loss_scale": None}
    for loss in (2.5, 9.0):  # the second write finds the first one's file
        add_cut_off_step(path, 1, loss=loss, **known)
    summary = report.summary(read_metrics(path))
    assert (summary["steps"], summary["first_loss"], summary["tokens"]) == (1, 2.5, 64)
    assert (summary["median_step_s"], summary["training_s"], summary["written_bytes"]) == (None, 0, 0)
    timed = {"kind": "step", "step": 2, "loss": 2.0, "skipped": False, "seconds": 4.0, "read_bytes": 6} | known
    path.write_text(path.read_text() + json.dumps(timed | {"written_bytes": 8}) + "\n")
    summary = report.summary(read_metrics(path))
    assert (summary["steps"], summary["tokens"], summary["last_loss"]) == (2, 128, 2.0)
    assert (summary["median_step_s"], summary["median_tokens_per_s"], summary["written_bytes"]) == (4.0, 16.0, 8)
