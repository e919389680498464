"""The commands that a user types, and their output."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from workflows import registry

ROOT = Path(__file__).resolve().parents[2]
PROFILES = ("smoke", "quick", "paper", "full", "gpu")


BUILT = {entry["id"] for entry in registry.exhibits() if entry["status"] == "built"}


def snakemake(*words: str, fresh: Path) -> subprocess.CompletedProcess[str]:
    """Run Snakemake in the repository, with every output folder and its own state under ``fresh``."""
    config = [word for word in words if "=" in word and not word.startswith("-")]
    named = {word.partition("=")[0] for word in config}
    folders = [f"{name}_dir={fresh / name}" for name in ("raw", "derived", "figures") if f"{name}_dir" not in named]
    words = tuple(word for word in words if word not in config)
    command = [sys.executable, "-m", "snakemake", *words, "--config", *folders, *config]
    environment = {**os.environ, "HOME": str(fresh), "XDG_CACHE_HOME": str(fresh / "cache")}
    return forked.run(command, cwd=ROOT, env=environment)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return [line for line in (done.stdout + done.stderr).splitlines() if line.strip()][-1]


def test_misspelt_config_key_gives_one_line_with_a_suggestion(tmp_path: Path) -> None:
    done = snakemake("-n", "figures", "profil=smoke", fresh=tmp_path)
    assert done.returncode == 1
    assert last_line(done) == "config: top level: unknown key 'profil' (did you mean profile?)"
    assert "Traceback" not in done.stderr


def test_unknown_profile_lists_the_five_profiles(tmp_path: Path) -> None:
    done = snakemake("-n", "figures", "profile=smok", fresh=tmp_path)
    assert done.returncode == 1
    assert all(profile in last_line(done) for profile in PROFILES)


@pytest.mark.parametrize(
    ("word", "near"), [("memascend-fig99", "memascend-fig09"), ("memascend-fig8", "memascend-fig08"), ("fig11", "")]
)
def test_unknown_exhibit_gives_one_line_with_similar_names(tmp_path: Path, word: str, near: str) -> None:
    done = snakemake("-n", word, fresh=tmp_path)
    assert done.returncode == 1
    assert last_line(done).startswith(f"{word} is no exhibit; ")
    assert near in last_line(done)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("word", "near"),
    [("figs", "figures"), ("tabless", "tables"), ("memascned", "memascend"), ("memascend-fgi11", "memascend-fig11")],
)
def test_mistyped_target_gives_one_line_with_a_suggestion(tmp_path: Path, word: str, near: str) -> None:
    done = snakemake("-n", word, fresh=tmp_path)
    assert done.returncode == 1
    assert last_line(done).startswith(f"{word} is no target; did you mean {near}? Targets: figures, tables, ")
    assert "Traceback" not in done.stderr


def test_forced_rule_is_not_taken_for_a_mistyped_target(tmp_path: Path) -> None:
    done = snakemake("-n", "memascend-tab03", "--forcerun", "figure", "profile=smoke", fresh=tmp_path)
    assert done.returncode == 0, done.stderr


def test_unwritable_folder_is_named_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = snakemake("-n", "figures", f"figures_dir={tmp_path / 'file' / 'figures'}", fresh=tmp_path)
    assert done.returncode == 1
    where = f"config: {tmp_path / 'file' / 'figures'} cannot be written; make {tmp_path / 'file'} writable"
    assert last_line(done).startswith(where)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_write_permission_is_refused(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    done = snakemake("-n", "figures", f"figures_dir={closed / 'figures'}", fresh=tmp_path)
    assert "cannot be written" in last_line(done)


@pytest.mark.parametrize(
    "profile", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("quick", "gpu"))) for name in PROFILES]
)
def test_dry_run_of_each_profile_lists_runs_and_all_exhibits(tmp_path: Path, profile: str) -> None:
    done = snakemake("-n", "figures", f"profile={profile}", fresh=tmp_path)
    text = done.stdout + done.stderr
    if profile == "full":  # its 0.16 environment is made on request; without it the plan names the fix
        assert done.returncode == 0 or "environment deepspeed_016 is missing" in last_line(done)
        return
    assert done.returncode == 0, text
    assert set(re.findall(r"output: .*?/figures/([a-z]+-\w+)\.svg", text)) == BUILT
    runs = set(re.findall(r"output: \S+/raw/(train-\S+)\.json", text))
    assert any("as_published" in run for run in runs)
    assert any(run.removesuffix("-cuda").endswith("-memascend") for run in runs)


def test_timed_runs_take_all_cores_and_the_exclusive_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "snakemake", "--cores", "3", "-n", "figures", "--config", "profile=smoke"]
    folders = [f"{name}_dir={tmp_path / name}" for name in ("raw", "derived", "figures")]
    done = subprocess.run([*command, *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    blocks = re.split(r"\n\s*\n", done.stdout + done.stderr)
    measuring = [b for b in blocks if re.search(r"rule (forked_)?record:", b)]
    assert len(measuring) > 5
    # For one round only the bytes count, except over paths of known rates.
    timed = [b for b in measuring if re.search(r"raw/(bench|kernel|times-mlpoffload)-", b)]
    assert len(timed) >= 3
    for block in measuring:
        assert ("threads: 3" in block) == (block in timed)
        assert bool(re.search(r"flock +\S+/raw/\.machine\.lock", block)) == (block in timed)
        assert "/raw/.machine.lock" in block
        assert ("benchmark: " in block) == ("rule record:" in block)
    assert all("rule record:" in block for block in timed)


def test_exhibits_target_lists_all_exhibits(tmp_path: Path) -> None:
    done = snakemake("exhibits", fresh=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = re.findall(rf"^(?:{'|'.join(registry.PAPERS)})-\S+ +\S.*\(.*\)$", done.stdout, re.MULTILINE)
    assert len(lines) == len(registry.exhibits())
    measured = {line.split()[0] for line in lines if ", measured;" in line}
    assert {"lohan-fig07a", "lohan-fig09b", "memascend-tab03", "memascend-fig18"} <= measured
    assert measured.isdisjoint({"lohan-fig05b", "cxl-fig13"})


def test_exhibit_list_ends_when_its_reader_stops_early(tmp_path: Path) -> None:
    folders = " ".join(f"{name}_dir={tmp_path / name}" for name in ("raw", "derived", "figures"))
    command = f"{sys.executable} -m snakemake exhibits --config {folders} 2>&1 | head -n 3"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert len(done.stdout.splitlines()) == 3


def test_lint_and_format_are_clean(tmp_path: Path) -> None:
    assert snakemake("--lint", fresh=tmp_path).returncode == 0
    done = subprocess.run(
        [sys.executable, "-m", "snakefmt", "--check", "Snakefile", "workflows/rules"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_schema_has_its_id_and_version() -> None:
    for path in (ROOT / "workflows/schemas").glob("*.schema.json"):
        schema = json.loads(path.read_text())
        assert schema["$id"] == path.name
        assert "version" in schema["title"].lower() or path.name == "trace.schema.json"


def test_uncheckable_bundle_ends_with_nonzero_status(tmp_path):
    """The rule shows the check's output through a pipe, but its status is the check's."""
    (tmp_path / "mine.zip").write_text("no bundle")
    done = snakemake("--cores", "1", "artifact-verify", f"bundle={tmp_path / 'mine.zip'}", fresh=tmp_path)
    assert done.returncode != 0, done.stdout + done.stderr
    assert "mine.zip" in done.stdout + done.stderr
