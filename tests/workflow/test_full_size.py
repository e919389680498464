"""Twins predict the host peaks of full models: the program that compares them, and its committed records."""

import json
import subprocess
import sys

import pytest

from workflows import registry
from workflows.run import full_size, training

FOLDER = registry.ROOT / "results/reference/epyc-genoa-2core"


def record(name):
    return json.loads((FOLDER / name).read_text())


def test_pages_quote_the_full_size_records():
    found, predicted = record("full-size.json"), record("full-size-foretold.json")
    now = {"foretold_bytes": "predicted_bytes", "of_the_foretold": "of_the_predicted"}  # its current keys
    for case, each in found["summary"].items():
        assert each["foretold_bytes"] == predicted["summary"][case]["full_bytes"]["8"]
        as_now = {now.get(key, key): value for key, value in each.items()}
        assert as_now == full_size.summary(found["points"], predicted["summary"])[case]
    gib = {case: each["full_bytes"]["1"] / 2**30 for case, each in found["summary"].items()}
    ours, lohan = gib["memascend:memascend:llama3.2-1b"], gib["lohan:optimized:llama3.2-1b"]
    share = found["summary"]["memascend:memascend:llama3.2-1b"]["of_the_foretold"]
    text = " ".join((registry.ROOT / "docs/explanation/how-it-is-measured.md").read_text().split())
    assert f"took {ours:.2f} GiB" in text
    assert f"which took {lohan:.2f} GiB" in text
    assert f"took {share:.3f} of the value scaled up" in (registry.ROOT / "README.md").read_text()
    rows = (FOLDER / "README.md").read_text()
    assert f"takes {ours:.2f} GiB, {share:.3f} of what was predicted" in rows
    assert f"LoHan: {lohan:.2f} GiB (1B) and {gib['lohan:optimized:llama3.2-3b']:.2f} (3B)" in rows


@pytest.mark.parametrize("model", ["llama3.2-1b", "llama3.2-3b"])
def test_plan_of_the_full_model_matches_the_measured_ledger(model):
    words = ["plan", "--model", model, "--system", "lohan", "--context", "128", "--device", "cpu", "--json"]
    done = subprocess.run([sys.executable, "-m", "memascend.cli", *words], capture_output=True, text=True, check=True)
    planned = {}
    for row in json.loads(done.stdout)["ledger"]:
        planned[row["owner"]] = planned.get(row["owner"], 0) + row["reserved_bytes"]
    (point,) = [each for each in record("full-size.json")["points"] if each["case"] == f"lohan:optimized:{model}"]
    assert {owner: planned[owner] for owner in point["ledger"]} == point["ledger"]


def test_summary_compares_predicted_and_measured_bytes(tmp_path):
    points = [{"case": "a:b:m", "k": 8, "full_bytes": 100}, {"case": "a:b:m", "k": 16, "full_bytes": 90}]
    predicted = full_size.summary(points, {})
    assert predicted == {"a:b:m": {"full_bytes": {"8": 100, "16": 90}}}
    found = full_size.summary([{"case": "a:b:m", "k": 1, "full_bytes": 99}], predicted)
    assert found["a:b:m"] == {"full_bytes": {"1": 99}, "predicted_bytes": 100, "of_the_predicted": 0.99}
    assert "predicted_bytes" not in full_size.summary([{"case": "a:b:n", "k": 1, "full_bytes": 9}], predicted)["a:b:n"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--cases", "lohan"], "'lohan' is not a case: expected system:arm:model"),
        (["--predicted", "nowhere.json"], "there is no record nowhere.json"),
        (["--foretold", "nowhere.json"], "there is no record nowhere.json"),
    ],
)
def test_invalid_cases_and_missing_records_are_refused(tmp_path, capsys, more, said):
    with pytest.raises(SystemExit):
        full_size.parse(["--ks", "8", "--out", str(tmp_path / "out.json"), *more])
    assert said in capsys.readouterr().err


def test_out_of_memory_run_records_its_reason(tmp_path, monkeypatch, capsys):
    reason = "pinned buffer 'flat': 8192 MiB is more than the 4000 MiB of RAM that is free now"
    outcome = {"status": "oom", "results": [{"status": "oom", "reason": reason}], "samples": [], "wall_s": 1.0}
    monkeypatch.setattr(training, "_train", lambda *_: outcome)
    words = ["--run-id", "r", "--system", "zero_infinity", "--arm", "as_published", "--model", "llama3.2-1b"]
    words += ["--k", "32", "--dtype", "bf16", "--nvme", str(tmp_path / "nvme"), "--out", str(tmp_path / "r.json")]
    assert training.main(words) == 0
    record = json.loads((tmp_path / "r.json").read_text())
    assert (record["status"], record["reason"]) == ("oom", reason)
    assert reason in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.deepspeed
def test_small_twins_of_two_systems_predict_larger_ones(tmp_path):
    words = ["--cases", "zero_infinity:as_published:llama3.2-1b", "lohan:optimized:llama3.2-1b"]
    words += ["--folder", str(tmp_path / "nvme"), "--out", str(tmp_path / "out.json")]
    assert full_size.main([*words, "--ks", "32", "16"]) == 0
    found = json.loads((tmp_path / "out.json").read_text())["summary"]
    for each in found.values():
        coarse, fine = (each["full_bytes"][k] for k in ("32", "16"))
        assert 0.8 < coarse / fine < 1.6  # the part that does not scale has more weight in the smaller one
    assert not list((tmp_path / "nvme").iterdir())
