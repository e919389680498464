"""What an activation cache is told, and what it counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """What is offloaded, and how far ahead it is read.

    Args:
        amount: `all` (whatever is large enough), `auto` (what the SSD takes while forward runs, nothing where the
            device's memory suffices anyway), or bytes a forward pass.
        minimum_bytes: smaller tensors stay. The paper's limit is 2^20 elements (Algorithm 1 prints 2 * 20).
        prefetch_bytes: how much may be read ahead of backward.
        reserve_bytes: space that is left free on the tier; beyond it tensors stay in memory, which is logged once.
        write_budget_bytes: what may be written in all (the drive's endurance); beyond it tensors stay, logged once.
        device: whose tensors are activations; default: cuda (or another accelerator) where there is one, else cpu.
    """

    amount: str | int = "auto"
    minimum_bytes: int = 1 << 20
    prefetch_bytes: int = 256 << 20
    reserve_bytes: int = 1 << 30
    write_budget_bytes: int | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if not (self.amount in ("auto", "all") or (isinstance(self.amount, int) and self.amount >= 0)):
            raise ValueError(f"activations: amount must be 'auto', 'all' or bytes, got {self.amount!r}")
        for name in ("minimum_bytes", "prefetch_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"activations: {name} must be at least 1, got {getattr(self, name)!r}")


@dataclass(frozen=True, kw_only=True)
class CacheStatistics:
    """Since the cache was made; bytes. `waited_s`: how long backward stood still for reads.

    `resident`: saved tensors that are in memory now, `peak` their most since `ActivationCache.restart_peak`.
    """

    written: int = 0
    read: int = 0
    kept: int = 0
    forwarded: int = 0
    deduplicated: int = 0
    waited_s: float = 0.0
    live_tensors: int = 0
    resident: int = 0
    peak: int = 0


def options_from(section: Mapping[str, Any]) -> CacheOptions:
    """CacheOptions of a configuration section; ValueError in one line for an unknown key."""
    known = CacheOptions.__dataclass_fields__
    unknown = next((key for key in section if key not in known), None)
    if unknown is not None:
        raise ValueError(f"activations: unknown key {unknown!r}; known: {', '.join(known)}")
    return CacheOptions(**section)
