"""A calibrated constant: its value, where it comes from, and which published rows were used to find it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """One constant of a model.

    Args:
        name: identifier of the constant, e.g. `gpu_efficiency`.
        value: the value, in `unit`.
        reason: why the value is this one, with its source (paper and place, data sheet, benchmark record).
        reach: where it may be used (testbeds, models); any other use is an extrapolation that a page has to name.
        solved_from: ids of the published rows (exhibit:series:model:x:metric) that were used to find the value.
    """

    name: str
    value: float
    unit: str
    reason: str
    reach: str
    solved_from: tuple[str, ...] = ()


class CircularClaim(ValueError):
    """Raised when a claim's expectation was itself used to calibrate the value that the claim tests."""


def same_row(one: str, other: str) -> bool:
    """Return whether two row ids name the same published number.

    Exhibit, x and metric must be equal. A series may carry a reading after its name ("LoHan (Eqs. 1 to 5)"), and either
    id may leave out series or model, as rows of an exhibit with a single model do.
    """
    (exhibit, *name, x, metric), (other_exhibit, *other_name, other_x, other_metric) = one.split(":"), other.split(":")
    if (exhibit, x, metric) != (other_exhibit, other_x, other_metric):
        return False
    (series, model), (other_series, other_model) = name, other_name
    longer, shorter = (series, other_series) if len(series) > len(other_series) else (other_series, series)
    return longer.startswith(shorter) and (model == other_model or not model or not other_model)


def require_held_out(claim: str, expected_rows: Iterable[str], calibrations: Iterable[Calibration]) -> None:
    """Raise CircularClaim if a row that a claim expects was used to solve for a constant behind the claim's value."""
    rows = set(expected_rows)
    for calibration in calibrations:
        both = sorted(row for row in rows if any(same_row(row, used) for used in calibration.solved_from))
        if both:
            raise CircularClaim(
                f"claim {claim}: its expectation {both[0]} was used to calibrate {calibration.name} "
                f"({calibration.value:g} {calibration.unit}), so it cannot test what follows from it"
            )
