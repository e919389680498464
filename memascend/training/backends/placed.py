"""Placement of an in-memory model on memory nodes: the sizes of its classes of tensors, and moving its weights."""

from __future__ import annotations

import math
from typing import Any

import torch

from memascend.memory import classes
from memascend.memory.pinned import Allocator, page_rounded_bytes
from memascend.ops.adamw8 import scales_shape


def class_sizes(model: torch.nn.Module, config: Any, *, states_on_cpu: bool) -> dict[str, int]:
    """Return the host bytes of one process by class. `config`: the run's configuration.

    Activation checkpoints are counted if they are offloaded (Table I: batch x context x blocks x hidden size).
    """
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    on_cpu = {p for p in model.parameters() if p.device.type == "cpu"}
    sizes: dict[str, int] = {}
    if states_on_cpu:
        # Flat tensors as in the backend: one for all parameters, or with 8-bit moments one per parameter.
        eight = config.states == "int8"
        flat = [p.numel() for p in model.parameters() if p.requires_grad] if eight else [trained]
        state, gradient = 4 if config.states == "fp32" else 2, 2 if config.gradients == "bf16" else 4
        moment = 1 if eight else state
        for name, each in {classes.MASTERS: state, classes.MOMENTUM: moment, classes.VARIANCE: moment}.items():
            sizes[name] = sum(page_rounded_bytes(each * numel) for numel in flat)
        if eight:
            sizes[classes.VARIANCE] += sum(page_rounded_bytes(math.prod(scales_shape(numel))) for numel in flat)
        sizes[classes.GRADIENTS] = sum(page_rounded_bytes(gradient * numel) for numel in flat)
    sizes[classes.WEIGHTS] = sum(page_rounded_bytes(p.numel() * p.element_size()) for p in on_cpu)
    if config.checkpointing == "offloaded" and config.context:
        text = model.config.get_text_config()
        per_block = config.batch * config.context * text.hidden_size * next(model.parameters()).element_size()
        sizes[classes.ACTIVATIONS] = page_rounded_bytes(per_block * text.num_hidden_layers)
    return sizes


def place_weights(model: torch.nn.Module, allocator: Allocator) -> None:
    """Move every parameter to memory of `allocator` (owner `weights`), with its values; tied ones share the memory."""
    for name, parameter in model.named_parameters():
        if parameter.numel():
            flat = allocator.allocate(parameter.numel(), parameter.dtype, name=name, owner=classes.WEIGHTS)
            parameter.data = flat.view(parameter.shape).copy_(parameter.data)
