"""MemAscend's parts inside stock DeepSpeed, without a fork (hooks in :mod:`.hooks`)."""

from .hooks import Enabled, active, disable, enable
from .parts import Parts

__all__ = ["Enabled", "Parts", "active", "disable", "enable"]
