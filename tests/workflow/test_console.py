"""What the terminal shows, what the rules know, and what a committed reference adds."""

from __future__ import annotations

import copy
import json
import logging
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from workflow_fixtures import full_set, smoke_set, write_records

from workflows import configuration, registry, tidy
from workflows import console as console_module
from workflows.configuration import score
from workflows.console import Console
from workflows.derive import claims, reference, table
from workflows.experiments import Experiments
from workflows.records import load
from workflows.run import children

ROOT = Path(__file__).resolve().parents[2]


def console(seconds: dict[str, float | None]) -> Console:
    known = SimpleNamespace(runs=dict.fromkeys(seconds), seconds=seconds.get, raw="no such folder")
    return Console(known, [])


def event(name: str, **more: object) -> logging.LogRecord:
    record = logging.makeLogRecord({"levelno": logging.INFO, "event": SimpleNamespace(name=name), **more})
    return record


def start(job: int, run: str) -> logging.LogRecord:
    wildcards = {"run_id": run}
    return event("JOB_INFO", jobid=job, rule_name="record", wildcards=wildcards)


def test_console_shows_one_line_per_run_with_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    shown = console({"train-a": 120.0, "train-b": 60.0})
    assert not shown.filter(event("RUN_INFO", stats={"record": 2, "total": 3}))
    assert not shown.filter(start(1, "train-a"))
    assert not shown.filter(event("JOB_FINISHED", job_id=1))
    assert not shown.filter(start(2, "train-b"))
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["[  1/3] record train-a, about 2 min; 3 min left", "[  2/3] record train-b, about 60 s; 60 s left"]


def test_time_left_counts_only_requested_runs(capsys: pytest.CaptureFixture[str]) -> None:
    shown = console({"train-a": 120.0, "train-b": 120.0, "train-c": 120.0, "train-d": 120.0})
    shown.filter(event("RUN_INFO", stats={"record": 1, "forked_record": 1, "total": 2}))
    shown.filter(start(1, "train-c"))
    shown.filter(event("JOB_FINISHED", job_id=1))
    shown.filter(start(2, "train-d"))
    assert [line.partition("; ")[2] for line in capsys.readouterr().err.splitlines()] == ["4 min left", "2 min left"]


@pytest.mark.parametrize("word", ["-n", "-np", "-nF", "--dry-run", "--dryrun", "--lint"])
def test_calls_that_run_nothing_are_told_by_joined_options_too(word: str, tmp_path: Path) -> None:
    failed = tmp_path / "bench-x.json"
    failed.write_text('{"kind": "no-result", "status": "failed", "reason": ""}')
    known = SimpleNamespace(raw=tmp_path, config={"retry": 1})
    shown = Console(known, ["--cores", "all", "figures", word])
    shown.attach()
    assert (shown.quiet, failed.exists()) == (False, True)


@pytest.mark.parametrize("words", [["-p"], ["--verbose"], ["-s", "Snakefile"], ["-k", "--config", "retry=1"]])
def test_failures_are_forgotten_by_calls_that_run(words: list[str], tmp_path: Path) -> None:
    failed = tmp_path / "bench-x.json"
    failed.write_text('{"kind": "no-result", "status": "failed", "reason": ""}')
    Console(SimpleNamespace(raw=tmp_path, config={"retry": 1}), words).attach()
    assert not failed.exists()


def test_target_of_a_paper_reports_its_pictures_and_no_old_score(tmp_path: Path, capsys) -> None:
    (tmp_path / "claims.csv").write_text("exhibit_id,lane,verdict,basis\ncxl-fig05,measured,reproduced,held out\n")
    entries = {"mlpoffload-fig04": {"paper": "mlpoffload"}, "cxl-fig05": {"paper": "cxl"}}
    known = SimpleNamespace(
        papers=["mlpoffload", "cxl"],
        target_of={"mlpoffload": "mlp-offload", "cxl": "cxl"}.get,
        built=list(entries),
        entries=entries,
        figures="figures",
        derived=str(tmp_path),
        raw=str(tmp_path),
    )
    Console(known, []).end(["mlp-offload"])
    said = capsys.readouterr().out
    assert "Drawn: figures/mlpoffload-*.svg, 1 exhibit\n" in said
    assert "reproduced" not in said
    assert "index.html" not in said


