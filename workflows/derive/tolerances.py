"""The tolerance of a claim, by the one rule of docs/tolerances.md.

The amount depends on the claim's kind of quantity and the lane (workflows/papers/tolerances.yaml), and is never less
than half a unit of the last digit that the paper prints. For a bound, that half unit is the whole tolerance.
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from workflows import registry, tidy

HISTORY = registry.ROOT / "workflows/papers/tolerance-history.csv"
WITHOUT = ("order", "exact")  # kinds of quantity without a rounded digit
IN_WORDS = "in words"
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Tolerance:
    """The larger of a percentage of the expected value and an amount in the claim's unit (for percentages: points)."""

    relative_percent: float = 0
    absolute: float = 0

    def margin(self, end: float) -> float:
        """Return the amount by which an end of the expectation may be missed; 0 for an open end."""
        return 0 if math.isinf(end) else max(abs(end) * self.relative_percent / 100, self.absolute)

    def widened(self, low: float, high: float) -> tuple[float, float]:
        """Return the interval with both ends moved outwards."""
        return low - self.margin(low), high + self.margin(high)

    def text(self, low: float, high: float, unit: str) -> str:
        """Return in words what is accepted in addition to the expectation; empty if nothing is."""
        finite = [end for end in (low, high) if not math.isinf(end)]
        if not any(self.margin(end) for end in finite):
            return ""
        if all(abs(end) * self.relative_percent / 100 >= self.absolute for end in finite):
            margin = f"{self.relative_percent:g} %" + (" of it" if unit.startswith("%") else "")
        else:
            margin = points(self.absolute) if unit.startswith("%") else f"{self.absolute:g} {unit}".rstrip()
        if low == high:
            return f"± {margin}"
        if len(finite) == 1:
            return f"or up to {margin} {'more' if math.isinf(low) else 'less'}"
        return f"± {margin} at either end"


def points(amount: float) -> str:
    """Return an amount of percentage points in words."""
    return f"{amount:g} {'point' if amount == 1 else 'points'}"


def of(claim: dict[str, Any], lane: str, low: float, high: float) -> Tolerance:
    """Return the tolerance of a claim in a lane whose expectation is `low` to `high`; the claim may set its own."""
    kinds = registry.tolerances()
    kind = kinds.get(claim["quantity"])
    if kind is None:
        what = f"quantity {claim['quantity']!r} is no kind of tolerances.yaml"
        raise tidy.TableError(f"claims: {claim['id']}: {what}: {', '.join(kinds)}")
    half = half_unit(claim)
    own = claim["lanes"][lane].get("tolerance")
    is_bound = math.isinf(low) != math.isinf(high)
    if own is None and is_bound and half:
        return Tolerance(absolute=half)
    amount = Tolerance(**(own or kind[lane]))
    return Tolerance(amount.relative_percent, max(amount.absolute, half))


def half_unit(claim: dict[str, Any]) -> float:
    """Return half a unit of the last digit of the number that the paper prints; 0 if the paper rounds none."""
    if claim["quantity"] in WITHOUT or claim.get("printed") == IN_WORDS:
        return 0
    return max(0.5 * 10.0 ** -decimals(number) for number in printed(claim))


def printed(claim: dict[str, Any]) -> list[str]:
    """Return the expected number, or the ends of an interval, as the paper prints them, from the quote or from
    `printed`."""
    if "printed" in claim:
        return [claim["printed"]]
    ends = [claim["expected"]] if "expected" in claim else [end for end in claim["expected_range"] if end is not None]
    found = []
    for end in ends:
        same = [n for n in NUMBER.findall(claim["quote"]) if float(n.replace(",", "")) == abs(end)]
        if not same:
            raise tidy.TableError(
                f"claims: {claim['id']}: {end:g} is not in the quote {claim['quote']!r}; give `printed`, the number as "
                f"the paper prints it, or `printed: {IN_WORDS}`"
            )
        found.append(min(same, key=decimals))
    return found


def decimals(number: str) -> int:
    """Return the number of digits after the point."""
    return len(number.partition(".")[2])


@cache
def _moved() -> dict[tuple[str, str], str]:
    """Return how each changed tolerance was changed, by claim and lane."""
    with HISTORY.open(encoding="utf-8", newline="") as file:
        return {
            (row["claim_id"], row["lane"]): f"tolerance {row['before']} until {row['at']}, then {row['after']}"
            for row in csv.DictReader(file)
        }


def history(claim_id: str, lane: str) -> str:
    """Return in words how a tolerance was changed; empty if it never was."""
    return _moved().get((claim_id, lane), "")
