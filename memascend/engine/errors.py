"""Errors of the streaming engine. Each message is one line that names the fix."""

from __future__ import annotations

from pathlib import Path


class NotStreamable(ValueError):
    """The engine cannot train this model or loop; the message names the fix."""


class NotThisModel(ValueError):
    """The folder holds the states of another model, or of other settings."""


class InterruptedUpdate(ValueError):
    """A step was interrupted while it replaced the only version of its states."""

    @classmethod
    def of(cls, folder: Path) -> InterruptedUpdate:
        """Return the error for the states in `folder`."""
        return cls(
            f"{folder}: a step was interrupted while it replaced the only version of the states, which are incomplete "
            "(one version is kept, and no gradients to redo the step from): continue from the last checkpoint"
        )


class CommittedAfterAll(InterruptedUpdate):
    """The drive failed while a step was being completed, but the step was saved."""
