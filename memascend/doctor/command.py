"""`memascend doctor`."""

from typing import Any


def add_doctor(commands: Any) -> None:
    """Register the subcommand."""
