"""Too little memory, a full disk, a folder that was moved, data that are not text: one line with what to do."""

import contextlib
import dataclasses
import errno
import io
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from memascend.integrations.text import Documents
from memascend.memory.cgroup import host_memory
from memascend.planner import model_spec
from memascend.storage.tensor_file import TensorLayout
from memascend.training import launch, preflight
from memascend.training import prepare as preparation
from memascend.training.config import TrainConfig, complete
from memascend.training.folder import RunFolder
from memascend.training.prepare import prepare
from memascend.training.progress import Progress
from memascend.training.worker import Worker
from tests.loop_devices import small_file_system
from tests.train_runs import text_folder

CONFIG = TrainConfig(model="m", data=["d"])


def full_disk(worker):
    """Make a worker's disk refuse every checkpoint."""

    def write():
        (worker.folder.checkpoints / ".partial-step-00000007").mkdir(parents=True)
        raise OSError(errno.ENOSPC, "No space left on device")

    worker._write_checkpoint = write
    return worker


def test_full_disk_at_checkpoint_names_path_size_and_resume_command(tmp_path):
    worker = Worker.__new__(Worker)
    worker.folder, worker.step, worker.rank, worker.ranks = RunFolder(tmp_path / "run"), 7, 0, 2
    worker.config = SimpleNamespace(checkpoints="full")
    layouts = [TensorLayout("a", torch.float32, (1 << 18,))]
    kept = [None, 5]
    worker.backend = SimpleNamespace(
        weight_layouts=lambda: layouts, state_layouts=lambda: layouts, kept_step=lambda: kept.pop(0)
    )
    with pytest.raises(ValueError, match=r"cannot save the checkpoint of step 7 in .*/run/checkpoints") as refused:
        full_disk(worker)._save()
    said = str(refused.value)
    assert "(No space left on device): it takes 3.0 MiB, and " in said
    assert f"then: memascend train --output {tmp_path / 'run'} --resume (starts over" in said
    assert "\n" not in said
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    with pytest.raises(ValueError, match=r"--resume \(continues after step 5\)"):  # its states are on the SSD
        full_disk(worker)._save()


def test_full_disk_at_metrics_names_the_file_and_the_remedy(tmp_path):
    progress = Progress(io.StringIO(), Path("/dev/full"), terminal=False, steps=1, log_every=1)
    with pytest.raises(
        ValueError, match=r"cannot write /dev/full: No space left on device; free some space, and continue with"
    ):
        progress.evaluation(1, 2.5, 4, 0.1)
    with contextlib.suppress(OSError):  # the row is written again
        progress.close()


def test_a_trace_into_a_folder_is_refused_before_the_start(tmp_path):
    prepared = {"planned_host_bytes": 1, "planned_components": {}, "parameters": 10}
    with pytest.raises(ValueError, match=r"--trace .* is a folder: name a file in it, such as .*/trace\.json"):
        preflight.check(dataclasses.replace(CONFIG, trace=str(tmp_path)), prepared, tmp_path, None)


def test_other_disk_errors_are_raised_unchanged(tmp_path):
    worker = Worker.__new__(Worker)
    worker.config, worker.step = SimpleNamespace(checkpoints="full"), 7

    def write():
        raise OSError(errno.EIO, "Input/output error")

    worker._write_checkpoint = write
    with pytest.raises(OSError, match="Input/output error"):
        worker._save()


def test_copied_run_continues_under_its_new_name(tmp_path, capsys):
    (tmp_path / "copy").mkdir()
    began = dataclasses.replace(CONFIG, output=str(tmp_path / "old"), system="in_memory")
    launch.save_config(RunFolder(tmp_path / "copy"), began)
    wanted = {"output": str(tmp_path / "copy")}
    with launch._opened(RunFolder(tmp_path / "copy"), complete(began.as_dict() | wanted), True, wanted) as (config, *_):
        assert config.output_folder == tmp_path / "copy"
        prepared = dict.fromkeys(("parameters", "train_tokens", "train_sequences", "eval_sequences", "context"), 1)
        launch._announce(config, prepared | {"planned_host_bytes": 1}, {"config": {"steps": 3}}, [])
    assert f"output  {tmp_path / 'copy'}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fits", "said"),
    [
        (["--states bf16 (2.00 GiB)", "--system lohan (1.00 GiB)"], "What fits: --states bf16 (2.00 GiB); or --system"),
        ([], "no setting of this run does: take a smaller model"),
        (None, "To make it fit, take a smaller model"),  # prepared by an earlier version
    ],
)
def test_memory_refusal_names_what_would_fit(tmp_path, fits, said):
    prepared = {
        "planned_host_bytes": host_memory().available_bytes + (1 << 40),
        "planned_components": {"pool": 1 << 40},
        "parameters": 10,
    }
    if fits is not None:
        prepared["what_fits"] = fits
    with pytest.raises(ValueError, match="of host memory and") as refused:
        preflight.check(CONFIG, prepared, tmp_path, None)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("system", "what"),
    [
        ("in_memory", ["--system lohan"]),
        ("memascend", ["--system lohan"]),
        ("lohan", []),
    ],
)
def test_run_too_large_for_memory_is_offered_only_what_fits(tmp_path, monkeypatch, system, what):
    """Qwen2.5-14B fits into 6 GiB only with the streaming engine, and not at all into 1 GiB."""
    memory = SimpleNamespace(available_bytes=(6 if system != "lohan" else 1) << 30)
    monkeypatch.setattr(preparation, "host_memory", lambda: memory)
    config = dataclasses.replace(CONFIG, model="qwen2.5-14b", twin=1, system=system, random_weights=True)
    model_config = model_spec("qwen2.5-14b").hf_config_dict()
    if system == "in_memory":
        components = preparation._in_memory(config, 14_000_000_000)["planned_components"]
        fits = preparation._systems_that_fit(config, model_config, 64, components)
    else:
        fits = preparation._plan(config, model_config, 64, [])["what_fits"]
    assert [change.split(" (")[0] for change in fits] == what
    memory.available_bytes = 1 << 40  # a later call with less must not say that nothing fits
    if system != "in_memory":
        assert preparation._plan(config, model_config, 64, [])["what_fits"] is None


