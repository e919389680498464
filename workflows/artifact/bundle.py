"""Write a profile's artifact: a zip from which every exhibit can be drawn and every verdict decided again, offline.

usage: python -m workflows.artifact.bundle --config JSON --out artifact/memascend-1.0.0-quick.zip
(the rule `artifact` does it, once everything is drawn; run at the top of the checkout)

In it: the sources (every file that git tracks, as it is now), the records of the profile's runs, tables, pictures, the
report's pages, claims.json for programs, artifact appendices, an RO-Crate description, artifact.json and SHA256SUMS.
Times in the zip are those of the commit, so the same inputs give the same bytes.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from workflows import registry, tidy
from workflows.artifact import appendix, crate
from workflows.artifact.given import changed_sources
from workflows.artifact.layout import (
    CLAIMS,
    CONFIGURED,
    DRAWN_WITH,
    FIGURES,
    FORMAT,
    MADE,
    MANIFEST,
    README,
    RECORDS,
    SOURCE,
    TABLES,
    TRACE,
    files_in,
    name_of,
    write_sums,
)
from workflows.configuration import Configuration
from workflows.derive.citation import project
from workflows.derive.report import ASSETS
from workflows.run.provenance import atomically
from workflows.staleness import versions

PICTURES = (".svg", ".pdf", ".png", ".csv", ".md")
TEXT = """\
# memascend {version}, profile {profile}

Records, tables, figures and verdicts of five papers' exhibits, with the sources that made them (commit {commit}).

- `figures/index.html`: the report; open it in a browser.
- `claims.json`: every claim with its verdict, for programs. `tables/claims.csv`: the same as a table.
- `appendix/`: artifact appendices, of each paper and of the whole, as PDF and LaTeX.
- `records/`: what was measured, one file per run. `tables/`: what was computed from them.
- `source/`: the project; its README says how to install it.
- `ro-crate-metadata.json`: how runs, tables and figures hang together (RO-Crate 1.1).
- `SHA256SUMS`: check with `sha256sum -c SHA256SUMS`.

To draw all exhibits and decide all claims again from this file alone, and compare every byte:

    python -m workflows.artifact.verify {name}

