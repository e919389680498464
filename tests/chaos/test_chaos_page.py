"""The page of chaos runs agrees with its records, and the records are complete."""

import pytest

from tests.chaos import page
from tests.chaos.draws import DRAWN_AS, as_stock, draw
from tests.chaos.verdicts import FAILURES, VERDICTS

FOUND = page.records()


def test_the_page_is_made_from_the_records():
    assert page.PAGE.read_text() == page.page(FOUND)


@pytest.mark.parametrize(("name", "record"), FOUND, ids=[name for name, _ in FOUND])
def test_record_holds_draw_and_verdict_of_each_seed(name, record):
    from tests.chaos.loops import SHAPES_DRAWN

    assert record["drawn_as"] == DRAWN_AS
    assert record["host"]["name"] in name
    for seed, row in record["seeds"].items():
        drawn = draw(int(seed), SHAPES_DRAWN)
        drawn = as_stock(drawn) if row["target"] == "stock" else drawn
        found = (row["target"], row["training"], row["fault"], row["how"])
        assert found == (drawn.target, drawn.training, drawn.fault, drawn.how)
        assert row["verdict"] in VERDICTS
        assert row["seconds"] >= 0
        assert row.get("why") or row["verdict"] not in FAILURES
