"""Signal handling of a rank: when to stop."""

from __future__ import annotations

import math
import os
import signal
from typing import Any

from memascend.storage import leaving
from memascend.training.processes import exit_status

_PATIENCE_S = 5.0  # without progress of any transfer, after which a drive counts as hanging


class Stop:
    """Handler of SIGTERM and SIGINT: the first asks for a checkpoint after the current step, the second exits at once.

    From the first signal on, a drive that hangs ends the run with the error of its transfers, since the step would
    never finish.
    """

    def __init__(self) -> None:
        self.asked = False
        self.status = exit_status(signal.SIGTERM)  # also if this rank stops because another was asked to
        self.training = False

    def install(self) -> None:
        """Handle SIGTERM and SIGINT in this process."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._received)

    def _received(self, number: int, _: Any) -> None:
        if not self.asked:
            self.status = exit_status(number)
        if self.asked or not self.training:  # before the first step there is nothing to save
            os._exit(self.status)
        self.asked = True
        leaving.begin(_PATIENCE_S, math.inf)
