"""An artifact's zip: its contents, and the findings of a check. `make smoke` makes one and checks it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import typst
from workflow_fixtures import header

from memascend import systems
from tests import forked
from workflows import registry
from workflows.artifact import appendix, bundle, crate, layout, verify
from workflows.configuration import Configuration
from workflows.derive.citation import project

EXHIBITS = {
    "memascend-fig08": {"paper": "memascend", "title": "Peak", "table": True, "records": ["train-a.json"]},
    "memascend-alg01": {"paper": "memascend", "title": "Order", "table": False, "records": []},
}
MANIFEST = {
    "format": layout.FORMAT,
    "version": "0.1.0",
    "profile": "smoke",
    "commit": "c0ffee",
    "committed": "2026-01-02T03:04:05+00:00",
    "packages": {"python": "3.11.7", "numpy": "2.0.0", "snakemake": "9.0.0"},
    "exhibits": {name: {"published": "results/published", "reference": [], **each} for name, each in EXHIBITS.items()},
}
CLAIM = {"claim_id": "memascend-fig08-pool-memascend", "exhibit_id": "memascend-fig08", "lane": "measured"}
TERMS = {  # the terms of RO-Crate 1.1's context that we use
    *("@id", "@type", "about", "actionStatus", "agent", "author", "citation", "conformsTo", "contentSize"),
    *("datePublished", "description", "encodingFormat", "endTime", "error", "hasPart", "instrument", "license"),
    *("location", "mainEntity", "mentions", "name", "object", "position", "programmingLanguage", "result"),
    *("softwareVersion", "startTime", "step", "url", "value", "version", "workExample"),
}
OURS = {"lane", "basis", "verdict", "expected", "unit"}


def lines(verdict: str = "reproduced") -> str:
    head = (
        "claim_id,exhibit_id,lane,sentence,verdict,basis,value,unit,expected,tolerance,reason,deviates_because,testbed"
    )
    row = ",".join(
        [*CLAIM.values(), "Of a pool.", verdict, "held out", "2.47", "GiB", "2.46 GiB", "± 5 %", "", "", "local"]
    )
    return f"{head}\n{row}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make the contents of a bundle of two exhibits and one run, unpacked."""
    made = tmp_path / "memascend-0.1.0-smoke"
    record = header("train-a", "training", 7) | {"wall_s": 12.25}
    texts = {
        "source/Snakefile": "",
        "source/workflows/derive/table.py": "",
        "records/train-a.json": json.dumps(record),
        "records/train-a.trace.csv": "time\n",
        "tables/claims.csv": lines(),
        "tables/modelled/memascend.csv": "a\n",
        "tables/exhibits/memascend-fig08.csv": "a\n",
        "figures/memascend-fig08.svg": "<svg/>",
        "figures/memascend-alg01.svg": "<svg/>",
        "figures/index.html": "<html>",
        layout.MANIFEST: json.dumps(MANIFEST),
    }
    texts |= {f"tables/modelled/{paper}.csv": "a\n" for paper in registry.PAPERS}
    for name, text in texts.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text)
    (made / "claims.json").write_text(json.dumps(bundle.claims_of(made, MANIFEST)))
    layout.write_sums(made)
    return made


def test_the_same_files_give_the_same_zip(folder: Path, tmp_path: Path) -> None:
    zips = [tmp_path / f"{name}.zip" for name in "ab"]
    for path in zips:
        bundle.pack(folder, path, folder.name, (2026, 1, 2, 3, 4, 6))
    assert zips[0].read_bytes() == zips[1].read_bytes()
    unpacked = verify.unpack(zips[0], tmp_path / "out")
    assert unpacked == tmp_path / "out" / folder.name
    assert verify.damaged(unpacked) == []
    assert verify.manifest_of(unpacked) == MANIFEST


def test_changed_added_and_removed_files_are_damaged(folder: Path) -> None:
    (folder / "tables/claims.csv").write_text(lines("deviates"))
    (folder / "figures/more.svg").write_text("<svg/>")
    (folder / "records/train-a.trace.csv").unlink()
    assert verify.damaged(folder) == ["figures/more.svg", "records/train-a.trace.csv", "tables/claims.csv"]


