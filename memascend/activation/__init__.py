"""Activation offloading: gradient checkpoints in host memory (MemAscend II-C4 and V-B), and other tensors that autograd
saves on a storage tier (SSDTrain).
"""

from memascend.activation.attach import attach_cache, cache_of
from memascend.activation.cache import ActivationCache
from memascend.activation.checkpointing import OffloadedCheckpoint, offload_checkpoints
from memascend.activation.offload import offload_activations
from memascend.activation.options import CacheOptions
from memascend.activation.saved import ActivationError
from memascend.activation.store import CheckpointStore

__all__ = [
    "ActivationCache",
    "ActivationError",
    "CacheOptions",
    "CheckpointStore",
    "OffloadedCheckpoint",
    "attach_cache",
    "cache_of",
    "offload_activations",
    "offload_checkpoints",
]
