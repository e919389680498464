"""Host buffers of SSDTrain: none. Activations go from the device to the SSD, weights and states stay on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.baselines.protocol import device_only

if TYPE_CHECKING:
    from memascend.planner.footprint import RankFootprint


def footprint(build: RankFootprint) -> None:
    """As with everything on the device: what the arms differ in, the activations, the plan of the GPU has."""
    device_only(build)