def zipped(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name in names:
            file.writestr(name, "x")
    return path


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a/x", "../evil"], "leads out of it"),
        (["/etc/evil"], "leads out of it"),
        (["a/x", "b/y"], "one folder, not 2"),
        (["a/x", "loose.txt"], "one folder, not 2"),
        (["loose.txt"], "one folder, not one file"),
        ([], "one folder, not 0"),
    ],
)
def test_malformed_zip_is_refused_and_unpacks_nothing_outside_its_folder(
    tmp_path: Path, names: list[str], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        verify.unpack(zipped(tmp_path / "b.zip", *names), tmp_path / "into")
    assert not (tmp_path / "evil").exists()


def test_unreadable_zip_and_missing_checksums_are_refused(folder: Path, tmp_path: Path) -> None:
    bundle.pack(folder, tmp_path / "b.zip", folder.name, (2026, 1, 2, 3, 4, 6))
    whole = (tmp_path / "b.zip").read_bytes()
    for number, data in enumerate((b"", whole[:200])):
        (tmp_path / "bad.zip").write_bytes(data)
        with pytest.raises(ValueError, match="cannot be read as a zip"):
            verify.unpack(tmp_path / "bad.zip", tmp_path / f"into{number}")
    (folder / layout.SUMS).unlink()
    with pytest.raises(ValueError, match="SHA256SUMS is missing"):
        verify.damaged(folder)


def test_every_kind_of_file_is_compared_and_differences_are_listed(folder: Path, tmp_path: Path) -> None:
    again, said = tmp_path / "again", layout.read_sums(folder)
    for name in said:
        if name.partition("/")[0] in layout.MADE:
            (again / name).parent.mkdir(parents=True, exist_ok=True)
            (again / name).write_bytes((folder / name).read_bytes())
    assert not any(verify.compared(said, again).values())
    (again / "figures/memascend-fig08.svg").write_text("<svg></svg>")
    (again / "figures/index.html").unlink()
    (again / "tables/exhibits/extra.csv").write_text("a\n")
    (again / "tables/claims.csv").write_text(lines("deviates"))
    (again / "claims.json").write_text("[]")
    # Later changes of the files by a bundle's own programs have no effect.
    (folder / "tables/claims.csv").write_text(lines("deviates"))
    found = {kind: names for kind, names in verify.compared(said, again).items() if names}
    assert found == {
        "pictures, .svg": ["figures/memascend-fig08.svg"],
        "the report": ["figures/index.html"],
        "tables, exhibits": ["tables/exhibits/extra.csv"],
        "claims": ["tables/claims.csv"],
        "descriptions": ["claims.json"],
    }
    assert verify.counted(said, again)["tables, exhibits"] == 2
    ids = ("memascend-fig08-pool-memascend", "measured")
    assert verify.flipped({ids: "reproduced"}, verify.verdicts(again / "tables/claims.csv")) == [
        "memascend-fig08-pool-memascend, measured: reproduced in the bundle, deviates when decided again"
    ]


def test_files_outside_the_bundle_layout_are_listed(folder: Path) -> None:
    assert verify.unknown(folder) == []
    (folder / "extra").mkdir()
    (folder / "extra/more.txt").touch()
    (folder / "tables/none").mkdir()
    assert verify.unknown(folder) == ["extra/more.txt", "tables/none/"]


def test_zip_with_a_duplicate_file_name_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as file:
        file.writestr("a/tables/claims.csv", "one")
        with pytest.warns(UserWarning, match="Duplicate name"):
            file.writestr("a/tables/claims.csv", "two")
    with pytest.raises(ValueError, match="two files of one name"):
        verify.unpack(tmp_path / "b.zip", tmp_path / "into")


def test_damaged_zip_member_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "records/train-a.trace.csv").write_text(
        "".join(f"{number},{number * 7919 % 997}\n" for number in range(9999))
    )
    bundle.pack(folder, tmp_path / "b.zip", folder.name, (2026, 1, 2, 3, 4, 6))
    data = bytearray((tmp_path / "b.zip").read_bytes())
    place = data.index(b"train-a.trace.csv") + 200
    data[place : place + 40] = bytes(40)
    (tmp_path / "b.zip").write_bytes(data)
    with pytest.raises(ValueError, match="copy or download the zip again"):
        verify.unpack(tmp_path / "b.zip", tmp_path / "into")


