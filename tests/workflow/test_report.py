"""The report as a browser gets it: links work, every exhibit has its page, every deviation has its reason."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
import shutil
from collections import Counter
from html import unescape
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from report_fixtures import BAD_SETS, BUILT, ENDS, REGISTRY, ROW, TASKS, TIMELINE, TITLE, Page, write

from memascend.simulator.trace import read_trace
from workflows import registry, tidy
from workflows.derive import claims
from workflows.derive.site import against, content, judged, picture
from workflows.derive.site.templates import HERE, opening, slug


@pytest.fixture(scope="module")
def lines(report_folder: Path) -> list[dict[str, str]]:
    """Return the lines of claims.csv."""
    with (report_folder / "claims.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_links_and_pictures_exist_and_stay_within_the_site(report_pages: dict[str, Page], report_folder: Path) -> None:
    missing, seen = [], 0
    for name, page in report_pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            assert not parts.scheme, f"{name}: {target}"
            assert not parts.netloc, f"{name}: {target}"
            file = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
            assert file.is_relative_to(report_folder / "figures"), f"{name}: {target} leads out of the site"
            there = file.is_file()
            if there and parts.fragment and "=" not in parts.fragment:
                there = (
                    unquote(parts.fragment) in report_pages[file.relative_to(report_folder / "figures").as_posix()].ids
                )
            missing += [] if there else [f"{name}: {target}"]
            seen += 1
    assert missing == []
    assert seen > 20 * len(BUILT)


def test_pages_are_well_formed_with_unique_ids(report_pages: dict[str, Page]) -> None:
    for name, page in report_pages.items():
        assert page.crossed == [], name
        assert [each for each, count in Counter(page.ids).items() if count > 1] == [], name
        assert page.of("html", "lang") == ["en"]
        assert page.elements.count(("main", {"id": "main"})) == 1
        assert sum(tag == "h1" for tag, _ in page.elements) == 1
        assert all("alt" in given for tag, given in page.elements if tag == "img"), name


def test_exhibit_pages_have_picture_data_command_and_neighbours(report_pages: dict[str, Page]) -> None:
    assert {Path(name).stem for name in report_pages if name.startswith("exhibits/")} == set(BUILT)
    names = {entry["id"]: entry["title"] for entry in REGISTRY}
    for place, exhibit in enumerate(BUILT):
        page = report_pages[f"exhibits/{exhibit}.html"]
        assert page.of("img", "src") == []
        assert page.of("svg", "role")[0] == "img"
        assert page.of("svg", "aria-label")[0] == opening(names[exhibit])
        assert TITLE in page.text
        assert "of nobody" not in page.text
        assert '<style type="text/css">.picture svg *{' in page.path.read_text()
        assert {f"../{exhibit}.{end}" for end in ENDS} <= set(page.of("a", "href"))
        assert f"snakemake --cores all {exhibit}" in page.text
        assert "Prose & <more>." in page.text
        assert f"**{exhibit}" not in page.text
        around = {given["rel"]: given["href"] for tag, given in page.elements if tag == "a" and "rel" in given}
        before, after = BUILT[place - 1 : place], BUILT[place + 1 : place + 2]
        assert around == {
            **({"prev": f"{before[0]}.html"} if before else {}),
            **({"next": f"{after[0]}.html"} if after else {}),
        }


def test_exhibit_page_shows_the_values_as_a_table(report_pages: dict[str, Page]) -> None:
    page = report_pages[f"exhibits/{TIMELINE}.html"].path.read_text()
    rows = re.findall(r"<tr><td>(.*)</td></tr>", page)
    cells = [[unescape(cell) for cell in row.split("</td><td>")] for row in rows]
    expected = [
        [series, "", f"begin (s) {x}", metric, str(value), "", lane] for lane, series, metric, x, value in TASKS
    ]
    assert cells[: len(TASKS)] == expected
    assert len(cells) == len(TASKS) + 1
    assert f"The table behind it ({len(cells)} rows)" in page
    assert "The table behind it" not in report_pages[f"exhibits/{BUILT[-1]}.html"].text  # its table has no row


def test_picture_without_svg_drawing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x-fig01.svg").write_text("")
    with pytest.raises(tidy.TableError, match=r"x-fig01\.svg: no SVG drawing.*snakemake --cores all x-fig01"):
        picture.inlined(tmp_path / "x-fig01.svg", "A title")


def test_timelines_match_their_rows_and_appear_only_on_their_pages(
    report_pages: dict[str, Page], report_folder: Path
) -> None:
    folder = report_folder / "figures/traces"
    files = {path.name for path in folder.iterdir()}
    assert files == {f"{TIMELINE}-{lane}.json" for lane in ("modelled", "measured")}
    found = []
    for lane in ("modelled", "measured"):
        events, facts = read_trace(folder / f"{TIMELINE}-{lane}.json")
        assert (facts["lane"], facts["source"], facts["exhibit"]) == (lane, "c1", TIMELINE)
        found += [(lane, each.resource, each.name, each.begin_s, each.seconds) for each in events]
    assert found == TASKS
    page = report_pages[f"exhibits/{TIMELINE}.html"]
    assert {f"../traces/{name}" for name in files} <= set(page.of("a", "href"))
    text = re.search(r'id="timeline-data">(.*?)</script>', page.path.read_text(), re.S)[1]
    embedded = [
        (lane["lane"], *(each[name] for name in ("resource", "name", "begin", "seconds")))
        for lane in json.loads(text)
        for each in lane["events"]
    ]
    assert embedded == TASKS
    assert [name for name, page in report_pages.items() if "timeline" in page.ids] == [f"exhibits/{TIMELINE}.html"]
    scripts = [name for name, page in report_pages.items() if "../timeline.js" in page.of("script", "src")]
    assert scripts == [f"exhibits/{TIMELINE}.html"]


def test_first_page_lists_papers_and_exhibits_with_titles_and_pictures(
    report_pages: dict[str, Page],
) -> None:
    page = report_pages["index.html"]
    for paper in registry.PAPERS:
        about = registry.read(registry.file_of(paper, "paper.yaml"))
        assert about["title"] in page.text
        assert all(author in page.text for author in about["authors"])
        assert about["picture"] in BUILT
        assert about["picture"].startswith(f"{paper}-")
    assert all(f"{exhibit}.png" in page.of("img", "src") for exhibit in BUILT)
    assert all(content.opening(entry["title"]) in page.text for entry in REGISTRY if entry["id"] in BUILT)
    assert "Not built" not in page.text
    assert re.search(r"\d+ runs on local \(Example CPU, 2 cores, 16.0 GiB\), 2026-01-02, profile smoke", page.text)
    assert "elsewhere, 2026-01-02" in page.text


def test_scores_on_the_first_page_match_the_claims(report_pages: dict[str, Page], lines: list[dict[str, str]]) -> None:
    count = Counter((*(slug(each[name]) for name in ("lane", "verdict", "basis")), paper_of(each)) for each in lines)
    links = [
        urlsplit(target) for target in report_pages["index.html"].of("a", "href") if target.startswith("claims.html#")
    ]
    linked = [parse_qs(link.fragment) for link in links if "verdict" in link.fragment]
    keys = {(*(slug(named[name][0]) for name in ("lane", "verdict", "basis")), named["paper"][0]) for named in linked}
    assert keys == set(count)
    source = (report_pages["index.html"].path).read_text()
    numbers = {
        found[0]: int(found[1]) for found in re.findall(r'href="claims.html#([^"]*verdict[^"]*)">(\d+)<', source)
    }
    for fragment, number in numbers.items():
        named = parse_qs(fragment.replace("&amp;", "&"))
        key = *(slug(named[name][0]) for name in ("lane", "verdict", "basis")), named["paper"][0]
        assert number == count[key], fragment
    assert sum(numbers.values()) == len(lines)


def paper_of(line: dict[str, str]) -> str:
    return line["exhibit_id"].rpartition("-")[0]


def test_filter_attributes_agree_with_the_claims_table(
    report_pages: dict[str, Page], lines: list[dict[str, str]]
) -> None:
    rows = report_pages["claims.html"].rows
    assert sorted(rows) == sorted(f"{line['claim_id']}.{line['lane']}" for line in lines)
    for line in lines:
        given, _ = rows[f"{line['claim_id']}.{line['lane']}"]
        assert given["data-paper"] == paper_of(line)
        assert [given[f"data-{name}"] for name in ("lane", "verdict", "basis")] == [
            line["lane"],
            line["verdict"],
            line["basis"],
        ]
        assert bool(given["data-distance"]) == bool(line["value"]) == bool(given["data-tolerances"])
    choices = {(given.get("value")) for tag, given in report_pages["claims.html"].elements if tag == "option"}
    assert {
        value for line in lines for value in (paper_of(line), line["lane"], line["verdict"], line["basis"])
    } <= choices


def test_only_deviating_claims_are_beyond_their_tolerance(report_pages: dict[str, Page]) -> None:
    decided = 0
    for given, _ in report_pages["claims.html"].rows.values():
        if given["data-verdict"] in (claims.REPRODUCED, claims.DEVIATES):
            off = float(given["data-tolerances"])
            # The value is rounded to six digits.
            assert off <= 1.001 if given["data-verdict"] == claims.REPRODUCED else off >= 0.999, given["id"]
            decided += 1
    assert decided > 100


def test_unreproduced_claims_show_their_reason_on_both_pages(
    report_pages: dict[str, Page], lines: list[dict[str, str]]
) -> None:
    seen = Counter()
    for line in lines:
        if line["verdict"] == claims.REPRODUCED:
            continue
        reason = line["deviates_because"] if line["verdict"] == claims.DEVIATES else line["reason"]
        reason = reason or "No cause is recorded for this run."
        for name in ("claims.html", f"exhibits/{line['exhibit_id']}.html"):
            text = report_pages[name].rows[f"{line['claim_id']}.{line['lane']}"][1]
            assert reason[1:] in text, f"{name}: {line['claim_id']}"  # the page capitalises the first letter
        seen[line["verdict"]] += 1
    assert seen[claims.DEVIATES] > 10
    assert seen[claims.NOT_CHECKABLE] > 10


def test_pages_show_quotes_of_claims_and_their_errata(
    report_pages: dict[str, Page],
) -> None:
    quotes = {claim["id"]: claim["quote"] for claim in registry.claims()}
    for name, page in report_pages.items():
        for anchor, (_, text) in page.rows.items():
            assert judged.plain(quotes[anchor.rpartition(".")[0]]) in text, f"{name}: {anchor}"
    assert "5.507 s / 13.36 % = 41.22 s" in report_pages["exhibits/memascend-fig03.html"].text
    assert "memascend-M5" in report_pages["exhibits/memascend-fig03.html"].ids
    assert "memascend-M5" not in report_pages["exhibits/memascend-fig11.html"].ids


def test_runs_link_to_copies_of_their_records(report_pages: dict[str, Page], report_folder: Path, smoke: Path) -> None:
    with (smoke / "runs.csv").open(newline="") as file:
        runs = [line["run_id"] for line in csv.DictReader(file)]
    assert len(runs) > 3
    for run in runs:
        assert f"../records/{run}.json" in report_pages["exhibits/memascend-fig11.html"].targets
        copied = report_folder / "figures/records" / f"{run}.json"
        assert json.loads(copied.read_text()) == json.loads((smoke / "raw" / f"{run}.json").read_text())


def test_rewritten_report_is_identical_and_drops_stale_files(report_folder: Path, smoke: Path) -> None:
    figures = report_folder / "figures"
    before = {path: path.read_bytes() for path in figures.rglob("*") if path.is_file()}
    for stale in ("exhibits/memascend-fig99.html", "records/old.json", "traces/old.json"):
        (figures / stale).write_text("of an earlier report")
    write(report_folder, smoke / "raw")
    assert {path: path.read_bytes() for path in figures.rglob("*") if path.is_file()} == before


def test_quotes_are_shown_without_tex_markup() -> None:
    assert judged.plain("about $2.25\\times$ the\n  original") == "about 2.25× the original"
    assert judged.plain(r"US\$360 and $\approx 2s$") == "US$360 and ≈ 2s"
    assert not [claim["id"] for claim in registry.claims() if "\\" in judged.plain(claim["quote"])]


@pytest.mark.parametrize(
    ("testbed", "said"), [("local/qwen2.5-7b-k64", True), ("local/qwen2.5-7b-k8", False), ("", False)]
)
def test_report_notes_coarse_twins(testbed: str, said: bool) -> None:
    made = verdict(testbed=testbed, verdict=claims.DEVIATES)
    assert ("one page of memory then stands for 16 MiB" in judged.coarse_twins([made])) is said
    assert ("one page of memory stands for 16 MiB" in judged.why(made)) is said
    assert judged.why(dataclasses.replace(made, deviates_because="The reason.")) == "The reason."


def verdict(**more: str) -> claims.Verdict:
    empty = dict.fromkeys((field.name for field in dataclasses.fields(claims.Verdict)), "")
    return claims.Verdict(**empty | {"lane": "measured"} | more)


@pytest.mark.parametrize(
    ("expected", "unit", "value", "words", "distance", "tolerances"),
    [
        (100, "GiB", "100", "0", 0, 0),
        (100, "GiB", "112", "+12 %", 0.12, 2.4),
        (100, "GiB", "300", "+200 %", 2, 40),
        (100, "GiB", "90", "−10 %", 0.1, 2),
        ([None, 100], "GiB", "50", "0", 0, 0),
        ([90, 100], "GiB", "80", "−11 %", 1 / 9, 20 / 9),
        (0, "GiB", "2.5", "+2.5 GiB", math.inf, 5),
        (50, "%", "53", "+3.0 points", 0.06, 1.2),
    ],
)
def test_distance_from_the_expectation_is_computed_and_worded(
    expected, unit, value, words, distance, tolerances
) -> None:
    kind = "expected_range" if isinstance(expected, list) else "expected"
    tolerance = {"relative_percent": 5} if expected else {"absolute": 0.5}
    lanes = {"measured": {"tolerance": tolerance if unit != "%" else {"absolute": 2.5}}}
    claim = {"id": "x", "quote": "100", "quantity": "order", "unit": unit, "lanes": lanes, kind: expected}
    found = judged.judged(verdict(value=value, unit=unit, verdict=claims.REPRODUCED), claim)
    assert found.off_by == words
    assert (found.distance, found.tolerances) == (pytest.approx(distance), pytest.approx(tolerances, rel=0.02))


def test_undrawn_exhibit_and_missing_record_are_named(report_folder: Path, smoke: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(report_folder, copy)
    with pytest.raises(tidy.TableError, match=r"\.json: the record of a run that an exhibit shows is missing"):
        write(copy, tmp_path)
    (copy / "figures/memascend-fig01.md").unlink()
    with pytest.raises(tidy.TableError, match="memascend-fig01 is not drawn yet"):
        write(copy, smoke / "raw")


def test_embedded_claims_are_complete_and_cannot_end_the_script(tmp_path: Path) -> None:
    line = dict(zip(against.COLUMNS, ROW.split(","), strict=True)) | {"expected": '1 GiB</script><b> "or", more'}
    tidy.write_table([line], tmp_path / "before/claims.csv", list(line))
    text = against.embedded(tmp_path / "before/claims.csv")
    assert "<" not in text
    assert json.loads(text) == {"name": "before/claims.csv", "lines": [line]}


@pytest.mark.parametrize(("text", "said"), BAD_SETS.items())
def test_malformed_claims_file_is_named_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    (path := tmp_path / "claims.csv").write_text(text)
    with pytest.raises(tidy.TableError) as caught:
        against.read(path)
    assert str(caught.value).startswith(f"{path}: {said}")
    assert "\n" not in str(caught.value)


def test_missing_or_binary_claims_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "figure.png").write_bytes(b"\x89PNG\xff\xfe")
    for name, said in (
        ("none.csv", "cannot be read: No such file"),
        ("figure.png", "no claims.csv: it is not a table"),
    ):
        with pytest.raises(tidy.TableError, match=f"{name}: {said}"):
            against.read(tmp_path / name)


def test_committed_claims_files_can_be_read_for_comparison() -> None:
    found = sorted((registry.ROOT / "results/reference").glob("*/claims.csv"))
    found = [path for path in found if len(path.read_text().splitlines()) > 1]  # records may decide no claim
    assert found
    assert all(against.read(path) for path in found)


def luminance(colour: str) -> float:
    """Return the relative luminance of #rrggbb (WCAG 2.1)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_text_contrast_suffices_in_light_and_dark_schemes() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    style = (HERE / "assets/site.css").read_text()
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in re.findall(r":root \{(.*?)\}", style, re.S)
    )
    assert light.keys() == dark.keys()
    for scheme in (light, dark):
        grounds = ("ground", "surface", "marked")
        pairs = [(text, ground) for text in ("text", "muted", "link") for ground in grounds]
        pairs += [(slug(each), f"{slug(each)}-ground") for each in judged.VERDICTS]
        weak = {pair: contrast(*(scheme[name] for name in pair)) for pair in pairs}
        assert {pair: ratio for pair, ratio in weak.items() if ratio < 4.5} == {}
        assert min(contrast(scheme["focus"], scheme[ground]) for ground in grounds) >= 3
