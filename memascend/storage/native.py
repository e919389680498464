"""The native part, for modules that need no torch otherwise: its libraries must be there before the extension."""

import torch  # noqa: F401

from memascend import _C

__all__ = ["_C"]
