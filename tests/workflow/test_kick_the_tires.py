"""The badge list is executed: a line is met if its command succeeded, and never if it needs the outside world."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from workflows import registry, tidy
from workflows.artifact import badge_checks, badges
from workflows.artifact import kick_the_tires as tires
from workflows.artifact.badges import AVAILABLE, FUNCTIONAL, LINES, Line
from workflows.artifact.kick_the_tires import MET, NOT_MET, NOT_RUN, OUTSIDE
from workflows.configuration import Configuration
from workflows.derive import claims

ROOT = Path(__file__).resolve().parents[2]


def line(name: str, command: str = "true", **more) -> Line:
    return Line(name=name, badge=FUNCTIONAL, says=f"{name} holds", command=command, **more)


def checked(lines, folder, *, long=False, only=(), **more):
    env = tires.bare(folder / "home", folder / "venv")
    found = tires.check_all(lines, folder, env, (), long=long, only=only, **more)
    return {each.name: each for each in found}


def test_badge_list_is_consistent_and_ordered_by_needs():
    names = [each.name for each in LINES]
    assert len(set(names)) == len(names)
    assert {each.badge for each in LINES} == set(badges.BADGES)
    for number, each in enumerate(LINES):
        assert bool(each.command) != bool(each.outside), each.name
        assert set(each.needs) <= set(names[:number]), each.name
        # Tests load the library, which loads its extension.
        assert "build" in each.needs or "pytest" not in each.command, each.name
    assert {each.name for each in LINES if each.outside} == {"archive", "others"}


def test_files_and_checks_named_by_commands_exist():
    for each in LINES:
        words = each.command.split()
        assert [word for word in words if word.startswith("tests/") and not (ROOT / word).exists()] == []
        for first, second in itertools.pairwise(words):
            assert first != "workflows.artifact.badge_checks" or second in badge_checks.CHECKS


def test_plan_and_train_commands_are_those_of_the_readme():
    readme = (ROOT / "README.md").read_text()
    for name in ("plan", "train"):
        (command,) = (each.command for each in LINES if each.name == name)
        assert command.replace("python -m memascend.cli", "memascend") in readme


def test_lines_are_met_by_successful_commands_and_failures_block_dependents(tmp_path, capsys):
    found = checked(
        [
            line("good", "echo one; echo ===== 3 passed ====="),
            line("bad", "echo broken; exit 3"),
            line("piped", "false | cat"),
            line("after", needs=["bad"]),
            line("silent", "exit 4"),
            line("here", f"echo built $PWD/core.so, with {tmp_path}/venv/bin/python, in $HOME/.cache"),
            Line(name="doi", badge=AVAILABLE, says="it has a DOI", outside="no archive yet"),
        ],
        tmp_path,
    )
    assert {name: each.status for name, each in found.items()} == {
        **dict.fromkeys(("good", "here"), MET),
        **dict.fromkeys(("bad", "piped", "silent"), NOT_MET),
        "after": NOT_RUN,
        "doi": OUTSIDE,
    }
    assert found["good"].found == "3 passed"
    assert found["bad"].found == "broken"
    assert found["here"].found == "built core.so, with bin/python, in .cache"  # no folder of the machine
    assert found["after"].found == "it needs bad"
    assert found["silent"].found == "exit status 4, without a word"
    assert "[2/7] Functional, bad: not met, 0 s: broken" in capsys.readouterr().out


def test_long_lines_run_only_on_request(tmp_path):
    lines = [line("short"), line("hour", long=True), line("other")]
    assert [each.status for each in checked(lines, tmp_path).values()] == [MET, NOT_RUN, MET]
    assert [each.status for each in checked(lines, tmp_path, long=True).values()] == [MET, MET, MET]
    assert [each.status for each in checked(lines, tmp_path, only=["hour"]).values()] == [NOT_RUN, MET, NOT_RUN]


def test_overdue_command_is_stopped_with_its_children(tmp_path):
    stopped = line("hangs", "echo begun; sleep 600 & echo $! > child; wait", minutes=0.02)
    found = checked([stopped], tmp_path)["hangs"]
    assert found.status == NOT_MET
    assert found.found == "stopped after 0.02 minutes; last: begun"
    stat = Path("/proc", (tmp_path / "child").read_text().strip(), "stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_offline_program_reaches_only_the_loopback_interface():
    if not (isolated := tires.offline()):
        pytest.skip("network namespaces are not allowed here")
    talk = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname(), 5); "
        "print([name for _, name in socket.if_nameindex() if name not in ('lo', 'sit0', 'tunl0', 'ip6tnl0')])"
    )
    done = subprocess.run([*isolated, sys.executable, "-c", talk], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_patience_extends_the_time_limit(tmp_path):
    slow = line("slow", "sleep 0.5", minutes=0.001)
    assert checked([slow], tmp_path)["slow"].status == NOT_MET
    assert checked([slow], tmp_path, patience=1000)["slow"].status == MET


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--out", "/dev/null/x"], "--out '/dev/null/x' cannot be written: Not a directory; name a folder"),
        (["--out", __file__], "is not a folder; name a folder"),
        (["--with", "nowhere"], "--with nowhere: there is no bin/python in it"),
        (["--only", "tyres"], "tyres: no line of the list"),
        (["--patience", "0"], "'0' is not a number above 0"),
        (["--patience", "-1"], "'-1' is not a number above 0"),
        (["--patience", "nan"], "'nan' is not a number above 0"),
        (["--patience", "inf"], "'inf' is not a number above 0"),
        (["--patience", "long"], "'long' is not a number above 0"),
    ],
)
def test_invalid_options_are_refused_before_cloning(monkeypatch, capsys, words, said):
    monkeypatch.setattr(tires, "clone", lambda folder: pytest.fail("it was cloned"))
    try:
        status = tires.main(words)
    except SystemExit as of_argparse:
        status = of_argparse.code
    assert status == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_unreached_lines_are_listed_as_not_run():
    first = tires.result(LINES[0], MET, "built")
    found = tires.complete([first])
    assert {each.name for each in found} == {each.name for each in LINES}
    assert {each.status for each in found} == {MET, NOT_RUN, OUTSIDE}
    assert [each.name for each in found if each.status == OUTSIDE] == ["archive", "others"]


def test_requested_lines_include_what_they_need():
    assert tires.asked(LINES, ["twice"]) == {"twice", "measured", "build"}
    with pytest.raises(ValueError, match="tyres: no line of the list; they are build, archive"):
        tires.asked(LINES, ["tyres"])


def test_commands_do_not_inherit_the_callers_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("MEMASCEND_CPU_LEVEL", "x86-64-v3")
    env = tires.bare(tmp_path / "home", tmp_path / "venv")
    assert set(env) - {"MAX_JOBS", "PIP_CONFIG_FILE"} == {"HOME", "LANG", "PATH", "PYTHONPATH", "MEMASCEND_CPU_LEVEL"}
    assert env["PATH"].split(":")[0] == str(tmp_path / "venv/bin")
    assert str(Path.home()) not in env["PATH"].split(":")


def test_clone_has_only_committed_files(tmp_path, monkeypatch):
    origin = tmp_path / "origin"
    git = ["git", "-C", str(origin), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "init", "-q", str(origin)], check=True)
    (origin / "committed").write_text("1")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    (origin / "not-committed").write_text("2")
    monkeypatch.setattr(tires, "ROOT", origin)
    where, commit = tires.clone(tmp_path)
    assert sorted(path.name for path in where.iterdir()) == [".git", "committed"]
    assert len(commit) == 40
    monkeypatch.setattr(tires, "ROOT", tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"git clone: .*; call this in a checkout"):
        tires.clone(tmp_path / "other")


def test_table_counts_lines_per_badge_and_calls_none_earned(tmp_path):
    lines = [
        line("good", "echo a b; echo 'a|b'"),
        line("bad", "exit 1"),
        Line(name="doi", badge=AVAILABLE, says="it has a DOI", outside="no archive yet"),
    ]
    said = tires.document(list(checked(lines, tmp_path).values()), tires.surroundings((), None, "0" * 40))
    tires.write(tmp_path, said)
    assert json.loads((tmp_path / tires.JSON).read_text()) == said
    text = (tmp_path / tires.TABLE).read_text()
    assert (
        "## Available\n\n*Archived for the public, under a name that does not change*: 1 needs the outside world."
        in text
    )
    assert "1 met, 1 not met." in text
    assert r"| good holds | **met** | a\|b | " in text
    assert "| it has a DOI | **needs the outside world** | no archive yet |  |  |" in text
    assert not {"earned", "passed"} & set(text.lower().split())


def test_licence_that_differs_between_files_is_found(tmp_path, monkeypatch):
    for name in ("CITATION.cff", ".zenodo.json", "codemeta.json", "LICENSE"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.chdir(tmp_path)
    assert badge_checks.licence()[0]
    (tmp_path / "CITATION.cff").write_text((ROOT / "CITATION.cff").read_text().replace("Apache-2.0", "MIT"))
    assert badge_checks.licence() == (
        False,
        "pyproject.toml says Apache-2.0; CITATION.cff says MIT; .zenodo.json says Apache-2.0; "
        "codemeta.json says Apache-2.0",
    )


def test_packages_missing_or_of_other_versions_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "constraints.txt").write_text("# pins\npytest==0.1\nno-such-package==1.0\n")
    met, text = badge_checks.packages()
    assert not met
    assert text.startswith("pytest ")
    assert "(0.1 pinned); not installed: no-such-package (make setup installs all" in text


def test_unmeasured_exhibit_is_not_reproduced(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert badge_checks.main(["reproduced", "memascend-fig11"]) == 1
    assert "memascend-fig11.csv is missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name one of tag, licence"),
        (["licenses"], "'licenses' is no check (did you mean licence?): name one of tag, licence"),
        (["reproduced"], "reproduced takes EXHIBIT, and none was given"),
        (["tag", "extra"], "tag takes no argument, and extra was given"),
        (["reproduced", "memascend-fig111"], "memascend-fig111 is no exhibit (did you mean memascend-fig11?)"),
    ],
)
def test_misused_check_ends_with_a_usage_error(capsys, words, said):
    assert badge_checks.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"badge_checks: {said}")
    assert error.count("\n") == 1


def test_every_run_of_the_default_profile_has_a_committed_duration(monkeypatch):
    """Otherwise the line `resources` is not met on a fresh clone, which has no records of its own."""
    monkeypatch.chdir(ROOT)
    known = Configuration(yaml.safe_load(Path("workflows/config/config.yaml").read_text()), [])
    seconds = [json.loads(path.read_text()) for path in Path("results/reference").glob("*/times.json")]
    timed = {run for times in seconds for run in times}
    assert [run for run in known.runs if run not in timed and run != "testbed-local"] == []


def test_exhibit_with_untimed_runs_is_named_with_the_remedy(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(Configuration, "seconds", lambda self, run: None if run == "kernel-latency-quick" else 60.0)
    met, text = badge_checks.budgets()
    assert (met, text.partition(":")[0]) == (False, "cxl-fig04")
    assert "--times-only" in text


def pools(factor: float) -> list[dict[str, str]]:
    """Return rows of Fig. 11 as runs of the twins leave them, with MemAscend's pool times a factor."""
    gib = {
        "Llama3.1-8B": (8.81, 2.36),
        "Qwen2.5-7B": (9.14, 2.33),
        "Qwen2.5-14B": (13.05, 3.6),
        "Qwen2.5-32B": (13.05, 3.81),
    }
    common = {"exhibit_id": "memascend-fig11", "metric": "parameter buffer pool", "unit": "GiB", "lane": "measured"}
    return [
        {**dict.fromkeys(tidy.COLUMNS, ""), **common, "testbed": f"local/{model}-k1", "model": model}
        | {"series": series, "value": str(value)}
        for model, (whole, adaptive) in gib.items()
        for series, value in ((tidy.AS_PUBLISHED, whole), ("MemAscend", factor * adaptive))
    ]


