"""How to cite the project and the five papers: CITATION.cff, .zenodo.json and codemeta.json.

usage: python -m workflows.derive.citation     (from the top of the checkout)

All three say the same, from pyproject.toml and each paper's `paper.yaml`: Citation File Format 1.2.0, Zenodo's deposit
metadata, CodeMeta 3.0. A test compares them with what this program writes.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from workflows import registry

ROOT = Path(__file__).resolve().parents[2]
AUTHORS = "The memascend developers"
ABSTRACT = (
    "A library that fine-tunes all weights of a large language model with little host memory, by keeping optimizer "
    "states, weights and activations on SSDs, several drives or CXL memory; and a harness that measures five published "
    "offloading systems on equal terms and redraws every figure and table of their papers."
)


def project() -> dict[str, Any]:
    """Return the section `project` of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def papers() -> list[dict[str, Any]]:
    """Return title, authors and, where known, `doi`, `venue` and `year` of each paper, in the project's order.

    An arXiv number gives a DOI, and the year of its first version.
    """
    found = []
    for name in registry.PAPERS:
        described = yaml.safe_load((ROOT / f"workflows/papers/{name}/paper.yaml").read_text())
        source = described.get("source", "")
        doi = re.search(r"doi (10\.\S+)", source)
        arxiv = re.search(r"arXiv (\d{4}\.\d{5})", source)
        identifier = doi[1] if doi else f"10.48550/arXiv.{arxiv[1]}" if arxiv else None
        venue = described.get("venue", "arXiv" if arxiv else None)
        year = described.get("year", 2000 + int(arxiv[1][:2]) if arxiv else None)
        each = {"title": described["title"], "authors": described["authors"], "doi": identifier}
        found.append(each | {"venue": venue, "year": year})
    return found


def person(name: str) -> dict[str, str]:
    """Return a name by its parts, the last word as the family name."""
    given, _, family = name.rpartition(" ")
    return {"family-names": family, "given-names": given}


def citation_file() -> str:
    """Return the text of CITATION.cff."""
    references = []
    for each in papers():
        preprint = each["venue"] in (None, "arXiv")
        place = {"journal" if preprint else "collection-title": each["venue"], "year": each["year"], "doi": each["doi"]}
        references.append(
            {"type": "article" if preprint else "conference-paper", "title": each["title"]}
            | {"authors": [person(name) for name in each["authors"]]}
            | {key: value for key, value in place.items() if value}
        )
    said = {
        "cff-version": "1.2.0",
        "message": "If you use this software, please cite it, and the papers whose methods you use.",
        "type": "software",
        "title": project()["name"],
        "abstract": ABSTRACT,
        "authors": [{"name": AUTHORS}],
        "version": project()["version"],
        "license": project()["license"],
        "keywords": project()["keywords"],
        "references": references,
    }
    return yaml.safe_dump(said, sort_keys=False, width=110, allow_unicode=True)


def reference(paper: dict[str, Any]) -> str:
    """Return authors, title, venue and year in one line."""
    place = ", ".join(str(paper[key]) for key in ("venue", "year") if paper[key])
    return f"{', '.join(paper['authors'])}. {paper['title']}.{f' {place}.' if place else ''}"


def zenodo() -> str:
    """Return the text of .zenodo.json."""
    related = [
        {"identifier": each["doi"], "relation": "isDerivedFrom", "resource_type": "publication-article"}
        for each in papers()
        if each["doi"]
    ]
    said = {
        "upload_type": "software",
        "title": project()["name"],
        "description": ABSTRACT,
        "creators": [{"name": AUTHORS}],
        "version": project()["version"],
        "license": project()["license"],
        "keywords": project()["keywords"],
        "references": [reference(each) for each in papers()],
        "related_identifiers": related,
    }
    return json.dumps(said, indent=2, ensure_ascii=False) + "\n"


def codemeta() -> str:
    """Return the text of codemeta.json."""

    def article(paper: dict[str, Any]) -> dict[str, Any]:
        writers = [
            {"@type": "Person", "givenName": name["given-names"], "familyName": name["family-names"]}
            for name in map(person, paper["authors"])
        ]
        known = {"@id": f"https://doi.org/{paper['doi']}"} if paper["doi"] else {}
        venue = {"isPartOf": {"@type": "CreativeWork", "name": paper["venue"]}} if paper["venue"] else {}
        year = {"datePublished": str(paper["year"])} if paper["year"] else {}
        return {"@type": "ScholarlyArticle", **known, "name": paper["title"], "author": writers} | venue | year

    said = {
        "@context": "https://w3id.org/codemeta/3.0",
        "@type": "SoftwareSourceCode",
        "name": project()["name"],
        "description": ABSTRACT,
        "author": [{"@type": "Organization", "name": AUTHORS}],
        "version": project()["version"],
        "license": f"https://spdx.org/licenses/{project()['license']}",
        "keywords": project()["keywords"],
        "programmingLanguage": ["Python", "C++"],
        "operatingSystem": "Linux",
        "runtimePlatform": f"Python {project()['requires-python']}",
        "citation": [article(each) for each in papers()],
    }
    return json.dumps(said, indent=2, ensure_ascii=False) + "\n"


FILES = {"CITATION.cff": citation_file, ".zenodo.json": zenodo, "codemeta.json": codemeta}


def main() -> None:
    for name, content in FILES.items():
        (ROOT / name).write_text(content(), encoding="utf-8")
        print(name)


if __name__ == "__main__":
    main()
