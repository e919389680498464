"""A training that is saved, discarded and loaded ends like one that was never interrupted, to the last bit."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
from trainings import Job, train_all

pytestmark = pytest.mark.deepspeed

STEPS, SAVED = 6, 3
_IN_MEMORY = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
_HYSTERESIS = {"fp16": {"hysteresis": 1}, "gradient_clipping": 0.1}

KINDS = {
    "memascend": {},
    "on_files": {"arm": "memascend_on_files"},
    "on_files_copied": {"arm": "memascend_on_files", "parts": {"prestage_checkpoints": False}},
    "as_published": {"system": "zero_infinity", "arm": "as_published"},
    "bf16_states": {"arm": "memascend_bf16", "dtype": "bf16"},
    "optimizer_in_memory": {"config": _IN_MEMORY},
    "some_groups_in_memory": {"minimum_swap_bytes": 40_000, "micro_steps": 2},
    "frozen_on_nvme": {"freeze": ("embed_tokens", "layers.0.")},
    "after_an_overflow": {"overflow_at": 1, "config": _HYSTERESIS, "tied": True},
    "pipelined": {
        "config": {
            "zero_optimization": {
                "offload_optimizer": {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
            }
        }
    },
}


def interrupted(name: str, folder: Path, **fields) -> list[Job]:
    """Return a training that saves on its way, and one that resumes from there with other initial weights."""
    whole = Job(name=name, layers=1, steps=STEPS, save_at=(SAVED,), checkpoint=str(folder / name), **fields)
    return [whole, dataclasses.replace(whole, name=f"{name}-resumed", save_at=(), resume=True, init_seed=5)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    kinds = KINDS | {"stock": {"system": "zero_infinity", "arm": "today"}}
    jobs = [job for name in kinds for job in interrupted(name, folder, **kinds[name])]
    return train_all(jobs, folder) | {"folder": folder}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_equals_an_uninterrupted_one(results, kind):
    whole, resumed = results[kind], results[f"{kind}-resumed"]
    assert resumed["losses"] == whole["losses"][SAVED:]
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["scales"] == whole["scales"][SAVED:]
    assert resumed["skipped"] == whole["skipped"][SAVED:]


def manifest(results, kind) -> list[dict]:
    (found,) = (results["folder"] / kind).glob("*/offloaded_tensors/*/manifest.json")
    return list(json.loads(found.read_text()).values())


def test_checkpoint_links_states_in_files_without_copying_them(results):
    """Later steps wrote to other files; otherwise the resumed training above would have found different states."""
    referenced, copied = manifest(results, "on_files"), manifest(results, "on_files_copied")
    assert {entry.get("referenced") for entry in referenced} == {"link"}
    assert [entry["crc32"] for entry in referenced] == [entry["crc32"] for entry in copied]
    assert [entry["bytes"] for entry in referenced] == [entry["bytes"] for entry in copied]
    assert results["on_files_copied"]["weights_sha256"] == results["on_files"]["weights_sha256"]


def test_overflow_skips_one_step_and_halves_the_scale(results):
    whole = results["after_an_overflow"]
    assert whole["skipped"][0] == 0
    assert whole["skipped"][-1] == 1
    assert whole["scales"][1] == whole["scales"][0] / 2


def test_stock_deepspeed_does_not_resume_exactly(results):
    """The negative control: the comparison notices moments, step counts and a loss scale that are not restored."""
    whole, resumed = results["stock"], results["stock-resumed"]
    assert resumed["weights_sha256"] != whole["weights_sha256"]


@pytest.mark.slow
def test_two_ranks_resume_exactly(tmp_path):
    results = train_all(interrupted("ranks", tmp_path, config=_HYSTERESIS, overflow_at=1), tmp_path, ranks=2)
    assert results["ranks-resumed"]["losses"] == results["ranks"]["losses"][SAVED:]
    assert results["ranks-resumed"]["weights_sha256"] == results["ranks"]["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("die_at_sync", [1, 15, 30])
def test_training_killed_while_saving_resumes_from_previous_checkpoint(tmp_path, die_at_sync):
    whole, resumed = interrupted("killed", tmp_path)
    killed = dataclasses.replace(whole, save_at=(SAVED, SAVED + 2), die_at_sync=die_at_sync)
    train_all([killed], tmp_path)
    results = train_all([resumed, dataclasses.replace(whole, checkpoint=str(tmp_path / "other"))], tmp_path)
    assert results["killed-resumed"]["losses"] == results["killed"]["losses"][SAVED:]
    assert results["killed-resumed"]["weights_sha256"] == results["killed"]["weights_sha256"]


# -- the commit, killed at every system call that changes a name or waits for the device -------------------------------


def folder_of(save_dir: Path, tag: str, content: str) -> Path:
    from memascend.integrations.deepspeed.checkpoint import _place, _staging

    staging = _staging(_place(save_dir, tag))
    shutil.rmtree(staging, ignore_errors=True)
    (staging / tag / "offloaded_tensors").mkdir(parents=True)
    (staging / tag / "model.pt").write_text(content)
    (staging / tag / "offloaded_tensors" / "a.swp").write_text(content)
    (staging / "zero_to_fp32.py").write_text("script")
    return staging


def commit_and_die(save_dir: Path, tag: str, call: int, exchange: bool) -> bool:
    """Commit in a child that is killed at its ``call``-th fsync, rename or
    removal; return whether it survived to the end."""
    from memascend.integrations.deepspeed import checkpoint

    child = os.fork()
    if child == 0:
        count = 0
        if not exchange:
            checkpoint._exchanged = lambda *names: False

        def dying(stock):
            def call_or_die(*args, **kwargs):
                nonlocal count
                count += 1
                if count == call:
                    os._exit(9)
                return stock(*args, **kwargs)

            return call_or_die

        for name in ("fsync", "rename", "replace", "unlink"):
            setattr(os, name, dying(getattr(os, name)))
        checkpoint._commit(checkpoint._staging(checkpoint._place(save_dir, tag)), save_dir, tag, True)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("same_tag", [False, True])
@pytest.mark.parametrize("exchange", [True, False])
def test_commit_killed_at_any_call_leaves_a_whole_checkpoint(tmp_path, same_tag, exchange):
    from memascend.integrations.deepspeed import checkpoint

    for call in range(1, 100):
        save_dir = tmp_path / str(call)
        checkpoint._commit(folder_of(save_dir, "first", "old"), save_dir, "first", True)
        tag = "first" if same_tag else "second"
        folder_of(save_dir, tag, "new")
        lived = commit_and_die(save_dir, tag, call, exchange)
        named = save_dir / checkpoint._latest(save_dir)
        checkpoint._finish_replacement(named)
        texts = {path.read_text() for path in (named / "model.pt", named / "offloaded_tensors" / "a.swp")}
        assert len(texts) == 1, f"torn at call {call}"
        assert texts == {"new"} if lived else texts <= {"old", "new"}
        if lived:
            assert not list(save_dir.glob(".*"))
            return
    raise AssertionError("the commit never came to its end")


# -- files of others in the folder of a checkpoint ---------------------------------------------------------------------

OTHERS = {"tokenizer.json": "a tokenizer", "adapter/config.json": "an adapter", "notes_model_states.pt": "notes"}
STALE = "zero_pp_rank_1_mp_rank_00_model_states.pt"


def write_others(place: Path) -> None:
    for name, text in OTHERS.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)


def others_of(place: Path) -> dict[str, str]:
    return {name: (place / name).read_text() for name in OTHERS if (place / name).exists()}


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("linked", [False, True])
def test_saving_again_keeps_files_that_are_not_the_checkpoints(tmp_path, monkeypatch, exchange, linked):
    from memascend.integrations.deepspeed import checkpoint

    if not exchange:
        monkeypatch.setattr(checkpoint, "_exchanged", lambda *names: False)
    save_dir, place = tmp_path / "out", tmp_path / "out" / "best"
    if linked:
        save_dir.mkdir()
        place.symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").mkdir()
    write_others(place)
    place.chmod(0o2750)
    for content in ("first", "second"):
        checkpoint._commit(folder_of(save_dir, "best", content), save_dir, "best", True)
        assert others_of(place) == OTHERS
        assert (place / "model.pt").read_text() == content
        assert not (place / STALE).exists()
        (place / STALE).write_text("of the second of two ranks")
    assert place.is_symlink() == linked
    assert place.stat().st_mode & 0o7777 == 0o2750
    assert not [*tmp_path.glob(".*"), *save_dir.glob(".*")]


@pytest.mark.parametrize("exchange", [True, False])
def test_commit_killed_at_any_call_loses_no_other_file(tmp_path, exchange):
    from memascend.integrations.deepspeed import checkpoint

    for call in range(1, 100):
        save_dir, place = tmp_path / str(call), tmp_path / str(call) / "best"
        checkpoint._commit(folder_of(save_dir, "best", "old"), save_dir, "best", True)
        write_others(place)
        folder_of(save_dir, "best", "new")
        lived = commit_and_die(save_dir, "best", call, exchange)
        if not lived:
            checkpoint._finish_replacement(place)
        assert others_of(place) == OTHERS, f"lost at call {call}"
        assert (place / "model.pt").read_text() == (place / "offloaded_tensors" / "a.swp").read_text()
        if lived:
            return
    raise AssertionError("the commit never came to its end")


def test_file_written_anew_after_a_kill_is_not_replaced_by_the_old_one(tmp_path):
    from memascend.integrations.deepspeed import checkpoint

    place, staging = tmp_path / "best", checkpoint._staging(tmp_path / "best")
    old = staging / checkpoint._COMPLETE
    write_others(old)
    (staging / checkpoint._OTHERS).write_text(json.dumps(sorted({name.split("/")[0] for name in OTHERS})))
    (place / "adapter").mkdir(parents=True)
    (place / "adapter" / "weights.bin").write_text("new")
    (place / "tokenizer.json").write_text("a new tokenizer")
    checkpoint._finish_replacement(place)
    assert others_of(place) == OTHERS | {"tokenizer.json": "a new tokenizer"}
    assert (place / "adapter" / "weights.bin").read_text() == "new"


@pytest.mark.parametrize("tag", ["", ".", "..", "../best", "/tmp/best"])
def test_tag_that_names_no_folder_in_the_save_dir_is_refused(tag):
    from memascend.integrations.deepspeed import checkpoint

    with pytest.raises(ValueError, match="does not name a folder in out; use a name such as 'best'"):
        checkpoint._require_below("out", tag)
    checkpoint._require_below("out", "epoch1/best")
