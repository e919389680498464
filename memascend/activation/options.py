"""Options and statistics of an activation cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memascend.memory.budget import parse_bytes
from memascend.suggestions import did_you_mean

MINIMUM_BYTES = 1 << 20  # minimum size of a saved tensor that goes to the SSD


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Selects what is offloaded, and how far ahead it is read. Bytes can also be given as text, such as `1MiB`.

    Args:
        amount: `all` (whatever is large enough), `auto` (what the SSD can write during forward; nothing if the device's
            memory suffices anyway), or bytes per forward pass.
        minimum_bytes: smaller tensors stay. The paper's limit is 2^20 elements (Algorithm 1 prints 2 * 20).
        prefetch_bytes: how much may be read ahead of backward.
        reserve_bytes: space to leave free on the tier; beyond it tensors stay in memory, which is logged once.
        write_budget_bytes: limit of total writes in bytes (the drive's endurance); beyond it tensors stay, logged once.
        device: device type whose tensors are activations; default: cuda or another available accelerator, else cpu.
    """

    amount: str | int = "auto"
    minimum_bytes: int | str = MINIMUM_BYTES
    prefetch_bytes: int | str = 256 << 20
    reserve_bytes: int | str = 1 << 30
    write_budget_bytes: int | str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        for name, least in {
            "minimum_bytes": 1,
            "prefetch_bytes": 1,
            "reserve_bytes": 0,
            "write_budget_bytes": 0,
        }.items():
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, value := parse_bytes(value, f"activations: {name}"))
            if not (_is_bytes(value, least) or (value is None and name == "write_budget_bytes")):
                raise ValueError(
                    f"activations: {name} must be bytes, at least {least}, or a text such as '1MiB', got {value!r}"
                )
        if isinstance(self.amount, str) and self.amount not in ("auto", "all"):
            object.__setattr__(self, "amount", parse_bytes(self.amount, "activations: amount (auto, all or bytes)"))
        if not (self.amount in ("auto", "all") or _is_bytes(self.amount, 0)):
            raise ValueError(f"activations: amount must be 'auto', 'all' or bytes, got {self.amount!r}")
        if not isinstance(self.device, str | None):
            raise ValueError(f"activations: device must be a text such as 'cuda', or None, got {self.device!r}")


def _is_bytes(value: object, least: int) -> bool:
    return type(value) is int and value >= least


@dataclass(frozen=True, kw_only=True)
class CacheStatistics:
    """Counters since the cache was created, in bytes. `waited_s`: seconds in which backward was blocked by reads.

    `resident` counts saved tensors in memory now, `peak` the maximum since `ActivationCache.restart_peak`.
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


def options_from(section: Mapping[str, Any], others: tuple[str, ...] = ()) -> CacheOptions:
    """Return the CacheOptions of a configuration section, in which the keys `others` are for the caller.

    Raises ValueError, in one line, for an unknown key.
    """
    own = CacheOptions.__dataclass_fields__
    known = (*others, *own)
    unknown = next((key for key in section if key not in known), None)
    if unknown is not None:
        raise ValueError(
            f"activations: unknown key {unknown!r}{did_you_mean(unknown, known)}; known: {', '.join(known)}"
        )
    return CacheOptions(**{name: value for name, value in section.items() if name in own})
