"""Where things lie in a bundle, and how its files are listed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

MANIFEST, SUMS = "artifact.json", "SHA256SUMS"
SOURCE, RECORDS, TABLES, FIGURES = "source", "records", "tables", "figures"
TRACE = ".trace.csv"  # ends the name of what was sampled in a run, beside its record
APPENDIX, CLAIMS, CRATE, README = "appendix", "claims.json", "ro-crate-metadata.json", "README.md"
MADE = (TABLES, FIGURES, APPENDIX, CLAIMS, CRATE, README)  # folders and files that a check makes again
GIVEN = (SOURCE, RECORDS, MANIFEST, SUMS)  # what it makes them from
# Of config.yaml: what says which records are an exhibit's.
CONFIGURED = ("experiments", "published_dir", "reference_dir")
EXPECTED = "expected.json"  # of a check: what the sources say that exhibits and records should be
FORMAT = 2
ANY = "*"  # in what is expected of a record: whatever it says
# What artifact.json says, and the packages that decide the bytes of a table or picture.
KEYS: tuple[str, ...] = ("format", "version", "profile", "commit", "committed", "changed_since", "config", "packages")
KEYS += ("measured_by_other_code", "exhibits")
DRAWN_WITH = ("matplotlib", "numpy", "pandas", "seaborn", "snakemake")


def name_of(version: str, profile: str) -> str:
    """memascend-<version>-<profile>, as the zip and its one folder are called."""
    return f"memascend-{version}-{profile}"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_in(folder: Path) -> Iterator[str]:
    """Every file below a folder, as a path in it, sorted."""
    yield from sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def sums_of(folder: Path) -> dict[str, str]:
    """Path -> SHA-256 of every file below a folder, the list itself left out."""
    return {name: sha256(folder / name) for name in files_in(folder) if name != SUMS}


def read_sums(folder: Path) -> dict[str, str]:
    """The list that a bundle holds. ValueError, in one line, where there is none or a line is no sum."""
    path = folder / SUMS
    if not path.is_file():
        raise ValueError(f"{path.name} is missing: this is not a bundle, or not all of one")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{SUMS} is not text in UTF-8: {error.reason} at byte {error.start}") from None
    found = {}
    for number, line in enumerate(lines, 1):
        digest, _, name = line.partition("  ")
        if len(digest) != 64 or not name:
            raise ValueError(f"{SUMS}, line {number}: not a SHA-256 and a path")
        if name in found:
            raise ValueError(f"{SUMS}, line {number}: {name} is listed twice")
        found[name] = digest
    return found


def write_sums(folder: Path) -> None:
    text = "".join(f"{digest}  {name}\n" for name, digest in sums_of(folder).items())
    (folder / SUMS).write_text(text, encoding="utf-8")
