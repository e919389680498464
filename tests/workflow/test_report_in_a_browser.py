"""The report in a real browser: filters, search, sorting, another set of results, and nothing wider than the screen."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from report_fixtures import BAD_SETS, BUILT, HEAD, ROW, TIMELINE, TITLE, Page, write

from workflows import tidy
from workflows.derive import claims


def chromium() -> str:
    """Return the path of the browser; the test is skipped if there is none."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("chromium is not installed")
    return found


def in_a_browser(address: str, tmp_path: Path, width: int = 1400) -> tuple[Page, str]:
    """Return the page after its script has run, and the messages on the console."""
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--enable-logging=stderr"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},1000", "--virtual-time-budget=20000"]
    done = subprocess.run([chromium(), *words, "--dump-dom", address], capture_output=True, text=True, timeout=240)
    (tmp_path / "dom.html").write_text(done.stdout)
    said = "\n".join(line for line in done.stderr.splitlines() if ":CONSOLE" in line)
    return Page(tmp_path / "dom.html"), said


def slow(*values: object) -> object:
    """Mark parameters whose tests take some seconds of a browser each."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("fragment", "fits"),
    [
        ("paper=memascend&verdict=deviates", {"data-paper": "memascend", "data-verdict": claims.DEVIATES}),
        ("memascend-fig08-reduction.measured", {}),
        slow("lane=modelled&basis=by+construction", {"data-lane": "modelled", "data-basis": "by construction"}),
        slow("", {}),
        slow("paper=nobody", {}),
    ],
)
def test_filters_follow_the_address(report_folder: Path, tmp_path: Path, fragment: str, fits: dict[str, str]) -> None:
    address = f"{(report_folder / 'figures/claims.html').as_uri()}#{fragment}"
    page, said = in_a_browser(address, tmp_path)
    rows = {anchor: given for anchor, (given, _) in page.rows.items()}
    wanted = {anchor for anchor, given in rows.items() if fits.items() <= given.items()}
    assert {anchor for anchor, given in rows.items() if "hidden" not in given} == wanted
    assert wanted
    assert f"{len(wanted)} of {len(rows)} verdicts" in page.text
    assert said == ""


@pytest.mark.parametrize("by", ["distance", slow("tolerances")])
def test_search_finds_words_and_sorting_is_by_descending_distance(report_folder: Path, tmp_path: Path, by: str) -> None:
    address = f"{(report_folder / 'figures/claims.html').as_uri()}#q=Qwen2.5-7b+reduction&sort={by}"
    page, said = in_a_browser(address, tmp_path)
    shown = [(given, text) for given, text in page.rows.values() if "hidden" not in given]
    assert 0 < len(shown) < len(page.rows)
    assert all("qwen2.5-7b" in text.lower() and "reduction" in text.lower() for _, text in shown)
    keys = [float(given[f"data-{by}"] or -1) for given, _ in page.rows.values()]
    assert keys == sorted(keys, reverse=True)
    assert keys[0] > keys[-1] == -1
    assert said == ""


# Chooses one file after the other in the page's file input, and records
# the page's message about each; the last one stays.
CHOOSE = """addEventListener("load", async () => {
  const input = document.getElementById("compare-file"), said = [document.getElementById("shown").value];
  for (const text of %s) {
    const chosen = new DataTransfer();
    chosen.items.add(new File([text], "there.csv"));
    input.files = chosen.files;
    input.dispatchEvent(new Event("change"));
    while (input.files.length) await new Promise((done) => setTimeout(done, 1)); // until it has been read
    said.push(document.getElementById("compare-error").textContent);
  }
  const list = document.createElement("script");
  list.type = "application/json";
  list.id = "said";
  list.textContent = JSON.stringify(said);
  document.body.append(list);
});"""


@pytest.fixture(scope="module")
def sets(report_folder: Path) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the lines of claims.csv, and those of another set: a verdict
    and a value changed, some missing, one more."""
    with (report_folder / "claims.csv").open(newline="") as file:
        here = list(csv.DictReader(file))
    there = [dict(line) for line in here if line["lane"] == "measured"]
    decided = [
        line for line in there if line["value"] and float(line["value"]) > 1 and not line["unit"].startswith("%")
    ]
    decided[0] |= {"verdict": other(decided[0]["verdict"]), "value": str(float(decided[0]["value"]) / 2)}
    decided[1]["value"] = str(float(decided[1]["value"]) * 2)
    return here, [*there, decided[0] | {"claim_id": "memascend-fig99-gone", "sentence": 'Of "old", and\nmore.'}]


