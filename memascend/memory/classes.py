"""What kind of tensor a host buffer holds, how much latency that kind tolerates, and a placement for each kind.

The levels are those of CXL-aware allocation, section IV-B1: 1, what the CPU computes on; 2, what the GPU fetches before
it can go on; 3, what the GPU stores and fetches again; 4, what it only stores. Every allocation names its owner, so a
placement by class is one policy of an allocator, and code that allocates knows nothing of nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memascend.memory.policies import Placement

MASTERS, MOMENTUM, VARIANCE, GRADIENTS = "master_weights", "momentum", "variance", "gradients"
WEIGHTS, ACTIVATIONS, ARRIVING = "weights", "activations", "arriving_gradients"

FLAT_BUFFER = "gradient_flat_buffer"

# By level, and within one by bytes that a step moves for each that is stored: masters and moments are read and written.
LEVELS: Mapping[str, int] = {
    MASTERS: 1,
    MOMENTUM: 1,
    VARIANCE: 1,
    GRADIENTS: 1,
    WEIGHTS: 2,
    ACTIVATIONS: 3,
    ARRIVING: 4,
}
CLASSES = tuple(LEVELS)

# Owners of ledger entries whose name is not their class.
_OF_OWNER = {
    FLAT_BUFFER: ARRIVING,  # stored by the GPU; converted, or written to the SSD, after backward
    "adam_states": MOMENTUM,
    "in_memory_optimizer": MASTERS,  # of a plan: masters and moments of sub-groups too small to swap
    "optimizer_buffers": MASTERS,  # master, moments and gradient of a sub-group, on their way from the SSD
    "parameter_pool": WEIGHTS,
    "parameter_flat_buffer": WEIGHTS,
    "small_parameters": WEIGHTS,
    "swap_out_buffer": WEIGHTS,
    "streamed_gradients": GRADIENTS,
    "streamed_states": MASTERS,  # of a block on its way from the SSD and back: masters, moments and gradients
    "streamed_weights": WEIGHTS,
    "activation_checkpoints": ACTIVATIONS,
}


def class_of(owner: str, *, host_gradients: bool = False) -> str | None:
    """The class of what an owner of ledger entries holds; None for what is no tensor of the training. With
    `host_gradients` the optimizer reads gradients from the flat buffer itself, so the CPU computes on it (level 1)."""
    if host_gradients and owner == FLAT_BUFFER:
        return GRADIENTS
    return owner if owner in LEVELS else _OF_OWNER.get(owner)


@dataclass(frozen=True)
class ByClass:
    """A placement for each class of tensors; classes that are not named, and other buffers, lie where the kernel puts
    them, or under `otherwise`."""

    placements: Mapping[str, Placement]
    otherwise: Placement | None = None
    host_gradients: bool = False  # see `class_of`

    def __post_init__(self) -> None:
        unknown = sorted(set(self.placements) - set(LEVELS))
        if unknown:
            raise ValueError(f"placement: unknown class {unknown[0]!r}: use {', '.join(CLASSES)}")

    def of(self, owner: str) -> Placement | None:
        """Where a buffer of this owner goes."""
        found = class_of(owner, host_gradients=self.host_gradients)
        return self.otherwise if found is None else self.placements.get(found, self.otherwise)

    def __str__(self) -> str:
        return "; ".join(f"{name}: {placement}" for name, placement in self.placements.items())
