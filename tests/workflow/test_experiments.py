"""Coverage of the measured exhibits by the profiles."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from memascend import cli
from memascend.baselines.protocol import folders
from workflows import registry, staleness, tidy
from workflows.configuration import Configuration
from workflows.experiments import Experiments
from workflows.run import training, validation

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = yaml.safe_load((ROOT / "workflows/config/experiments.yaml").read_text())
PROFILES = EXPERIMENTS["profiles"]


def groups(profile: str) -> list[dict]:
    return [group for kind in ("training", "bench", "times") for group in PROFILES[profile][kind]]


def test_experiments_file_fits_its_schema() -> None:
    tidy.check(EXPERIMENTS, "experiments.schema.json", "experiments.yaml")


@pytest.mark.parametrize(
    "change", [{"model": {}}, {"dtypes": ["fp8"]}, {"models": {"qwen2.5-7b": 3}}, {"time_limit_s": 0}]
)
def test_schema_refuses_invalid_training_groups(change: dict) -> None:
    broken = json.loads(json.dumps(EXPERIMENTS))
    broken["profiles"]["smoke"]["training"][0] |= change
    with pytest.raises(tidy.TableError, match="profiles/smoke/training/0"):
        tidy.check(broken, "experiments.schema.json", "experiments.yaml")


@pytest.mark.parametrize("profile", PROFILES)
def test_measured_memascend_exhibits_have_runs_in_every_profile(profile: str) -> None:
    entries = registry.exhibits()
    measured = {
        e["id"] for e in entries if e["status"] == "built" and "measured" in e["lanes"] and e["kind"] != "spec-table"
    }
    measured &= {e["id"] for e in entries if e["paper"] == "memascend"}  # only published values of the others are shown
    # Unfused experts need a separate environment, which only the profile full uses.
    measured -= {"memascend-fig18"} if profile != "full" else set()
    assert measured <= {exhibit for group in groups(profile) for exhibit in group["exhibits"]}


def test_measured_exhibits_are_exactly_those_with_runs_or_records() -> None:
    named = {exhibit for profile in PROFILES for group in groups(profile) for exhibit in group["exhibits"]}
    named |= {"memascend-tab03", "memascend-tab05"}  # those of the probed machine
    for path in (ROOT / "results/reference").glob("*/*.json"):
        named |= set(json.loads(path.read_text()).get("exhibits", []))
    assert {entry["id"] for entry in registry.exhibits() if "measured" in entry["lanes"]} == named


@pytest.mark.parametrize("profile", ["smoke", "quick", "paper"])
def test_short_profiles_measure_every_measured_paper(profile: str) -> None:
    named = {exhibit.rpartition("-")[0] for group in groups(profile) for exhibit in group["exhibits"]}
    assert named == {entry["paper"] for entry in registry.exhibits() if "measured" in entry["lanes"]}


def test_status_page_counts_the_exhibits_of_each_paper() -> None:
    page = (ROOT / "docs/status.md").read_text()
    for paper, name in registry.PAPERS.items():
        lanes = [set(entry["lanes"]) for entry in registry.exhibits() if entry["paper"] == paper]
        computed = {"measured", "modelled"}
        counts = (
            len(lanes),
            sum("measured" in each for each in lanes),
            sum("modelled" in each for each in lanes),
            sum(bool(each) and not each & computed for each in lanes),
            sum(not each for each in lanes),
        )
        assert f"| {name} | {' | '.join(map(str, counts))} |" in page


@pytest.mark.parametrize("profile", PROFILES)
def test_exhibits_named_by_groups_are_in_the_registry(profile: str) -> None:
    known = {e["id"] for e in registry.exhibits()}
    assert {exhibit for group in groups(profile) for exhibit in group["exhibits"]} <= known


@pytest.mark.parametrize("profile", PROFILES)
def test_models_are_committed_and_arms_are_described(profile: str) -> None:
    for group in PROFILES[profile]["training"]:
        assert set(group["models"]) <= set(tidy.DISPLAY)
        assert set(group["arms"]) <= set(EXPERIMENTS["arms"])
    papers_own = {
        model for paper in registry.PAPERS for model in registry.read(registry.file_of(paper, "models.yaml")) or {}
    }
    for run in PROFILES[profile]["times"]:
        assert run["model"] in {*tidy.DISPLAY, *papers_own}
        assert {word.split(":")[0] for word in run["arms"]} <= set(EXPERIMENTS["arms"])
    for arm in EXPERIMENTS["arms"].values():
        described = yaml.safe_load((folders()[arm["system"]] / "system.yaml").read_text())["arms"]
        assert arm["arm"] in described or "environment" in arm


def test_paper_profile_runs_ten_steps_on_the_7b_twin() -> None:
    seven = [g for g in PROFILES["paper"]["training"] if "qwen2.5-7b" in g["models"] and "fp16" in g["dtypes"]]
    seven = [g for g in seven if "points" not in g]
    assert any(
        {"as_published", "today", "memascend", "zero_offload"} <= set(g["arms"])
        and g["steps"] >= 10
        and g["models"]["qwen2.5-7b"] == 8
        for g in seven
    )


def test_schemas_are_themselves_valid() -> None:
    for path in (ROOT / "workflows/schemas").glob("*.schema.json"):
        jsonschema.Draft202012Validator.check_schema(json.loads(path.read_text()))


def test_overflow_bench_accepts_every_size_of_every_profile(monkeypatch) -> None:
    """Counts of layers have a limit that elements may exceed: quick and full requested more than was accepted."""
    asked: list[int] = []
    nothing = {"missing": {}, "summary": []}
    monkeypatch.setattr(
        "memascend.bench.overflow.measure", lambda dtypes, numels, repeats: asked.extend(numels) or nothing
    )
    for profile in PROFILES.values():
        for group in profile["bench"]:
            if group["part"] == "overflow":
                numels = group["options"]["numels"]
                asked.clear()
                assert cli.main(["bench", "overflow", "--numels", ",".join(map(str, numels))]) == 0
                assert asked == numels


def test_profile_paper_validates_the_simulator_and_smoke_does_not(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    usual = registry.read(ROOT / "workflows/config/config.yaml")
    paper, smoke = (Configuration(usual | {"profile": profile}, []) for profile in ("paper", "smoke"))
    (record,) = paper.simulator
    run_id = Path(record).stem
    assert f"timeout {paper.run(run_id)['allowed_s']} python -m workflows.run.validation" in paper.command(run_id)
    assert smoke.simulator == []
    with pytest.raises(SystemExit, match=r"profile smoke does not measure .*: --config profile=paper"):
        smoke.no_simulator()


def test_code_digest_of_validation_covers_all_of_its_systems(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    paper = Configuration(registry.read(ROOT / "workflows/config/config.yaml") | {"profile": "paper"}, [])
    (record,) = paper.simulator
    systems = sorted({system for system, _ in validation.RUNS})
    code = staleness.digest("workflows.run.validation", systems, [validation.MODEL])
    assert paper.measured_by(Path(record).stem) == code


def test_harness_refuses_a_system_without_deepspeed_in_one_line(tmp_path: Path, capsys) -> None:
    words = ["--run-id", "r", "--system", "lohan", "--arm", "optimized", "--model", "llama3.2-1b", "--k", "16"]
    assert training.main([*words, "--out", str(tmp_path / "r.json")]) == 2
    said = capsys.readouterr().err
    assert "training: error: system 'lohan' does not run on DeepSpeed" in said
    assert said.count("\n") == 1


def test_error_for_an_unknown_arm_says_where_arms_are_defined(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        Experiments(str(ROOT / "workflows/config/experiments.yaml"), "smoke").named("arms", "my_arm")
    assert "define further ones under arms: in this file" in f"{caught.value} {capsys.readouterr().err}"