def other(verdict: str) -> str:
    return claims.DEVIATES if verdict == claims.REPRODUCED else claims.REPRODUCED


def compared(page: Page) -> dict[str, list[str]]:
    """Return the anchors of rows by their state compared with the other set."""
    found: dict[str, list[str]] = {}
    for anchor, (given, _) in page.rows.items():
        found.setdefault(given.get("data-compare", ""), []).append(anchor)
    return found


def expect_compared(page: Page, here: list[dict[str, str]], there: list[dict[str, str]]) -> None:
    """Check every claim's state compared with the other set, and the counts at the head of the page."""
    before = {(line["claim_id"], line["lane"]): line for line in there}
    wanted: dict[str, list[str]] = {}
    for line in here:
        found = before.get((line["claim_id"], line["lane"]))
        same = found and (found["verdict"], found["value"]) == (line["verdict"], line["value"])
        state = "the same" if same else "same verdict, another value" if found else "only here"
        state = "verdict changed" if found and found["verdict"] != line["verdict"] else state
        wanted.setdefault(state, []).append(f"{line['claim_id']}.{line['lane']}")
    states = ("verdict changed", "same verdict, another value", "the same", "only here")
    assert {state: len(wanted[state]) for state in states[:2]} == dict.fromkeys(states[:2], 1)
    assert {state: sorted(ids) for state, ids in compared(page).items()} == {k: sorted(v) for k, v in wanted.items()}
    assert all(f"{len(wanted[state])} {state}" in page.text for state in states)
    assert "1 only there" in page.text
    assert "memascend-fig99-gone, measured: " in page.text
    (changed,), (moved,) = (wanted[state] for state in states[:2])
    given, text = page.rows[changed]
    assert f"1 {other(given['data-verdict'])} → {given['data-verdict']}" in page.text
    assert "+100 %" in text  # the other value is half of this one
    assert "−50 %" in page.rows[moved][1]


def test_chosen_file_is_compared_and_a_malformed_one_is_named(
    report_folder: Path, sets: tuple[list[dict[str, str]], list[dict[str, str]]], tmp_path: Path
) -> None:
    here, there = sets
    shutil.copytree(report_folder / "figures", copy := tmp_path / "figures", ignore=shutil.ignore_patterns("exhibits"))
    tidy.write_table(there, tmp_path / "there.csv", list(there[0]))
    files = [*BAD_SETS, f"{HEAD}\n{ROW}", f'{HEAD}\n"{ROW}', (tmp_path / "there.csv").read_text()]
    (copy / "choose.js").write_text(CHOOSE % json.dumps(files))
    text = (copy / "claims.html").read_text().replace("</body>", '<script src="choose.js"></script></body>')
    (copy / "claims.html").write_text(text)
    page, console = in_a_browser(f"{(copy / 'claims.html').as_uri()}#compare=verdict+changed", tmp_path)
    said = json.loads(re.search(r'id="said">(.*?)</script>', (tmp_path / "dom.html").read_text(), re.DOTALL)[1])
    # the address requests changes, but there is no other set
    assert said.pop(0) == f"{len(here)} of {len(here)} verdicts"
    wanted = [*BAD_SETS.values(), "none of its claims is on this page", "no claims.csv: a quote is not closed"]
    assert [line.startswith(f"there.csv: {words}") for line, words in zip(said[:-1], wanted, strict=True)] == [
        True for _ in wanted
    ], said
    assert said[-1] == ""
    expect_compared(page, here, there)
    assert console == ""


def test_report_with_an_embedded_set_opens_compared_and_filters_changes(
    report_folder: Path, smoke: Path, sets: tuple[list[dict[str, str]], list[dict[str, str]]], tmp_path: Path
) -> None:
    here, there = sets
    shutil.copytree(report_folder, copy := tmp_path / "copy")
    tidy.write_table(there, tmp_path / "before/claims.csv", list(there[0]))
    write(copy, smoke / "raw", tmp_path / "before/claims.csv")
    page, console = in_a_browser(f"{(copy / 'figures/claims.html').as_uri()}#compare=verdict+changed", tmp_path)
    expect_compared(page, here, there)
    assert "Compared with before/claims.csv" in page.text
    shown = [anchor for anchor, (given, _) in page.rows.items() if "hidden" not in given]
    assert shown == compared(page)["verdict changed"]
    assert console == ""


