"""The native extension, for modules that need no torch otherwise: torch's libraries must be loaded before it."""

import torch  # noqa: F401

from memascend import _C

__all__ = ["_C"]
