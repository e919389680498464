"""The spans of a model's blocks, the waits between them, and what its activation cache moves, in a traced step."""

from __future__ import annotations

from typing import Any

import torch

from memascend.integrations.memory_options import AppliedOptions
from memascend.simulator.recorder import Recorder, record_transfers
from memascend.storage import interrupts


def record_blocks(model: torch.nn.Module, recorder: Recorder) -> None:
    """From now on each block of `model` is an event of the device, less what the main thread waits in it.

    In backward a block lasts from its recomputation, which calls its parts and not the block, to that of the block
    before it; without gradient checkpointing backward has no blocks.
    """
    interrupts.record_waits(recorder.wait)
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    for number, block in enumerate(max(lists, key=len, default=())):
        for part in block.children():
            part.register_forward_pre_hook(lambda *_, name=f"block {number}": recorder.begin_block(name))
        block.register_forward_hook(lambda *_: _ended(recorder))


def record_activations(options: AppliedOptions, recorder: Recorder) -> None:
    """From now on every transfer of the activation cache is an event, if the model has one."""
    if options.cache is not None:
        record_transfers(options.cache.tier, recorder)


def _ended(recorder: Recorder, *_: Any) -> None:
    if recorder.current_phase == "forward":
        recorder.end_block()
