"""Findings of a check of a bundle that was changed and whose sums were rewritten, as by a deliberate forger."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
import subprocess
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from workflows import registry, staleness, tidy
from workflows.artifact import bundle, given, layout, redraw, unpack, verify
from workflows.configuration import Configuration
from workflows.run.provenance import digest_of

EXHIBITS = {
    "memascend-fig08": {"paper": "memascend", "title": "Peak", "table": True, "records": ["train-a.json"]},
    "memascend-alg01": {"paper": "memascend", "title": "Order", "table": False, "records": []},
}


FIELDS: dict[str, Any] = {
    "lane": "measured",
    "environment": None,
    "system": "zero_infinity",
    "model": "a",
    "twin": {"k": 8},
    "points_requested": [[16, 1]],
}
RECORDS = {"train-a.json": {"kind": "training", "fields": FIELDS, "code_digest": "1" * 64, "key": "2" * 64}}
RECORDS["train-a.json"]["has_own_packages"] = False
PACKAGES = {name: verify.installed(name) for name in ("python", *layout.DRAWN_WITH)}
EXPECTED = {"exhibits": EXHIBITS, "records": RECORDS}
CONFIG = {"experiments": "runs.yaml", "published_dir": "published", "reference_dir": "reference"}


SOURCES = {
    "Snakefile": "rules",
    "systems/a.py": "a = 1",
    "library/b.py": "b = 1",
    "pyproject.toml": '[project]\nversion = "0.1.0"\n',
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a project of five files, one of them also below a link to its folder, in git; no test changes it."""
    root = tmp_path_factory.mktemp("project") / "checkout"
    (root / "library/deep").mkdir(parents=True)
    (root / "systems").mkdir()
    _parent(root / given.CONFIG).write_text(yaml.safe_dump(CONFIG))
    for name, text in SOURCES.items():
        (root / name).write_text(text)
    (root / "library/deep/systems").symlink_to("../../systems")
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True)
    return root


@pytest.fixture
def folder(tmp_path: Path, checkout: Path) -> Path:
    """Make a bundle of that project, unpacked."""
    made = tmp_path / "memascend-0.1.0-smoke"
    head = given.git("rev-parse", "HEAD", root=checkout).strip()
    losses = [2.5, 2.25]
    record = {
        "run_id": "train-a",
        "losses": losses,
        "loss_checksum": digest_of(losses),
        **FIELDS,
        "stacks": [],
        "steps": 2,
    }
    record |= {"samples_sha256": hashlib.sha256(b"time\n").hexdigest(), "kind": "training", "dirty": False}
    record |= {"commit": head, "code_digest": "1" * 64, "key": "2" * 64, "status": "ok", "versions": PACKAGES}
    record |= {"points": [{"sequence": 16, "batch": 1}]}
    manifest = {"format": layout.FORMAT, "commit": head, "changed_since": [], "packages": PACKAGES}
    manifest |= {"exhibits": EXHIBITS}
    manifest |= {"profile": "smoke", "config": CONFIG, "version": "0.1.0", "measured_by_other_code": []}
    manifest |= {"committed": given.git("show", "-s", "--format=%cI", head, root=checkout).strip()}
    texts = {f"source/{name}": text for name, text in SOURCES.items()} | {
        f"source/{given.CONFIG}": yaml.safe_dump(CONFIG),
        "source/library/deep/systems/a.py": "a = 1",
        "records/train-a.json": json.dumps(record),
        "records/train-a.trace.csv": "time\n",
        "tables/claims.csv": "claim_id,lane,verdict\nx,measured,deviates\n",
        "figures/memascend-fig08.svg": "<svg/>",
        "README.md": "read",
        layout.MANIFEST: json.dumps(manifest),
    }
    for name, text in texts.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text)
    return made


