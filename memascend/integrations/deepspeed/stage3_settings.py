"""Settings of the mixins that make up our ZeRO-3 optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .accelerator import PinnedAllocator
from .auto_settings import DerivedSettings
from .config import Parts
from .tier_options import NO_TIERS, TierOptions


@dataclass(frozen=True, kw_only=True)
class Stage3Settings:
    """Settings shared by all mixins, bound to the class as ``settings``.

    parts: the part that replaces each place of DeepSpeed.
    minimum_swap_bytes: replaces DeepSpeed's limit of 1 MiB below which it does not swap.
    derived: fills in settings that the user left out; None for stock DeepSpeed, which is not corrected either.
    allocator: keeps start-up and first step within the memory of later steps; None leaves them to DeepSpeed.
    exact_checkpoints: whether checkpoints are those of :mod:`.checkpoint`.
    tiers: several paths, for which the optimizer swapper is another one.
    before_update, end_of_update: called around each update over several paths.
    placement: the nodes on which ``allocator`` places each class of buffers.
    prestage_checkpoints: whether states that a checkpoint can reference are not copied.
    """

    parts: Parts
    minimum_swap_bytes: int | None = None
    derived: DerivedSettings | None = None
    allocator: PinnedAllocator | None = None
    exact_checkpoints: bool = False
    tiers: TierOptions = NO_TIERS
    before_update: Callable[[], None] | None = None
    end_of_update: Callable[[], None] | None = None
    placement: str | None = None
    prestage_checkpoints: bool = True
