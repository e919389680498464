"""Simulated steps of several arms on a paper's testbed, as one record: the measured record's form, lane ``modelled``.

Its points are those of `workflows.run.turns`, one round each: seconds by phase as the simulator plays the system's
schedule, and bytes on the SSDs. Nothing is measured, so the record names the testbed beside the host that computed it.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from hardware.registry import load_testbed
from memascend.planner import Workload, model_spec
from memascend.planner.machine import CALIBRATIONS, Machine, machine_from_testbed
from memascend.planner.step import io_volume
from memascend.planner.step_time import step_time
from memascend.planner.workload import papers
from workflows import staleness
from workflows.run import provenance
from workflows.run.training import parser, point
from workflows.run.turns import ARMS

FORWARD, BACKWARD = "forward", "backward"


def played(arm: dict[str, str], model: str, ranks: int, where: Machine, tokens: int, batch: int) -> dict[str, Any]:
    """One point of one arm: tokens of a sequence and sequences a rank, of the original model."""
    words = {name: arm[name] for name in ("system", "arm", "dtype")}
    work = papers(Workload(spec=model_spec(model), ranks=ranks, batch=batch, context=tokens, **words))
    made = step_time(work, where)
    seconds = {phase.name: phase.seconds for phase in made.phases}
    passes = {f"{name}_s": seconds.get(name, 0.0) for name in (FORWARD, BACKWARD)}
    rest = made.seconds - sum(passes.values())  # optimizer and overflow check, less what they overlap with
    moved = io_volume(work)
    amounts = passes | {"optimizer_s": rest, "bytes_read": moved.total_read_bytes}
    amounts["bytes_written"] = moved.total_write_bytes
    return {"sequence": tokens, "batch": batch, **arm, **{name: [value] for name, value in amounts.items()}}


def simulate(args: argparse.Namespace) -> int:
    """Raises ValueError for what is unknown, or a rate that the testbed lacks."""
    arms = [dict(zip(("system", "arm", "dtype"), word.split(":"), strict=True)) for word in args.arms]
    where = machine_from_testbed(load_testbed(args.testbed))
    points = [point(text) for text in args.points]
    fields = {
        "lane": "modelled",
        "testbed": args.testbed,
        "model": args.model,
        "twin": {"k": 1, "parameters": model_spec(args.model).parameters},
        "arms": arms,
        "ranks": args.ranks,
        "points_requested": [list(p) for p in points],
        "rounds": 1,
        "calibrations": {each.name: each.value for each in CALIBRATIONS},
        "points": [played(arm, args.model, args.ranks, where, *p) for arm in arms for p in points],
    }
    code = staleness.digest("workflows.run.simulation", sorted({arm["system"] for arm in arms}), [args.model])
    provenance.write_record(args.out, args.run_id, "step-times", code, fields)
    return 0


def main(argv: list[str] | None = None) -> int:
    own = {
        "testbed": {"required": True, "help": "a file of hardware/testbeds"},
        "arms": ARMS,
        "points": {"required": True},
    }
    args = parser(__doc__, "run-id", "model", "ranks", "out", **own).parse_args(argv)
    return provenance.program("simulation", lambda: simulate(args))


if __name__ == "__main__":
    sys.exit(main())
