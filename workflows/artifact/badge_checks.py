"""Checks behind lines of the badge list that are no command of the project's already.

usage: python -m workflows.artifact.badge_checks tag|licence|packages|exhibits|budgets|modelled|reproduced [EXHIBIT]

Run at the top of a checkout. Each prints one line that says what was found; the exit status is 0 if the line is met.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import yaml

from memascend.suggestions import did_you_mean
from workflows import registry
from workflows.derive.citation import project

Found = tuple[bool, str]


def tag() -> Found:
    """Check that a tag of this version points at the commit that is checked out."""
    wanted = f"v{project()['version']}"
    done = subprocess.run(["git", "tag", "--points-at", "HEAD"], capture_output=True, text=True, check=False)
    tags = done.stdout.split()
    if wanted in tags:
        return True, f"{wanted} points at this commit"
    return False, f"no tag {wanted} points at this commit ({', '.join(tags) or 'it has none'}): git tag {wanted}"


def licence() -> Found:
    """Check that the licence's text and every file that names a licence agree."""
    named = {
        "pyproject.toml": project()["license"],
        "CITATION.cff": yaml.safe_load(Path("CITATION.cff").read_text())["license"],
        ".zenodo.json": json.loads(Path(".zenodo.json").read_text())["license"],
        "codemeta.json": json.loads(Path("codemeta.json").read_text())["license"].rpartition("/")[2],
    }
    text = " ".join(Path("LICENSE").read_text().split())
    if set(named.values()) != {"Apache-2.0"}:
        return False, "; ".join(f"{file} says {name}" for file, name in named.items())
    if not text.startswith("Apache License Version 2.0"):
        return False, "LICENSE is not the text of Apache-2.0, which the other files name"
    return True, f"Apache-2.0: LICENSE, {', '.join(named)}"


def packages() -> Found:
    """Check that the versions pinned in constraints.txt are installed; a local suffix (+cpu) makes no difference."""
    pins = dict(
        line.split("==") for line in Path("constraints.txt").read_text().splitlines() if line and line[0] not in "#- "
    )
    other, absent = [], []
    for name, version in pins.items():
        try:
            here = metadata.version(name)
        except metadata.PackageNotFoundError:
            absent.append(name)
            continue
        if here.partition("+")[0] != version:
            other.append(f"{name} {here} ({version} pinned)")
    if other or absent:
        missing = (
            f"not installed: {', '.join(absent)} (make setup installs all; EXTRAS= leaves some out)" if absent else ""
        )
        return False, "; ".join(filter(None, [", ".join(other), missing]))
    return True, f"{len(pins)} packages are pinned in constraints.txt, and installed in these versions"


def exhibits() -> Found:
    """Check that every exhibit is built, and that every claim belongs to one."""
    entries = registry.exhibits()
    waiting = [entry["id"] for entry in entries if entry["status"] != "built"]
    known, claims = {entry["id"] for entry in entries}, registry.claims()
    astray = [claim["id"] for claim in claims if claim["exhibit_id"] not in known]
    if waiting or astray:
        return (
            False,
            f"not built: {', '.join(waiting) or 'none'}; claims without an exhibit: {', '.join(astray) or 'none'}",
        )
    count = Counter(entry["paper"] for entry in entries)
    of = ", ".join(f"{name} {count[paper]}" for paper, name in registry.PAPERS.items())
    return True, f"{len(entries)} of {len(entries)} exhibits are built ({of}), with {len(claims)} claims"


def budgets() -> Found:
    """Check that every exhibit with runs says how long they take."""
    from workflows.configuration import Configuration

    known = Configuration(yaml.safe_load(Path("workflows/config/config.yaml").read_text()), [])
    budget = {name: known.budget(name) for name in known.built}
    vague = [name for name, text in budget.items() if "not timed yet" in text and not text.startswith("about")]
    timed = sum(text.startswith("about") for text in budget.values())
    if vague:
        how = "run them, then python -m workflows.derive.reference --times-only --records FILE ..."
        return False, f"{', '.join(vague)}: nobody has timed their runs of the profile quick; {how}"
    return (
        True,
        f"{timed} exhibits say the minutes of their runs in the profile quick; {len(budget) - timed} have none in it: "
        "they are computed, quoted or drawn in seconds",
    )


def modelled() -> Found:
    """Check that every paper has modelled rows."""
    rows = {}
    for paper in registry.PAPERS:
        path = Path("results/derived/modelled", f"{paper}.csv")
        rows[paper] = len(path.read_text().splitlines()) - 1 if path.is_file() else 0
    text = ", ".join(f"{name} {rows[paper]}" for paper, name in registry.PAPERS.items())
    return all(rows.values()), f"rows: {text}"


def reproduced(exhibit: str) -> Found:
    """Decide the claims of one exhibit from its own table.

    The line is met if at least one measured claim is reproduced and every deviation has a recorded cause.
    """
    table = Path("results/derived/exhibits", f"{exhibit}.csv")
    if not table.is_file():
        return False, f"{table} is missing: snakemake --cores all {exhibit}"
    from workflows.derive import claims

    about = [claim for claim in registry.claims() if claim["exhibit_id"] == exhibit]
    decided = claims.decide_all(about, table.parent)
    mine = [verdict for verdict in decided if verdict.lane == "measured" and verdict.verdict in registry.DECIDED]
    reproduced_ones = [verdict for verdict in mine if verdict.verdict == "reproduced"]
    unexplained = [verdict for verdict in mine if verdict.verdict == "deviates" and not verdict.deviates_because]
    said = "; ".join(f"{verdict.claim_id} {verdict.verdict} ({verdict.shown})" for verdict in mine)
    return bool(reproduced_ones) and not unexplained, f"measured here: {said or 'nothing'}"


CHECKS: dict[str, Callable[..., Found]] = {
    check.__name__: check for check in (tag, licence, packages, exhibits, budgets, modelled, reproduced)
}


def misused(argv: list[str]) -> str:
    """Return what is wrong with the command line and how to fix it; empty if it can be run."""
    if not argv or argv[0] not in CHECKS:
        hint = did_you_mean(argv[0], CHECKS) if argv else ""
        said = f"{argv[0]!r} is no check{hint}: " if argv else ""
        return f"{said}name one of {', '.join(CHECKS)}"
    name, *more = argv
    wanted = [parameter.upper() for parameter in inspect.signature(CHECKS[name]).parameters]
    if len(more) != len(wanted):
        return f"{name} takes {' '.join(wanted) or 'no argument'}, and {' '.join(more) or 'none'} was given"
    known = [entry["id"] for entry in registry.exhibits()] if wanted else []
    if wanted and more[0] not in known:
        return f"{more[0]} is no exhibit{did_you_mean(more[0], known)}; snakemake exhibits lists them all"
    return ""


def main(argv: list[str]) -> int:
    if wrong := misused(argv):
        print(f"badge_checks: {wrong}", file=sys.stderr)
        return 2
    try:
        met, text = CHECKS[argv[0]](*argv[1:])
    except (OSError, ValueError, KeyError, TypeError) as error:
        met, text = False, f"{type(error).__name__}: {error}"
    print(text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
