"""`memascend storage`: what it makes and removes, and all that it refuses."""

import json
import os
import shutil

import pytest
import torch

from memascend.cli import main
from memascend.storage import commands
from memascend.storage.direct_engine import DirectEngine, DirectEngineConfig


def run(capsys, *words):
    status = main(["storage", *map(str, words)])
    said = capsys.readouterr()
    return status, said.out.strip(), said.err.strip()


def fresh(tmp_path, count=2):
    paths = [str(tmp_path.resolve() / f"device{number}") for number in range(count)]
    return paths, [word for path in paths for word in ("--serial", path)]


@pytest.fixture
def store(tmp_path, capsys):
    paths, words = fresh(tmp_path)
    assert run(capsys, "format", *paths, *words, "--owner", "run 1", "--size", "4M", "--chunk", "4K")[0] == 0
    with DirectEngine(paths, "run 1", DirectEngineConfig(control_folder=str(tmp_path))) as engine:
        engine.write("w", torch.ones(7, 3))
        engine.write("other", torch.arange(5))
        engine.wait()
        engine.commit()
    return paths


def test_store_can_be_created_listed_verified_collected_and_destroyed(store, tmp_path, capsys):
    folder = ("--control-folder", tmp_path)
    status, out, _ = run(capsys, "ls", *store, *folder)
    assert status == 0
    assert "float32    7x3                w" in out
    assert "2 tensors, 124 bytes" in out
    listed = json.loads(run(capsys, "ls", *store, *folder, "--json")[1])
    assert [tensor["key"] for tensor in listed["tensors"]] == ["other", "w"]
    assert run(capsys, "verify", *store, *folder)[1] == "2 tensors are whole"
    assert "0 reservations" in run(capsys, "gc", *store, *folder)[1]
    words = [word for path in store for word in ("--serial", path)]
    assert run(capsys, "destroy", *store, *folder, "--owner", "run 1", *words)[0] == 0
    assert "holds no store" in run(capsys, "ls", *store, *folder)[2]


def test_damage_is_named_and_repaired_on_request(store, tmp_path, capsys):
    folder = ("--control-folder", tmp_path)
    listed = json.loads(run(capsys, "ls", *store, *folder, "--json")[1])
    device, offset, _ = next(tensor["extents"][0] for tensor in listed["tensors"] if tensor["key"] == "w")
    with open(listed["devices"][device], "r+b") as file:
        file.seek(offset)
        file.write(b"damage")
    status, _, err = run(capsys, "verify", *store, *folder)
    assert status == 2
    assert "1 of 2 tensors are damaged: w" in err
    assert "1 damaged ones erased: w" in run(capsys, "verify", *store, *folder, "--repair")[1]
    assert run(capsys, "verify", *store, *folder)[1] == "1 tensors are whole"


class Meanwhile:
    """A store that calls `act` once, before the first use of its method `name`."""

    def __init__(self, store, name, act):
        self._store, self._name, self._act = store, name, act

    def __getattr__(self, name):
        if name == self._name and self._act:
            act, self._act = self._act, None
            act()
        return getattr(self._store, name)


@pytest.mark.parametrize("step", ["erase", "commit"])
def test_repair_keeps_a_tensor_that_its_writer_replaces_meanwhile(store, tmp_path, capsys, monkeypatch, step):
    with DirectEngine(store, "run 1", DirectEngineConfig(control_folder=str(tmp_path))) as engine:

        def replace():
            engine.write("w", torch.full((7, 3), 2.0))
            engine.wait()
            engine.commit()

        device, offset, _ = engine.info("w").extents[0]
        with open(engine.paths[device], "r+b") as file:
            file.seek(offset)
            file.write(b"damage")
        opened = commands._open
        monkeypatch.setattr(commands, "_open", lambda options: Meanwhile(opened(options), step, replace))
        status, out, _ = run(capsys, "verify", *store, "--control-folder", tmp_path, "--repair")
        assert status == 0
        assert out == "1 tensors are whole, 1 damaged ones written again meanwhile: w"
        assert bool((engine.read_new("w") == 2).all())
        assert engine.verify() == {}


def test_verify_leaves_out_a_tensor_that_is_erased_meanwhile(store, tmp_path, capsys, monkeypatch):
    with DirectEngine(store, "run 1", DirectEngineConfig(control_folder=str(tmp_path))) as engine:

        def erase():
            engine.erase("w")
            engine.commit()

        opened = commands._open
        monkeypatch.setattr(commands, "_open", lambda options: Meanwhile(opened(options), "verify", erase))
        assert run(capsys, "verify", *store, "--control-folder", tmp_path)[:2] == (0, "1 tensors are whole")


