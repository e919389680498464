"""A paper's modelled lane with one constant changed: `python -m tests.workflow.perturbed PAPER [CONSTANT FACTOR]`.

Prints {claim: value} for all claims that the lane decides. Each call is a separate process, since rows are cached and
values are read at import.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import pandas as pd

from memascend.planner import footprint, machine
from workflows import paper_models, registry, tidy
from workflows.derive import claims
from workflows.derive.table import rows_of


def change(paper: str, name: str, factor: float) -> None:
    """Change a constant of the paper's calibrations.yaml, or of the planner."""
    if name in paper_models.constants(paper):
        each = paper_models.constants(paper)[name]
        paper_models.constants(paper)[name] = dataclasses.replace(each, value=each.value * factor)
    elif name == machine.PROCESS_OVERHEAD.name:
        object.__setattr__(machine.PROCESS_OVERHEAD, "value", machine.PROCESS_OVERHEAD.value * factor)
        footprint.PROCESS_OVERHEAD_BYTES = round(machine.PROCESS_OVERHEAD.value * machine.GIB)
    else:
        machine.Calibrations.__init__.__kwdefaults__[name] *= factor


def values(paper: str) -> dict[str, str]:
    rows = pd.DataFrame(rows_of(paper).modelled()).reindex(columns=tidy.COLUMNS).fillna("").astype(str)
    mine = [claim for claim in registry.claims() if claim["exhibit_id"].startswith(f"{paper}-")]
    decided = (claims.decide(claim, "modelled", rows[rows["exhibit_id"] == claim["exhibit_id"]]) for claim in mine)
    return {verdict.claim_id: verdict.value for verdict in decided if verdict.value}


if __name__ == "__main__":
    paper, *changed = sys.argv[1:]
    if changed:
        change(paper, changed[0], float(changed[1]))
    print(json.dumps(values(paper)))
