"""Prediction of a streamed step: the simulator run for this machine, without using measurements of streamed steps.

The device's speed comes from forward and backward of the same model in memory, the CPU's from AdamW measured alone, and
the SSD's from the rate limit of the path, which serves one request at a time. Nothing comes from the streamed steps
with which the prediction is compared.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from memascend.planner.machine import Calibrations, MachineSpec
from memascend.planner.options import Stack
from memascend.planner.pieces import forward_flops
from memascend.planner.spec import ModelSpec
from memascend.planner.step_time import StepTime, step_time
from memascend.planner.workload import ELEMENT_BYTES, Workload

SYSTEM, ARMS = "lohan", ("optimized", "naive", "none")
_STATES = 7  # AdamW reads four fp32 tensors and writes three


def predicted_steps(
    memory: Mapping[str, Any], adamw: float, *, spec: ModelSpec, dtype: str, path_rate: float
) -> Iterator[dict[str, Any]]:
    """Yield the predicted seconds of the step and its phases for each arm, at the context of `memory`.

    `memory` is a point of `memascend.bench.engine` for the in-memory way; points of other ways yield nothing. `adamw`
    is in elements per second, `path_rate` in bytes per second, reads and writes together. Raises ValueError for a dtype
    that the planner does not know.
    """
    if memory["method"] != "memory":
        return
    for arm in ARMS:
        made = _simulated(memory, adamw, spec, dtype, path_rate, arm)
        phases = {f"{phase.name}_s": phase.seconds for phase in made.phases}
        named = {"context": memory["context"], "method": arm}
        yield {**named, "seconds": made.seconds, **phases, "bottleneck": made.bottleneck}


def rate_of_ratio(memory: Mapping[str, Any], adamw: float, *, spec: ModelSpec, dtype: str, ratio: float) -> float:
    """Return the SSD rate, in bytes per second for reads and writes together, that gives a ratio of device to SSD time.

    At that rate, the SSD moves the bytes of a step of the optimized arm in 1/`ratio` of the time of the in-memory
    step's forward and backward. The other arguments are those of `predicted_steps`.
    """
    nbytes = 1e9 * _simulated(memory, adamw, spec, dtype, 1e9, ARMS[0]).of_resource("SSD")
    return ratio * nbytes / sum(statistics.median(memory[name]) for name in ("forward_s", "backward_s"))


def _simulated(
    memory: Mapping[str, Any], adamw: float, spec: ModelSpec, dtype: str, path_rate: float, arm: str
) -> StepTime:
    """Simulate a step on a machine with the measured speeds; `memory` is the in-memory point."""
    context = memory["context"]
    forward_s, backward_s = (statistics.median(memory[name]) for name in ("forward_s", "backward_s"))
    flops = forward_flops(spec, 1, context)
    of_blocks = 1.0 - 2.0 * context * spec.vocab * spec.hidden / flops
    machine = MachineSpec(
        name="local",
        gpu_flops_per_s=flops / forward_s,
        pcie_bytes_per_s=1e12,  # the device's memory is the host's
        ssd_read_bytes_per_s=path_rate,
        ssd_write_bytes_per_s=path_rate,
        memory_bytes_per_s=adamw * (4 * _STATES + ELEMENT_BYTES[dtype]),
    )
    costs = dataclasses.replace(
        Calibrations(),
        gpu_efficiency=1.0,
        host_seconds_per_parameter=0.0,
        adam_memory_efficiency=1.0,
        backward_products=backward_s / forward_s - of_blocks,
    )
    work = Workload(
        spec=spec, system=SYSTEM, arm=arm, dtype=dtype, context=context, stack=Stack(checkpointing="offloaded")
    )
    return step_time(work, machine, calibrations=costs)
