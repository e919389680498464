"""The content of the pages, gathered from claims.csv, the captions, the lists of runs and the papers' folders."""

from __future__ import annotations

import csv
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from workflows import registry, tidy
from workflows.derive.claims import LANES, read_verdicts
from workflows.derive.errata import errata_of
from workflows.derive.site import judged, picture
from workflows.derive.site.against import embedded
from workflows.derive.site.judged import Judged
from workflows.derive.site.templates import markdown, opening
from workflows.derive.site.timelines import Timeline, timelines_of


@dataclass(frozen=True)
class Exhibit:
    """A drawn exhibit.

    `prose` is its caption without the title. `notes` are the origins of its numbers (lane -> HTML, in order). `runs`
    has one line per record, `errata` those that concern it. `picture` is an SVG element, `data` the rows that it was
    drawn from, and `timelines` has one entry per lane.
    """

    id: str
    paper: str
    number: str
    title: str
    prose: Markup
    notes: list[tuple[str, Markup]]
    runs: list[dict[str, str]]
    claims: list[Judged]
    errata: list[dict[str, Any]]
    picture: Markup
    data: list[dict[str, str]]
    timelines: list[Timeline] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        """Number of claims by verdict, in both lanes and on every basis."""
        return Counter(each.verdict.verdict for each in self.claims)


@dataclass(frozen=True)
class Paper:
    """A paper with its drawn exhibits; `about` is its paper.yaml."""

    id: str
    name: str
    about: dict[str, Any]
    exhibits: list[Exhibit]
    errata: list[dict[str, Any]]

    @property
    def claims(self) -> list[Judged]:
        """Claims of all exhibits, in both lanes."""
        return [each for exhibit in self.exhibits for each in exhibit.claims]

    @property
    def measured(self) -> str:
        """The runs of this machine in words: how many, where and when."""
        return measured_here([run for exhibit in self.exhibits for run in exhibit.runs])

    @property
    def references(self) -> list[str]:
        """Machines whose committed records are shown next to the runs of this one, with the days."""
        days = defaultdict(set)
        said = [str(text) for exhibit in self.exhibits for lane, text in exhibit.notes if lane == "reference"]
        for machine, day in re.findall(r"([\w.-]+), (\d{4}-\d{2}-\d{2})", " ".join(said)):
            days[machine].add(day)
        return [f"{machine}, {from_to(days[machine])}" for machine in sorted(days)]


@dataclass(frozen=True)
class Site:
    """All content of the report; `profile` is the list of runs that was measured."""

    papers: list[Paper]
    profile: str
    coarse: str
    against: Markup | None = None  # another claims.csv, as JSON

    @property
    def exhibits(self) -> list[Exhibit]:
        """Exhibits of all papers."""
        return [exhibit for paper in self.papers for exhibit in paper.exhibits]

    @property
    def claims(self) -> list[Judged]:
        """Claims of all papers, in both lanes."""
        return [each for paper in self.papers for each in paper.claims]


def gather(claims: Path, figures: Path, runs: Path, profile: str, against: Path | None = None) -> Site:
    """Return the site of `claims` (claims.csv), `figures` (folder of the captions) and `runs` (folder of their lists).

    `against` is another claims.csv to compare with. Raises TableError if a built exhibit is not drawn.
    """
    compared = against and embedded(against)
    verdicts = read_verdicts(claims)
    decided = defaultdict(list)
    for each in judged.all_of(verdicts):
        decided[each.verdict.exhibit_id].append(each)
    papers = []
    for paper, name in registry.PAPERS.items():
        path = registry.file_of(paper, "paper.yaml")
        tidy.check(about := registry.read(path), "paper.schema.json", str(path))
        entries = [e for e in registry.exhibits() if e["paper"] == paper and e["status"] == "built"]
        errata = (errata_of(paper) or {"errata": []})["errata"]
        drawn = [exhibit(entry, figures, runs, decided[entry["id"]], errata) for entry in entries]
        papers.append(Paper(paper, name, about, drawn, errata))
    return Site(papers, profile, judged.coarse_twins(verdicts), compared)


def exhibit(
    entry: dict[str, Any], figures: Path, runs: Path, claims: list[Judged], errata: list[dict[str, Any]]
) -> Exhibit:
    """Return one exhibit with the content of its caption, runs and claims."""
    path = figures / f"{entry['id']}.md"
    if not path.exists():
        raise tidy.TableError(f"{entry['id']} is not drawn yet; draw it with: snakemake --cores all {entry['id']}")
    caption = path.read_text()
    prose, notes = parts(caption)
    ids = {each.verdict.claim_id for each in claims}
    said = " ".join([caption, *(each.why for each in claims)])
    cited = set(re.findall(r"\berratum ([A-Z]\d+)\b", said))
    mine = [each for each in errata if each["id"] in cited or ids.intersection(each.get("claims", ()))]
    title = opening(entry["title"])
    listed, rows = read_rows(runs / f"{entry['id']}.csv"), read_rows(figures / f"{entry['id']}.csv")
    shown = picture.inlined(figures / f"{entry['id']}.svg", title)
    who = entry["id"], entry["paper"], entry["number"]
    return Exhibit(*who, title, prose, notes, listed, claims, mine, shown, rows, timelines_of(rows))


def parts(caption: str) -> tuple[Markup, list[tuple[str, Markup]]]:
    """Return the prose of a caption without its bold title, and its list as (lane or "", HTML)."""
    lines = caption.strip().splitlines()
    prose = " ".join(line for line in lines if not line.startswith("- "))
    notes = []
    for line in (line[2:] for line in lines if line.startswith("- ")):
        lane, colon, rest = line.partition(": ")
        known = bool(colon) and lane in (*tidy.LANES, "reference")
        notes.append((lane, markdown(rest)) if known else ("", markdown(line)))
    return markdown(re.sub(r"^\*\*.+?\*\*\s*", "", prose)), notes


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the lines of an exhibit's list of runs or table; empty for a drawing of structure or without a run."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def measured_here(runs: list[dict[str, str]]) -> str:
    """Return in words how many runs were made, on which machine and when; empty if only the machine was probed."""
    own = {run["run_id"]: run for run in runs if run["kind"] != "testbed"}
    if not own:
        return ""
    machines = {f"{r['host']} ({r['cpu']}, {r['cores']} cores, {r['memory_gib']} GiB)" for r in own.values()}
    days = from_to({run["started_at"][:10] for run in own.values()})
    return f"{len(own)} {'run' if len(own) == 1 else 'runs'} on {' and '.join(sorted(machines))}, {days}"


def from_to(days: set[str]) -> str:
    """Return the first and the last of some days, or the day if they are the same."""
    return " to ".join(dict.fromkeys((min(days), max(days))))


def by_lane(claims: list[Judged]) -> list[tuple[str, str, Counter[str]]]:
    """Return (lane, basis, number by verdict) for each lane and basis that has a claim."""
    found: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for verdict in (each.verdict for each in claims):
        found[verdict.lane, verdict.basis][verdict.verdict] += 1
    return [(lane, basis, found[lane, basis]) for lane in LANES for basis in judged.BASES if found[lane, basis]]