def test_console_passes_errors_and_does_not_estimate_untimed_runs(capsys: pytest.CaptureFixture[str]) -> None:
    shown = console({"train-a": None})
    shown.filter(event("RUN_INFO", stats={"record": 1, "total": 1}))
    shown.filter(start(1, "train-a"))
    assert capsys.readouterr().err == "[  1/1] record train-a\n"
    assert shown.filter(event("JOB_ERROR"))
    assert shown.filter(logging.makeLogRecord({"levelno": logging.WARNING, "msg": "look"}))


def test_score_counts_held_out_verdicts_per_paper_and_lane(tmp_path: Path) -> None:
    lines = ["exhibit_id,lane,verdict,basis"]
    lines += ["memascend-fig04,measured,reproduced,held out", "memascend-fig04,measured,deviates,held out"]
    lines += ["memascend-fig04,measured,reproduced,calibrated", "lohan-fig05a,modelled,no result,held out"]
    lines += ["cxl-fig05,measured,not checkable here,held out"]
    (tmp_path / "claims.csv").write_text("\n".join(lines) + "\n")
    assert score(tmp_path / "claims.csv") == {
        "MemAscend, measured": "1 of 2 held-out claims reproduced, 1 deviates",
        "LoHan, modelled": "0 of 1 held-out claim reproduced, 0 deviate, 1 without a result",
    }
    assert score(tmp_path / "none.csv") == {}


