"""`memascend bench engine`: what it refuses, and that both methods train alike."""

import json
import os
import subprocess
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from memascend.bench import engine
from memascend.cli import main


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ways", "memory,streamed"], "--ways: unknown way 'streamed'; use memory and some of optimized"),
        (["--ways", "memory,swap101"], "--ways: unknown way 'swap101'"),
        (["--path-rate", "-3"], "--path-rate -3: use bytes per second"),
        (["--device-to-ssd", "nan"], "--device-to-ssd nan: use a ratio above 0"),
        (["--device-to-ssd", "2", "--path-rate", "9"], "--device-to-ssd 2: use a ratio above 0, without --path-rate"),
        (["--device-to-ssd", "2", "--model", "dit:2x128x16"], "--device-to-ssd: no step of a diffusion transformer"),
        (["--ways", "optimized"], "--ways: without 'memory' there is nothing to compare with"),
        (["--contexts", "none"], "--contexts"),
        (["--model", "nothing"], "unknown model 'nothing'"),
        (["--model", "dit:2x100x12"], "--model dit:2x100x12 --twin 16: use a width divisible by the twin and 8 heads"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, said, tmp_path, capsys):
    assert main(["bench", "engine", "--folder", str(tmp_path), *options]) == 2
    out = capsys.readouterr().err.strip()
    assert said in out
    assert "\n" not in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_refused_in_one_line(tmp_path, capsys):
    assert main(["bench", "engine", "--folder", str(tmp_path), "--device", "cuda"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.endswith("--device cuda: torch sees no GPU here; omit it to compute on the CPU")
    assert "\n" not in said


def test_gpu_excludes_cores_path_rate_and_device_to_ssd(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    words = ["--folder", str(tmp_path), "--device", "cuda"]
    for more in (["--cores", "split"], ["--path-rate", "1000000"], ["--device-to-ssd", "2"]):
        assert main(["bench", "engine", *words, *more]) == 2
        assert "--device: with a GPU omit --cores, --path-rate and --device-to-ssd" in capsys.readouterr().err


@pytest.mark.gpu
def test_both_ways_train_alike_on_a_gpu(tmp_path, capsys):
    words = ["--folder", str(tmp_path), "--model", "llama3.2-1b", "--twin", "16", "--contexts", "64", "--dtype", "bf16"]
    assert main(["bench", "engine", *words, "--device", "cuda", "--repeats", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["conditions"]["gpu"] == torch.cuda.get_device_name()
    assert all(row["losses_apart"] < 1e-3 for row in result["summary"])
    assert list(tmp_path.iterdir()) == []


def test_single_core_cannot_be_split(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert main(["bench", "engine", "--folder", str(tmp_path), "--cores", "split"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.endswith(
        "--cores split: matrix products and everything else need a core each, but there is one: use --cores shared"
    )
    assert "\n" not in said


def test_leftovers_of_a_killed_benchmark_do_not_affect_another(tmp_path, monkeypatch):
    (tmp_path / "optimized").mkdir()
    folders = []

    def ran(command, **_):
        folders.append(Path(json.loads(command[-1])["folder"]))
        assert list(folders[-1].iterdir()) == []
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps({"points": [], "path_rate": 0}))

    monkeypatch.setattr(engine.subprocess, "run", ran)
    for _ in range(2):
        engine.measure(engine.EngineBench(model="qwen2.5-7b", folder=tmp_path, twin=16))
    assert len(set(folders)) == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "optimized"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="products and all else have a core each")
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "memory"])
def test_split_cores_run_only_streamed_updates_on_the_host_core(streamed):
    device, host = sorted(os.sched_getaffinity(0))[:2]
    at_work = {}

    def says(what):
        return lambda **_: at_work.update({what: os.sched_getaffinity(0)})

    way = object.__new__(engine._Way)
    way.device = torch.device("cpu")
    way.engine = SimpleNamespace(transferred=(0, 0), limit=None, decision=None) if streamed else None
    weight = torch.ones((), requires_grad=True)
    way.model = lambda **_: says("forward")() or SimpleNamespace(loss=weight * 1.0)
    way.optimizer = SimpleNamespace(step=says("update"), zero_grad=lambda: None)
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {device})
        way.step({"input_ids": torch.zeros(1, 1, dtype=torch.long)}, [device, host])
        assert os.sched_getaffinity(0) == {device}
    finally:
        os.sched_setaffinity(0, before)
    assert at_work == {"forward": {device}, "update": {host if streamed else device}}


@pytest.mark.slow  # runs a separate process
def test_every_way_trains_alike_and_leaves_no_files(tmp_path, capsys):
    ways = "memory,optimized,naive,none,inputs,swapped"
    words = ["--folder", str(tmp_path), "--model", "llama3.2-1b", "--twin", "32", "--contexts", "16,32"]
    assert main(["bench", "engine", *words, "--ways", ways, "--repeats", "2", "--json"]) == 0
    assert list(tmp_path.iterdir()) == []
    result = json.loads(capsys.readouterr().out)
    points = {(point["context"], point["method"]): point for point in result["points"]}
    assert len(points) == len(result["summary"]) == 12
    for row in result["summary"]:
        mine, memory = points[row["context"], row["method"]], points[row["context"], "memory"]
        assert mine["losses"] == pytest.approx(memory["losses"], rel=1e-4)
        assert row["losses_apart"] < 1e-4
        assert len(mine["seconds"]) == 2
        assert (mine["written"][-1] > 0) == (row["method"] != "memory")
        assert (row["bound_share"] is not None) == (row["context"] == 16 and row["method"] != "memory")
    assert points[16, "none"]["written"][-1] > points[16, "optimized"]["written"][-1]


def test_diffusion_transformer_trains_alike_streamed_and_in_memory(tmp_path):
    options = engine.EngineBench(model="dit:2x64x8", folder=tmp_path, ways=("memory", "optimized"))
    with ExitStack() as ends:
        ways = [engine._Way(way, options, ends, measure=False) for way in options.ways]
        for step in range(3):
            batch = ways[0].batch(torch.Generator().manual_seed(step), 4)
            memory, streamed = (way.step(batch) for way in ways)
            assert streamed["losses"] == pytest.approx(memory["losses"], rel=1e-6)
            assert streamed["read"] > 0


@pytest.mark.slow  # runs a separate process
def test_known_ssd_rate_adds_predictions_and_traces_to_results(tmp_path, capsys):
    words = ["--folder", str(tmp_path), "--model", "llama3.2-1b", "--twin", "32", "--contexts", "16"]
    words += ["--dtype", "bf16", "--path-rate", "400000000", "--cores", "split", "--trace", "1"]
    assert main(["bench", "engine", *words, "--ways", "memory,naive,swap50", "--repeats", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in result["predicted"]] == ["optimized", "naive", "none"]
    assert result["foretold"] == result["predicted"]  # the key's name in version 1.0
    assert 0 <= result["late_share"] <= 1
    chosen = {row["method"]: row["swapping"] for row in result["summary"]}
    assert chosen["naive"] is None
    assert 0 < chosen["swap50"]["more_bytes"] <= chosen["swap50"]["offered_bytes"] / 2
    events = result["traces"]["naive"]
    assert {"ssd.read", "ssd.write", "cpu", "gpu0"} <= {event["resource"] for event in events}
