"""Communication between the ranks of a run; with one rank nothing is sent."""

from __future__ import annotations

from typing import Any

import torch


def sums(ranks: int, values: list[float], backend: Any) -> list[float]:
    """Return the sum of each value over all ranks, computed on the backend's device in fp64."""
    if ranks == 1:
        return [float(value) for value in values]
    found = torch.tensor(values, dtype=torch.float64, device=backend.device)
    torch.distributed.all_reduce(found)
    return [float(value) for value in found.tolist()]


def gather(ranks: int, value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order."""
    if ranks == 1:
        return [value]
    values: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(values, value)
    return values


def barrier(ranks: int) -> None:
    """Wait until all ranks have called this."""
    if ranks > 1:
        torch.distributed.barrier()
