"""A verdict with what a page adds to it: the paper's words, how far the value is off, and the reason."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from workflows import registry
from workflows.derive import tolerances
from workflows.derive.claims import (
    DEVIATES,
    HELD_OUT,
    NO_RESULT,
    NOT_CHECKABLE,
    REPRODUCED,
    TWIN,
    Verdict,
    expected_ends,
    value_text,
    with_unit,
)

VERDICTS = (REPRODUCED, DEVIATES, NO_RESULT, NOT_CHECKABLE)
COARSE_TWIN = 32  # from this divisor on, pages and Python objects are no longer small next to the buffers
BASES = (HELD_OUT, TWIN, "calibrated", "by construction", "alternate reading")


@dataclass(frozen=True)
class Judged:
    """One claim in one lane.

    `off_by` is in words, `distance` is a fraction of the expected value, and `tolerances` is in multiples of the
    tolerance. The last two are None without a value, and infinite if the divisor is 0. `why` says why a claim deviates,
    has no result or cannot be checked, and is empty if it is reproduced.
    """

    verdict: Verdict
    quote: str
    off_by: str
    distance: float | None
    tolerances: float | None
    why: str

    @property
    def anchor(self) -> str:
        """Name of the claim's place in a page: its id and lane."""
        return f"{self.verdict.claim_id}.{self.verdict.lane}"

    @property
    def paper(self) -> str:
        """Id of the paper, from that of the exhibit."""
        return self.verdict.exhibit_id.rpartition("-")[0]


def all_of(verdicts: list[Verdict]) -> list[Judged]:
    """Return the verdicts in their order; raise ValueError for one whose claim is in no claims.yaml."""
    claims = {claim["id"]: claim for claim in registry.claims()}
    unknown = [verdict.claim_id for verdict in verdicts if verdict.claim_id not in claims]
    if unknown:
        raise ValueError(f"{unknown[0]}: a verdict without its claim; derive claims.csv again")
    return [judged(verdict, claims[verdict.claim_id]) for verdict in verdicts]


def judged(verdict: Verdict, claim: dict[str, Any]) -> Judged:
    """Return a verdict with what its claim adds to it."""
    quote = plain(claim["quote"])
    if not verdict.value:
        return Judged(verdict, quote, "", None, None, why(verdict))
    low, high = expected_ends(claim, claim["lanes"][verdict.lane])
    value = float(verdict.value)
    nearest = min(max(value, low), high)
    off = value - nearest
    allowed = tolerances.of(claim, verdict.lane, low, high).margin(nearest)
    words = in_words(off, nearest, verdict.unit)
    return Judged(verdict, quote, words, share(off, nearest), share(off, allowed), why(verdict))


TEX = {r"\approx": "≈", r"\sim": "∼", r"\times": "×"}


def plain(quote: str) -> str:
    """Return a quote without the marks of TeX that the papers' texts have: "$2.25\\times$" -> "2.25×"."""
    text = re.sub(r"(?<!\\)\$", "", quote)
    for command, sign in TEX.items():
        text = text.replace(command, sign)
    return " ".join(text.replace(r"\$", "$").split())


def share(off: float, of: float) -> float:
    """Return |off| as a fraction of |of|: 0 if `off` is 0, otherwise infinite if `of` is 0."""
    if not off:
        return 0.0
    return abs(off / of) if of else math.inf


def in_words(off: float, expected: float, unit: str) -> str:
    """Return a difference in percent of the expected value; for a percentage in points, and from 0 as an amount."""
    sign = "+" if off > 0 else "−"
    if not off:
        return "0"
    if unit.startswith("%"):
        return f"{sign}{rounded(abs(off))} points"
    if not expected:
        return with_unit(f"{sign}{value_text(abs(off))}", unit)
    return f"{sign}{rounded(100 * abs(off / expected))} %"


def rounded(value: float) -> str:
    """Return a number with two decimals below 1, one below 10, and none from 10 on."""
    return f"{value:,.{0 if value >= 10 else 1 if value >= 1 else 2}f}"


def why(verdict: Verdict) -> str:
    """Return why a claim is not reproduced, or that no cause of a deviation is recorded."""
    if verdict.verdict in (NO_RESULT, NOT_CHECKABLE):
        return verdict.reason
    if verdict.verdict != DEVIATES:
        return ""
    return verdict.deviates_because or f"No cause is recorded for this run.{coarse(verdict)}"


def coarse(verdict: Verdict) -> str:
    """Return what a small twin means for byte counts; empty for a finer twin or none."""
    found = coarsest([verdict])
    if found is None:
        return ""
    return f" Its twin has k = {found[0]}: one page of memory stands for {found[1]:.0f} MiB of the original."


def coarse_twins(verdicts: list[Verdict]) -> str:
    """Return a sentence on small twins if any were judged; empty otherwise."""
    found = coarsest(verdicts)
    if found is None:
        return ""
    return (
        f"Some of these runs train models whose widths are divided by {found[0]} (twins): one page of memory then "
        f"stands for {found[1]:.0f} MiB of the original, so their byte counts are coarse. Judge the papers by the "
        "profile quick, paper or full."
    )


def coarsest(verdicts: list[Verdict]) -> tuple[int, float] | None:
    """Return the divisor of the smallest twin and the MiB that one of its pages stands for; None if all are fine."""
    divisors = [int(k) for verdict in verdicts for k in re.findall(r"-k(\d+)", verdict.testbed)]
    if not divisors or max(divisors) < COARSE_TWIN:
        return None
    return max(divisors), 4 * max(divisors) ** 2 / 1024