def run_on(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *more: str) -> str:
    """Return the one line with which a check that is impossible ends."""
    monkeypatch.setattr(verify, "redraw", lambda *args, **kwargs: pytest.fail("it was drawn again"))
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    monkeypatch.setattr(sys, "argv", ["verify", str(path), *more])
    assert verify.main() == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.count(str(path)) <= 1
    assert "memascend-verify-" not in error  # the folder where it was unpacked
    return error


PARTS = {
    "a/artifact.json": "{}",
    "a/tables/claims.csv": "claim_id,lane,verdict\n",
    "a/source/x": "",
    "a/SHA256SUMS": "",
}


def manifest(**changes: object) -> str:
    return json.dumps({"format": layout.FORMAT, "profile": "smoke", "exhibits": {}, "packages": {}} | changes)


WHOLE = manifest()


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"a/SHA256SUMS": ""}, "artifact.json, tables/claims.csv, source are missing: this is not a bundle"),
        ({k: v for k, v in PARTS.items() if k != "a/SHA256SUMS"}, "SHA256SUMS is missing: this is not a bundle"),
        (PARTS | {"a/SHA256SUMS": b"\xff\xfe"}, "SHA256SUMS is not text in UTF-8: invalid start byte at byte 0"),
        (PARTS | {"a/artifact.json": WHOLE, "a/tables/claims.csv": "x\n1\n"}, "it has no column 'claim_id'"),
        ({f"a/{'x' * 300}": ""}, "x... cannot be unpacked: File name too long"),
        ({"a/x": "", "a/x/y": ""}, "a/x/y cannot be unpacked: Not a directory"),
    ],
)
def test_uncheckable_zip_gives_one_error_line_without_temporary_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, parts: dict, said: str
) -> None:
    path = tmp_path / "b.zip"
    with zipfile.ZipFile(path, "w") as file:
        for name, text in parts.items():
            file.writestr(name, text)
    error = run_on(path, capsys, monkeypatch)
    assert error.startswith(f"error: {path}: ")
    assert said in error


def test_missing_zip_and_unusable_keep_folder_are_refused_before_checking(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "check", lambda *args, **kwargs: pytest.fail("it was checked"))
    assert "is not a file: name an artifact's zip" in run_on(tmp_path, capsys, monkeypatch)
    assert "error: there is no " in run_on(tmp_path / "none.zip", capsys, monkeypatch)
    (zipped := tmp_path / "b.zip").touch()
    assert f"--keep {tmp_path} exists" in run_on(zipped, capsys, monkeypatch, "--keep", str(tmp_path))
    assert "--keep '/dev/null/x' cannot be written" in run_on(zipped, capsys, monkeypatch, "--keep", "/dev/null/x")


@pytest.mark.parametrize(
    "text",
    [
        *("[1]", "[" * 5000, json.dumps({"format": layout.FORMAT}), "x"),
        manifest(profile=None),
        manifest(packages=[]),
        manifest(packages={"": "1"}),
        manifest(config=["profile"]),
        manifest(exhibits={"x": 1}),
        manifest(exhibits={"x": {"records": "y", "table": True}}),
        manifest(exhibits={"x": {"records": [""], "table": True}}),
        manifest(exhibits={"x": {"records": ["../y.json"], "table": True}}),
        manifest(exhibits={"x": {"records": []}}),
        manifest(changed_since=7),
    ],
)
def test_malformed_manifest_is_refused(folder: Path, text: str) -> None:
    (folder / layout.MANIFEST).write_text(text)
    with pytest.raises(ValueError, match=r"artifact\.json|has format None"):
        verify.manifest_of(folder)


