"""`memascend bench nvme` on a small file: its results are complete and compared, and it leaves no files behind."""

import json
import shutil
from pathlib import Path

import pytest

from memascend.bench import nvme_target
from memascend.bench.arguments import in_memory_note
from memascend.bench.nvme_sizes import SizeOptions
from memascend.cli import main


def test_missing_fio_error_names_the_package(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["bench", "nvme", "--folder", str(tmp_path)]) == 2
    assert "apt-get install fio" in capsys.readouterr().err


@pytest.mark.deepspeed
def test_a_small_run_compares_with_fio_and_deepnvme(tmp_path, capsys):
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    options = [
        "--repeats",
        "1",
        "--ms",
        "50",
        "--region-mib",
        "128",
        "--mib",
        "1",
        "--block-kib",
        "256",
        "--workers",
        "1,2",
        "--json",
    ]
    assert main(["bench", "nvme", "--folder", str(tmp_path), *options]) == 0
    result = json.loads(capsys.readouterr().out)
    stream = [row for row in result["summary"] if row["question"] == "stream"]
    assert {row["op"] for row in stream} == {"read", "write"}
    assert all(row["bytes_per_second"]["median"] > 0 and row["share_of_fio"]["median"] > 0 for row in stream)
    assert all(len(point["fio"]) == len(point["engine"]) == 1 for point in result["points"] if "fio" in point)
    assert "engine libaio" in {row["method"] for row in stream}
    sizes = [row for row in result["summary"] if row["question"] == "sizes"]
    peers = set() if result["conditions"]["missing"] else {"DeepNVMe", "DeepNVMe, file per tensor"}
    methods = {"engine", "engine, 2 workers"} | peers
    assert {(row["method"], row["op"]) for row in sizes} == {(m, op) for m in methods for op in ("read", "write")}
    assert all(
        set(row["times_faster_than"]) == (peers if row["method"].startswith("engine") else set()) for row in sizes
    )
    assert list(tmp_path.iterdir()) == []


def test_buffers_are_registered_unless_disabled(tmp_path, capsys, monkeypatch):
    registered = []
    monkeypatch.setattr(
        "memascend.storage.direct_engine.DirectEngine.register_buffer",
        lambda self, tensor: registered.append(tensor.nbytes),
    )
    small = ["--folder", str(tmp_path), "--questions", "sizes", "--mib", "1", "--repeats", "1", "--json"]
    assert main(["bench", "nvme", *small, "--no-register"]) == 0
    assert not json.loads(capsys.readouterr().out)["registered"]
    assert registered == []
    assert main(["bench", "nvme", *small]) == 0
    assert json.loads(capsys.readouterr().out)["registered"]
    assert registered == [1 << 20]


def test_oversized_or_invalid_options_are_refused(tmp_path, capsys):
    common = ["bench", "nvme", "--folder", str(tmp_path), "--questions"]
    assert main([*common, "sizes", "--bytes", str(1 << 60)]) == 2
    assert "are needed: use smaller sizes" in capsys.readouterr().err
    assert main([*common, "sizes", "--bytes", "1,two"]) == 2
    assert "'two' is not a number of bytes" in capsys.readouterr().err
    assert main([*common, "sizes,speed"]) == 2
    assert "unknown 'speed': use stream, sizes" in capsys.readouterr().err


def test_repeats_fit_the_budget_and_cached_transfers_are_refused(tmp_path, capsys, monkeypatch):
    options = SizeOptions(sizes=(1 << 20,), block_bytes=1 << 20, depth=4, repeats=5, budget_bytes=3 << 20)
    assert [options.rounds(size) for size in (1, 1 << 20, 2 << 20, 1 << 40)] == [5, 3, 1, 1]
    monkeypatch.setattr(nvme_target, "sectors", lambda path: 1)  # a disk that transfers nothing
    assert main(["bench", "nvme", "--folder", str(tmp_path), "--questions", "sizes", "--mib", "1"]) == 2
    assert "a cache was measured" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_missing_folder_is_refused_and_tmpfs_is_noted(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "nowhere", tmp_path / "file"):
        assert main(["bench", "nvme", "--folder", str(path)]) == 2
        assert capsys.readouterr().err.startswith(f"memascend: error: --folder {path} is not a folder: create it first")
    assert in_memory_note(Path("/dev/shm")) == ["/dev/shm (tmpfs) is in memory: these are not a drive's rates"]
    assert in_memory_note(Path("/proc")) == []
