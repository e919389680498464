"""`memascend bench nvme` on a small file: what it measures is there, is compared, and leaves nothing behind."""

import json
import shutil

import pytest

from memascend.cli import main


def test_without_fio_the_mend_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["bench", "nvme", "--folder", str(tmp_path)]) == 2
    assert "apt-get install fio" in capsys.readouterr().err


@pytest.mark.deepspeed
def test_a_small_run_compares_with_fio_and_deepnvme(tmp_path, capsys):
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    options = ["--repeats", "1", "--ms", "50", "--region-mib", "128", "--mib", "1", "--block-kib", "256", "--json"]
    assert main(["bench", "nvme", "--folder", str(tmp_path), *options]) == 0
    result = json.loads(capsys.readouterr().out)
    stream = [row for row in result["summary"] if row["question"] == "stream"]
    assert {row["op"] for row in stream} == {"read", "write"}
    assert all(row["bytes_per_second"]["median"] > 0 and row["share_of_fio"]["median"] > 0 for row in stream)
    assert all(len(point["fio"]) == len(point["engine"]) == 1 for point in result["points"] if "fio" in point)
    assert "engine libaio" in {row["method"] for row in stream}
    sizes = [row for row in result["summary"] if row["question"] == "sizes"]
    methods = {"engine"} if result["conditions"]["missing"] else {"engine", "DeepNVMe"}
    assert {(row["method"], row["op"]) for row in sizes} == {(m, op) for m in methods for op in ("read", "write")}
    assert list(tmp_path.iterdir()) == []


def test_tensors_larger_than_the_region_are_refused(tmp_path, capsys):
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    assert main(["bench", "nvme", "--folder", str(tmp_path), "--region-mib", "32", "--mib", "64"]) == 2
    assert "larger --region-mib" in capsys.readouterr().err
