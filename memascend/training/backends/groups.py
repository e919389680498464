"""Groups of parameters whose states are stored in flat tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Group:
    """Parameters whose states are consecutive in flat tensors; they are updated with one call."""

    parameters: list[tuple[str, torch.nn.Parameter]]
    first_element: int  # offset of the group's first element among all groups
    master: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    scales: torch.Tensor | None = None  # scales of 8-bit moments, which are codes; the group is then one parameter
    slices: dict[torch.nn.Parameter, torch.Tensor] = field(default_factory=dict)  # each parameter's view of `gradient`
