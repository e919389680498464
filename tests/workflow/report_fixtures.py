"""A report of the smoke set, and its pages as a parser reads them."""

from __future__ import annotations

import shutil
from html import escape
from html.parser import HTMLParser
from pathlib import Path

from workflows import registry, tidy
from workflows.derive import claims, report
from workflows.derive.site import against, content

REGISTRY = registry.exhibits()
BUILT = [entry["id"] for entry in REGISTRY if entry["status"] == "built"]
# Files that are not a claims.csv, and the message about each, in the terminal and on the page.
HEAD, ROW = ",".join(against.COLUMNS), "x-fig01-a,measured,deviates,2.5,1 GiB,GiB"
BAD_SETS = {
    "": "no claims.csv: column 'claim_id' is missing",
    "claim_id,lane,value\nx,measured,1\n": "no claims.csv: column 'verdict' is missing",
    HEAD: "a claims.csv without a claim",
    f"{HEAD}\n{ROW.replace('measured', 'guessed')}": "claim 1: unknown lane 'guessed'; lanes are modelled, measured",
    f"{HEAD}\n{ROW.replace('deviates', 'fine')}": "claim 1: unknown verdict 'fine'; verdicts are reproduced, deviates",
    f"{HEAD}\n{ROW.replace('2.5', 'many')}": "claim 1: value 'many' is no number",
    f"{HEAD}\n{ROW.replace('x-fig01-a', '')}": "claim 1: it has no id",
    f"{HEAD}\n{ROW}\n{ROW}\n": "claim 2: x-fig01-a stands twice in lane measured",
}
# A time line of two lanes, and a row that is not part of it. Its exhibit draws one too.
TIMELINE = "memascend-fig01"
TASKS = [
    ("modelled", "SSD, read", "B1", 0.5, 0.25),
    ("modelled", "GPU </script>", "B1", 0.75, 1.25),
    ("modelled", "SSD, read", "B2", 1.0, 3.0),
    ("measured", "GPU", "B1", 0.0, 0.5),
]
# Replaces every exhibit's picture: as matplotlib writes one, with a value that a pointer shows.
TITLE = "MemAscend & <others>, measured: 4.2 GiB"
PICTURE = f"""<?xml version="1.0" encoding="utf-8" standalone="no"?>
<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "http://www.w3.org/Graphics/SVG/1.1/DTD/svg11.dtd">
<svg width="648pt" height="302.4pt" viewBox="0 0 648 302.4" xmlns="http://www.w3.org/2000/svg" version="1.1">
 <metadata><title>of nobody</title></metadata>
 <defs><style type="text/css">*{{stroke-linejoin: round}}</style></defs>
 <g id="figure_1"><path d="M 0 0 h 648 v 302 h -648 z" style="fill: #ffffff"/>
  <g class="value"><title>{escape(TITLE)}</title><path d="M 10 10 h 50 v 30 h -50 z" style="fill: #009e73"/></g></g>
</svg>
"""
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
ENDS = ("svg", "pdf", "png", "csv")


class Page(HTMLParser):
    """A parsed page: its elements with their attributes, texts of rows of claims, and tags that do not match."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.open, self.crossed = path, [], []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.rows: dict[str, tuple[dict[str, str], str]] = {}
        self.text, self._row = "", ""
        self.feed(path.read_text(encoding="utf-8"))
        self.crossed += self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.elements.append((tag, given))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr" and "data-verdict" in given:
            self._row = given["id"]
            self.rows[self._row] = given, ""

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.crossed.append(f"/{tag}")
        self._row = "" if tag == "tr" else self._row

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._row:
            given, text = self.rows[self._row]
            self.rows[self._row] = given, text + data

    @property
    def ids(self) -> list[str]:
        return [given["id"] for _, given in self.elements if "id" in given]

    def of(self, tag: str, attribute: str) -> list[str]:
        return [given[attribute] for name, given in self.elements if name == tag and attribute in given]

    @property
    def targets(self) -> list[str]:
        """Return what the page links to or loads."""
        pairs = (("a", "href"), ("link", "href"), ("img", "src"), ("script", "src"))
        return [target for tag, attribute in pairs for target in self.of(tag, attribute)]


def write(folder: Path, raw: Path, other: Path | None = None) -> None:
    """Write the report of a folder that `filled` made, compared with another claims.csv if one is given."""
    site = content.gather(folder / "claims.csv", folder / "figures", folder / "runs", "smoke", other)
    report.write(site, folder / "figures", raw)


def filled(made: Path, results: Path) -> Path:
    """Make pictures (one drawing for all), captions, lists of runs and
    claims.csv of a set of results, and their report."""
    figures, runs = made / "figures", made / "runs"
    figures.mkdir()
    runs.mkdir()
    for entry in (entry for entry in REGISTRY if entry["id"] in BUILT):
        for end in ENDS:
            (figures / f"{entry['id']}.{end}").write_text(PICTURE if end == "svg" else "")
        words = (
            f"**{entry['id']}.** Prose & <more>.\n\n- measured: twins on local\n- reference: elsewhere, 2026-01-02\n"
        )
        (figures / f"{entry['id']}.md").write_text(words)
        if "measured" in entry["lanes"] and entry["paper"] == "memascend":
            shutil.copy(results / "runs.csv", runs / f"{entry['id']}.csv")
    named = ("lane", "series", "metric", "x_value", "value")
    rows = [dict(zip(named, task, strict=True)) | {"x_name": "begin (s)", "testbed": "c1"} for task in TASKS]
    tidy.write_table([*rows, rows[0] | {"x_name": "constant"}], figures / f"{TIMELINE}.csv")
    verdicts = claims.decide_all(claims.of_built(registry.claims(), REGISTRY), results / "exhibits")
    claims.write(verdicts, made / "claims.csv")
    write(made, results / "raw")
    return made
