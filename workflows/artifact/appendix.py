"""Artifact appendices of a bundle, one per paper and one for the whole, as PDF (by typst) and LaTeX.

The sections are those of EuroSys' artifact appendix: abstract, requirements, set-up, claims with their experiments
(human and compute minutes), reuse. The appendix of the whole ends with the fields of cTuning's checklist. Claims are
counted from claims.json, minutes from the seconds in the records.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typst

from workflows import registry
from workflows.artifact.layout import RECORDS

HUMAN_MINUTES = 2  # to type a command, and to look at a figure and its verdicts


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; words in `backquotes` are set as code."""

    text: str


@dataclass(frozen=True)
class Table:
    """A table; `widths` are fractions of the text column."""

    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    widths: tuple[float, ...]


Block = Heading | Paragraph | Table


def minutes(folder: Path, records: list[str]) -> float:
    """Return the minutes of an exhibit's runs, one after the other."""
    read = (json.loads((folder / RECORDS / name).read_text(encoding="utf-8")) for name in records)
    return sum(record.get("wall_s") or 0.0 for record in read) / 60


def counted(claims: list[dict[str, Any]], exhibit: str, lane: str) -> str:
    """Return in words how many held-out claims are reproduced among those decided; a dash if none is decided."""
    found = Counter(
        claim["verdict"]
        for claim in claims
        if (claim["exhibit_id"], claim["lane"], claim["basis"]) == (exhibit, lane, "held out")
    )
    decided = sum(found[verdict] for verdict in registry.DECIDED)
    return f"{found['reproduced']} of {decided}" if decided else "-"


def experiments(folder: Path, manifest: dict[str, Any], paper: str) -> Table:
    """Return one row per exhibit of a paper with a decided held-out claim; its claim and experiment share a number."""
    claims = json.loads((folder / "claims.json").read_text(encoding="utf-8"))
    rows, numbers = [], {entry["id"]: entry["number"] for entry in registry.exhibits()}
    for name, each in manifest["exhibits"].items():
        verdicts = tuple(counted(claims, name, lane) for lane in ("modelled", "measured"))
        if each["paper"] == paper and set(verdicts) != {"-"}:
            time = f"{HUMAN_MINUTES} + {minutes(folder, each['records']):.1f}"
            rows.append((f"C{len(rows) + 1}, E{len(rows) + 1}", f"{numbers[name]}: {each['title']}", *verdicts, time))
    header = ("", "exhibit", "modelled", "measured", "minutes")
    return Table(header, rows, (0.13, 0.42, 0.15, 0.15, 0.15))


def requirements(manifest: dict[str, Any]) -> list[Block]:
    """Return the sections on access, hardware, software and set-up."""
    packages = manifest["packages"]
    named = ", ".join(f"{name} {packages[name]}" for name in ("torch", "deepspeed", "transformers") if name in packages)
    return [
        Heading("Description and requirements"),
        Paragraph(
            f"How to access. This bundle; commit `{manifest['commit'][:12]}` of the project. Hardware. Two cores, "
            "16 GiB of memory, 10 GB of disk; no GPU. Software. Linux, Python 3.11 or newer, a C++ compiler, "
            f"libaio; packages in the versions of `source/constraints.txt` ({named}). Benchmarks. None from "
            "outside: models are scaled-down (all widths divided by k) with initialised weights, texts are made "
            "from installed files."
        ),
        Heading("Set-up"),
        Paragraph(
            "In `source/` of the bundle, or in a checkout: `make setup` (6 to 13 minutes on two cores; the package "
            "registry is the only network access), then `. .venv/bin/activate`. A first look: `make smoke`. To "
            "check the bundle itself without a network: `python -m workflows.artifact.verify FILE` (2 minutes on "
            "two cores): it draws all exhibits and decides all claims again from the zip alone, and compares every "
            "byte."
        ),
    ]


def of_paper(folder: Path, manifest: dict[str, Any], paper: str) -> tuple[str, list[Block]]:
    """Return title and blocks of a paper's appendix."""
    about = registry.read(registry.file_of(paper, "paper.yaml"))
    table = experiments(folder, manifest, paper)
    drawn = sum(each["paper"] == paper for each in manifest["exhibits"].values())
    return f"Artifact appendix: {about['title']}", [
        Heading("Abstract"),
        Paragraph(
            f"{about['idea']} The artifact redraws {drawn} figures, tables and structures of the paper from "
            "printed, modelled and measured numbers, and gives verdicts on the numbers that the paper states."
        ),
        *requirements(manifest),
        Heading("Claims and experiments"),
        Paragraph(
            "Claim Ci: the numbers that the paper states for the exhibit hold, within the tolerance of their kind "
            "(`source/docs/tolerances.md`). Experiment Ei decides it: [preparation] set-up as above; [execution] "
            "`snakemake --cores all ID`, with the exhibit's id as in `snakemake exhibits`; [results] the figure in "
            "`figures/`, and the verdict, value and reason of each number on its page. Counted are claims that "
            "were held out: their number took no part in finding the value. Minutes: human + compute, the runs of "
            f"the exhibit one after the other in the profile {manifest['profile']}; exhibits share runs."
        ),
        table,
    ]


