"""Recording of the streaming engine's steps: the model's blocks, the transfers, and AdamW, run by another thread."""

from __future__ import annotations

from typing import Any

from memascend.engine.runtime import StreamingEngine
from memascend.integrations.block_spans import record_blocks
from memascend.simulator.recorder import CPU, Recorder, record_transfers


def record_engine(engine: StreamingEngine, recorder: Recorder) -> None:
    """Record all later steps of `engine`, for as long as it exists."""
    record_blocks(engine.model, recorder)
    record_transfers(engine.state_store, recorder)
    record_transfers(engine._auxiliary.scratch(), recorder)
    step = engine.updates.adam.step

    def stepped(run: Any, *rest: Any) -> None:
        begin = recorder.now()
        step(run, *rest)
        recorder.add(f"AdamW {run.part.name}", CPU, begin, run.numel)

    engine.updates.adam.step = stepped
