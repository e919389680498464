"""Check the parts of a bundle that cannot be made again: sources against their commit, its configuration against that
of the sources, and records against their own sums and the exhibits that they belong to.

Whoever changes a bundle can also rewrite SHA256SUMS, and a bundle's exhibits are redrawn by its own sources. So the
sources are compared with the commit that the bundle names, if this checkout has it.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from workflows.artifact.layout import (
    ANY,
    CONFIGURED,
    DRAWN_WITH,
    KEYS,
    RECORDS,
    SOURCE,
    TRACE,
    files_in,
    name_of,
    sha256,
)
from workflows.run.provenance import ROOT, digest_of
from workflows.staleness import PACKAGES

CONFIG = "workflows/config/config.yaml"
VERSIONS = ("python", *PACKAGES)  # whose versions a record states
_ARM = ("system", "arm", "dtype")
_PLACES = ("folder", "model", "trace")  # options of a bench that name files, or that it records in another form
LINK = "120000"  # git's mode of a symbolic link


def git(*words: str, root: Path, stdin: str | None = None) -> str:
    """Return git's output; raise ValueError with its message."""
    command = ["git", "-C", str(root), *words]
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ValueError(f"git: {error.strerror}") from None
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or [f"git {words[0]} failed"])[-1])
    return done.stdout


def tracked(commit: str, root: Path) -> dict[str, str]:
    """Return path -> blob for every file of a commit as in a bundle; files in a linked folder are
    also below the link."""
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
    """Return where a link in a folder of the repository leads, with `..` resolved."""
    parts: list[str] = []
    for part in (folder / link).parts:
        if part == ".." and parts:
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def changed_sources(folder: Path, commit: str) -> list[str]:
    """Return the sources of a bundle that differ from a commit; raise ValueError if this checkout lacks the commit."""
    wanted = tracked(commit, ROOT)
    names = list(files_in(folder / SOURCE))
    paths = "".join(f"{folder / SOURCE / name}\n" for name in names)
    blobs = git("hash-object", "--no-filters", "--stdin-paths", root=ROOT, stdin=paths).split()
    found = dict(zip(names, blobs, strict=True))
    return [name for name in sorted(wanted | found) if wanted.get(name) != found.get(name)]


def other_sources(folder: Path, manifest: dict[str, Any]) -> tuple[str, list[str]]:
    """Return what was compared in words, and the sources that differ from the commit without
    artifact.json saying so."""
    commit = str(manifest.get("commit"))
    try:
        if not (ROOT / ".git").exists():
            raise ValueError("this is no git checkout")
        if not re.fullmatch("[0-9a-f]{40}", commit):
            raise ValueError("that is no commit")
        if (kind := _kind_of(commit)) != "commit":
            raise ValueError("that is no commit" if kind else "this checkout has no such commit (git fetch)")
        differ = changed_sources(folder, commit)
    except ValueError as error:
        return f"sources are not compared with commit {_brief(commit[:12])}: {error}", []
    named = manifest.get("changed_since", [])
    known = [name for name in differ if name in named]
    says = f"; artifact.json names {len(known)} changed since: {', '.join(known)}" if known else ""
    wrong = [name for name in differ if name not in named]
    wrong += [f"{_brief(name)} was not changed since" for name in named if name not in differ]
    made = git("show", "-s", "--format=%cI", commit, root=ROOT).strip()
    wrong += [f"the commit is of {made}, not {_brief(said)}"] if (said := manifest.get("committed")) != made else []
    return f"sources of commit {commit[:12]}{says}", wrong


def _kind_of(name: str) -> str:
    """Return the type of git's object with that name, such as commit; empty if there is none."""
    try:
        return git("cat-file", "-t", name, root=ROOT).strip()
    except ValueError:
        return ""


def other_settings(folder: Path, manifest: dict[str, Any], *, experiments: bool) -> list[str]:
    """Return the settings in artifact.json that differ from those of the sources.

    Records made with other settings need not be those of the profile. The list of runs is not compared if the person
    who checks names one (`experiments`).
    """
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
    """Return records that no exhibit names, that are missing, or that contradict themselves or their samples."""
    named = {record for each in manifest["exhibits"].values() for record in each["records"]}
    traces = {str(Path(record).with_suffix(TRACE)) for record in named}
    there = set(files_in(folder / RECORDS))
    found = [f"{name} is named by no exhibit" for name in sorted(there - named - traces)]
    found += [f"{name} is missing" for name in sorted(named - there)]
    for name in sorted(there & named):
        found += [f"{name}: {what}" for what in contradictions(folder / RECORDS / name)]
    return found


