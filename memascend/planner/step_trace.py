"""Writing a plan's simulated step as a trace, in the same format as the traces of real runs."""

from __future__ import annotations

from pathlib import Path

from memascend.planner.plan_result import PlanResult
from memascend.simulator import write_trace


def write_step(result: PlanResult, path: Path, *, force: bool = False) -> None:
    """Write the events to `path`.

    Raises a one-line ValueError if no step was simulated, or if the file exists and `force` is off.
    """
    if result.time is None or result.machine is None:
        raise ValueError(f"--trace needs a simulated step, and there is none: {result.no_time}")
    if path.exists() and not force:
        raise ValueError(f"{path} exists: --force replaces it, or name another file")
    work = result.work
    write_trace(
        path,
        result.time.simulated.events,
        lane="modelled",
        source=result.machine.name,
        system=work.system,
        arm=work.arm_name,
        model=work.spec.name,
        twin=work.spec.k,
        dtype=work.dtype,
        ranks=work.ranks,
        batch=work.batch,
        context=work.context,
        accumulate=work.accumulation,
        seconds=result.time.seconds,
    )
