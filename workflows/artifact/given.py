"""What a bundle gives and no check can make again, compared with what is known of it: sources with their commit,
its configuration with that of the sources, records with their own sums and with the exhibits that they are for.

Someone who changes a bundle also writes SHA256SUMS anew, and the sources of a bundle are what draws its exhibits again.
So the sources are compared with the commit that the bundle names, where this checkout has it.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from workflows.artifact.layout import CONFIGURED, RECORDS, SOURCE, TRACE, files_in
from workflows.run.provenance import ROOT, digest_of

CONFIG = "workflows/config/config.yaml"
LINK = "120000"  # git's mode of a symbolic link


def git(*words: str, root: Path, stdin: str | None = None) -> str:
    """What git says. ValueError with its words."""
    command = ["git", "-C", str(root), *words]
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ValueError(f"git: {error.strerror}") from None
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or [f"git {words[0]} failed"])[-1])
    return done.stdout


def tracked(commit: str, root: Path) -> dict[str, str]:
    """Every path of a commit in a bundle -> its blob. What a link to a folder leads to is below the link too."""
    files, links = {}, {}
    for entry in git("ls-tree", "-r", "-z", "--full-tree", commit, root=root).split("\0"):
        if entry:
            about, _, name = entry.partition("\t")
            mode, _, blob = about.split()
            (links if mode == LINK else files)[name] = blob
    for name, blob in links.items():
        target = _joined(PurePosixPath(name).parent, git("cat-file", "blob", blob, root=root))
        if target in files:
            files[name] = files[target]
        below = {path.removeprefix(f"{target}/"): of for path, of in files.items() if path.startswith(f"{target}/")}
        files |= {f"{name}/{path}": of for path, of in below.items()}
    return files


def _joined(folder: PurePosixPath, link: str) -> str:
    """Where a link in a folder of the repository leads, without `..`."""
    parts: list[str] = []
    for part in (folder / link).parts:
        if part == ".." and parts:
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def other_sources(folder: Path, manifest: dict[str, Any]) -> tuple[str, list[str]]:
    """(what was compared, sources that are not the commit's and that artifact.json does not name as changed)."""
    commit = str(manifest.get("commit"))
    try:
        if not (ROOT / ".git").exists():
            raise ValueError("this is no git checkout")
        if not re.fullmatch("[0-9a-f]+", commit):
            raise ValueError("that is no commit")
        wanted = tracked(commit, ROOT)
    except ValueError as error:
        return f"sources are not compared with commit {commit[:12]}: {error}", []
    names = list(files_in(folder / SOURCE))
    paths = "".join(f"{folder / SOURCE / name}\n" for name in names)
    blobs = git("hash-object", "--no-filters", "--stdin-paths", root=ROOT, stdin=paths).split()
    found = dict(zip(names, blobs, strict=True))
    differ = [name for name in sorted(wanted | found) if wanted.get(name) != found.get(name)]
    named = {each for said in manifest.get("changed_since", ()) for each in said.split(" -> ")}
    known = [name for name in differ if name in named]
    says = f"; artifact.json names {len(known)} changed since: {', '.join(known)}" if known else ""
    return f"sources of commit {commit[:12]}{says}", [name for name in differ if name not in named]


def other_settings(folder: Path, manifest: dict[str, Any], *, experiments: bool) -> list[str]:
    """What artifact.json was configured with that the sources are not; of its list of runs nothing is said where who
    checks names one (`experiments`). Records of other settings need not be those of the profile."""
    try:
        usual = yaml.safe_load((folder / SOURCE / CONFIG).read_text(encoding="utf-8"))
        wanted = {name: usual[name] for name in CONFIGURED}
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return [f"{SOURCE}/{CONFIG} is no configuration"]
    said = manifest.get("config", {})
    names = sorted((wanted.keys() | said.keys()) - ({"experiments"} if experiments else set()))
    return [
        f"{name} is {said.get(name, 'not said')}, and {wanted.get(name, 'not said')} in the sources"
        + ("; if the other list of runs is yours, name it with --experiments" if name == "experiments" else "")
        for name in names
        if said.get(name) != wanted.get(name)
    ]


def odd_records(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Records that no exhibit names, or that contradict themselves, and those that are named and not there."""
    named = {record for each in manifest["exhibits"].values() for record in each["records"]}
    traces = {str(Path(record).with_suffix(TRACE)) for record in named}
    there = set(files_in(folder / RECORDS))
    found = [f"{name} is named by no exhibit" for name in sorted(there - named - traces)]
    found += [f"{name} is missing" for name in sorted(named - there)]
    for name in sorted(there & named):
        found += [f"{name}: {what}" for what in contradictions(folder / RECORDS / name)]
    return found


def contradictions(path: Path) -> Iterator[str]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        run_id = record["run_id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        yield "not a record"
        return
    if run_id != path.stem:
        yield f"of the run {run_id}"
    if "loss_checksum" in record and record["loss_checksum"] != digest_of(record.get("losses")):
        yield "its losses are not those of its loss_checksum"


def other_exhibits(said: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Exhibits of artifact.json that are not drawn from what the sources say, or are left out of it."""
    found = []
    for name in sorted(said | expected):
        if name not in said:
            found.append(f"{name} is left out")
        elif name not in expected:
            found.append(f"{name} is no exhibit of the sources")
        else:
            keys = sorted(said[name].keys() | expected[name].keys())
            found += [f"{name}: other {key}" for key in keys if said[name].get(key) != expected[name].get(key)]
    return found
