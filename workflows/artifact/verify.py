"""Check an artifact: from the zip alone, draw every exhibit and decide every claim again, and compare the bytes.

usage: python -m workflows.artifact.verify artifact/memascend-1.0.0-quick.zip [--keep FOLDER] [--no-build]
       [--experiments FILE]

The zip is unpacked into a temporary folder and its checksums are checked. There its sources are built, and their
`workflows.artifact.redraw` runs, without a network where the kernel allows that (`unshare`). What it writes is compared
with what the zip holds, byte for byte: tables, pictures, report, claims.json, appendices, crate. Sources are compared
with the commit that the zip names, if this checkout has it; records are taken as they are, and artifact.json has to
list the exhibits and records that the sources say (of a bundle of runs of your own: that --experiments says). Exit
status: 0 if everything is equal, 1 if something differs, 2 on an error.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from memascend.terminal import printable
from workflows.artifact.given import (
    odd_manifest,
    odd_records,
    of_other_code,
    of_other_runs,
    other_exhibits,
    other_settings,
    other_sources,
    parsed,
    provenance_of,
)
from workflows.artifact.layout import (
    EXPECTED,
    FORMAT,
    GIVEN,
    MADE,
    MANIFEST,
    SOURCE,
    SUMS,
    files_in,
    read_sums,
    sha256,
    sums_of,
)
from workflows.artifact.unpack import unpack
from workflows.refusals import ready

TABLE_OF_CLAIMS = "tables/claims.csv"
NO_NETWORK = (["unshare", "--net"], ["unshare", "--map-root-user", "--net"])


def refuse_parts(folder: Path) -> None:
    """Raise ValueError if a part is missing that every check needs."""
    wanted = [SUMS, MANIFEST, TABLE_OF_CLAIMS, SOURCE]
    if missing := [name for name in wanted if not (folder / name).exists()]:
        are = "is" if len(missing) == 1 else "are"
        raise ValueError(f"{', '.join(missing)} {are} missing: this is not a bundle, or not all of one")


def damaged(folder: Path) -> list[str]:
    """Return files that do not match the list of sums, are missing, or are not listed."""
    said, found = read_sums(folder), sums_of(folder)
    return sorted(name for name in said.keys() | found.keys() if said.get(name) != found.get(name))


def unknown(folder: Path) -> list[str]:
    """Return files that belong to no part of a bundle, and empty folders."""
    empty = [path for path in folder.rglob("*") if path.is_dir() and not any(path.iterdir())]
    found = [name for name in files_in(folder) if name.partition("/")[0] not in (*MADE, *GIVEN)]
    return found + sorted(f"{path.relative_to(folder).as_posix()}/" for path in empty)


def manifest_of(folder: Path) -> dict[str, Any]:
    """Return the content of artifact.json. Raises ValueError, with the entry, for one that this program cannot
    trust."""
    try:
        manifest = parsed((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {reason_of(error)}") from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT or not isinstance(found, int):
        raise ValueError(f"the bundle has format {found}, and this program reads {FORMAT}")
    if not isinstance(manifest.get("profile"), str):
        raise ValueError(f"{MANIFEST} names no profile: it is not whole")
    for name in ("exhibits", "packages"):
        if not isinstance(manifest.get(name), dict):
            raise ValueError(f"{MANIFEST} has no {name}: it is not whole")
    for name in ("packages", "config"):
        if not is_text_to_text(manifest.get(name, {})):
            raise ValueError(f"{MANIFEST}: {name} is no list of names and texts")
    for name, each in manifest["exhibits"].items():
        if not re.fullmatch("[a-z0-9-]+", name):
            raise ValueError(f"{MANIFEST}: {name[:80]!r} is no name of an exhibit")
        if not (isinstance(each, dict) and is_list_of_texts(each.get("records"))):
            raise ValueError(f"{MANIFEST} has no list of records for {name}: it is not whole")
        if odd := [record for record in each["records"] if not re.fullmatch(r"[\w.-]+\.json", record)]:
            raise ValueError(f"{MANIFEST}: {odd[0]!r} of {name} is no name of a record")
        if not isinstance(each.get("table"), bool):
            raise ValueError(f"{MANIFEST} does not say whether {name} has a table: it is not whole")
    for name in ("changed_since", "measured_by_other_code"):
        if not is_list_of_texts(manifest.get(name, [])):
            raise ValueError(f"{MANIFEST}: {name} is no list of files")
    return manifest


def is_list_of_texts(value: Any) -> bool:
    """Return whether a value read from JSON is a list of strings."""
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def is_text_to_text(value: Any) -> bool:
    """Return whether a value read from JSON maps names, none of them empty, to strings."""
    return isinstance(value, dict) and all(key and isinstance(each, str) for key, each in value.items())


def other_packages(manifest: dict[str, Any]) -> list[str]:
    """Return the packages whose version differs from the one that the bundle was made with."""
    here = {name: installed(name) for name in manifest["packages"]}
    return [
        f"{name} {here[name] or 'is not installed'} ({wanted} in the bundle)"
        for name, wanted in manifest["packages"].items()
        if here[name] != wanted
    ]


def installed(package: str) -> str:
    """Return the installed version of Python or of a package; empty if it is not installed."""
    if package == "python":
        return platform.python_version()
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def without_network() -> list[str]:
    """Return the prefix that starts a program without a network; empty if this is not allowed."""
    if shutil.which("unshare"):
        for words in NO_NETWORK:
            if not subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
                return words
    return []


def given_otherwise(folder: Path, manifest: dict[str, Any], *, experiments: bool) -> tuple[list[str], bool]:
    """Print the findings on sources, configuration and records.

    Returns those that are wrong, and whether the sources could be compared with a commit.
    """
    text, sources = other_sources(folder, manifest)
    if is_compared := not text.startswith("sources are not"):
        line(not sources, text, sources)
    else:
        note(text)
    about = odd_manifest(folder, manifest)
    line(not about, f"{MANIFEST} says what a bundle says, of the sources' version", about)
    settings = other_settings(folder, manifest, experiments=experiments)
    line(not settings, "configured as in the sources", settings)
    records = odd_records(folder, manifest)
    line(not records, f"records are those that {MANIFEST} names, with their samples", records)
    return [*sources, *about, *settings, *records], is_compared


def take_away(folder: Path) -> None:
    """Delete the parts that are to be made again, so that nothing can be copied from them."""
    for name in MADE:
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink(missing_ok=True)


def expected_otherwise(folder: Path, manifest: dict[str, Any], out: Path) -> list[str]:
    """Print and return where artifact.json and the records differ from what the sources say.

    Checked are the list of exhibits with their records, whether records are of the runs in their names, and their code.
    """
    expected = json.loads((out / EXPECTED).read_text(encoding="utf-8"))
    (out / EXPECTED).unlink()
    try:
        exhibits, records = ({**expected[what]} for what in ("exhibits", "records"))
        other = other_exhibits(manifest["exhibits"], exhibits)
        runs = list(of_other_runs(folder, records))
        code = of_other_code(folder, records)
        notes = list(provenance_of(folder, records, manifest))
    except (TypeError, KeyError, AttributeError):
        raise ValueError("the bundle's sources do not say what there should be: they are not the project's") from None
    profile = manifest["profile"]
    line(not other, f"{len(exhibits)} exhibits of profile {profile} are listed with their records", other)
    line(not runs, f"{len(records)} records are of the runs of profile {profile} in their names", runs)
    named = set(manifest.get("measured_by_other_code", ()))
    if known := [name for name in code if name in named]:
        note(f"{MANIFEST} names {len(known)} records that other code made than that of the sources: {', '.join(known)}")
    code = [name for name in code if name not in named]
    code += [f"{name} is named, and of the code of the sources" for name in sorted(named - {*known, *code})]
    line(not code, "records are of the code of the sources" + (", but for those" if known else ""), code)
    for each in notes:
        note(each)
    return [*other, *runs, *code]


def redraw(folder: Path, out: Path, *, build: bool, experiments: Path | None = None) -> str:
    """Run the bundle's own sources on it, and return in words whether there was a network.

    The planner allocates with the library's own classes, so it needs the C++ extension: built from the bundle's
    sources, or with `build` False the installed one. Raises ValueError with the program's last message if it fails.
    """
    isolated, source = without_network(), folder / SOURCE
    if build:
        run([*isolated, sys.executable, "setup.py", "-q", "build_ext", "--inplace"], source, "building the extension")
    else:
        installed = importlib.util.find_spec("memascend._C")  # not imported, since that would load torch's libraries
        if installed is None or installed.origin is None:
            raise ValueError("--no-build: memascend's C++ extension is not installed; run without it, or make setup")
        shutil.copy(installed.origin, source / "memascend")
    program = [sys.executable, "-m", "workflows.artifact.redraw", str(folder), str(out)]
    program += ["--experiments", str(experiments.absolute())] if experiments else []
    run([*isolated, *program], source, "drawing again")
    return "without a network" if isolated else "with the network (unshare is not allowed here)"


def run(command: list[str], source: Path, what: str) -> None:
    """Run a command in `source` with few variables of ours; at its end all of its processes are killed. Raises
    ValueError with the last line of its output if it fails; `what` names it in the message."""
    kept = {name: os.environ[name] for name in ("HOME", "PATH", "LANG", "TMPDIR") if name in os.environ}
    more = {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "MAX_JOBS": str(len(os.sched_getaffinity(0)))}
    child = subprocess.Popen(
        command,
        cwd=source,
        env=kept | more,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that processes that it starts end with it
    )
    try:
        said, _ = child.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if child.returncode:
        lines = said.replace(f"{source.parent}/", "").strip().splitlines()  # without the temporary folder
        raise ValueError(f"{what} failed: {lines[-1] if lines else f'exit status {child.returncode}'}")


def compared(said: dict[str, str], out: Path) -> dict[str, list[str]]:
    """Return for each kind of file the names that differ among all that is made again.

    `said` are the bundle's sums, which were checked before any of its programs ran.
    """
    theirs = {name: digest for name, digest in said.items() if name.partition("/")[0] in MADE}
    ours, found = sums_of(out), {}
    for name in sorted(theirs | ours):
        differ = found.setdefault(kind_of(name), [])
        differ += [] if theirs.get(name) == ours.get(name) else [name]
    return found


def kind_of(name: str) -> str:
    """Return the kind of file by which differences are reported."""
    path = PurePosixPath(name)
    if path.parts[0] == "tables":
        return "claims" if name == TABLE_OF_CLAIMS else f"tables, {path.parts[1]}"
    if path.parts[0] != "figures":
        return "descriptions"
    return (
        "the report" if len(path.parts) > 2 or path.suffix in (".html", ".css", ".js") else f"pictures, {path.suffix}"
    )


def counted(said: dict[str, str], out: Path) -> Counter[str]:
    """Return the number of files of each kind, in the bundle or made again."""
    return Counter(map(kind_of, {name for name in said if name.partition("/")[0] in MADE} | set(sums_of(out))))


def flipped(theirs: dict[tuple[str, str], str], ours: dict[tuple[str, str], str]) -> list[str]:
    """Return the claims whose verdict differs from the bundle's."""
    return [
        f"{claim}, {lane}: {theirs.get((claim, lane), 'not there')} in the bundle, "
        f"{ours.get((claim, lane), 'not there')} when decided again"
        for claim, lane in sorted(theirs.keys() | ours.keys())
        if theirs.get((claim, lane)) != ours.get((claim, lane))
    ]


