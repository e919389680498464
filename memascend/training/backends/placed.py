"""A model in host memory whose tensors lie where a placement says: what each class takes, and its weights moved."""

from __future__ import annotations

from typing import Any

import torch

from memascend.memory import classes
from memascend.memory.pinned import Allocator, page_rounded_bytes


def class_sizes(model: torch.nn.Module, config: Any, *, states_on_cpu: bool) -> dict[str, int]:
    """Host bytes by class of one process: `config` is the run's. Activation checkpoints are counted as they are stored
    when they are offloaded (Table I: batch x context x blocks x hidden size)."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    on_cpu = {p for p in model.parameters() if p.device.type == "cpu"}
    sizes: dict[str, int] = {}
    if states_on_cpu:
        state = page_rounded_bytes((2 if config.states == "bf16" else 4) * trained)
        sizes = dict.fromkeys((classes.MASTERS, classes.MOMENTUM, classes.VARIANCE), state)
        sizes[classes.GRADIENTS] = page_rounded_bytes((2 if config.gradients == "bf16" else 4) * trained)
    sizes[classes.WEIGHTS] = sum(page_rounded_bytes(p.numel() * p.element_size()) for p in on_cpu)
    if config.checkpointing == "offloaded" and config.context:
        text = model.config.get_text_config()
        per_block = config.batch * config.context * text.hidden_size * next(model.parameters()).element_size()
        sizes[classes.ACTIVATIONS] = page_rounded_bytes(per_block * text.num_hidden_layers)
    return sizes


def place_weights(model: torch.nn.Module, allocator: Allocator) -> None:
    """Give every parameter memory of `allocator` (owner `weights`) with the values that it has; tied ones share it."""
    for name, parameter in model.named_parameters():
        if parameter.numel():
            flat = allocator.allocate(parameter.numel(), parameter.dtype, name=name, owner=classes.WEIGHTS)
            parameter.data = flat.view(parameter.shape).copy_(parameter.data)