def contradictions(path: Path) -> Iterator[str]:
    """Yield the contradictions within a record."""
    try:
        record = parsed(path.read_text(encoding="utf-8"))
        run_id, kind, is_ok = record["run_id"], record.get("kind"), record.get("status") == "ok"
        if run_id != path.stem:
            yield f"of the run {_brief(run_id)}"
        if kind == "training":
            yield from _other_losses(record, is_ok)
        if kind == "bench":
            yield from _other_options(record)
        if is_ok and kind in ("training", "step-times"):
            yield from _other_points(record)
        yield from _other_samples(path, record)
    except TwiceError as error:
        yield str(error)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        yield "not a record, or not one of its kind"


def _other_losses(record: dict[str, Any], is_ok: bool) -> Iterator[str]:
    """Yield a message if the losses do not match their checksum or the number of steps."""
    if is_ok and record.get("loss_checksum") != digest_of(record.get("losses")):
        yield "its losses are not those of its loss_checksum"
    elif is_ok and not record.get("points") and len(record["losses"]) != record["steps"]:
        yield "it has not one loss of each step"


def _other_samples(path: Path, record: dict[str, Any]) -> Iterator[str]:
    """Yield a message if the file of samples is missing, superfluous or changed."""
    samples, said = path.with_suffix(TRACE), record.get("samples_sha256")
    if record.get("kind") != "training":
        if said is not None or samples.is_file():
            yield "samples of a run that is no training"
    elif not samples.is_file():
        yield f"{samples.name} is missing"
    elif said is None:
        yield f"{samples.name} is there, and the record has no samples_sha256"
    elif said != sha256(samples):
        yield f"{samples.name} is not that of its samples_sha256"


def _other_points(record: dict[str, Any]) -> Iterator[str]:
    """Yield a message unless each requested point is present once per stack or arm, with all rounds."""
    asked = [tuple(each) for each in record.get("points_requested") or ()]
    if record["kind"] == "step-times":
        ways: list[Any] = [tuple(each[name] for name in _ARM) for each in record["arms"]]
        found = [(*_place(each), *(each[name] for name in _ARM)) for each in record["points"]]
        lists = [value for each in record["points"] for name, value in each.items() if name.endswith("_s")]
        if any(len(value) != record["rounds"] for value in lists):
            yield f"its points have not {_brief(record['rounds'])} rounds each"
    elif asked or record.get("stacks"):
        asked = asked or [(record["sequence"], record["batch"])]
        ways = [(json.dumps(each, sort_keys=True),) for each in record["stacks"]] or [()]
        found = [
            (*_place(each), *((json.dumps(each["stack"], sort_keys=True),) if record["stacks"] else ()))
            for each in record.get("points", ())
        ]
    else:
        return
    if Counter(found) != Counter((*point, *way) for point in asked for way in ways):
        yield "its points are not those of its points_requested"


def _place(point: dict[str, Any]) -> tuple[Any, ...]:
    """Return what distinguishes a point of a run from its others: tokens, sequences and accumulated batches."""
    accumulation = (point["accumulation"],) if "accumulation" in point else ()
    return (point["sequence"], point["batch"], *accumulation)


def _other_options(record: dict[str, Any]) -> Iterator[str]:
    """Yield the options that a bench used and that differ from those of its command line."""
    words, taken = record["points_requested"]["options"], record.get("options") or {}
    for option, value in itertools.pairwise(words):
        name = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--") or name not in taken or name in _PLACES:
            continue
        is_list = isinstance(taken[name], list)
        found, asked = (taken[name], value.split(",")) if is_list else ([taken[name]], [value])
        if [_number(str(each)) for each in found] != [_number(each) for each in asked]:
            yield f"its option {name} is {_brief(taken[name])}, and {_brief(value)} in its points_requested"


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


class TwiceError(ValueError):
    """A key occurs twice in an object, so two readers could see different values."""


def parsed(text: str) -> Any:
    """Parse JSON; raise a one-line ValueError, or TwiceError for a key that occurs twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise TwiceError(f"the key {_brief(twice)} stands twice")
        return found

    return json.loads(text, object_pairs_hook=once)


def of_other_runs(folder: Path, expected: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each record that does not match the run in its name, as the list of runs has it."""
    for name, record, wanted in _both(folder, expected):
        about = {name: record.get(name) for name in wanted["fields"]} | {"kind": record.get("kind")}
        for where, found, meant in differences(about, wanted["fields"] | {"kind": wanted["kind"]}):
            yield f"{name}: {where} is {_brief(found)}, and {_brief(meant)} in the list of runs"
        if record.get("key") != wanted["key"]:
            yield f"{name}: its key is not that of its configuration, versions, code and host"


