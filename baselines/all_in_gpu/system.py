"""Plain training with everything in GPU memory, the first row of the papers' memory tables."""

from __future__ import annotations

from memascend.arrangements import Arrangement
from memascend.baselines.all_in_gpu.schedule import schedule
from memascend.baselines.protocol import PlannedSystem, device_only

_ARMS = {"today": Arrangement(label="All in GPU", states_on="gpu", runs=False)}

SYSTEM = PlannedSystem(name="all_in_gpu", arms=_ARMS, buffers=device_only, tasks=schedule)
