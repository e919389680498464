"""One rule for the tolerances of all papers."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path

import pandas as pd
import pytest

from workflows import registry, tidy
from workflows.derive import claims, tolerances
from workflows.panels import style
from workflows.panels import table as table_panel

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = registry.claims()
CHECKED = [(claim, lane) for claim in CLAIMS for lane in claims.LANES if "not_checkable" not in claim["lanes"][lane]]
CLAIM = {"id": "x-fig01-y", "quantity": "ratio", "quote": "2.40 times in 1,024 steps", "lanes": {"modelled": {}}}


def judged(low: float = -math.inf, high: float = math.inf, **more: object) -> tuple[float, float]:
    """Return the values that the modelled lane of a claim accepts."""
    return tolerances.of(CLAIM | more, "modelled", low, high).widened(low, high)


def test_every_kind_of_claim_has_tolerances_and_a_reason() -> None:
    assert {claim["quantity"] for claim in CLAIMS} <= set(registry.tolerances())
    for kind in registry.tolerances().values():
        assert {"what", "reason", *claims.LANES} == set(kind)
        for lane in claims.LANES:
            ((form, amount),) = kind[lane].items()
            assert form in ("relative_percent", "absolute")
            assert amount >= 0
    without = [registry.tolerances()[name] for name in tolerances.WITHOUT]
    assert not any(kind[lane]["absolute"] for kind in without for lane in claims.LANES)


# Orders whose words include the limit itself: a size that fits or is enough, a multiple, an exception to a growth.
LIMIT_INCLUDED = {
    "memascend-tab02-all-in-gpu-up-to-1b": 24,
    "memascend-tab02-zero-offload-up-to-3b": 128,
    "memascend-tab02-zero-infinity-up-to-8b": 128,
    "lohan-fig06a-175b": 175,
    "mlpoffload-fig07-52b-exception": 1,
    "mlpoffload-fig07-120b-exception": 1,
    "mlpoffload-fig07-52b-exception-alone": 1,
    "mlpoffload-fig07-120b-exception-alone": 1,
    "mlpoffload-fig08-order-of-magnitude": 10,
    **{f"ssdtrain-fig07{sub}-batch{ending}": 2 for sub in "ab" for ending in ("", "-slow")},
}
# Limits that the words exclude, with the unit.
LIMITS = {
    ("%", 50),  # "primarily", "dominates"
    ("%", 55.7),  # "lower than"
    ("%", 100),  # "smaller than"
    ("GiB", 24),
    ("GiB", 128),
    ("TFLOPS", 135),
    ("B", 175),
    ("B", 40),
}


def beyond(unit: str, limit: float, is_least: bool) -> float:
    """Return the end of the values that an order accepts: a thousandth beyond the limit, for shares 0.1 point."""
    margin = 0.1 if unit == "%" else limit / 1000
    return limit + margin if is_least else limit - margin


def test_claims_of_order_accept_ties_only_where_listed() -> None:
    for claim in (claim for claim in CLAIMS if claim["quantity"] == "order"):
        ((is_least, end),) = [(i == 0, end) for i, end in enumerate(claim["expected_range"]) if end is not None]
        assert claim["compute"]["operation"] != "difference" or claim["unit"] == "%", claim["id"]
        if claim["id"] in LIMIT_INCLUDED:
            assert end == LIMIT_INCLUDED[claim["id"]], claim["id"]
            continue
        limits = {("x", 1), ("%", 0), *LIMITS}
        accepted = [beyond(unit, limit, is_least) for unit, limit in limits if unit == claim["unit"]]
        assert any(end == pytest.approx(each, rel=1e-9) for each in accepted), claim["id"]


def test_unknown_quantity_is_refused_with_the_list_of_kinds() -> None:
    with pytest.raises(tidy.TableError, match=r"x-fig01-y: quantity 'speed' is no kind of tolerances.yaml: memory, "):
        judged(2.4, 2.4, quantity="speed", expected=2.4)


def test_only_four_claims_have_their_own_tolerance_each_with_reason() -> None:
    own = {(claim["id"], lane) for claim, lane in CHECKED if "tolerance" in claim["lanes"][lane]}
    assert own == {
        ("memascend-fig08-pinned-memascend", "measured"),  # the expected value is zero bytes
        ("memascend-fig09-zero-infinity-plateau", "measured"),
        ("memascend-fig13-fused-adds-nothing", "measured"),
        ("mlpoffload-fig07-forward-share", "modelled"),  # 0.02 %
    }
    assert all("tolerance_because" in claim["lanes"][lane] for claim, lane in CHECKED if (claim["id"], lane) in own)


def test_claims_of_one_kind_have_one_tolerance_in_every_paper() -> None:
    """The wider of the amount and half a unit of the last digit; bounds get the half unit."""
    for claim, lane in CHECKED:
        low, high = claims.expected_ends(claim, claim["lanes"][lane])
        if "tolerance" in claim["lanes"][lane]:
            continue
        ((form, amount),) = registry.tolerances()[claim["quantity"]][lane].items()
        half = tolerances.half_unit(claim)
        for end, found in zip((low, high), tolerances.of(claim, lane, low, high).widened(low, high), strict=True):
            if math.isinf(end):
                assert found == end, claim["id"]
                continue
            by_kind = abs(end) * amount / 100 if form == "relative_percent" else amount
            is_bound = math.isinf(low) or math.isinf(high)
            assert abs(found - end) == pytest.approx(half if is_bound and half else max(by_kind, half)), claim["id"]


def test_tolerance_is_at_least_half_the_last_printed_digit() -> None:
    rounded = 0
    for claim, lane in CHECKED:
        if claim["quantity"] in tolerances.WITHOUT or claim.get("printed") == tolerances.IN_WORDS:
            continue
        low, high = claims.expected_ends(claim, claim["lanes"][lane])
        (end, *_) = (end for end in (low, high) if not math.isinf(end))
        decimals = min(len(number.partition(".")[2]) for number in tolerances.printed(claim))
        assert tolerances.of(claim, lane, low, high).margin(end) >= 0.5 * 10**-decimals, claim["id"]
        rounded += 1
    assert rounded > 300


@pytest.mark.parametrize(
    ("claim", "accepted"),
    [
        ({"expected": 2.4}, (2.16, 2.64)),
        ({"expected": 2.4, "quantity": "memory"}, (2.352, 2.448)),
        ({"expected": 2, "quote": "2x"}, (1.5, 2.5)),
        ({"expected": 2, "quote": "2.0x"}, (1.8, 2.2)),
        ({"expected": 2, "quote": "twice", "printed": "2"}, (1.5, 2.5)),
        ({"expected": 1024, "quantity": "exact"}, (1024, 1024)),
        ({"expected": 1024, "quantity": "size"}, (1003.52, 1044.48)),
        ({"expected": 0, "quote": "the same", "printed": "in words"}, (0, 0)),
        ({"expected": 100, "quantity": "share", "quote": "the same", "printed": "in words"}, (98, 102)),
    ],
)
def test_accepted_values_follow_kind_and_printed_digits(claim: dict, accepted: tuple[float, float]) -> None:
    assert judged(claim["expected"], claim["expected"], **claim) == pytest.approx(accepted)


def test_intervals_widen_by_the_tolerance_and_bounds_by_rounding_alone() -> None:
    assert judged(28, 40, quantity="share", quote="28%-40%", expected_range=[28, 40]) == (26, 42)
    assert judged(40, quantity="share", quote="at least 40%", expected_range=[40, None]) == (39.5, math.inf)
    assert judged(high=0.2, quantity="share", quote="within 0.2%", expected_range=[None, 0.2])[1] == pytest.approx(0.25)
    assert judged(50, quantity="order", quote="mostly", expected_range=[50, None]) == (50, math.inf)
    almost = {"quantity": "share", "quote": "almost none", "printed": "in words", "expected_range": [None, 0]}
    assert judged(high=0, **almost) == (-math.inf, 2)


def test_expected_number_missing_from_the_quote_is_refused() -> None:
    with pytest.raises(tidy.TableError, match=r"x-fig01-y: 7\.5 is not in the quote '2\.40 times"):
        tolerances.half_unit(CLAIM | {"expected": 7.5})
    assert tolerances.half_unit(CLAIM | {"expected": 2.4}) == pytest.approx(0.005)
    assert tolerances.half_unit(CLAIM | {"expected": 1024}) == 0.5


def test_own_tolerance_of_a_lane_keeps_half_a_unit() -> None:
    own = {"modelled": {"tolerance": {"absolute": 0.001}, "tolerance_because": "a test"}}
    assert judged(2.4, 2.4, expected=2.4, lanes=own) == pytest.approx((2.395, 2.405))


def test_history_names_existing_claims_and_their_current_tolerances() -> None:
    with tolerances.HISTORY.open(newline="") as file:
        rows = list(csv.DictReader(file))
    known = {(claim["id"], lane): claim for claim, lane in CHECKED}
    assert len({(row["claim_id"], row["lane"]) for row in rows}) == len(rows) > 300
    for row in rows:
        claim = known[row["claim_id"], row["lane"]]
        low, high = claims.expected_ends(claim, claim["lanes"][row["lane"]])
        text = tolerances.of(claim, row["lane"], low, high).text(low, high, claim["unit"])
        assert row["after"] in (text or "none"), row
        assert row["before"] != row["after"]


def test_history_of_a_claim_says_how_its_tolerance_changed() -> None:
    claim = next(claim for claim in CLAIMS if claim["id"] == "cxl-fig13-a-naive-low")
    assert claims.history(claim, "modelled").endswith("; tolerance 5 points until 2026-11-24, then 2 points")
    assert "tolerance 5 points until" not in claims.history(claim, "measured")


def test_tolerances_page_has_the_amounts_of_the_rule() -> None:
    table = re.findall(
        r"^\| `(\w+)` \|.*\| (\S+(?: %| points)?) \| (\S+(?: %| points)?) \|$",
        (ROOT / "docs/tolerances.md").read_text(),
        re.M,
    )

    def words(amount: dict[str, float]) -> str:
        ((form, number),) = amount.items()
        return f"{number} %" if form == "relative_percent" else f"{number} points" if number else "0"

    rule = registry.tolerances()
    assert table == [(name, words(kind["modelled"]), words(kind["measured"])) for name, kind in rule.items()]


@pytest.mark.parametrize(
    ("quantity", "lane", "number", "colour"),
    [
        ("share", "modelled", "13.9", style.INK),
        ("share", "modelled", "14.1", style.PALETTE["vermilion"]),
        ("memory", "modelled", "12.3", style.PALETTE["vermilion"]),
        ("memory", "measured", "12.3", style.INK),
        ("memory", "published", "14.1", style.INK),
    ],
)
def test_table_cells_beyond_the_tolerance_are_coloured(quantity: str, lane: str, number: str, colour: str) -> None:
    printed = [("published", "printed", "12"), (lane, "ours", number)]
    rows = pd.DataFrame([{"lane": a, "metric": m, "value": v, "number": float(v), "unit": ""} for a, m, v in printed])
    column = {"select": {"metric": "ours"}, "against": {"metric": "printed"}, "quantity": quantity}
    assert table_panel.cell(rows, column, {}).colour == colour
