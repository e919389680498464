"""What the mixins that make up our ZeRO-3 optimizer are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .accelerator import PinnedAllocator
from .auto_settings import DerivedSettings
from .config import Parts
from .tier_options import NO_TIERS, TierOptions


@dataclass(frozen=True, kw_only=True)
class Stage3Settings:
    """One object for all of them, bound to the class as ``settings``.

    ``minimum_swap_bytes``: replaces DeepSpeed's 1 MiB below which it does not swap. ``derived`` fills in what the user
    left out; None for DeepSpeed as it is, which is not corrected either. ``allocator`` keeps start-up and first step in
    the memory of later ones; None leaves them to DeepSpeed. ``exact_checkpoints``: as :mod:`.checkpoint` installs them.
    ``tiers``: over several paths the optimizer swapper is another one; ``before_update`` and ``end_of_update`` are
        called around each update.
    ``prestage_checkpoints``: states that a checkpoint can reference are not copied.
    ``placement``: where ``allocator`` puts each class of buffers.
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