def exhibit_with_a_script(report_folder: Path, tmp_path: Path, exhibit: str, script: str) -> tuple[Page, str]:
    """Run a script of the test on an exhibit's page; return the page and the messages on the console."""
    copy = tmp_path / "figures"
    shutil.copytree(report_folder / "figures", copy)
    path = copy / f"exhibits/{exhibit}.html"
    (copy / "own.js").write_text(script)
    path.write_text(path.read_text().replace("</body>", '<script src="../own.js"></script></body>'))
    return in_a_browser(path.as_uri(), tmp_path)


# Zooms, focuses the second task, and records the axis before and after, and the page's text.
LOOK = """addEventListener("load", () => {
  const axis = () => [...document.querySelectorAll("#timeline .axis text")].map((each) => each.lastChild.data).join();
  const said = document.querySelector("#timeline output"), before = axis();
  document.querySelector("#timeline [name=in]").click();
  const after = axis();
  document.querySelector("#timeline [name=all]").click();
  document.querySelector('[data-task="1"]').dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
  const pointed = said.value;
  document.querySelector('[data-task="1"]').focus();
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
  const list = document.createElement("script");
  list.type = "application/json";
  list.id = "said";
  list.textContent = JSON.stringify([before, after, axis(), pointed, said.value]).replaceAll("<", "\\\\u003c");
  document.body.append(list);
});"""


def test_timeline_zooms_and_describes_its_tasks(report_folder: Path, tmp_path: Path) -> None:
    _, console = exhibit_with_a_script(report_folder, tmp_path, TIMELINE, LOOK)
    said = re.search(r'id="said">(.*?)</script>', (tmp_path / "dom.html").read_text(), re.DOTALL)
    assert said, console
    before, after, again, pointed, focused = json.loads(said[1])
    assert "0.0 s" in before
    assert "4.0 s" in before
    assert "0.0 s" not in after
    assert "2.0" in after
    assert again == before
    assert pointed == "B1 on GPU </script>: begins at 0.75 s, takes 1.25 s"
    assert focused == "B2 on SSD, read: begins at 1 s, takes 3 s"
    assert console == ""


# Points at a value of the picture, then away from it, and records the page's text.
POINT = """addEventListener("load", () => {
  const line = document.querySelector(".told"), said = [line.checkVisibility(), line.value];
  const over = (what) => document.querySelector(what).dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
  over(".picture .value path");
  said.push(line.value);
  over(".picture #figure_1 > path");
  document.body.append(JSON.stringify([...said, line.value]));
});"""


def test_pointing_at_a_mark_shows_its_value(report_folder: Path, tmp_path: Path) -> None:
    page, console = exhibit_with_a_script(report_folder, tmp_path, BUILT[0], POINT)
    hint = "Point at a bar or a mark to read its value."
    assert json.dumps([True, hint, TITLE, hint], separators=(",", ":")) in page.text
    assert console == ""


# Loads each page in a frame of that width, and records how much wider than the frame it is.
FRAMES = """<!doctype html><meta charset="utf-8"><title>frames</title><body><script>
const names = %s, next = (place) => {
  if (place === names.length) return;
  const frame = document.createElement("iframe");
  frame.style.width = "%dpx"; frame.style.height = "900px"; frame.style.border = 0;
  frame.onload = () => {
    const root = frame.contentDocument.documentElement, line = document.createElement("p");
    line.textContent = `${names[place]} ${root.scrollWidth - frame.contentWindow.innerWidth}`;
    document.body.append(line);
    frame.remove();
    next(place + 1);
  };
  frame.src = names[place];
  document.body.append(frame);
};
next(0);
</script></body>"""


@pytest.mark.parametrize("width", [400, 1400])
def test_pages_are_not_wider_than_the_screen(
    report_folder: Path, report_pages: dict[str, Page], tmp_path: Path, width: int
) -> None:
    copy = tmp_path / "figures"
    shutil.copytree(report_folder / "figures", copy)
    few = [name for name in report_pages if not name.startswith("exhibits/")] + [
        f"exhibits/{name}.html" for name in BUILT[::9]
    ]
    (copy / "frames.html").write_text(FRAMES % (json.dumps(few), width))
    page, said = in_a_browser((copy / "frames.html").as_uri(), tmp_path, width + 200)
    found = dict(line.split() for line in re.findall(r"\S+\.html -?\d+", page.text))
    assert set(found) == set(few)
    assert {name: over for name, over in found.items() if int(over) > 0} == {}
    assert said == ""
