"""A named folder for swap files exists, or only its last part is
missing; anything else is a typo and gives one line."""

import os

import pytest

from memascend.storage.folders import swap_folder


def test_existing_folder_is_accepted_and_left_unchanged(tmp_path):
    (tmp_path / "other.swp").write_text("kept")
    assert swap_folder(tmp_path, "--nvme") == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["other.swp"]


def test_last_part_of_relative_path_is_created(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert swap_folder("swap", "--nvme") == tmp_path / "swap"
    assert (tmp_path / "swap").is_dir()


def test_missing_parent_is_named_and_nothing_is_created(tmp_path):
    with pytest.raises(ValueError, match=r"^nvme_path: .*/nowhere/x/y cannot .* since .*/nowhere does not exist; "):
        swap_folder(tmp_path / "nowhere" / "x" / "y", "nvme_path")
    assert list(tmp_path.iterdir()) == []


def test_missing_folder_in_root_is_refused_and_not_created():
    with pytest.raises(
        ValueError, match=r"^--nvme: /memascend-nowhere does not exist, and would be created on the syst"
    ):
        swap_folder("/memascend-nowhere", "--nvme")
    assert not os.path.exists("/memascend-nowhere")
    with pytest.raises(ValueError, match="does not exist"):
        swap_folder("/tmp/../memascend-nowhere/", "--nvme")


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file/x cannot be created, since .*/file is not a folder"):
        swap_folder(tmp_path / "file" / "x", "--nvme")
    with pytest.raises(ValueError, match=r"--nvme: .*/file is a file; name a folder"):
        swap_folder(tmp_path / "file", "--nvme")


def test_dangling_link_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "unmounted" / "swap")
    with pytest.raises(ValueError, match="link is a link to nowhere"):
        swap_folder(tmp_path / "link", "--nvme")


@pytest.mark.skipif(not os.path.exists("/proc/version"), reason="needs procfs as an unwritable folder")
def test_a_folder_that_cannot_be_written_is_named():
    with pytest.raises(ValueError, match=r"--nvme: /proc/memascend cannot be written"):
        swap_folder("/proc/memascend", "--nvme")
