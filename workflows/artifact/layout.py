"""Layout of a bundle, and the list of its files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

MANIFEST, SUMS = "artifact.json", "SHA256SUMS"
SOURCE, RECORDS, TABLES, FIGURES = "source", "records", "tables", "figures"
TRACE = ".trace.csv"  # suffix of the file next to a run's record that has the run's samples
APPENDIX, CLAIMS, CRATE, README = "appendix", "claims.json", "ro-crate-metadata.json", "README.md"
MADE = (TABLES, FIGURES, APPENDIX, CLAIMS, CRATE, README)  # folders and files that a check makes again
GIVEN = (SOURCE, RECORDS, MANIFEST, SUMS)  # the inputs of that check
# Keys of config.yaml that determine which records an exhibit uses.
CONFIGURED = ("experiments", "published_dir", "reference_dir")
EXPECTED = "expected.json"  # written by a check: exhibits and records that the sources ask for
FORMAT = 2
ANY = "*"  # matches any value in the expectation of a record
# Keys of artifact.json, and the packages that determine the bytes of a table or picture.
KEYS: tuple[str, ...] = ("format", "version", "profile", "commit", "committed", "changed_since", "config", "packages")
KEYS += ("measured_by_other_code", "exhibits")
DRAWN_WITH = ("matplotlib", "numpy", "pandas", "seaborn", "snakemake")


def name_of(version: str, profile: str) -> str:
    """Return memascend-<version>-<profile>, the name of the zip and of its one folder."""
    return f"memascend-{version}-{profile}"


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_in(folder: Path) -> Iterator[str]:
    """Yield every file in a folder and its subfolders as a relative path, sorted."""
    yield from sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def sums_of(folder: Path) -> dict[str, str]:
    """Return path -> SHA-256 of every file in a folder, except for the list of sums itself."""
    return {name: sha256(folder / name) for name in files_in(folder) if name != SUMS}


def read_sums(folder: Path) -> dict[str, str]:
    """Return a bundle's list of sums; raise a one-line ValueError if it is missing or a line is malformed."""
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
    """Write the list of sums of a filled bundle."""
    text = "".join(f"{digest}  {name}\n" for name, digest in sums_of(folder).items())
    (folder / SUMS).write_text(text, encoding="utf-8")