def verdicts(path: Path) -> dict[tuple[str, str], str]:
    """Return the verdicts of a claims.csv by claim and lane. Raises ValueError if it cannot be read."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return {(line["claim_id"], line["lane"]): line["verdict"] for line in csv.DictReader(file)}
    except KeyError as error:
        raise ValueError(f"{TABLE_OF_CLAIMS} cannot be read: it has no column {error}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{TABLE_OF_CLAIMS} cannot be read: {reason_of(error)}") from None


def check(bundle: Path, keep: Path | None = None, *, build: bool = True, experiments: Path | None = None) -> bool:
    """Print a line for each kind of file, and return whether everything is equal.

    `experiments` is the list of runs that the records must match, if it is not the sources'.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="memascend-verify-") as temporary:
        folder, out = unpack(bundle, Path(temporary) / "bundle"), Path(temporary) / "again"
        out.mkdir()
        refuse_parts(folder)
        note(f"SHA-256 of the zip: {sha256(bundle)}")
        said, wrong = read_sums(folder), damaged(folder)
        line(not wrong, f"checksums of {len(said):,} files", wrong)
        strange = unknown(folder)
        if strange:
            line(False, "files that are no part of a bundle", strange)
            wrong += strange
        manifest, theirs = manifest_of(folder), verdicts(folder / TABLE_OF_CLAIMS)
        found_wrong, is_compared = given_otherwise(folder, manifest, experiments=experiments is not None)
        wrong += found_wrong
        if bundle.stem != folder.name:
            note(f"the zip is called {bundle.name}, and its folder {folder.name}")
        others = other_packages(manifest)
        if others:
            note(f"other packages than in the bundle: {', '.join(others)}")
        if wrong:
            exhibits = f"{len(manifest['exhibits'])} exhibits"
            print(f"FAIL  {printable(bundle.name)}, {exhibits}: nothing of it was run, so nothing was drawn again")
            if keep is not None:
                keep.rmdir()  # it is empty
            return False
        take_away(folder)
        try:
            how = redraw(folder, out, build=build, experiments=experiments)
        except ValueError:
            if (out / EXPECTED).is_file():
                expected_otherwise(folder, manifest, out)
            raise
        whose = "the bundle's" if build else "the installed"
        note(f"drawn again by the bundle's sources with {whose} C++ extension, {how}")
        other = expected_otherwise(folder, manifest, out)
        found, many = compared(said, out), counted(said, out)
        for kind, differ in sorted(found.items()):
            line(not differ, f"{kind}: {many[kind] - len(differ):,} of {many[kind]:,} files equal", differ)
        ours = verdicts(out / TABLE_OF_CLAIMS)
        turned, both = flipped(theirs, ours), len(theirs.keys() | ours.keys())
        line(not turned, f"verdicts: {both - len(turned):,} of {both:,} as the bundle says", turned)
        if keep is not None:
            shutil.copytree(out, keep, dirs_exist_ok=True)
            note(f"what was made again is in {keep}")
    good = not (other or turned or any(found.values()))
    seconds = time.monotonic() - began
    unknown_sources = "" if is_compared else "; its sources were not compared with a commit"
    text = f"{bundle.name}, {len(manifest['exhibits'])} exhibits, {seconds:.0f} s{unknown_sources}"
    print(f"{'PASS' if good else 'FAIL'}  {printable(text)}")
    return good


