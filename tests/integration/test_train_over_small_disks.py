"""`memascend train --tiers` over small disks trains as over large ones, or is refused before it begins."""

import pytest

from tests.loop_devices import small_file_system
from tests.train_runs import finished_run, losses, options_for, text_folder, train

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow]


def test_second_disk_without_space_leaves_its_share_to_the_first(tmp_path, tmp_path_factory):
    reference = finished_run(tmp_path_factory)
    (tmp_path / "first").mkdir()
    with small_file_system(tmp_path / "second", 4 << 20) as second:
        tiers = ["--tiers", str(tmp_path / "first"), str(second)]
        done = train(tmp_path / "run", *options_for(reference.parent / "text"), *tiers)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path / "run") == losses(reference)


def test_two_folders_on_too_small_a_disk_are_refused(tmp_path):
    with small_file_system(tmp_path / "small", 16 << 20) as small:
        tiers = ["--tiers", str(small / "a"), str(small / "b")]
        done = train(tmp_path / "run", *options_for(text_folder(tmp_path)), *tiers)
        assert sorted(path.name for path in small.iterdir()) == ["lost+found"]
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"({small / 'a'} and {small / 'b'} (one file system): " in line
    assert "and this run swaps " in line
    assert not (tmp_path / "run").exists()
