"""The lines that artifact evaluators tick, each with the command that checks it in this project.

Badges and lines follow ACM's Artifact Review and Badging 1.1 and the check-lists of systems conferences that apply it.
A line that depends on the outside world (an archive, a DOI, other people) is marked so, with what is still to do,
because no command in a checkout can check it. All other lines are executed by `workflows.artifact.kick_the_tires`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workflows import registry

AVAILABLE, FUNCTIONAL, REUSABLE, REPRODUCED = "Available", "Functional", "Reusable", "Results Reproduced"
BADGES = (AVAILABLE, FUNCTIONAL, REUSABLE, REPRODUCED)
MEANING = {
    AVAILABLE: "archived for the public, under a name that does not change",
    FUNCTIONAL: "documented, consistent with the papers, complete, and it runs",
    REUSABLE: "so well structured and documented that others build on it",
    REPRODUCED: "other people get the main results with it",
}
CHECK = "python -m workflows.artifact.badge_checks"
SNAKEMAKE = "snakemake --cores 1 --config profile=smoke --"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the badge list.

    `command` is run by a shell at the top of a fresh clone. `outside` says why no command can decide the line, and what
    to do. `needs` names lines that must be met before. `minutes` is the time limit. `long` lines run only on request.
    """

    name: str
    badge: str
    says: str
    command: str = ""
    outside: str = ""
    needs: Sequence[str] = ()
    minutes: float = 5.0
    long: bool = False


def pytest(*words: str) -> str:
    """Return the command that runs these tests without writing to the checkout."""
    return f"python -m pytest -q -p no:cacheprovider {' '.join(words)}"


LINES = (
    Line(
        name="build",
        badge=FUNCTIONAL,
        says="it builds from its sources",
        command="python setup.py -q egg_info build_ext --inplace && "
        """python -c 'import torch, memascend._C; print("built, and loads beside torch", torch.__version__)'""",
        minutes=20,
    ),
    Line(
        name="archive",
        badge=AVAILABLE,
        says="in a public archive with a DOI",
        outside="no archive holds it yet: upload the zip of `snakemake --cores all artifact`, fill in the form "
        "from .zenodo.json, and add the DOI to CITATION.cff",
    ),
    Line(
        name="version",
        badge=AVAILABLE,
        says="the version that is evaluated has a tag",
        command=f"{CHECK} tag",
    ),
    Line(
        name="licence",
        badge=AVAILABLE,
        says="a licence that allows reuse, the same in all files that name one",
        command=f"{CHECK} licence",
    ),
    Line(
        name="metadata",
        badge=AVAILABLE,
        says="the archive's metadata, citation file and README name the papers with title, authors and identifier",
        command=pytest("tests/workflow/test_citation.py"),
        needs=["build"],
    ),
    Line(
        name="pinned",
        badge=FUNCTIONAL,
        says="every dependency in an exact version, and these are the ones installed",
        command=f"{CHECK} packages",
    ),
    Line(
        name="container",
        badge=FUNCTIONAL,
        says="a recipe for a container with what comes from the operating system, its base image by digest",
        command=pytest("tests/unit/test_container.py"),
        needs=["build"],
    ),
    Line(
        name="documented",
        badge=FUNCTIONAL,
        says="documented: what pages link to and name exists, every measured exhibit has its row and command",
        command=pytest("tests/unit/test_setup_docs.py"),
        needs=["build"],
    ),
    Line(
        name="consistent",
        badge=FUNCTIONAL,
        says="consistent and complete: every figure and table of the papers is built, every claim names its exhibit",
        command=f"{CHECK} exhibits",
    ),
    Line(
        name="resources",
        badge=FUNCTIONAL,
        says="what every experiment needs is said: exhibits with runs have an estimate of their minutes",
        command=f"{CHECK} budgets",
        needs=["build"],
    ),
    Line(
        name="plan",
        badge=FUNCTIONAL,
        says="the README's first command: what fits",
        command="python -m memascend.cli plan --model Qwen/Qwen2.5-7B --dtype fp16 --batch 4 --ram 64 --gpu-memory 24",
        needs=["build"],
    ),
    Line(
        name="train",
        badge=FUNCTIONAL,
        says="a minimal example: the README's training, of a small model on the repository's pages",
        command="python -m memascend.cli train --model qwen2.5-0.5b --twin 16 --data docs --files '*.md' --context 64 "
        "--steps 20 --eval-sequences 4 --output runs/look",
        needs=["build"],
        minutes=15,
    ),
    Line(
        name="tests",
        badge=FUNCTIONAL,
        says="exercised: tests of the kernels, pools and tiers (a part of `make test`)",
        command=pytest("tests/unit/test_overflow.py", "tests/unit/test_pools.py", "tests/unit/test_adamw.py"),
        needs=["build"],
        minutes=15,
    ),
    Line(
        name="structure",
        badge=REUSABLE,
        says="well structured: what may import what is held by a test",
        command=pytest("tests/unit/test_walls.py"),
        needs=["build"],
    ),
    Line(
        name="extended",
        badge=REUSABLE,
        says="extended by a folder: a system that is no part of the project plans and trains",
        command=pytest("tests/unit/test_systems.py"),
        needs=["build"],
        minutes=15,
    ),
    Line(
        name="style",
        badge=REUSABLE,
        says="one style, by its own linters",
        command="ruff check . && ruff format -q --check . && snakefmt --check Snakefile workflows/rules && echo ok",
    ),
    Line(
        name="modelled",
        badge=REPRODUCED,
        says="the modelled lane of all five papers, computed here at the papers' sizes",
        command=f"{SNAKEMAKE} results/derived/modelled/{{{','.join(registry.PAPERS)}}}.csv && {CHECK} modelled",
        needs=["build"],
        minutes=20,
    ),
    Line(
        name="measured",
        badge=REPRODUCED,
        says="one exhibit measured here, from its runs to the verdict: MemAscend's Figure 3",
        command=f"{SNAKEMAKE} memascend-fig03 && {CHECK} reproduced memascend-fig03",
        needs=["build"],
        minutes=30,
    ),
    Line(
        name="twice",
        badge=REPRODUCED,
        says="safe to call twice: the second call has nothing to do",
        command=f"{SNAKEMAKE} memascend-fig03 2>&1 | grep 'Nothing to be done'",
        needs=["measured"],
    ),
    Line(
        name="figures",
        badge=REPRODUCED,
        says="all figures and tables drawn, all claims decided, on the smallest twins",
        command=f"{SNAKEMAKE} figures",
        needs=["build"],
        minutes=120,
        long=True,
    ),
    Line(
        name="bundle",
        badge=REPRODUCED,
        says="from one zip alone, everything drawn and decided again, byte for byte",
        command=f"{SNAKEMAKE} artifact && {SNAKEMAKE} artifact-verify",
        needs=["figures"],
        minutes=60,
        long=True,
    ),
    Line(
        name="others",
        badge=REPRODUCED,
        says="other people got the main results with it",
        outside="only they can say so: `make figures`, then `memascend compare` of their artifact and the authors'",
    ),
)
