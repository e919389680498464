"""Classes of tensors in host buffers, the latency tolerance of each class, and a NUMA placement by class.

The levels are those of CXL-aware allocation, section IV-B1: 1, data that the CPU computes on; 2, data that the GPU must
fetch before it can continue; 3, data that the GPU stores and fetches again; 4, data that it only stores. Every
allocation names its owner, so placement by class is a policy of the allocator, and allocating code knows no nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memascend.memory.policies import Placement

MASTERS, MOMENTUM, VARIANCE, GRADIENTS = "master_weights", "momentum", "variance", "gradients"
WEIGHTS, ACTIVATIONS, ARRIVING = "weights", "activations", "arriving_gradients"

FLAT_BUFFER = "gradient_flat_buffer"

# Ordered by level, then by bytes moved per step and byte stored: masters and moments are both read and written.
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
    FLAT_BUFFER: ARRIVING,  # stored by the GPU; converted or written to the SSD after backward
    "adam_states": MOMENTUM,
    "in_memory_optimizer": MASTERS,  # in a plan: masters and moments of sub-groups too small to swap
    "optimizer_buffers": MASTERS,  # master, moments and gradient of a sub-group, read from the SSD
    "parameter_pool": WEIGHTS,
    "parameter_flat_buffer": WEIGHTS,
    "small_parameters": WEIGHTS,
    "swap_out_buffer": WEIGHTS,
    "streamed_gradients": GRADIENTS,
    "streamed_states": MASTERS,  # masters, moments and gradients of a block in transit to or from the SSD
    "streamed_weights": WEIGHTS,
    "activation_checkpoints": ACTIVATIONS,
}


def class_of(owner: str, *, host_gradients: bool = False) -> str | None:
    """Return the class of an owner of ledger entries, or None if it is not a tensor of the training.

    With `host_gradients` the optimizer reads gradients directly from the flat buffer, so the CPU computes on it
    (level 1).
    """
    if host_gradients and owner == FLAT_BUFFER:
        return GRADIENTS
    return owner if owner in LEVELS else _OF_OWNER.get(owner)


@dataclass(frozen=True)
class ByClass:
    """A placement for each class of tensors. Classes without one, and other buffers, get `otherwise`, or are left to
    the kernel."""

    placements: Mapping[str, Placement]
    otherwise: Placement | None = None
    host_gradients: bool = False  # see `class_of`

    def __post_init__(self) -> None:
        unknown = sorted(set(self.placements) - set(LEVELS))
        if unknown:
            raise ValueError(f"placement: unknown class {unknown[0]!r}: use {', '.join(CLASSES)}")

    def of(self, owner: str) -> Placement | None:
        """Return the placement of this owner's buffers, or None for the kernel's policy."""
        found = class_of(owner, host_gradients=self.host_gradients)
        return self.otherwise if found is None else self.placements.get(found, self.otherwise)

    def __str__(self) -> str:
        return "; ".join(f"{name}: {placement}" for name, placement in self.placements.items())
