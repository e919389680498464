"""Colossal-AI with Gemini and NVMe offload, as in LoHan's comparison; it is planned and simulated, not run."""

from __future__ import annotations

from memascend.arrangements import Arrangement
from memascend.baselines.colossal_ai.footprint import chunks
from memascend.baselines.colossal_ai.schedule import schedule
from memascend.baselines.protocol import PlannedSystem

_ARMS = {"as_published": Arrangement(label="Colossal-AI", states_on="host", pinned="page_aligned", runs=False)}

SYSTEM = PlannedSystem(name="colossal_ai", arms=_ARMS, buffers=chunks, tasks=schedule)
