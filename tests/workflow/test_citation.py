"""CITATION.cff, .zenodo.json and codemeta.json agree with each other, with the project and with its papers' folders."""

import json
import re
from pathlib import Path

import pytest
import yaml

import memascend
from workflows import registry
from workflows.derive import citation

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", citation.FILES)
def test_committed_citation_file_matches_the_project(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == citation.FILES[name](), "python -m workflows.derive.citation"


def test_citation_files_agree_on_version_licence_papers_and_authors() -> None:
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    zenodo, codemeta = (json.loads((ROOT / name).read_text()) for name in (".zenodo.json", "codemeta.json"))
    assert {cff["version"], zenodo["version"], codemeta["version"]} == {memascend.__version__}
    assert cff["license"] == zenodo["license"] == codemeta["license"].rpartition("/")[2]
    papers = [
        (each["title"], [f"{name['given-names']} {name['family-names']}" for name in each["authors"]])
        for each in cff["references"]
    ]
    assert len(papers) == len(registry.PAPERS)
    assert papers == [
        (each["name"], [f"{name['givenName']} {name['familyName']}" for name in each["author"]])
        for each in codemeta["citation"]
    ]
    places = [f"{each.get('journal') or each['collection-title']}, {each['year']}." for each in cff["references"]]
    assert zenodo["references"] == [
        f"{', '.join(names)}. {title}. {place}" for (title, names), place in zip(papers, places, strict=True)
    ]
    assert places == [f"{each['isPartOf']['name']}, {each['datePublished']}." for each in codemeta["citation"]]
    known = [each["doi"] for each in cff["references"] if "doi" in each]
    assert known == [each["identifier"] for each in zenodo["related_identifiers"]]


def test_readme_cites_the_same_titles_authors_and_identifiers() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    for paper in citation.papers():
        assert paper["title"] in text
        for name in paper["authors"]:
            family = name.split()[-1]
            assert re.search(rf"\. {family}\b", text), name
        assert re.search(rf"{paper['doi'].removeprefix('10.48550/arXiv.')}\), {paper['year']}\.", text) or (
            f"SC '25, [doi {paper['doi']}]" in text
        )
        if paper["doi"]:
            assert paper["doi"].removeprefix("10.48550/arXiv.") in text
