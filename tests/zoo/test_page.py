"""The page of architectures agrees with its record, and the record has the architectures of this transformers."""

import json

from tests.zoo import page
from tests.zoo.architectures import ARCHITECTURES

FOUND = json.loads(page.RECORD.read_text())
DROP_IN = json.loads(page.DROP_IN_RECORD.read_text())


def test_the_page_is_made_from_the_records():
    assert page.PAGE.read_text() == page.page(FOUND, DROP_IN)


def test_every_architecture_has_a_row():
    assert set(FOUND["architectures"]) == {each.id for each in ARCHITECTURES}


def test_no_architecture_fails_and_nearly_all_are_equal():
    outcomes = [
        entry["outcome"]
        for row in FOUND["architectures"].values()
        for entry in row.values()
        if entry["outcome"] != "not built"
    ]
    assert "fails" not in outcomes
    for column in page.COLUMNS:
        of_column = [row[column]["outcome"] for row in FOUND["architectures"].values()]
        built = [outcome for outcome in of_column if outcome != "not built"]
        assert built.count("equal") >= 0.99 * len(built), column


def test_drop_in_outcomes_are_equal_or_refused_where_deepspeed_trains():
    outcomes = {entry["outcome"] for entry in DROP_IN["architectures"].values()}
    assert outcomes <= {"equal", "refused", "stock fails", "not built"}
