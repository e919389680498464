"""Recording of a model's blocks, the waits between them and its activation cache's transfers in a traced step."""

from __future__ import annotations

from typing import Any

import torch

from memascend.integrations.memory_options import AppliedOptions
from memascend.simulator.recorder import Recorder, record_transfers
from memascend.storage import interrupts


def record_blocks(model: torch.nn.Module, recorder: Recorder) -> None:
    """Record every later run of a block of `model` as an event of the device, minus the main thread's waits in it.

    In backward a block lasts from its own recomputation, which calls its parts and not the block itself, to that of the
    preceding block. Without gradient checkpointing, blocks are not recorded in backward.
    """
    interrupts.record_waits(recorder.wait)
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    for number, block in enumerate(max(lists, key=len, default=())):
        for part in block.children():
            part.register_forward_pre_hook(lambda *_, name=f"block {number}": recorder.begin_block(name))
        block.register_forward_hook(lambda *_: _ended(recorder))


def record_activations(options: AppliedOptions, recorder: Recorder) -> None:
    """Record every later transfer of the activation cache, if the model has one."""
    if options.cache is not None:
        record_transfers(options.cache.tier, recorder)


def _ended(recorder: Recorder, *_: Any) -> None:
    """End the recorded block in forward; in backward the next recomputation ends it."""
    if recorder.current_phase == "forward":
        recorder.end_block()
