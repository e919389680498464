"""The pages of the site, each from its template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from workflows import registry
from workflows.derive.claims import LANES, score
from workflows.derive.site import judged
from workflows.derive.site.content import Exhibit, Site, by_lane
from workflows.derive.site.templates import render
from workflows.derive.site.timelines import embedded


def every(site: Site) -> Iterator[tuple[str, str]]:
    """Yield (path in the site's folder, text) of each page."""
    yield "index.html", front(site)
    yield "claims.html", claims(site)
    yield "errata.html", errata(site)
    shown = site.exhibits
    for before, one, after in zip([None, *shown], shown, [*shown[1:], None], strict=False):
        yield f"exhibits/{one.id}.html", exhibit(one, before, after)


def common(here: str, root: str = "") -> dict[str, Any]:
    """Return the values that each template reads; `here` is the page's own place in the site's folder."""
    return {"here": here, "root": root, "names": registry.PAPERS, "verdicts": judged.VERDICTS}


def front(site: Site) -> str:
    """Return the first page: the papers with their scores, then every exhibit."""
    scores = {paper.id: by_lane(paper.claims) for paper in site.papers}
    return render("front", "Five papers, reproduced", **common("index.html"), site=site, scores=scores)


def exhibit(one: Exhibit, before: Exhibit | None, after: Exhibit | None) -> str:
    """Return the page of one exhibit, with its neighbours in the order of the papers."""
    title = f"{registry.PAPERS[one.paper]}, {one.number}: {one.title}"
    shown = {"one": one, "before": before, "after": after, "timelines": embedded(one.timelines)}
    return render("exhibit", title, **common(f"exhibits/{one.id}.html", "../"), **shown)


def claims(site: Site) -> str:
    """Return the page of all claims; without JavaScript they are in the order of the papers."""
    decided = [each.verdict for each in site.claims]
    lanes = {lane: score(decided, lane) for lane in LANES}
    exhibits = {each.id: each for each in site.exhibits}
    choices = {"paper": registry.PAPERS, "lane": LANES, "verdict": judged.VERDICTS, "basis": judged.BASES}
    return render(
        "claims",
        "Claims",
        **common("claims.html"),
        site=site,
        lanes=lanes,
        exhibits=exhibits,
        choices=choices,
        against=site.against,
    )


def errata(site: Site) -> str:
    """Return the page of numbers in the papers that contradict each other."""
    shown = {each.verdict.claim_id: each.verdict.lane for each in reversed(site.claims)}  # the first lane of each
    return render("errata", "Errata", **common("errata.html"), site=site, shown=shown)
