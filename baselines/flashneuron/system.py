"""FlashNeuron as LoHan compares with it: activations on the SSD, model states on the GPU. Planned, not simulated."""

from __future__ import annotations

from memascend.arrangements import Arrangement
from memascend.baselines.protocol import PlannedSystem, device_only

_ARMS = {"as_published": Arrangement(label="FlashNeuron", states_on="gpu", runs=False)}

SYSTEM = PlannedSystem(name="flashneuron", arms=_ARMS, buffers=device_only)