def test_the_installed_extension_is_found_without_torch(folder: Path, tmp_path: Path) -> None:
    """It is found by a separate program, where torch's libraries are not loaded yet."""
    (folder / "source/memascend").mkdir()
    program = "import pathlib, sys; from workflows.artifact import verify; "
    program += "verify.redraw(*map(pathlib.Path, sys.argv[1:]), build=False)"
    command = [sys.executable, "-c", program, str(folder), str(tmp_path)]
    done = subprocess.run(command, cwd=registry.ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "ValueError: drawing again failed" in done.stderr  # this bundle has no sources, so it got as far as it can


def test_failure_of_the_bundle_sources_is_reported(folder: Path, tmp_path: Path) -> None:
    (folder / "source/workflows/__init__.py").touch()
    (folder / "source/memascend").mkdir()
    with pytest.raises(ValueError, match=r"drawing again failed: .*No module named 'workflows\.artifact"):
        verify.redraw(folder, tmp_path, build=False)


def test_redraw_refuses_sources_outside_the_bundle(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "workflows.artifact.redraw", str(folder), str(tmp_path)]
    done = forked.run(command, cwd=registry.ROOT, env={**os.environ, "PYTHONPATH": str(registry.ROOT)}, timeout=120)
    assert done.returncode == 1
    assert "is not the bundle's own" in done.stderr
    assert not (tmp_path / "tables").exists()


def test_claims_json_gives_verdict_command_host_and_duration(folder: Path) -> None:
    (claim,) = json.loads((folder / "claims.json").read_text())
    assert CLAIM.items() <= claim.items()
    wanted = {"value": 2.47, "unit": "GiB", "expected": "2.46 GiB", "tolerance": "± 5 %", "verdict": "reproduced"}
    wanted |= {"command": "snakemake --cores all memascend-fig08", "seconds": 12.2, "hosts": ["Example CPU, 2 cores"]}
    assert wanted.items() <= claim.items()
    assert "73% reduction" in claim["quote"]


def test_crate_links_figures_and_runs_to_their_files(folder: Path) -> None:
    crate.write(folder, MANIFEST)
    graph = json.loads((folder / "ro-crate-metadata.json").read_text())["@graph"]
    entities = {each["@id"]: each for each in graph}
    assert len(entities) == len(graph)
    used = {name for each in graph for name in each}
    assert used <= TERMS | OURS, used - TERMS - OURS

    def mentioned(value: object) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(mentioned, value))
        return {value["@id"]} if isinstance(value, dict) else set()

    names = set().union(*(mentioned(value) for each in graph for name, value in each.items() if name != "@id"))
    outside = {name for name in names - entities.keys() if not name.startswith(("http://", "https://"))}
    assert outside == set()
    run = entities["#record-train-a"]
    assert (run["startTime"], run["endTime"]) == ("2026-01-02T03:04:05+00:00", "2026-01-02T03:04:17.250000+00:00")
    assert [each["@id"] for each in run["result"]] == ["records/train-a.json", "records/train-a.trace.csv"]
    drawn = entities["#figure-memascend-fig08"]
    assert {"@id": "records/train-a.json"} in drawn["object"]
    assert {"@id": "figures/memascend-fig08.svg"} in drawn["result"]
    verdict = entities["#claim-memascend-fig08-pool-memascend-measured"]
    assert (verdict["verdict"], verdict["lane"], verdict["value"]) == ("reproduced", "measured", 2.47)
    assert entities["./"]["datePublished"] == MANIFEST["committed"]