@pytest.fixture
def check(folder: Path, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """Return a check of the bundle as it is now; redrawing its sources gives the original contents."""
    honest = tmp_path / "honest"
    for name in layout.MADE:
        if (folder / name).exists():
            (shutil.copytree if (folder / name).is_dir() else shutil.copy)(folder / name, _parent(honest / name))

    def again(unpacked: Path, out: Path, *, build: bool, experiments: Path | None) -> str:
        assert not [name for name in layout.MADE if (unpacked / name).exists()], "there is something to copy from"
        shutil.copytree(honest, out, dirs_exist_ok=True)
        bundle.write_json(out / layout.EXPECTED, EXPECTED)
        return "without a network"

    def checked(**options: Any) -> bool:
        layout.write_sums(folder)
        bundle.pack(folder, tmp_path / f"{folder.name}.zip", folder.name, (2026, 1, 2, 3, 4, 6))
        return verify.check(tmp_path / f"{folder.name}.zip", **options)

    monkeypatch.setattr(verify, "redraw", again)
    monkeypatch.setattr(given, "ROOT", checkout)
    return checked


def _parent(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def manifest_of(folder: Path, **changes: Any) -> None:
    said = json.loads((folder / layout.MANIFEST).read_text()) | changes
    (folder / layout.MANIFEST).write_text(json.dumps(said))


def test_unchanged_bundle_passes_and_its_checksum_is_printed(
    check: Callable[[], bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check()
    said = capsys.readouterr().out
    assert f"note  SHA-256 of the zip: {layout.sha256(tmp_path / 'memascend-0.1.0-smoke.zip')}" in said
    assert "ok    sources of commit " in said
    assert "ok    configured as in the sources" in said
    assert "ok    2 exhibits of profile smoke are listed with their records" in said
    assert "ok    1 records are of the runs of profile smoke in their names" in said
    assert said.splitlines()[-1].startswith("PASS  memascend-0.1.0-smoke.zip, 2 exhibits, ")
    assert "compared" not in said
    assert "note" not in said.partition("drawn again")[2]
    assert "FAIL" not in said


def edit(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: _parent(folder / name).write_text(text) and None


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def configured(**changes: str) -> Callable[[Path], None]:
    return lambda folder: manifest_of(folder, config=CONFIG | changes)


def record(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "records/train-a.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (edit("figures/memascend-fig08.svg", "<svg></svg>"), "0 of 1 files equal: figures/memascend-fig08.svg"),
        (edit("figures/more.svg", "<svg/>"), "1 of 2 files equal: figures/more.svg"),
        (edit("tables/claims.csv", "claim_id,lane,verdict\nx,measured,reproduced\n"), "verdicts: 0 of 1 as the bundle"),
        (edit("README.md", "rewritten"), "descriptions: 0 of 1 files equal: README.md"),
        (
            edit("tables/claims.csv", "claim_id,lane,verdict\nx,measured,deviates\ny,measured,deviates\n"),
            "verdicts: 1 of 2",
        ),
        (without("README.md"), "descriptions: 0 of 1 files equal: README.md"),
        (edit("notes.txt", "x"), "files that are no part of a bundle: notes.txt"),
        (edit("records/more.json", "{}"), "more.json is named by no exhibit"),
        (without("records/train-a.json"), "train-a.json is missing"),
        (record(losses=[2.5, 2.0]), "train-a.json: its losses are not those of its loss_checksum"),
        (record(run_id="train-b"), "train-a.json: of the run train-b"),
        (edit("records/train-a.json", "[]"), "train-a.json: not a record"),
        (record(model="b"), "train-a.json: model is b, and a in the list of runs"),
        (record(twin={"k": 16}), "train-a.json: twin.k is 16, and 8 in the list of runs"),
        (
            record(points_requested=[[16, 2]], points=[{"sequence": 16, "batch": 2}]),
            "train-a.json: points_requested[0][1] is 2, and 1 in the list of runs",
        ),
        (record(points=[]), "train-a.json: its points are not those of its points_requested"),
        (record(points=[{"sequence": 16, "batch": 1, "accumulation": []}]), "not a record, or not one of its kind"),
        (record(points_requested=[[{}]]), "not a record, or not one of its kind"),
        (record(points=[], points_requested=[], steps=3), "it has not one loss of each step"),
        (record(loss_checksum=None), "its losses are not those of its loss_checksum"),
        (
            record(stacks=[{}, {"x": 1}], points=2 * [{"sequence": 16, "batch": 1, "stack": {}}]),
            "train-a.json: its points are not those of its points_requested",
        ),
        (record(lane="modelled"), "train-a.json: lane is modelled, and measured in the list of runs"),
        (record(environment="other"), "train-a.json: environment is other, and None in the list of runs"),
        (record(kind="moments"), "train-a.json: samples of a run that is no training"),
        (record(key="3" * 64), "train-a.json: its key is not that of its configuration"),
        (record(code_digest="3" * 64), "records are of the code of the sources: train-a.json"),
        (edit("records/train-a.trace.csv", "time\n1\n"), "train-a.trace.csv is not that of its samples_sha256"),
        (without("records/train-a.trace.csv"), "train-a.json: train-a.trace.csv is missing"),
        (record(samples_sha256=None), "train-a.trace.csv is there, and the record has no samples_sha256"),
        (lambda folder: manifest_of(folder, version="2.0.0"), "version is 2.0.0, and 0.1.0 in the sources"),
        (lambda folder: manifest_of(folder, committed="2020-01-01"), ", not 2020-01-01"),
        (lambda folder: manifest_of(folder, doi="10.1/x"), "doi is nothing that a bundle says"),
        (lambda folder: manifest_of(folder, packages=PACKAGES | {"good": "1"}), "packages: good decides nothing"),
        (
            lambda folder: manifest_of(folder, packages={}),
            "packages: python is not said; packages: matplotlib is not said",
        ),
        (lambda folder: manifest_of(folder, changed_since=["Snakefile"]), "Snakefile was not changed since"),
        (
            lambda folder: manifest_of(folder, measured_by_other_code=["train-a.json"]),
            "train-a.json is named, and of the code of the sources",
        ),
        (edit("records/train-a.json", '{"run_id": "train-b", "run_id": "train-a"}'), "the key run_id stands twice"),
        (
            lambda folder: manifest_of(
                folder, exhibits=EXHIBITS | {"memascend-alg01": EXHIBITS["memascend-alg01"] | {"doi": None}}
            ),
            "memascend-alg01: other doi",
        ),
        (edit("source/systems/a.py", "a = 2"), ": systems/a.py"),
        (edit("source/library/deep/systems/a.py", "a = 2"), ": library/deep/systems/a.py"),
        (edit("source/more.py", "c = 1"), ": more.py"),
        (without("source/library/b.py"), ": library/b.py"),
        (configured(reference_dir="none"), "reference_dir is none, and reference in the sources"),
        (configured(profile="quick"), "profile is quick, and not said in the sources"),
        (configured(experiments="none.yaml"), "name it with --experiments"),
        (lambda folder: manifest_of(folder, exhibits={"memascend-fig08": EXHIBITS["memascend-fig08"]}), "is left out"),
        (
            lambda folder: manifest_of(folder, exhibits=EXHIBITS | {"x": EXHIBITS["memascend-alg01"]}),
            "x is no exhibit of the sources",
        ),
        (
            lambda folder: manifest_of(folder, exhibits=EXHIBITS | {"memascend-alg01": EXHIBITS["memascend-fig08"]}),
            "memascend-alg01: other records",
        ),
    ],
)
def test_changes_with_recomputed_checksums_are_found(
    folder: Path, check: Callable[[], bool], capsys: pytest.CaptureFixture[str], change: Callable, said: str
) -> None:
    change(folder)
    assert not check()
    found = capsys.readouterr().out
    assert "ok    checksums" in found
    assert said in "\n".join(line for line in found.splitlines() if line.startswith("FAIL"))


def test_incomplete_exhibit_list_is_reported_even_if_drawing_fails(
    folder: Path, check: Callable[[], bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(unpacked: Path, out: Path, **options: object) -> str:
        bundle.write_json(out / layout.EXPECTED, EXPECTED)
        raise ValueError("drawing again failed: no picture")

    monkeypatch.setattr(verify, "redraw", fails)
    manifest_of(folder, exhibits={"memascend-fig08": EXHIBITS["memascend-fig08"]})
    with pytest.raises(ValueError, match="no picture"):
        check()
    assert "FAIL  2 exhibits of profile smoke are listed" in (said := capsys.readouterr().out)
    assert "memascend-alg01 is left out" in said


def test_sources_that_list_no_exhibits_are_refused(check: Callable[[], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    def dishonest(unpacked: Path, out: Path, **options: object) -> str:
        bundle.write_json(out / layout.EXPECTED, {"x": 1})
        return ""

    monkeypatch.setattr(verify, "redraw", dishonest)
    with pytest.raises(ValueError, match="do not say what there should be"):
        check()


def test_declared_source_changes_are_named_and_pass(
    folder: Path, check: Callable[[], bool], capsys: pytest.CaptureFixture[str]
) -> None:
    changed = ["library/b.py", "library/deep/systems/a.py", "more.py", "systems/a.py"]
    for name in changed:
        edit(f"source/{name}", "a = 2")(folder)
    manifest_of(folder, changed_since=changed)
    assert check()
    assert f"; artifact.json names 4 changed since: {', '.join(changed)}\n" in capsys.readouterr().out


def test_custom_runs_pass_only_with_their_experiments_file(
    folder: Path, check: Callable[..., bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configured(experiments="mine.yaml")(folder)
    assert not check()
    assert check(experiments=tmp_path / "mine.yaml")
    configured(experiments="mine.yaml", reference_dir="none")(folder)
    assert not check(experiments=tmp_path / "mine.yaml")


def test_control_characters_in_names_never_reach_the_terminal(
    folder: Path, check: Callable[[], bool], capsys: pytest.CaptureFixture[str]
) -> None:
    steering = "\x1b[2K\x1b[1GPASS\x1b[8m"
    manifest_of(folder, changed_since=[steering])
    assert not check()
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert r"\x1b[2K\x1b[1GPASS\x1b[8m was not changed since" in said
    edit(f"records/{steering}.json", "{}")(folder)
    with pytest.raises(ValueError, match="it holds a name with control characters: it is not unpacked"):
        check()


@pytest.mark.parametrize("name", ["memascend-/../../../x", "../x", "", "Memascend-fig08", "memascend-fig08\n"])
def test_unsafe_exhibit_names_are_refused(folder: Path, check: Callable[[], bool], name: str) -> None:
    manifest_of(folder, exhibits=EXHIBITS | {name: EXHIBITS["memascend-fig08"]})
    with pytest.raises(ValueError, match="is no name of an exhibit"):
        check()


def test_sources_that_differ_from_their_commit_are_not_run(
    folder: Path, check: Callable[[], bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "redraw", lambda *words, **options: pytest.fail("it ran"))
    edit("source/systems/a.py", "a = 2")(folder)
    assert not check()
    assert "nothing of it was run, so nothing was drawn again" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("commit", "why"), [("0" * 40, " (git fetch)"), ("", ": that is no commit"), ("--help", ": that is no commit")]
)
def test_unknown_commit_leaves_sources_uncompared_with_a_note(
    folder: Path, check: Callable[[], bool], capsys: pytest.CaptureFixture[str], commit: str, why: str
) -> None:
    manifest_of(folder, commit=commit)
    assert check()
    line, last = (line for line in capsys.readouterr().out.splitlines() if "not compared" in line)
    assert last.startswith("PASS")
    assert line.startswith("note  sources are not compared with commit ")
    assert why in line


def test_expected_exhibits_of_a_profile_follow_from_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(registry.ROOT)
    usual = yaml.safe_load(Path("workflows/config/config.yaml").read_text()) | {"profile": "smoke"}
    made = bundle.exhibits_of(Configuration(usual, []))
    assert redraw.expected("smoke", tmp_path)["exhibits"] == made
    assert redraw.expected("smoke", tmp_path, Path(usual["experiments"]).absolute())["exhibits"] == made
    assert redraw.expected("quick", tmp_path)["exhibits"] != made


@pytest.mark.parametrize("profile", ["smoke", "quick", "paper", "gpu"])
def test_expected_fields_of_records_follow_from_the_runs(
    profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(registry.ROOT)
    monkeypatch.setattr(staleness.Tree, "digest", lambda *words: "digest")
    records = redraw.expected(profile, tmp_path)["records"]
    assert len(records) > 10
    for name, wanted in records.items():
        fields = wanted["fields"]
        assert wanted["code_digest"] == "digest"
        assert fields or name == "testbed-local.json"
        assert fields["lane"] == "measured"
        assert "time_limit_s" not in fields
        if wanted["kind"] == "training":
            assert re.match(f"train-{re.escape(fields['model'])}-k{fields['twin']['k']}-{fields['dtype']}-", name)
        elif wanted["kind"] == "step-times":
            assert fields["arms"]
            assert fields["rounds"] > 0
    assert len({json.dumps(each["fields"]) for each in records.values()}) == len(records), "two runs are alike"


def test_records_of_another_commit_or_dirty_checkout_pass_with_notes(
    folder: Path, check: Callable[[], bool], capsys: pytest.CaptureFixture[str]
) -> None:
    record(commit="0" * 40, dirty=True)(folder)
    assert check()
    said = capsys.readouterr().out
    assert "note  1 of 1 records are of a checkout with changes: train-a.json\n" in said
    assert "note  1 of 1 records are of another commit: train-a.json\n" in said


def test_records_declared_as_made_by_other_code_pass(
    folder: Path, check: Callable[[], bool], capsys: pytest.CaptureFixture[str]
) -> None:
    record(code_digest="3" * 64)(folder)
    manifest_of(folder, measured_by_other_code=["train-a.json"])
    assert check()
    assert "names 1 records that other code made than that of the sources: train-a.json" in capsys.readouterr().out


def test_record_without_a_result_needs_no_fields_or_samples(
    folder: Path, check: Callable[[], bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"run_id": "train-a", "kind": "no-result", "status": "failed", "key": "2" * 64, "code_digest": "1" * 64}
    (folder / "records/train-a.json").write_text(json.dumps(record))
    (folder / "records/train-a.trace.csv").unlink()
    monkeypatch.setitem(
        EXPECTED, "records", {"train-a.json": RECORDS["train-a.json"] | {"kind": "no-result", "fields": {}}}
    )
    assert check()
    assert "note  1 of 1 runs failed, or had too little memory or time: train-a.json\n" in capsys.readouterr().out


def test_hash_of_a_tree_is_not_compared_as_a_commit(
    folder: Path, checkout: Path, check: Callable[[], bool], capsys: pytest.CaptureFixture[str]
) -> None:
    manifest_of(folder, commit=given.git("rev-parse", "HEAD^{tree}", root=checkout).strip())
    assert check()
    said = capsys.readouterr().out
    assert ": that is no commit\n" in said
    assert said.endswith(" s; its sources were not compared with a commit\n")


def test_renamed_zip_passes_with_a_note(
    folder: Path, check: Callable[[], bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check()
    other = (tmp_path / "memascend-0.1.0-smoke.zip").rename(tmp_path / "downloaded.zip")
    assert verify.check(other)
    assert "note  the zip is called downloaded.zip, and its folder memascend-0.1.0-smoke\n" in capsys.readouterr().out


def test_zip_with_a_link_or_leading_bytes_is_refused(folder: Path, check: Callable[[], bool], tmp_path: Path) -> None:
    assert check()
    path = tmp_path / "memascend-0.1.0-smoke.zip"
    whole = path.read_bytes()
    path.write_bytes(b"before" + whole)
    with pytest.raises(ValueError, match="does not begin with its first file"):
        verify.check(path)
    path.write_bytes(whole)
    with zipfile.ZipFile(path, "a") as file:
        entry = zipfile.ZipInfo(f"{folder.name}/tables/link")
        entry.external_attr = 0o120777 << 16
        file.writestr(entry, "/etc/passwd")
    with pytest.raises(ValueError, match="tables/link is a link or a device"):
        verify.check(path)


def test_path_listed_twice_in_the_checksums_is_refused(folder: Path, tmp_path: Path) -> None:
    layout.write_sums(folder)
    sums = folder / layout.SUMS
    sums.write_text(sums.read_text() + f"{'0' * 64}  README.md\n")
    with pytest.raises(ValueError, match=r"SHA256SUMS, line \d+: README.md is listed twice"):
        layout.read_sums(folder)


def test_zip_entry_with_a_second_name_is_refused(folder: Path, check: Callable[[], bool], tmp_path: Path) -> None:
    assert check()
    other = b"\x01" + zlib.crc32(b"x").to_bytes(4, "little") + b"figures/index.html"
    with zipfile.ZipFile(tmp_path / f"{folder.name}.zip", "a") as file:
        entry = zipfile.ZipInfo(f"{folder.name}/tables/more.csv")
        entry.extra = struct.pack("<HH", 0x7075, len(other)) + other
        file.writestr(entry, "x")
    with pytest.raises(ValueError, match=r"tables/more\.csv has a second name or more than a file needs"):
        verify.check(tmp_path / f"{folder.name}.zip")


def test_changed_sources_lists_every_file_that_differs_from_the_commit(
    folder: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(given, "ROOT", checkout)
    head = given.git("rev-parse", "HEAD", root=checkout).strip()
    assert given.changed_sources(folder, head) == []
    for name in ("systems/a.py", "library/deep/systems/a.py", "with a space.txt", "größe.txt"):
        edit(f"source/{name}", "other")(folder)
    without("source/Snakefile")(folder)
    changed = ["Snakefile", "größe.txt", "library/deep/systems/a.py", "systems/a.py", "with a space.txt"]
    assert sorted(given.changed_sources(folder, head)) == sorted(changed)


def turns(folder: Path, **changes: Any) -> list[str]:
    """Return the findings on a record of two arms at one point, with these changes."""
    arms = [{"system": "a", "arm": name, "dtype": "fp16"} for name in ("x", "y")]
    points = [{"sequence": 16, "batch": 1, **arm, "forward_s": [1.0, 2.0]} for arm in arms]
    record = {"run_id": "times-a", "kind": "step-times", "status": "ok", "rounds": 2, "arms": arms, "points": points}
    path = folder / "times-a.json"
    path.write_text(json.dumps(record | {"points_requested": [[16, 1]]} | changes))
    return list(given.contradictions(path))


def test_step_times_must_have_every_round_of_every_point(tmp_path: Path) -> None:
    assert turns(tmp_path) == []
    one = {"sequence": 16, "batch": 1, "system": "a", "arm": "x", "dtype": "fp16", "forward_s": [1.0, 2.0]}
    assert turns(tmp_path, points=[one, one]) == ["its points are not those of its points_requested"]
    assert turns(tmp_path, rounds=1) == ["its points have not 1 rounds each"]


def test_bench_options_unlike_the_command_line_are_found(tmp_path: Path) -> None:
    asked = {"options": ["--twin", "32", "--contexts", "96,128", "--mix", "a:1,b:2", "--folder", "x"]}
    record = {"run_id": "kernel-a", "kind": "bench", "status": "ok", "points_requested": asked}
    path = tmp_path / "kernel-a.json"
    for twin, said in ((32, []), (64, ["its option twin is 64, and 32 in its points_requested"])):
        taken = {"twin": twin, "contexts": [96, 128], "mix": "a:1,b:2", "folder": "y"}
        path.write_text(json.dumps(record | {"options": taken}))
        assert list(given.contradictions(path)) == said


def test_zip_with_bytes_between_or_after_files_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "b.zip"
    bundle.pack(folder, path, folder.name, (2026, 1, 2, 3, 4, 6))
    whole = path.read_bytes()
    end = whole.rindex(b"PK\x05\x06")
    begin = int.from_bytes(whole[end + 16 : end + 20], "little")
    later = whole[:end] + whole[end:].replace(begin.to_bytes(4, "little"), (begin + 40).to_bytes(4, "little"))
    gap = later[:begin] + b"PK\x03\x04" + bytes(36) + later[begin:]
    for odd in (gap, whole + b"more"):
        path.write_bytes(odd)
        with pytest.raises(ValueError, match="it holds bytes that are of none of its files"):
            verify.unpack(path, tmp_path / "into")


def test_zip_that_unpacks_to_too_many_bytes_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "b.zip"
    bundle.pack(folder, path, folder.name, (2026, 1, 2, 3, 4, 6))
    monkeypatch.setattr(unpack, "LARGEST", 1000)
    with pytest.raises(ValueError, match="no bundle has over 4: it is not unpacked"):
        verify.unpack(path, tmp_path / "into")
    assert not (tmp_path / "into").exists()


def test_check_that_ends_early_keeps_no_folder(folder: Path, check: Callable[..., bool], tmp_path: Path) -> None:
    edit("source/systems/a.py", "a = 2")(folder)
    (tmp_path / "kept").mkdir()
    assert not check(keep=tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "bench", "status": "timeout"},
        {"kind": "training", "status": "failed"},
        {"kind": "training", "status": "oom", "losses": [1.0]},
        {"kind": "step-times", "status": "timeout", "points": []},
        {"kind": "no-result", "status": "ok"},
        {"kind": "no-result", "status": "failed", "benchmark": "adamw"},
    ],
)
def test_impossible_records_do_not_fit_their_schema(changes: dict[str, Any]) -> None:
    path = next(iter(sorted((registry.ROOT / "results/reference/epyc-genoa-2core").glob("train-*-as_published.json"))))
    record = json.loads(path.read_text())
    tidy.check(record, "record.schema.json", "it")
    kept = {name: value for name, value in record.items() if name not in ("losses", "memory", "ledger", "phases")}
    kept |= {"exit_status": 1, "reason": "x"} if changes["kind"] == "no-result" else {}
    with pytest.raises(tidy.TableError):
        tidy.check(kept | changes, "record.schema.json", "it")