def test_format_creates_no_file_without_confirmation(tmp_path, capsys):
    paths, words = fresh(tmp_path)
    status, _, err = run(capsys, "format", *paths, "--owner", "x", "--size", "4M")
    assert status == 2
    assert "--serial" in err
    assert not os.path.exists(paths[0])
    assert "one for each" in run(capsys, "format", *paths, *words[:2], "--owner", "x", "--size", "4M")[2]
    assert "confirm with" in run(capsys, "format", *paths, *words[2:], *words[:2], "--owner", "x", "--size", "4M")[2]
    assert not os.path.exists(paths[0])
    assert f"there is no {paths[0]}: name a device" in run(capsys, "format", *paths, *words, "--owner", "x")[2]


def test_format_refuses_a_file_with_unknown_contents(tmp_path, capsys):
    path = tmp_path.resolve() / "thesis.tex"
    path.write_bytes(b"years of work" + bytes(4 << 20))
    before = path.read_bytes()
    status, _, err = run(capsys, "format", path, "--serial", path, "--owner", "x", "--size", "4M")
    assert status == 2
    assert "unknown kind" in err
    assert path.read_bytes() == before


def test_one_device_under_two_names_is_refused(tmp_path, capsys):
    path = tmp_path.resolve() / "a"
    path.write_bytes(bytes(4 << 20))
    (tmp_path / "b").symlink_to(path)
    words = ("--serial", path, "--serial", path)
    assert "same device" in run(capsys, "format", path, tmp_path / "b", *words, "--owner", "x")[2]


def test_destroy_requires_the_owner_confirmations_and_all_devices(store, tmp_path, capsys):
    folder = ("--control-folder", tmp_path)
    words = [word for path in store for word in ("--serial", path)]
    for wrong, reason in (
        ((*store, *words, "--owner", "run 2"), "belongs to 'run 1', not to 'run 2'"),
        ((*store, "--owner", "run 1"), "confirm with its path"),
        ((*store, *words[2:], *words[:2], "--owner", "run 1"), "has the path"),
        ((store[0], *words[:2], "--owner", "run 1"), "device 1 of 2"),
    ):
        status, _, err = run(capsys, "destroy", *wrong, *folder)
        assert status == 2
        assert reason in err
    assert run(capsys, "verify", *store, *folder)[1] == "2 tensors are whole"


def test_destroy_is_refused_while_an_engine_runs(store, tmp_path, capsys):
    words = [word for path in store for word in ("--serial", path)]
    with DirectEngine(store, "run 1", DirectEngineConfig(control_folder=str(tmp_path))) as engine:
        _, _, err = run(capsys, "destroy", *store, *words, "--owner", "run 1", "--control-folder", tmp_path)
        assert "is in use" in err
        assert engine.read_new("w").shape == (7, 3)


@pytest.mark.parametrize("size", ["0", "4X", "-1", "M", "4.5G"])
def test_format_refuses_invalid_sizes(tmp_path, capsys, size):
    paths, words = fresh(tmp_path, 1)
    assert "is not a size" in run(capsys, "format", *paths, *words, "--owner", "x", f"--size={size}")[2]


@pytest.mark.parametrize("action", ["ls", "verify", "gc", "destroy"])
def test_a_missing_device_is_named_with_the_fix(tmp_path, capsys, action):
    gone = tmp_path / "gone"
    status, _, err = run(capsys, action, gone, *(("--owner", "x") if action == "destroy" else ()))
    assert status == 2
    assert err.startswith(f"memascend: error: there is no {gone}: name ")


def test_failed_file_creation_names_the_fix_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    path = tmp_path.resolve() / "no folder" / "device"
    assert (
        f"there is no {path.parent}: make"
        in run(capsys, "format", path, "--serial", path, "--owner", "x", "--size", "4M")[2]
    )
    large = tmp_path.resolve() / "large"
    monkeypatch.setattr(os, "posix_fallocate", None)  # it would fill the disk before it fails: other writes would fail
    size = shutil.disk_usage(tmp_path).total // 2**30 + 1
    err = run(capsys, "format", large, "--serial", large, "--owner", "x", "--size", f"{size}G")[2]
    assert err.startswith(f"memascend: error: {large}: No space left on device for {size * 2**30:,} bytes: free space")
    assert not large.exists()


def test_gc_does_not_suggest_formatting_a_file_with_contents(tmp_path, capsys):
    other = tmp_path / "thesis.tex"
    other.write_bytes(b"years of work" * 1000)
    err = run(capsys, "gc", other, "--control-folder", tmp_path)[2]
    assert err.startswith(f"memascend: error: {other} holds no store but data of unknown kind: name the devices")
