"""Activations: gradient checkpoints that wait for the backward pass in host memory (MemAscend II-C4 and V-B)."""

from memascend.activation.checkpointing import OffloadedCheckpoint, offload_checkpoints
from memascend.activation.store import CheckpointStore

__all__ = ["CheckpointStore", "OffloadedCheckpoint", "offload_checkpoints"]
