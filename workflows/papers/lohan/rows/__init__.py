"""The rows of LoHan's exhibits: its equations, and its schedule and those of its peers on its testbeds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from workflows.cases import Row
from workflows.papers.lohan.rows import equations, fig01, sizes, throughput, twins
from workflows.papers.lohan.rows.settings import PAPER


def modelled() -> Iterator[Row]:
    """Yield the modelled lane of all exhibits."""
    yield from fig01.rows()
    yield from sizes.rows()
    yield from throughput.rows()
    yield from equations.rows()
    yield from PAPER.assumptions()


def measured(records: list[dict[str, Any]]) -> Iterator[Row]:
    """Yield the measured lane, from records of the engine's benchmark and of step times."""
    good = [record for record in records if record["status"] == "ok"]
    yield from twins.rows([record for record in good if record.get("benchmark") == "engine"])
    yield from twins.phases([record for record in good if record["kind"] == "step-times"])