def test_run_over_its_memory_budget_is_refused_before_the_start(tmp_path):
    prepared = {"planned_host_bytes": 3 << 30, "planned_components": {"pool": 1 << 30}, "parameters": 10}
    config = dataclasses.replace(CONFIG, host_memory="2GiB")
    with pytest.raises(
        ValueError, match=r"needs 3.0 GiB of host memory, 1.0 GiB more than the --host-memory of 2.0 GiB"
    ):
        preflight.check(config, prepared, tmp_path, None)
    preflight.check(dataclasses.replace(CONFIG, host_memory="3GiB"), prepared, tmp_path, None)


def test_run_over_its_memory_budget_is_refused_while_preparing(tmp_path):
    values = {"model": "llama3.2-1b", "twin": 32, "data": [str(text_folder(tmp_path))], "context": 64}
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    with pytest.raises(ValueError, match=r"more than the --host-memory of .*; largest part: .*; ") as refused:
        prepare(complete(values | {"host_memory": "100MiB"}), folder)
    assert "\n" not in str(refused.value)
    assert not folder.prepared.exists()


def test_invalid_amount_of_memory_is_refused():
    with pytest.raises(ValueError, match="host_memory: '24G' is not an amount of memory: write 24GiB"):
        complete({"model": "m", "data": ["d"], "host_memory": "24G"})


def test_missing_parent_of_swap_folder_is_refused_and_not_created(tmp_path):
    config = dataclasses.replace(CONFIG, output=str(tmp_path / "run"), nvme=str(tmp_path / "typo" / "swap"), steps=1)
    (tmp_path / "run").mkdir()
    with (
        pytest.raises(ValueError, match=r"--nvme: .*/typo/swap cannot be created, since .*/typo does not exist"),
        launch._composed(config, RunFolder(tmp_path / "run"), {"steps_an_epoch": 1}),
    ):
        pass
    assert not (tmp_path / "typo").exists()


def documents(*sources):
    return Documents([str(source) for source in sources], pattern="*", field="text", subset=None, split="train")


def test_mistyped_text_folder_gets_a_suggestion(tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"there is no file or folder texst \(did you mean texts\?\); name text"):
        documents("texst")
    with pytest.raises(ValueError, match=r"did you mean .*/texts\?"):
        documents(tmp_path / "text", tmp_path / "texts")


def test_broken_link_to_text_is_refused_with_its_target(tmp_path):
    (tmp_path / "texts").symlink_to("/nowhere/texts")
    with pytest.raises(ValueError, match=r"/texts is a link to /nowhere/texts, which is not there; name text with"):
        documents(tmp_path / "texts")


def test_skipped_binary_data_is_reported(tmp_path):
    (tmp_path / "image.png").write_bytes(b"\xff\xfe\x00" * 100)
    values = {"model": "llama3.2-1b", "twin": 32, "data": [str(tmp_path / "image.png")], "context": 64}
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    with pytest.raises(ValueError, match=r"1 files are not UTF-8 text and were skipped, such as .*image\.png"):
        prepare(complete(values), folder)


def swaps(system="memascend", **options):
    """Return the configuration and sizes of a run that swaps 20 MiB, and whose checkpoints take nothing."""
    prepared = {"planned_host_bytes": None, "parameters": 0, "planned_swap_bytes": 20 << 20}
    return dataclasses.replace(CONFIG, system=system, **options), prepared


def refusal(config, prepared, folder):
    with pytest.raises(ValueError, match="are missing") as refused:
        preflight.check(config, prepared, folder, folder)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_two_tiers_on_one_file_system_share_its_space(tmp_path):
    with small_file_system(tmp_path / "small", 24 << 20) as small:
        tiers = [str(small / "a"), str(small / "b")]
        config, prepared = swaps(tiers=tiers)
        said = refusal(config, prepared, tmp_path)
        assert f"{tiers[0]} and {tiers[1]} (one file system): " in said
        assert sorted(path.name for path in small.iterdir()) == ["lost+found"]
        config, prepared = swaps(tiers=[*tiers, str(tmp_path)])
        preflight.check(config, prepared, tmp_path, tmp_path)


def test_smaller_second_disk_counts_only_its_own_space(tmp_path):
    with (
        small_file_system(tmp_path / "first", 20 << 20) as first,
        small_file_system(tmp_path / "second", 4 << 20) as second,
    ):
        config, prepared = swaps(tiers=[str(first), str(second)])
        said = refusal(config, prepared, tmp_path)
        assert f"; {second}: " in said
        fits = dict(prepared, planned_swap_bytes=12 << 20)
        preflight.check(config, fits, tmp_path, tmp_path)
        alone, _ = swaps(tiers=[str(second), str(first)], system="mlp_offload", arm="caching")
        assert f"not used by this arm: {first}" in refusal(alone, fits, tmp_path)


def test_checkpoints_reduce_tier_space_on_the_same_file_system(tmp_path):
    with small_file_system(tmp_path / "small", 40 << 20) as small:
        config, prepared = swaps(tiers=[str(small / "a")])
        preflight.check(config, prepared, small, small)
        three = dict(prepared, parameters=(16 << 20) // 3 // 14)  # two that are kept and the one that is being written
        assert " less 16.0 MiB of checkpoints" in refusal(config, three, small)
        preflight.check(config, three, tmp_path, small)
