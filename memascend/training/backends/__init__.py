"""Backends of a training: what keeps a model and its optimizer somewhere, and makes a step with them.

`protocol` says what the ranks of a run ask for. A backend is found by name, so that the training imports none: the one
on DeepSpeed lies in `memascend.integrations`, the only room that may import it. No torch here: the parent of a run
imports this.
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
# Arms of the system in_memory, and whose AdamW each is (memascend.training.backends.updates).
UPDATES = {"torch_adamw": "torch", "deepspeed_adamw": "deepspeed", "memascend_adamw": "memascend"}
_CLASSES = {
    DEEPSPEED: "memascend.integrations.deepspeed.backend:DeepSpeedBackend",
    IN_MEMORY: "memascend.training.backends.in_memory:InMemoryBackend",
    STREAMING: "memascend.training.backends.streaming:StreamingBackend",
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the ranks of a run are told of their backend. `settings` goes to it alone, as JSON."""

    backend: str
    settings: dict[str, Any]
    swaps: bool  # whether it needs a folder for swap files


def load(name: str) -> type[Backend]:
    """The class of the backend called `name`; ValueError for one that is not there."""
    if name not in _CLASSES:
        raise ValueError(f"there is no backend {name!r}; known: {', '.join(_CLASSES)}")
    module, _, cls = _CLASSES[name].partition(":")
    found: type[Backend] = getattr(importlib.import_module(module), cls)
    return found
