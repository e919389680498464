"""The report in a real browser: filters, search, sorting, and nothing wider than the screen."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from report_fixtures import BUILT, Page

from workflows.derive import claims


def chromium() -> str:
    """Path of the browser; the test is skipped where there is none."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("chromium is not installed")
    return found


def in_a_browser(address: str, tmp_path: Path, width: int = 1400) -> tuple[Page, str]:
    """The page as it stands after its script has run, and what the console said."""
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--enable-logging=stderr"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},1000", "--virtual-time-budget=20000"]
    done = subprocess.run([chromium(), *words, "--dump-dom", address], capture_output=True, text=True, timeout=240)
    (tmp_path / "dom.html").write_text(done.stdout)
    said = "\n".join(line for line in done.stderr.splitlines() if ":CONSOLE" in line)
    return Page(tmp_path / "dom.html"), said


@pytest.mark.parametrize(
    ("fragment", "fits"),
    [
        ("paper=memascend&verdict=deviates", {"data-paper": "memascend", "data-verdict": claims.DEVIATES}),
        ("lane=modelled&basis=by+construction", {"data-lane": "modelled", "data-basis": "by construction"}),
        ("", {}),
        ("memascend-fig08-reduction.measured", {}),
        ("paper=nobody", {}),
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


@pytest.mark.parametrize("by", ["distance", "tolerances"])
def test_search_finds_words_and_sorting_puts_the_farthest_first(report_folder: Path, tmp_path: Path, by: str) -> None:
    address = f"{(report_folder / 'figures/claims.html').as_uri()}#q=Qwen2.5-7b+reduction&sort={by}"
    page, said = in_a_browser(address, tmp_path)
    shown = [(given, text) for given, text in page.rows.values() if "hidden" not in given]
    assert 0 < len(shown) < len(page.rows)
    assert all("qwen2.5-7b" in text.lower() and "reduction" in text.lower() for _, text in shown)
    keys = [float(given[f"data-{by}"] or -1) for given, _ in page.rows.values()]
    assert keys == sorted(keys, reverse=True)
    assert keys[0] > keys[-1] == -1
    assert said == ""


# Loads each page in a frame of that width, and notes how much wider than the frame it is.
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
def test_no_page_is_wider_than_the_screen(
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
