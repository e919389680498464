"""Events of the streaming engine's steps: its model's blocks, its transfers, and AdamW, which another thread does."""

from __future__ import annotations

from typing import Any

from memascend.engine.runtime import StreamingEngine
from memascend.integrations.block_spans import record_blocks
from memascend.simulator.recorder import CPU, Recorder, record_transfers


def record_engine(engine: StreamingEngine, recorder: Recorder) -> None:
    """From now on, for as long as the engine lives."""
    record_blocks(engine.model, recorder)
    record_transfers(engine.state_store, recorder)
    record_transfers(engine._auxiliary.scratch(), recorder)
    step = engine.updates.adam.step

    def stepped(run: Any, *rest: Any) -> None:
        begin = recorder.now()
        step(run, *rest)
        recorder.add(f"AdamW {run.part.name}", CPU, begin, run.numel)

    engine.updates.adam.step = stepped