def test_exhibit_fails_only_on_unexplained_deviations_in_its_table(tmp_path, monkeypatch):
    """If one exhibit was drawn, no other has a table. Some claims on this one deviate for a committed reason."""
    folder = tmp_path / "results/derived/exhibits"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for factor, expected in ((1.0, True), (3.0, False)):
        tidy.write_table(pools(factor), folder / "memascend-fig11.csv")
        met, text = badge_checks.reproduced("memascend-fig11")
        assert met == expected, text
        assert f"memascend-fig11-average {'reproduced' if expected else 'deviates'}" in text
        assert "memascend-fig11-text-pool deviates" in text


def test_measured_exhibit_has_a_claim_that_profile_smoke_can_decide(monkeypatch):
    """Its models are those of the exhibit's runs there: a claim over four models has no verdict if one was run."""
    monkeypatch.chdir(ROOT)
    (command,) = (each.command for each in LINES if each.name == "measured")
    exhibit = command.split()[-1]
    usual = yaml.safe_load(Path("workflows/config/config.yaml").read_text())
    runs = Configuration({**usual, "profile": "smoke"}, []).runs.values()
    models = {model for run in runs if exhibit in (run["exhibits"] or []) for model in run["models"]}
    about = [claim for claim in registry.claims() if claim["exhibit_id"] == exhibit and "measured" in claim["lanes"]]
    assert models
    assert any(models_in(claim) <= models for claim in about)