def of_other_code(folder: Path, expected: dict[str, Any]) -> list[str]:
    """Return the records made by code other than the sources."""
    both = _both(folder, expected)
    return [name for name, record, wanted in both if record.get("code_digest") != wanted["code_digest"]]


def provenance_of(folder: Path, expected: dict[str, Any], manifest: dict[str, Any]) -> Iterator[str]:
    """Yield notes for readers: records without a result, or from another commit, a changed checkout
    or other packages."""
    records, commit = {name: record for name, record, _ in _both(folder, expected)}, manifest.get("commit")
    without = [name for name, record in records.items() if record.get("status") != "ok"]
    if without:
        yield f"{len(without)} of {len(records)} runs failed, or had too little memory or time: {_some(without)}"
    packages = manifest["packages"]
    odd = [
        name
        for name, record in records.items()
        if not expected[name]["has_own_packages"]
        if not isinstance(said := record.get("versions"), dict)
        or any(said.get(package) != packages.get(package) for package in VERSIONS)
    ]
    if odd:
        yield f"{len(odd)} of {len(records)} records are of other packages than artifact.json names: {_some(odd)}"
    changed = [name for name, record in records.items() if record.get("dirty") is not False]
    other = [name for name, record in records.items() if record.get("commit") != commit]
    if changed:
        yield f"{len(changed)} of {len(records)} records are of a checkout with changes: {_some(changed)}"
    if other:
        yield f"{len(other)} of {len(records)} records are of another commit: {_some(other)}"


def _some(names: list[str]) -> str:
    """Return at most three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")


def _both(folder: Path, expected: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield name, record and expectation of the records that exist and are readable."""
    for name, wanted in sorted(expected.items()):
        try:
            record = json.loads((folder / RECORDS / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield name, record, wanted


def differences(found: Any, wanted: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (place, value found, value expected) wherever `found` does not match `wanted`.

    Further keys in `found` are allowed; None requires a key to be absent, and ANY matches anything.
    """
    if isinstance(wanted, dict) and isinstance(found, dict):
        for name, each in wanted.items():
            yield from differences(found.get(name), each, f"{where}.{name}" if where else name)
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for number, (mine, each) in enumerate(zip(found, wanted, strict=True)):
            yield from differences(mine, each, f"{where}[{number}]")
    elif wanted != ANY and (found != wanted or isinstance(found, bool) != isinstance(wanted, bool)):
        yield where, found, wanted


def other_exhibits(said: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the exhibits of artifact.json that are missing or not drawn from what the sources say."""
    found = []
    for name in sorted(said | expected):
        if name not in said:
            found.append(f"{name} is left out")
        elif name not in expected:
            found.append(f"{name} is no exhibit of the sources")
        else:
            keys = sorted(said[name].keys() | expected[name].keys())
            found += [f"{name}: other {key}" for key in keys if _of(said[name], key) != _of(expected[name], key)]
    return found


def _of(exhibit: dict[str, Any], key: str) -> list[Any]:
    return [exhibit[key]] if key in exhibit else []


def odd_manifest(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Return missing and unknown entries of artifact.json, and a version or name that contradicts other parts."""
    found = [f"{name} is not said" for name in KEYS if name not in manifest]
    found += [f"{name} is nothing that a bundle says" for name in sorted(manifest.keys() - set(KEYS))]
    known = {*VERSIONS, *DRAWN_WITH}
    found += [f"packages: {name} decides nothing" for name in sorted(manifest["packages"].keys() - known)]
    found += [f"packages: {name} is not said" for name in ("python", *DRAWN_WITH) if name not in manifest["packages"]]
    try:
        text = (folder / SOURCE / "pyproject.toml").read_text(encoding="utf-8")
        version = tomllib.loads(text)["project"]["version"]
    except (OSError, ValueError, KeyError, TypeError):
        return [*found, f"{SOURCE}/pyproject.toml names no version"]
    if manifest.get("version") != version:
        found.append(f"version is {_brief(manifest.get('version'))}, and {_brief(version)} in the sources")
    if folder.name != (name := name_of(version, manifest["profile"])):
        found.append(f"the folder is called {folder.name}, not {name}")
    return found


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) < 80 else f"{text[:80]}..."
