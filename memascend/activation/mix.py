"""Keep, recompute or offload per block of a model (SSDTrain, Fig. 7), as executed in a run."""

from __future__ import annotations

from typing import Any

import torch

from memascend.activation.checkpointing import switch_on
from memascend.activation_policy import RECOMPUTE, ActivationPolicy


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the blocks of a model in forward order: its longest ModuleList."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=len, default=()))


def block_policies(model: torch.nn.Module, policy: ActivationPolicy, where: str) -> dict[torch.nn.Module, str]:
    """Return the policy of each block. Raises ValueError, in one line, if the numbers of blocks differ."""
    blocks = blocks_of(model)
    return dict(zip(blocks, policy.per_block(len(blocks), where), strict=True))


def recompute_blocks(model: Any, policies: dict[torch.nn.Module, str], options: dict[str, Any]) -> None:
    """Enable gradient checkpointing of a transformers model in exactly the blocks with policy RECOMPUTE.

    `options` go to `torch.utils.checkpoint.checkpoint`. Raises ValueError for a model whose blocks have no individual
    switches, as in transformers before 5.
    """
    if RECOMPUTE not in policies.values():
        return
    switch_on(model, options)
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) and module not in policies:
            module.gradient_checkpointing = False
    without = [block for block in policies if not hasattr(block, "gradient_checkpointing")]
    if without:
        raise ValueError(
            f"{type(without[0]).__name__} has no per-block switch for gradient checkpointing, so that single blocks "
            "cannot be recomputed: use transformers 5, or a mix of keep and offload"
        )
    for block, policy in policies.items():
        block.gradient_checkpointing = policy == RECOMPUTE