def models_in(claim: dict) -> set[str]:
    return {selector["model"].lower() for selector in claims.selectors(claim) if "model" in selector}


def test_badges_page_shows_the_committed_status_of_every_line():
    said = json.loads((ROOT / "docs/badges.json").read_text())
    text = (ROOT / "docs/badges.md").read_text()
    again = "python -m workflows.artifact.kick_the_tires --with .venv --all --out docs"
    assert text == tires.page(said), again
    assert [each["name"] for each in said["lines"]] == [each.name for each in LINES], again
    for each in said["lines"]:
        (row,) = (row for row in text.splitlines() if row.startswith(f"| {each['says']} |"))
        assert f"| **{each['status']}** |" in row
    assert not re.search(r"(?<![\w.}])/(work|tmp|root|home|mnt)\b", text), "a path of the machine that it ran on"
    assert "badges.md" in (ROOT / "mkdocs.yml").read_text()


def test_only_lines_that_no_checkout_can_meet_are_unmet():
    """A failure that is our fault is repaired, not published."""
    said = json.loads((ROOT / "docs/badges.json").read_text())
    left = {each["name"]: each["status"] for each in said["lines"] if each["status"] != MET}
    assert left.items() <= {"archive": OUTSIDE, "version": NOT_MET, "others": OUTSIDE}.items()