def by_paper(folder: Path, manifest: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return for each paper its number of exhibits, and by lane its held-out claims reproduced and decided."""
    found = []
    for paper, name in registry.PAPERS.items():
        rows = experiments(folder, manifest, paper).rows
        lanes = [[row[column].split(" of ") for row in rows if row[column] != "-"] for column in (2, 3)]
        totals = [
            f"{sum(int(a) for a, _ in lane)} of {sum(int(b) for _, b in lane)}" if lane else "-" for lane in lanes
        ]
        found.append((name, str(sum(e["paper"] == paper for e in manifest["exhibits"].values())), *totals))
    return found


def checklist(folder: Path, manifest: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the fields of cTuning's checklist with their values."""
    names: dict[str, None] = {}
    for each in manifest["exhibits"].values():
        names |= dict.fromkeys(each["records"])
    whole = f"{minutes(folder, [*names]):.0f} minutes of runs one after the other ({len(names)} records)"
    packages = manifest["packages"]
    return [
        (
            "Algorithm",
            "offloading of optimizer states, gradients, weights and activations; their placement and schedules",
        ),
        ("Program", "memascend (library and command line) and a Snakemake workflow"),
        (
            "Compilation",
            "a C++20 extension, compiled by set-up; DeepSpeed's CPU operators, compiled for the host's CPU",
        ),
        ("Transformations, binary", "none; none"),
        ("Model", "Llama 3, Qwen 2.5, Qwen 3 and Mistral configurations, initialised weights, widths divided by k"),
        ("Data set", "made from installed text files; nothing is downloaded"),
        ("Run-time environment", f"Linux, Python {packages.get('python', '')}, torch {packages.get('torch', '')}"),
        ("Hardware", "CPU; block device with O_DIRECT; a GPU for the profile gpu alone"),
        ("Run-time state", "timed runs hold a lock; nothing else should run beside them"),
        ("Execution", "snakemake; memory runs side by side, timed runs alone"),
        ("Metrics", "peak host and device memory, bytes read and written, seconds, throughput, loss"),
        ("Output", "figures, tables, verdicts, a report in HTML; this bundle"),
        ("Experiments", f"{len(manifest['exhibits'])} exhibits, each with its command"),
        ("Disk space", "10 GB"),
        ("Time to prepare", "6 to 13 minutes on two cores"),
        ("Time to complete", f"{whole}, profile {manifest['profile']}"),
        ("Publicly available", "not yet archived: no DOI"),
        ("Licenses", "Apache-2.0"),
        ("Workflow framework", f"Snakemake {packages.get('snakemake', '')}"),
    ]


def of_all(folder: Path, manifest: dict[str, Any]) -> tuple[str, list[Block]]:
    """Return title and blocks of the appendix of the whole artifact, with the checklist."""
    return f"Artifact appendix: memascend {manifest['version']}, five papers", [
        Heading("Abstract"),
        Paragraph(
            "Five systems that fine-tune large language models with little GPU and host memory, implemented on "
            "equal terms, and a workflow that measures them on scaled-down models, models them at full size, "
            "redraws every figure and table of their papers, and gives verdicts on the numbers that the papers state."
        ),
        *requirements(manifest),
        Heading("Claims and experiments"),
        Paragraph(
            "Held-out claims reproduced, of those decided, by lane; each paper's appendix has its exhibits. "
            f"Experiment: `make figures PROFILE={manifest['profile']}`, then open `figures/index.html`."
        ),
        Table(("paper", "exhibits", "modelled", "measured"), by_paper(folder, manifest), (0.37, 0.18, 0.23, 0.22)),
        Heading("Checklist (cTuning)"),
        Table(("field", ""), checklist(folder, manifest), (0.32, 0.68)),
        Heading("Reuse"),
        Paragraph(
            "`source/docs/tutorials/add-a-system.md` adds a sixth system from an empty folder to a bar in a "
            "figure; `memascend compare A.zip B.zip` names the claims that two bundles decide differently."
        ),
    ]


# ------------------------------------------------------------------------------------------------------- renderers

TYPST_SPECIAL, TEX_SPECIAL = "\\#$*_<>@[]~", "&%$#_{}"


def marked(text: str, plain: Callable[[str], str], code: Callable[[str], str]) -> str:
    """Return text with its `code` parts and the rest each escaped by their own function."""
    return "".join(code(part) if odd % 2 else plain(part) for odd, part in enumerate(text.split("`")))


def typst_of(title: str, blocks: list[Block]) -> str:
    """Return the typst source of a PDF on letter paper in two columns."""

    def plain(text: str) -> str:
        return "".join(f"\\{each}" if each in TYPST_SPECIAL else each for each in text)

    def words(text: str) -> str:
        return marked(text, plain, lambda part: f"#raw({json.dumps(part, ensure_ascii=False)})")

    out = [
        f"#set document(title: {json.dumps(title, ensure_ascii=False)}, date: none)",
        '#set page("us-letter", columns: 2, margin: (x: 1.9cm, y: 2cm), numbering: "1")',
        '#set text(size: 9pt, font: "Libertinus Serif")',
        "#set par(justify: true, leading: 0.5em)",
        '#set heading(numbering: "A.1")',
        "#show raw: set text(size: 8pt)",
        "#show heading: set text(size: 10pt)",
        '#place(top, scope: "parent", float: true)[#align(center, text(14pt, weight: "bold")[' + plain(title) + "])]",
    ]
    for block in blocks:
        if isinstance(block, Heading):
            out.append(f"= {plain(block.text)}")
        elif isinstance(block, Paragraph):
            out.append(words(block.text))
        else:
            widths = ", ".join(f"{width:g}fr" for width in block.widths)
            cells = [f"[*{plain(text)}*]" if text else "[]" for text in block.header]
            cells += [f"[{words(text)}]" for row in block.rows for text in row]
            out.append(
                f"#text(7.5pt)[#set par(justify: false)\n#table(columns: ({widths}), inset: 2pt, stroke: (x, y) => "
                f"(bottom: 0.3pt), {', '.join(cells)})]"
            )
    return "\n\n".join(out) + "\n"


def tex_of(title: str, blocks: list[Block]) -> str:
    """Return the same content as LaTeX source, using packages that every distribution has."""

    def plain(text: str) -> str:
        escaped = "".join(f"\\{each}" if each in TEX_SPECIAL else each for each in text.replace("\\", "/"))
        return escaped.replace("~", r"\textasciitilde{}").replace("^", r"\textasciicircum{}")

    def words(text: str) -> str:
        return marked(text, plain, lambda part: rf"\texttt{{{plain(part)}}}")

    out = [
        "% Made by workflows.artifact.appendix; compile with pdflatex.",
        r"\documentclass[twocolumn]{article}",
        r"\usepackage[utf8]{inputenc}\usepackage[T1]{fontenc}\usepackage[letterpaper,margin=1.9cm]{geometry}",
        r"\usepackage{array}\usepackage{textcomp}\sloppy\setlength{\parindent}{0pt}",
        rf"\title{{{plain(title)}}}\author{{}}\date{{}}",
        r"\begin{document}\maketitle\appendix",
    ]
    for block in blocks:
        if isinstance(block, Heading):
            out.append(rf"\section{{{plain(block.text)}}}")
        elif isinstance(block, Paragraph):
            out.append(words(block.text))
        else:
            columns = "".join(
                rf">{{\raggedright\arraybackslash}}p{{{0.88 * width:.3f}\columnwidth}}" for width in block.widths
            )
            lines = [" & ".join(map(words, row)) + r" \\ \hline" for row in block.rows]
            head = " & ".join(rf"\textbf{{{plain(text)}}}" if text else "" for text in block.header) + r" \\ \hline"
            body = "\n".join([head, *lines])
            out.append(
                rf"{{\scriptsize\setlength{{\tabcolsep}}{{2pt}}\begin{{tabular}}{{{columns}}}{body}\end{{tabular}}}}"
            )
    return "\n\n".join([*out, r"\end{document}"]) + "\n"


def sources(folder: Path, manifest: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return for each appendix its source for typst and for LaTeX."""
    made = {"memascend-artifact": of_all(folder, manifest)}
    made |= {f"paper-{paper}": of_paper(folder, manifest, paper) for paper in registry.PAPERS}
    return {name: (typst_of(*each), tex_of(*each)) for name, each in made.items()}


def write(folder: Path, manifest: dict[str, Any]) -> None:
    """Write appendix/<paper>.pdf and .tex, and those of the whole, into a filled bundle."""
    (folder / "appendix").mkdir()
    for name, (typeset, tex) in sources(folder, manifest).items():
        pdf = typst.compile(typeset.encode(), timestamp=0, ignore_system_fonts=True)
        (folder / "appendix" / f"{name}.pdf").write_bytes(pdf)
        (folder / "appendix" / f"{name}.tex").write_text(tex, encoding="utf-8")