def test_memory_limits_parallel_runs_and_timed_runs_take_all_cores(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(configuration, "machine_gib", lambda: 16.0)
    experiments = Experiments("workflows/config/experiments.yaml", "quick")
    known = SimpleNamespace(run=experiments.runs.get, node=None)
    threads = {run: configuration.Configuration.threads(known, run, 16) for run in experiments.runs}
    assert threads["kernel-overflow-quick"] == 16
    assert threads["train-llama3.2-1b-k16-fp16-as_published"] == 3  # seven of them at once
    assert all(1 < n <= 16 for n in threads.values())
    assert configuration.Configuration.threads(known, "train-qwen2.5-7b-k16-fp16-memascend", 2) == 1


def test_finer_reference_is_a_separate_series_and_decides_no_claim(tmp_path: Path) -> None:
    exhibit = "memascend-fig15"
    own = load(write_records(tmp_path / "raw", smoke_set()))
    reference = load(write_records(tmp_path / "epyc", full_set()))
    mine = table.measured_rows("memascend", own)
    rows = table.reference_rows(exhibit, reference, mine)
    assert len(rows)
    assert set(rows["series"].str.extract(tidy.OF_REFERENCE)[0]) == {"epyc, 2026-01-02"}
    assert set(rows["lane"]) == {"measured"}
    assert rows["testbed"].str.startswith("epyc").all()
    peaks = rows[rows["metric"] == "peak system memory (x k^2)"]
    coarse = {table.twin_k(t) for t in mine.loc[mine["model"] == "Qwen2.5-7B", "testbed"]}
    assert {table.twin_k(t) for t in peaks.loc[peaks["model"] == "Qwen2.5-7B", "testbed"]} < {8, *coarse}
    assert table.reference_rows(exhibit, reference, table.measured_rows("memascend", reference)).empty

    claim = next(c for c in registry.claims() if c["id"] == "memascend-fig15-qwen2.5-7b-memascend")
    alone = table.assemble(exhibit, ROOT / "results/published", mine.iloc[:0], mine)
    with_reference = table.assemble(exhibit, ROOT / "results/published", mine.iloc[:0], mine, rows)
    assert claims.decide(claim, "measured", with_reference) == claims.decide(claim, "measured", alone)


def test_record_that_names_exhibits_is_read_for_no_others(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    one, other = copy.deepcopy(smoke_set()[:2])
    (tmp_path / "host").mkdir()
    for name, record, exhibits in (("one", one, ["memascend-fig11"]), ("other", other, None)):
        record |= {"exhibits": exhibits} if exhibits else {}
        (tmp_path / f"host/{name}.json").write_text(json.dumps(record))
    folders = {f"{name}_dir": str(tmp_path / name) for name in ("raw", "derived", "published", "figures")}
    settings = {"profile": "smoke", "experiments": "workflows/config/experiments.yaml", "reference_dir": str(tmp_path)}
    known = configuration.Configuration(settings | folders, [])
    named = {Path(p).stem for p in known.reference_of("memascend-fig11")}
    assert named == {"one", "other"}
    assert {Path(p).stem for p in known.reference_of("memascend-fig15")} == {"other"}
    assert known.reference_of("lohan-tab04") == []


def test_compact_records_give_the_same_rows_and_keep_run_times(tmp_path: Path, monkeypatch) -> None:
    whole = load(write_records(tmp_path / "raw", [r | {"wall_s": 3.14} for r in full_set()]))
    host = "epyc-example"
    named = [json.loads(json.dumps({k: v for k, v in r.items() if k != "_path"})) for r in whole]
    named = [r | {"host": r["host"] | {"name": host}} for r in named]
    paths = write_records(tmp_path / "named", named)
    monkeypatch.setattr("sys.argv", ["reference", "--records", *map(str, paths), "--out-dir", str(tmp_path / "kept")])
    reference.main()
    kept = load([p for p in sorted((tmp_path / f"kept/{host}").glob("*.json")) if p.name != "times.json"])
    assert all("config" not in record for record in kept)
    times = json.loads((tmp_path / f"kept/{host}/times.json").read_text())
    assert set(times.values()) == {3.1}
    columns = [c for c in tidy.COLUMNS if c != "source"]
    before, after = (table.measured_rows("memascend", records)[columns] for records in (load(paths), kept))
    machine = ("memascend-tab03", "memascend-tab05")
    tables = (t[~t["exhibit_id"].isin(machine) & (t["x_name"] != "time in ms")] for t in (before, after))
    one, other = (sorted(map(tuple, t.values)) for t in tables)
    assert one == other
    assert len(one) > 200


def test_compact_record_omits_folders_of_the_measuring_machine() -> None:
    folders = {"folder": "/mnt/run-1/drive", "tiers": ["/mnt/a", "/mnt/run-1/b"]}
    record = {"kind": "bench", "options": {**folders, "model": "llama3.2-1b", "contexts": [256]}}
    kept = {"folder": "drive", "tiers": ["a", "b"], "model": "llama3.2-1b", "contexts": [256]}
    assert reference.compact(record)["options"] == kept
    asked = {"part": "checkpoints", "options": ["--folder", "/mnt/run-1/drive", "--repeats", "7"]}
    compact = reference.compact({"kind": "bench", "points_requested": asked})
    assert compact["points_requested"] == {"part": "checkpoints", "options": ["--folder", "drive", "--repeats", "7"]}
    assert folders.items() <= record["options"].items()


def test_records_of_an_unnamed_machine_are_no_reference(tmp_path: Path, monkeypatch, capsys) -> None:
    paths = write_records(tmp_path / "raw", smoke_set()[:1])
    monkeypatch.setattr("sys.argv", ["reference", "--records", *map(str, paths), "--out-dir", str(tmp_path / "kept")])
    with pytest.raises(SystemExit, match="MEMASCEND_HOST"):
        reference.main()
    assert not (tmp_path / "kept").exists()


def test_unbuilt_paper_and_exhibit_name_what_they_wait_for() -> None:
    waiting = {
        "id": "mlpoffload-fig04",
        "paper": "mlpoffload",
        "status": "planned",
        "waits_for": "the tier of several paths",
    }
    known = SimpleNamespace(entries={"mlpoffload-fig04": waiting})
    with pytest.raises(SystemExit) as ended:
        configuration.Configuration.of_paper(known, "mlpoffload")(None)
    assert ended.value.code == "mlp-offload: no exhibit is built yet; they wait for: the tier of several paths."
    with pytest.raises(SystemExit) as ended:
        configuration.Configuration.planned(known, "mlpoffload-fig04")(None)
    assert ended.value.code == "mlpoffload-fig04 is not built yet: it waits for the tier of several paths."


def test_socket_folder_of_the_servers_survives_scratch_collection(tmp_path, monkeypatch):
    monkeypatch.setattr(console_module, "SERVERS", {})
    monkeypatch.setenv("MEMASCEND_EXHIBITS", "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    console_module.start_servers(
        SimpleNamespace(raw=str(tmp_path / "raw"), exhibits_of_runs="{}", node=None, host=None)
    )
    (folder,) = tmp_path.glob(f"{children.SCRATCH}*")
    os.utime(folder, (1, 1))
    with children.scratch_folder(tmp_path):  # a run begins
        assert folder.exists()
