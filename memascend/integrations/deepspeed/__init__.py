"""MemAscend's parts inside stock DeepSpeed, without a fork (hooks in :mod:`.hooks`)."""

from .hooks import Enabled, active, disable, enable
from .parts import AS_PUBLISHED, AS_PUBLISHED_ONE_TENSOR, MEMASCEND, TODAY, Parts

__all__ = [
    "AS_PUBLISHED",
    "AS_PUBLISHED_ONE_TENSOR",
    "MEMASCEND",
    "TODAY",
    "Enabled",
    "Parts",
    "active",
    "disable",
    "enable",
]
