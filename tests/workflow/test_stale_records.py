"""Which records and exhibits are made again after a change, in a copy of the repository: nothing is measured."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from memascend import systems
from workflows import registry
from workflows.configuration import Configuration, systems_named
from workflows.derive.table import rows_of

ROOT = Path(__file__).resolve().parents[2]
MEMASCEND = "train-qwen2.5-7b-k64-fp16-memascend"
OFFLOAD = "train-qwen2.5-7b-k64-fp16-zero_offload"
BENCH = "kernel-overflow-smoke"
RECORDS = (MEMASCEND, OFFLOAD, BENCH)


def snakemake(project: Path, *words: str) -> str:
    targets = [f"results/raw/{name}.json" for name in RECORDS]
    command = [sys.executable, "-m", "snakemake", "--cores", "1", *words, *targets, "--config", "profile=smoke"]
    environment = {**os.environ, "HOME": str(project), "XDG_CACHE_HOME": str(project / "cache")}
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def made_again(project: Path) -> set[str]:
    return set(re.findall(r"output: results/raw/(\S+)\.json", snakemake(project, "-n")))


@pytest.mark.slow
def test_code_change_reruns_only_the_records_it_can_affect(tmp_path: Path) -> None:
    for name in ("workflows", "profiles", "memascend", "baselines", "hardware"):
        left_out = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=left_out, symlinks=True)
    for name in ("Snakefile", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "results/raw").mkdir(parents=True)
    for name in RECORDS:
        (tmp_path / f"results/raw/{name}.json").write_text("{}")
    snakemake(tmp_path, "--touch", "--forceall")

    # as if the records were older than such tables
    shutil.rmtree(tmp_path / "results/raw/benchmarks", ignore_errors=True)
    (tmp_path / "README.md").write_text("changed")
    (tmp_path / "baselines/memascend/README.md").write_text("new")
    shutil.copytree(tmp_path / "baselines/zero_infinity", tmp_path / "baselines/another")
    (tmp_path / "memascend/planner/models/new.json").write_text("{}")
    with (tmp_path / "memascend/doctor/command.py").open("a") as file:
        file.write("\nCHANGED = True\n")
    assert made_again(tmp_path) == set()

    with (tmp_path / "baselines/memascend/system.py").open("a") as file:
        file.write("\nCHANGED = True\n")
    assert made_again(tmp_path) == {MEMASCEND}

    with (tmp_path / "memascend/csrc/core/pinned.cpp").open("a") as file:
        file.write("\n// changed\n")
    assert made_again(tmp_path) == set(RECORDS)


def digests(project: Path) -> dict[str, str]:
    """Return, by exhibit, a digest of what its table and picture depend on besides records and the modelled lane."""
    folders = {f"{name}_dir": str(project / name) for name in ("raw", "derived", "published", "figures", "reference")}
    settings = {"profile": "smoke", "experiments": "workflows/config/experiments.yaml"}
    registry.read.cache_clear()
    known = Configuration(settings | folders, [])
    return {e: known.derives(e) if e in known.with_table else known.draws(e) for e in known.built}


def test_file_change_redraws_only_the_exhibits_it_concerns(tmp_path: Path, monkeypatch) -> None:
    for name in ("workflows", "baselines"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("memascend", "hardware"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    papers = tmp_path / "workflows/papers"

    known = digests(tmp_path)

    def touched(path: Path, old: str, new: str) -> set[str]:
        text, before = path.read_text(), dict(known)
        assert old in text
        path.write_text(text.replace(old, new, 1))
        known.update(digests(tmp_path))
        return {exhibit for exhibit in known if known[exhibit] != before[exhibit]}

    assert touched(papers / "lohan/captions.yaml", "Simulated throughput by", "Throughput by") == {"lohan-fig05a"}
    assert touched(papers / "cxl/figures.yaml", "cxl-alg01:", "cxl-alg01:\n  head: 0.2") == {"cxl-alg01"}
    # The text and the layout of the report's pages affect no picture.
    assert touched(papers / "lohan/paper.yaml", "idea:", "# changed\nidea:") == set()
    assert touched(tmp_path / "workflows/derive/site/pages.py", "from __future__", "# new\nfrom __future__") == set()
    lohan = touched(papers / "lohan/rows/sizes.py", "from __future__", "# changed\nfrom __future__")
    assert {exhibit.partition("-")[0] for exhibit in lohan} == {"lohan"}
    assert len(touched(tmp_path / "workflows/panels/style.py", "from __future__", "# new\nfrom __future__")) > 120


def test_system_change_affects_only_modelled_lanes_of_its_papers(tmp_path: Path, monkeypatch) -> None:
    for name in ("workflows", "baselines"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("memascend", "hardware"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)

    def lanes() -> dict[str, str]:
        folders = {
            f"{name}_dir": str(tmp_path / name) for name in ("raw", "derived", "published", "figures", "reference")
        }
        known = Configuration({"profile": "smoke", "experiments": "workflows/config/experiments.yaml"} | folders, [])
        return {paper: known.models(paper) for paper in registry.PAPERS}

    def changed(system: str) -> set[str]:
        before = lanes()
        with (tmp_path / f"baselines/{system}/schedule.py").open("a") as file:
            file.write("\nCHANGED = True\n")
        after = lanes()
        return {paper for paper in after if after[paper] != before[paper]}

    unchanged = lanes()
    with (tmp_path / "workflows/papers/lohan/paper.yaml").open("a") as file:
        file.write("# what the report's first page says is in no lane\n")
    assert lanes() == unchanged
    assert changed("lohan") == {"lohan"}
    assert changed("cxl") == {"cxl"}
    assert changed("zero_infinity") == {"memascend", "lohan"}


@pytest.mark.parametrize(
    "paper", [pytest.param(p, marks=() if p == "ssdtrain" else pytest.mark.slow) for p in registry.PAPERS]
)
def test_modelled_lane_loads_only_systems_that_its_paper_names(paper: str, monkeypatch) -> None:
    loaded = set()
    load = systems.load
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(systems, "load", lambda name, arm=None: loaded.add(name) or load(name, arm))
    assert list(rows_of(paper).modelled())
    assert loaded
    assert loaded <= set(systems_named(paper))  # some are in measured lanes only
