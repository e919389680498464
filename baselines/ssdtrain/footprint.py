"""Footprint of SSDTrain, which has no host buffers: weights and states stay on the device, and activations go directly
from there to the SSD."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.baselines.protocol import device_only

if TYPE_CHECKING:
    from memascend.planner.footprint import RankFootprint


def footprint(build: RankFootprint) -> None:
    """Book the buffers of training on the device; activations, in which the arms differ, are in the GPU's plan."""
    device_only(build)
