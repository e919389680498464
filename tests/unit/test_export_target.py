"""`memascend export` refuses a target that it cannot write before it reads anything."""

import errno
import os
from pathlib import Path

import pytest

from memascend.training.export import _begun, export
from memascend.training.folder import RunFolder
from memascend.training.kept import kept_source


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    folder.config.touch()
    return folder.root


@pytest.mark.parametrize("inside", [".", "model", "checkpoints/mine"])
def test_target_inside_the_run_folder_is_refused(run, inside):
    with pytest.raises(ValueError, match="is in the run's own folder: name one outside of"):
        export(run, run / inside)
    assert [path.name for path in run.iterdir()] == [RunFolder(run).config.name]


@pytest.mark.parametrize("there", [True, False], ids=["to an empty folder", "to nowhere"])
def test_a_link_is_refused_and_stays(run, tmp_path, there):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    if there:
        (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ValueError, match="link exists and is not an empty folder: name a new one"):
        export(run, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert not (tmp_path / ".link.partial").exists()


def test_user_folder_named_like_a_partial_export_is_kept(run, tmp_path):
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"\.model\.partial exists but was not left by an export: move it, or name a"):
        export(run, tmp_path / "model")
    assert (tmp_path / ".model.partial" / "thesis.txt").read_text() == "mine"


def test_concurrent_export_into_the_same_folder_is_refused(run, tmp_path):
    partial = tmp_path / ".model.partial"
    with _begun(partial, tmp_path / "model"):
        (partial / "weights").write_text("half")
        with pytest.raises(ValueError, match=r"another export is writing .*model: wait for it, or name another folder"):
            export(run, tmp_path / "model")
        assert (partial / "weights").read_text() == "half"
    with _begun(partial, tmp_path / "model"):  # as an export that was cut off leaves it
        assert not (partial / "weights").exists()


@pytest.mark.skipif(not os.path.exists("/proc/version"), reason="needs procfs as a folder that takes no new ones")
def test_target_that_cannot_be_created_is_named_with_the_reason(run, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"^/proc/memascend cannot be created \(No such file or directory\); name a "):
        export(run, Path("/proc/memascend"))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^\S+/file/model cannot be created \(Not a directory\)"):
        export(run, tmp_path / "file" / "model")

    mkdirs = Path.mkdir

    def mkdir(path, *rest, **options):
        if path.name == ".model.partial":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        mkdirs(path, *rest, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(ValueError, match=r"^\S+/model cannot be created \(Read-only file system\); name a folder"):
        export(run, tmp_path / "model")


def test_run_without_prepared_facts_is_refused_with_the_fix(tmp_path):
    with pytest.raises(ValueError, match=r"prepared\.json is missing: run memascend train --output .* --resume first"):
        kept_source(RunFolder(tmp_path))
