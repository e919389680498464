"""Recording of DeepSpeed's step: its transfers, overflow check and updates of sub-groups."""

from __future__ import annotations

from typing import Any

from memascend.simulator.recorder import CPU, Recorder

__all__ = ["record_step"]


def record_step(engine: Any, enabled: Any, recorder: Recorder) -> None:
    """Record all later steps, within the phases that the caller names. `enabled`: the result of `memascend.enable`."""
    optimizer = engine.optimizer
    enabled.io.recorder = recorder
    check, update = optimizer.has_overflow, optimizer._optimizer_step

    def has_overflow(*args: Any, **kwargs: Any) -> Any:
        with recorder.phase("overflow check"), recorder.span("overflow check", CPU):
            return check(*args, **kwargs)

    def optimizer_step(sub_group_id: int) -> Any:
        numel = optimizer.fp16_partitioned_groups_flat_numel[sub_group_id]
        with recorder.span(f"AdamW {sub_group_id}", CPU, numel):
            return update(sub_group_id)

    optimizer.has_overflow, optimizer._optimizer_step = has_overflow, optimizer_step
