"""MemAscend's parts inside stock DeepSpeed, without a fork (hooks in :mod:`.hooks`)."""

from .config import Parts
from .hooks import Enabled, active, disable, enable

__all__ = ["Enabled", "Parts", "active", "disable", "enable"]
