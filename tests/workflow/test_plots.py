"""Every exhibit is drawn, from a full table and from a sparse one, and the same table gives the same picture."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pandas as pd
import pytest
from workflow_fixtures import built_exhibits

from tests.modelled_lane import modelled
from workflows import registry, tidy
from workflows.derive import figure
from workflows.derive.table import assemble
from workflows.panels import bars, data, lines, style, text

ROOT = Path(__file__).resolve().parents[2]
REGISTRY = registry.exhibits()
BUILT = [entry["id"] for entry in REGISTRY if entry["status"] == "built"]
UNMEASURED = [name for name in BUILT if name not in built_exhibits()]
LANES = ("published", "modelled")


def lane_of(paper: str) -> pd.DataFrame:
    """Return the modelled lane of a paper whose exhibits are drawn without a record."""
    return pd.DataFrame([] if paper == "memascend" else list(modelled(paper)), columns=tidy.COLUMNS, dtype=str)


def drawn(folder: Path, exhibit: str):
    table = tidy.read_table(folder / "exhibits" / f"{exhibit}.csv")
    runs = pd.read_csv(folder / "runs.csv", dtype=str, keep_default_na=False)
    foot = figure.footer(figure.provenance(table, runs))
    picture = figure.draw(registry.figures(exhibit.rpartition("-")[0])[exhibit], table, foot)
    picture.canvas.draw()
    return picture


@pytest.mark.parametrize("exhibit", built_exhibits())
@pytest.mark.parametrize("amount", ["full", pytest.param("smoke", marks=pytest.mark.slow)])
def test_exhibit_is_drawn_with_its_text_inside(request: pytest.FixtureRequest, amount: str, exhibit: str) -> None:
    figure = drawn(request.getfixturevalue(amount), exhibit)
    frame = figure.bbox
    texts = [t for t in figure.findobj(matplotlib.text.Text) if t.get_visible() and t.get_text().strip()]
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts]
    assert len(boxes) > 5
    ticks = {label.get_text() for axis in figure.axes for label in (*axis.get_xticklabels(), *axis.get_yticklabels())}
    cut = [text for text, box in boxes if text not in ticks and not frame.padded(2).fully_containsx(box.x0)]
    cut += [text for text, box in boxes if text not in ticks and not frame.padded(2).fully_containsx(box.x1)]
    assert not cut
    plt.close(figure)


@pytest.mark.parametrize(  # one in six; `make smoke` draws all of them
    "exhibit", [pytest.param(name, marks=[pytest.mark.slow] * (n % 6 > 0)) for n, name in enumerate(UNMEASURED)]
)
def test_unmeasured_exhibit_is_drawn_and_names_its_lanes(exhibit: str) -> None:
    entry = figure.entry_of(exhibit)
    table = pd.DataFrame(columns=tidy.COLUMNS, dtype=str)
    if registry.has_table(entry):
        table = assemble(exhibit, ROOT / "results/published", lane_of(entry["paper"]))
    spec = registry.figures(entry["paper"])[exhibit]
    picture = figure.draw(spec, table, figure.footer(figure.provenance(table, pd.DataFrame())))
    picture.canvas.draw()
    said = " ".join(text.get_text() for text in picture.texts)
    assert [f"{lane}: " in said for lane in LANES] == [lane in set(table["lane"]) for lane in LANES]
    assert ("a drawing of structure" in said) != registry.has_table(entry)
    words = [text for axis in picture.axes for text in axis.texts]
    shown = {text.get_text() for text in words}
    assert not {"not stated", "nan"} & shown
    inside = [picture.bbox.padded(2).contains(*corner) for t in words for corner in t.get_window_extent().get_points()]
    assert all(inside)
    plt.close(picture)


@pytest.mark.parametrize(
    "exhibit", [pytest.param(name, marks=[pytest.mark.slow] * (n > 2)) for n, name in enumerate(built_exhibits())]
)
def test_footer_names_commit_and_date_of_the_records(full: Path, exhibit: str) -> None:
    figure = drawn(full, exhibit)
    text = " ".join(word for t in figure.texts for word in t.get_text().split())
    assert "Example CPU, 2 cores; commit c0ffee12" in text
    assert "2026-01-02" in text
    assert "measured: " in text
    plt.close(figure)


def test_labels_of_fig12_overlap_neither_the_line_nor_each_other() -> None:
    figure, axis = plt.subplots(figsize=(4, 4))
    axis.axhline(97.0)
    axis.set(xscale="log", xlim=(5e5, 1e9), ylim=(95, 100.5))
    points = [(1e6, 96.4), (8e6, 95.5), (3.2e7, 96.8), (6.4e7, 97.2), (1.28e8, 97.2), (3e8, 97.3)]
    lines.mark_all(axis, points, 97.0)
    figure.canvas.draw()
    boxes = [t.get_window_extent() for t in axis.texts]
    line = axis.transData.transform((1e6, 97.0))[1]
    assert len(boxes) == 6
    assert not [box for box in boxes if box.y0 <= line <= box.y1]
    assert not [1 for i, box in enumerate(boxes) for other in boxes[:i] if box.overlaps(other)]
    plt.close(figure)


def test_stack_label_can_differ_from_its_model_name() -> None:
    names, parts = ["m", "m, simplex"], {"one": "blue", "other": "green"}
    cells = {"lane": "modelled", "series": "s", "number": 1.0, "ranks": 1, "k": 1, "unit": "GiB"}
    cells |= {"x_name": "", "x_value": "", "at": float("nan")}
    table = pd.DataFrame([{"model": name, "metric": part, **cells} for name in names for part in parts])
    figure, axis = plt.subplots()
    bars.stacked(axis, table, {"parts": parts, "order": names, "ticks": {"m, simplex": "m,\nsimplex"}})
    assert [label.get_text() for label in axis.get_xticklabels()] == ["m", "m,\nsimplex"]
    plt.close(figure)


def test_labels_of_fig10_do_not_touch_the_curves(full: Path) -> None:
    figure = drawn(full, "memascend-fig10")
    axis = figure.axes[0]
    paths = [line.get_transform().transform_path(line.get_path()) for line in axis.lines if len(line.get_xdata()) > 2]
    words = [text for text in axis.texts if text.get_text().startswith(("paper", "128"))]
    assert len(words) == 4
    assert paths
    touched = [w.get_text() for w in words for p in paths if p.intersects_bbox(w.get_window_extent(), filled=False)]
    assert not touched
    plt.close(figure)


@pytest.mark.parametrize("exhibit", ["memascend-fig02", "memascend-fig08", "memascend-fig12"])
def test_svg_titles_give_the_values_of_the_table(full: Path, tmp_path: Path, exhibit: str) -> None:
    picture = drawn(full, exhibit)
    figure.save(picture, tmp_path / exhibit)
    svg = (tmp_path / f"{exhibit}.svg").read_text()
    titles = re.findall(r'<g class="value"><title>([^<]*)</title>', svg)
    table = tidy.read_table(full / "exhibits" / f"{exhibit}.csv")
    values = [number for number in map(tidy.numeric, table["value"]) if number is not None]
    for words in titles:
        number = float(re.search(r"(published|modelled|measured).*: (-?[\d.,]+)", words)[2].replace(",", ""))
        assert any(abs(number - value) <= 5e-4 * abs(value) for value in values), words
    assert all(any(lane in words for words in titles) for lane in ("modelled", "measured"))
    assert style.VALUE not in svg


def test_the_same_table_gives_the_same_bytes(full: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        figure.save(drawn(full, "memascend-fig11"), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert (tmp_path / "one.pdf").read_bytes() == (tmp_path / "two.pdf").read_bytes()


def test_caption_names_unmeasured_models(smoke: Path) -> None:
    entry = next(e for e in REGISTRY if e["id"] == "memascend-fig15")
    table = tidy.read_table(smoke / "exhibits/memascend-fig15.csv")
    text = figure.caption(entry, "Prose.", table, {"measured": "twins"})
    assert "not measured in this profile: Llama3.1-8B, Qwen2.5-14B, Qwen2.5-32B" in text


def test_captions_of_simulated_exhibits_quote_the_simulators_errors(smoke: Path) -> None:
    for exhibit, simulated in (("memascend-fig17", True), ("memascend-fig11", False)):
        entry = next(e for e in REGISTRY if e["id"] == exhibit)
        table = tidy.read_table(smoke / f"exhibits/{exhibit}.csv")
        text = figure.caption(entry, "Prose.", table, {"modelled": "memascend-c1"})
        for line in registry.validations():
            assert re.search(
                r"against \d+ phases of \d+ systems measured on \S+: -\d+ to \+\d+ %, half of them within \d+ %, "
                r"nine of ten within \d+ %$",
                line,
            )
            assert (line in text) == simulated
    assert registry.validations()


def test_lanes_look_different_and_systems_keep_their_colour() -> None:
    looks = [tuple(sorted(style.surface(lane, "#123456").items())) for lane in ("published", "modelled", "measured")]
    assert len(set(looks)) == 3
    names = [
        tidy.AS_PUBLISHED,
        "ZeRO-Infinity (DeepSpeed 0.19.8)",
        tidy.MEMASCEND,
        tidy.ZERO_OFFLOAD,
        tidy.ALL_IN_GPU,
        "torch.aminmax",
    ]
    assert len({style.colour(name) for name in names}) == len(names)
    assert style.colour("ZeRO-Infinity") == style.colour(tidy.AS_PUBLISHED)


def test_measured_bars_are_scaled_to_the_originals_size(full: Path) -> None:
    table = data.prepared(
        tidy.read_table(full / "exhibits/memascend-fig15.csv"), registry.figures("memascend")["memascend-fig15"]
    )
    measured, printed = (
        data.first(
            table, {"lane": lane, "model": "Qwen2.5-7B", "series": tidy.MEMASCEND, "metric": "peak system memory"}
        )
        for lane in ("measured", "published")
    )
    assert measured == pytest.approx(printed, rel=0.1)


def test_two_ranks_are_labelled_in_fig15(full: Path) -> None:
    figure = drawn(full, "memascend-fig15")
    texts = [t.get_text() for t in figure.findobj(matplotlib.text.Text)]
    assert any("2 ranks" in text for text in texts)
    plt.close(figure)


def test_a_listing_keeps_its_indentation_in_a_browser() -> None:
    """A browser merges several spaces into one, and drops those at the beginning."""
    gap = "\N{NO-BREAK SPACE}"
    shown = text.indented("for layer:\n    volume += 1  # bytes\n return")
    assert shown == f"for layer:\n{4 * gap}volume += 1{2 * gap}# bytes\n{gap}return"
    axis = plt.figure().subplots()
    text.draw(axis, pd.DataFrame(), {"blocks": [{"title": "a", "lines": "if x:\n    y"}]})
    assert "  " not in axis.texts[1].get_text()
    plt.close("all")


@pytest.mark.parametrize("paper", registry.PAPERS)
def test_panel_widths_match_the_columns_that_are_always_drawn(paper: str) -> None:
    """There is one width per column: an optional panel, which is omitted without its metric, has a separate column."""
    for exhibit, spec in registry.figures(paper).items():
        if "widths" in spec:
            assert len(spec["widths"]) == spec.get("columns", len(spec["panels"])), exhibit
            assert "columns" in spec or not any(panel.get("optional") for panel in spec["panels"]), exhibit


def test_measured_table_without_its_runs_is_refused_in_one_line() -> None:
    row = {"metric": "peak", "lane": "measured", "testbed": "here/qwen2.5-0.5b-k16", "source": "abc", "series": "x"}
    table = pd.DataFrame([row]).reindex(columns=tidy.COLUMNS, fill_value="").astype(str)
    with pytest.raises(tidy.TableError, match="name the list of their runs"):
        figure.provenance(table, pd.DataFrame())
