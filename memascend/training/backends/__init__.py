"""Training backends: each stores a model and its optimizer states somewhere and makes optimizer steps with them.

`protocol` defines the interface that the ranks of a run use. A backend is loaded by name, so that the training code
imports none of them: the DeepSpeed backend is in `memascend.integrations`, the only package that may import DeepSpeed.
This module does not import torch, because the parent process of a run imports it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memascend.training.backends.protocol import Backend

IN_MEMORY = "in_memory"
DEEPSPEED = "deepspeed"
STREAMING = "streaming"
# Arms of the system in_memory, and the AdamW implementation of each (memascend.training.backends.updates).
UPDATES = {"torch_adamw": "torch", "deepspeed_adamw": "deepspeed", "memascend_adamw": "memascend"}
_CLASSES = {
    DEEPSPEED: "memascend.integrations.deepspeed.backend:DeepSpeedBackend",
    IN_MEMORY: "memascend.training.backends.in_memory:InMemoryBackend",
    STREAMING: "memascend.training.backends.streaming:StreamingBackend",
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The choice of a backend for the ranks of a run. `settings` is passed only to the backend, as JSON."""

    backend: str
    settings: dict[str, Any]
    swaps: bool  # whether it needs a folder for swap files


def load(name: str) -> type[Backend]:
    """Return the class of the backend called `name`. Raises ValueError for an unknown name."""
    if name not in _CLASSES:
        raise ValueError(f"there is no backend {name!r}; known: {', '.join(_CLASSES)}")
    module, _, cls = _CLASSES[name].partition(":")
    found: type[Backend] = getattr(importlib.import_module(module), cls)
    return found