def reason_of(error: BaseException) -> str:
    """Return the error's message without a folder of this machine."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def line(good: bool, text: str, wrong: list[str]) -> None:
    """Print whether a check is good and, if not, the first three things that are wrong."""
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    said = text + (f": {'; '.join(wrong[:3])}{more}" if wrong else "")
    print(f"{'ok  ' if good else 'FAIL'}  {printable(said)}", flush=True)


def note(text: str) -> None:
    """Print a line that decides nothing."""
    print(f"note  {printable(text)}", flush=True)


def new_folder(path: Path) -> None:
    """Create the folder of --keep; raise ValueError if it exists or cannot be created."""
    if path.exists():
        raise ValueError(f"--keep {path} exists: name a new folder")
    ready(path, "--keep")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what is made again in a new folder")
    parser.add_argument(
        "--no-build",
        action="store_true",
        help="use the C++ extension that is installed, not one of the bundle's sources",
    )
    parser.add_argument(
        "--experiments",
        type=Path,
        metavar="FILE",
        help="list of runs that the bundle was made with, where it is not the project's own",
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the temporary folder is removed
    try:
        if not args.bundle.is_file():
            what = f"{args.bundle} is not a file" if args.bundle.exists() else f"there is no {args.bundle}"
            raise ValueError(f"{what}: name an artifact's zip (snakemake artifact makes one)")
        if args.experiments is not None and not args.experiments.is_file():
            raise ValueError(f"--experiments: there is no file {args.experiments}")
        if args.keep is not None:
            new_folder(args.keep)  # before the minutes of the check
    except (ValueError, OSError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    try:
        return 0 if check(args.bundle, args.keep, build=not args.no_build, experiments=args.experiments) else 1
    except (ValueError, OSError) as error:
        if args.keep is not None:
            with contextlib.suppress(OSError):  # fails if it has files
                args.keep.rmdir()
        print(f"error: {printable(str(args.bundle))}: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing is left of it", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
