"""Lock files: every package of an extra with the SHA-256 of each of its files on PyPI.

usage: python -m workflows.release.lock     (make lock)

Writes locks/*.txt, from the constraint files and from what the installed packages require: one for the library alone,
one for each extra, and one for each further constraint file. torch is in none of them: its pin stands for the CPU build
and for the CUDA build, which are different files on different indexes, so it is installed first and by itself. Then

    pip install --require-hashes --no-deps -r locks/huggingface.txt

installs the very files that were tried, or nothing. uv asks the index for the hashes; no file is downloaded.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from workflows.release import tools

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "locks"
USUAL = "constraints.txt"
EXTRAS = ("deepspeed", "huggingface", "lint", "test", "workflow")  # extras that constraints.txt pins
# Lock file -> constraint file that it contains completely.
WHOLE = {
    "cluster": "constraints-cluster.txt",
    "cuda": "constraints-cuda.txt",
    "docs": "constraints-docs.txt",
    "papers": "constraints-deepspeed-0.16.txt",
    "release": "constraints-release.txt",
}
BY_ITSELF = "torch"
HEAD = """\
# {what}, with the SHA-256 of each file; without torch, which goes first: pip install -c {constraints} torch
#   pip install --require-hashes --no-deps --no-build-isolation -r {name}
# Made by make lock; do not edit.
"""


def pins(file: Path) -> dict[str, str]:
    """Return canonical name -> line of a constraint file."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(line.partition("==")[0]): line for line in lines}


def asked_for(extra: str) -> list[str]:
    """Return the requirements in pyproject.toml: the library's own, and those of the extra unless it is ''."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *(project["optional-dependencies"][extra] if extra else ())]


def closure(wanted: Iterable[str]) -> set[str]:
    """Return canonical names of all installed packages that these requirements need, except torch and what only it
    needs.

    ValueError names a package that is not installed.
    """
    waiting = [Requirement(word) for word in wanted]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if name == BY_ITSELF or (name, extras) in seen:
            continue
        seen.add((name, extras))
        waiting += required_by(name, extras)
    return {name for name, _ in seen}


def required_by(name: str, extras: Iterable[str]) -> Iterator[Requirement]:
    """Yield what an installed package requires here, with some of its extras. Raises ValueError if it is not
    installed."""
    try:
        words = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        raise ValueError(f"{name} is not installed here: run make setup first") from None
    for requirement in map(Requirement, words):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in ("", *extras)):
            yield requirement


def wanted() -> dict[str, tuple[str, list[str]]]:
    """Return lock -> (constraint file, pins that it contains)."""
    found = {name: (USUAL, needed_by(name)) for name in ("core", *EXTRAS)}
    for name, file in WHOLE.items():
        found[name] = (file, [line for each, line in sorted(pins(ROOT / file).items()) if each != BY_ITSELF])
    return found


def needed_by(name: str) -> list[str]:
    """Return the pins of all that the library ('core'), or it with an extra, needs; ValueError if one has no pin."""
    usual = pins(ROOT / USUAL)
    needed = closure(asked_for("" if name == "core" else name))
    without = sorted(needed - usual.keys())
    if without:
        raise ValueError(f"{USUAL} does not pin {', '.join(without)}, which {name} needs: add the lines")
    return [usual[each] for each in sorted(needed)]


def hashes(lines: Iterable[str]) -> dict[str, str]:
    """Return pin -> its lines in a lock file; ValueError has uv's message."""
    uv = shutil.which("uv") or str(tools.ensure() / "uv")
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder, "pins.in")
        given.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        options = "--no-config --no-deps --no-header --no-annotate --generate-hashes --universal --python-version 3.11"
        command = [uv, "pip", "compile", "--quiet", *options.split(), str(given)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"uv pip compile: {' '.join(done.stderr.split())}")
    blocks = re.findall(r"^\S+==[^\n]*(?:\n +--hash=[^\n]*)+$", done.stdout, re.MULTILINE)
    return {block.split()[0]: block for block in blocks}


def texts() -> dict[str, str]:
    """Return path in the repository -> text of every lock file."""
    files = wanted()
    known: dict[str, str] = {}
    for constraints in {constraints for constraints, _ in files.values()}:  # two files may pin a package differently
        lines = {line for file, pinned in files.values() if file == constraints for line in pinned}
        known |= {canonical(line): block for line, block in hashes(sorted(lines)).items()}
    made = {}
    for name, (constraints, lines) in files.items():
        missing = [line for line in lines if canonical(line) not in known]
        if missing:
            raise ValueError(f"{constraints}: the index has no {', '.join(missing)}")
        path = f"{FOLDER}/{name}.txt"
        what = {"core": "The library alone", **{extra: f"The extra {extra}" for extra in EXTRAS}}
        head = HEAD.format(what=what.get(name, f"Every line of {constraints}"), constraints=constraints, name=path)
        made[path] = head + "".join(f"{known[canonical(line)]}\n" for line in lines)
    return made


def canonical(pin: str) -> str:
    """Return a pin with the canonical name of its package."""
    name, _, version = pin.partition("==")
    return f"{canonicalize_name(name)}=={version}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    try:
        made = texts()
        (ROOT / FOLDER).mkdir(exist_ok=True)
        for path, text in made.items():
            (ROOT / path).write_text(text, encoding="utf-8")
            print(f"{path}: {text.count('==')} packages, {text.count('--hash=')} hashes")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
