"""FlashNeuron as in LoHan's comparison: activations on the SSD, model states on the GPU; planned, not simulated."""

from __future__ import annotations

from memascend.arrangements import Arrangement
from memascend.baselines.protocol import PlannedSystem, device_only

_ARMS = {"as_published": Arrangement(label="FlashNeuron", states_on="gpu", runs=False)}

SYSTEM = PlannedSystem(name="flashneuron", arms=_ARMS, buffers=device_only)