def test_appendices_have_at_most_two_pages_and_count_claims(folder: Path) -> None:
    appendix.write(folder, MANIFEST)
    made = {path.name: path.read_bytes() for path in sorted((folder / "appendix").iterdir())}
    names = {"memascend-artifact", *(f"paper-{paper}" for paper in registry.PAPERS)}
    assert set(made) == {f"{name}.{kind}" for name in names for kind in ("pdf", "tex")}
    for name, (source, _) in appendix.sources(folder, MANIFEST).items():
        pages = typst.compile(source.encode(), format="svg", ignore_system_fonts=True)
        assert isinstance(pages, bytes) or len(pages) <= 2, name
    assert "C1, E1 & Figure 8: Peak & - & 1 of 1 & 2 + 0.2" in made["paper-memascend.tex"].decode()
    assert "MemAscend & 2 & - & 1 of 1" in made["memascend-artifact.tex"].decode()
    shutil.rmtree(folder / "appendix")
    appendix.write(folder, MANIFEST)
    assert {path.name: path.read_bytes() for path in (folder / "appendix").iterdir()} == made


@pytest.mark.parametrize("text", ["a_b & 50 % of #1 {x} ~ \\ $5 [*] <a@b>", "plain"])
def test_text_is_escaped_for_typst_and_tex(text: str) -> None:
    blocks = [
        appendix.Heading(text),
        appendix.Paragraph(f"{text} `{text}`"),
        appendix.Table((text,), [(text,)], (1.0,)),
    ]
    assert typst.compile(appendix.typst_of(text, blocks).encode(), ignore_system_fonts=True).startswith(b"%PDF")
    tex = appendix.tex_of("t", [appendix.Paragraph(text)])
    body = tex.split(r"\maketitle\appendix")[1]
    assert not re.search(r"(?<!\\)[&%#_$]", body)


CONFIG = {
    "profile": "smoke",
    "raw_dir": "results/raw",
    "derived_dir": "results/derived",
    "published_dir": "results/published",
    "reference_dir": "results/reference",
    "figures_dir": "figures",
    "artifact_dir": "artifact",
    "experiments": "workflows/config/experiments.yaml",
}


def test_bundle_sources_include_files_behind_links(tmp_path: Path) -> None:
    names = list(bundle.sources())
    assert len(names) == len(set(names))
    assert {"baselines/lohan/system.py", "memascend/baselines/lohan/system.py"} <= set(names)
    assert "memascend/planner/testbeds/lohan-4090.yaml" in names
    for name in names:
        if name.startswith(("memascend/", "setup.py")):
            bundle.copy(registry.ROOT / name, tmp_path / name)
    load = "from memascend.baselines import protocol as p"
    program = f"{load}; print(p.__file__, *p.system_names(), p.load_system('cxl').name)"
    options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(tmp_path)}}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, **options)
    place = tmp_path / "memascend/baselines/protocol/__init__.py"
    assert done.stdout.split() == [str(place), *systems.names(), "cxl"]


def test_bundle_defaults_to_the_profiles_own_and_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(registry.ROOT)
    bundle_of_now = tmp_path / f"memascend-{project()['version']}-smoke.zip"
    bundle_of_now.touch()
    own = Configuration(CONFIG | {"artifact_dir": str(tmp_path)}, [])
    assert own.bundle == own.artifact == str(bundle_of_now)
    with pytest.raises(SystemExit, match=r" is not a file: name a zip with --config bundle=FILE"):
        _ = Configuration(CONFIG | {"bundle": str(tmp_path)}, []).bundle
    with pytest.raises(SystemExit, match=r"there is no none\.zip: name a zip with --config bundle=FILE"):
        _ = Configuration(CONFIG | {"bundle": "none.zip"}, []).bundle


def test_snakemake_report_labels_and_captions_every_exhibit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(registry.ROOT)
    known = Configuration(CONFIG | {"derived_dir": str(folder / "tables")}, [])
    labels = {name: known.report_labels(name) for name in known.built}
    assert all(isinstance(text, str) and text for each in labels.values() for text in each.values())
    assert not any("{" in text for each in labels.values() for text in each.values())  # those are patterns of wildcards
    assert labels["memascend-fig08"]["verdicts"] == "1 reproduced"
    assert all(known.caption(name) for name in known.built)
    assert known.paper_of("lohan-fig07a") == "LoHan"