in a checkout with its environment, or in `source/` of this bundle. It needs no network.
"""


def git(*words: str) -> str:
    """Return git's output; raise ValueError with its message."""
    done = subprocess.run(["git", "-C", str(registry.ROOT), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"git {words[0]}: {done.stderr.strip()}; an artifact is made in a git checkout")
    return done.stdout


def exhibits_of(known: Configuration) -> dict[str, dict[str, Any]]:
    """Return what each built exhibit is drawn from."""
    return {
        name: {
            "paper": known.entries[name]["paper"],
            "title": known.entries[name]["title"],
            "table": name in known.with_table,
            "published": known.published,
            "records": [Path(path).name for path in known.records_of(name)],
            "reference": known.reference_of(name) if name in known.with_table else [],
        }
        for name in known.built
    }


def manifest_of(known: Configuration) -> dict[str, Any]:
    """Return the content of artifact.json; `changed_since` is filled in later."""
    exhibits = exhibits_of(known)
    return {
        "format": FORMAT,
        "version": project()["version"],
        "profile": known.config["profile"],
        "commit": git("rev-parse", "HEAD").strip(),
        "committed": git("log", "-1", "--format=%cI").strip(),
        "changed_since": [],  # filled in once the sources are copied
        "measured_by_other_code": other_code(known, exhibits),
        "config": {name: known.config[name] for name in CONFIGURED},
        "packages": {**versions(), **{name: metadata.version(name) for name in DRAWN_WITH}},
        "exhibits": exhibits,
    }


def other_code(known: Configuration, exhibits: dict[str, dict[str, Any]]) -> list[str]:
    """Return the records made by code other than the present sources.

    Snakemake measures such records again unless it is told to leave them (--rerun-triggers mtime).
    """
    found = []
    for name in sorted({name for each in exhibits.values() for name in each["records"]}):
        if not (path := Path(known.raw, name)).is_file():
            continue  # `fill` reports it
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["code_digest"] != known.measured_by(record["run_id"], record["kind"]):
            found.append(name)
    return found


def fill(folder: Path, known: Configuration, manifest: dict[str, Any]) -> None:
    """Put everything but the list of sums into an empty folder; TableError names a missing file."""
    for name in sources():
        copy(registry.ROOT / name, folder / SOURCE / name)
    for record in sorted({record for each in manifest["exhibits"].values() for record in each["records"]}):
        copy(Path(known.raw, record), folder / RECORDS / record)
        if (trace := Path(known.raw, record).with_suffix(TRACE)).is_file():  # samples of resident memory over time
            copy(trace, folder / RECORDS / trace.name)
    derived, figures = Path(known.derived), Path(known.figures)
    tables = ["claims.csv", *(f"modelled/{paper}.csv" for paper in registry.PAPERS)]
    tables += [f"{kind}/{name}.csv" for kind in ("exhibits", "runs") for name in known.with_table]
    for name in tables:
        copy(derived / name, folder / TABLES / name)
    for name in pages(figures, manifest):
        copy(figures / name, folder / FIGURES / name)
    manifest["changed_since"] = changed_sources(folder, manifest["commit"])
    write_json(folder / MANIFEST, manifest)
    describe(folder, manifest)


def sources() -> Iterator[str]:
    """Yield every existing file that git tracks.

    Files in the target of a link to a folder are also yielded below the link, since not every program that unpacks a
    zip creates links.
    """
    tracked = [name for name in git("ls-files", "-z").split("\0") if name]
    for name in tracked:
        if (path := registry.ROOT / name).is_file():
            yield name
        elif path.is_symlink() and path.is_dir():
            target = f"{path.resolve().relative_to(registry.ROOT.resolve()).as_posix()}/"
            inside = (other.removeprefix(target) for other in tracked if other.startswith(target))
            yield from (f"{name}/{other}" for other in inside if (path / other).is_file())


def describe(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the files that follow from records and tables: claims.json, appendices, the crate, README.md."""
    write_json(folder / CLAIMS, claims_of(folder, manifest))
    words = {"version": manifest["version"], "profile": manifest["profile"], "commit": manifest["commit"][:12]}
    name = f"{name_of(manifest['version'], manifest['profile'])}.zip"
    (folder / README).write_text(TEXT.format(**words, name=name), encoding="utf-8")
    appendix.write(folder, manifest)
    crate.write(folder, manifest)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON with a line end."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def pages(figures: Path, manifest: dict[str, Any]) -> Iterator[str]:
    """Yield the files of the pictures and of the report; other files in the folder belong to other profiles."""
    yield from (f"{name}{ending}" for name in manifest["exhibits"] for ending in PICTURES)
    yield from ("index.html", "claims.html", "errata.html", *ASSETS)
    for folder in ("exhibits", "records", "traces"):
        yield from (f"{folder}/{name}" for name in files_in(figures / folder) if not name.startswith("."))


def copy(source: Path, target: Path) -> None:
    """Copy a file and create its folder; raise TableError if the source is missing."""
    if not source.is_file():
        raise tidy.TableError(f"{source} is missing: run snakemake --cores all figures first")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def claims_of(folder: Path, manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every claim and lane for claims.json, with the command that decides it and the seconds and hosts of its
    runs."""
    sentences = {claim["id"]: claim for claim in registry.claims()}
    runs = {name: read_runs(folder, each["records"]) for name, each in manifest["exhibits"].items()}
    with (folder / TABLES / "claims.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    return [
        {
            **{name: line[name] for name in ("claim_id", "exhibit_id", "lane", "sentence", "verdict", "basis")},
            "quote": sentences[line["claim_id"]].get("quote", ""),
            "value": tidy.numeric(line["value"]) if line["value"] else None,
            "unit": line["unit"],
            "expected": line["expected"],
            "tolerance": line["tolerance"],
            "reason": line["deviates_because"] or line["reason"],
            "testbed": line["testbed"],
            "command": f"snakemake --cores all {line['exhibit_id']}",
            **(runs[line["exhibit_id"]] if line["lane"] == "measured" else {"seconds": None, "hosts": []}),
        }
        for line in lines
    ]


def read_runs(folder: Path, records: list[str]) -> dict[str, Any]:
    """Return the seconds and the hosts of runs, from their records."""
    read = [json.loads((folder / RECORDS / name).read_text(encoding="utf-8")) for name in records]
    hosts = dict.fromkeys(f"{record['host']['cpu']}, {record['host']['cores']} cores" for record in read)
    return {"seconds": round(sum(record.get("wall_s") or 0.0 for record in read), 1), "hosts": [*hosts]}


def pack(folder: Path, out: Path, root: str, when: tuple[int, ...]) -> None:
    """Zip a folder under the name `root`, in sorted order, with the commit's time for every file."""

    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
            for name in files_in(folder):
                entry = zipfile.ZipInfo(f"{root}/{name}", when)
                entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                file.writestr(entry, (folder / name).read_bytes())

    out.parent.mkdir(parents=True, exist_ok=True)
    atomically(out, write)


def commit_time() -> tuple[int, ...]:
    """Return the commit's date and time as six numbers, year to second."""
    return tuple(map(int, git("log", "-1", "--date=format:%Y %m %d %H %M %S", "--format=%cd").split()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=json.loads, required=True, help="Snakemake's configuration, as JSON")
    parser.add_argument("--out", type=Path, required=True, help="the zip")
    args = parser.parse_args()
    try:
        if args.config.get("against"):
            raise ValueError("a report that compares with --config against=FILE is not packed: leave that out")
        known = Configuration(args.config, [])
        manifest = manifest_of(known)
        with tempfile.TemporaryDirectory(prefix="memascend-artifact-") as made:
            fill(folder := Path(made), known, manifest)
            write_sums(folder)
            pack(folder, args.out, name_of(manifest["version"], manifest["profile"]), commit_time())
            count = sum(1 for name in files_in(folder) if name.partition("/")[0] in MADE)
    except (tidy.TableError, ValueError, OSError) as error:
        tidy.fail(error)
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB, {count} tables, pictures, pages and appendices")
    print(f"check it with: snakemake --cores all artifact-verify --config bundle={args.out}")


if __name__ == "__main__":
    main()
