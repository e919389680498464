"""Parameters and their states in flat tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Group:
    """Parameters whose states follow one another in flat tensors; updated with one call."""

    parameters: list[tuple[str, torch.nn.Parameter]]
    first_element: int  # of the group among all
    master: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    scales: torch.Tensor | None = None  # of 8-bit moments, which are codes: the group is one parameter
    slices: dict[torch.nn.Parameter, torch.Tensor] = field(default_factory=dict)  # of `gradient`
