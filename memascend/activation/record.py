"""Record of the tensors saved by a forward pass, and the next pass's offloading plan (SSDTrain, Fig. 3 and III-D)."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

_NUMBERED = re.compile(r"^(.*?\.?\d+)(?:\.|\[|$)")
# Bytes not yet written when forward ends do not reduce the peak, and backward would wait for their reads.
_SHARE_OF_RATE = 0.9
# Activations below this fraction of the free memory do not justify writes to a drive.
_NEEDS_NOTHING = 0.5


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Offloading of a forward pass: its first `offload_bytes` go to the tier; None means everything."""

    offload_bytes: int | None = None
    reason: str = ""


@dataclass
class Record:
    """One forward pass of a root module: (name, bytes, seconds since its begin) of each region that it saved."""

    tensors: list[tuple[str, int, float]] = field(default_factory=list)
    offloaded_bytes: int = 0
    forward_s: float = 0.0
    _begin: float = field(default_factory=time.monotonic)

    def add(self, name: str, nbytes: int) -> None:
        """Add a region that has just been saved."""
        self.tensors.append((name, nbytes, time.monotonic() - self._begin))

    def end(self) -> None:
        """Record the duration of the forward pass, which ends now."""
        self.forward_s = time.monotonic() - self._begin

    @property
    def bytes(self) -> int:
        return sum(nbytes for _, nbytes, _ in self.tensors)

    @property
    def last_module_bytes(self) -> int:
        """Bytes saved from the last numbered block on: backward uses them before any read could complete."""
        blocks = [block_of(name) for name, _, _ in self.tensors]
        last = next((block for block in reversed(blocks) if block is not None), None)
        if last is None:
            return 0
        return sum(nbytes for _, nbytes, _ in self.tensors[blocks.index(last) :])


def block_of(name: str) -> str | None:
    """Return the numbered block of a region's module, such as `model.layers.3`, or None outside of all blocks."""
    match = _NUMBERED.match(name)
    return match.group(1) if match else None


def next_plan(record: Record, amount: str | int, write_rate: float | None, free_bytes: int | None) -> Plan:
    """Return the plan for the next forward pass, based on the record of the last one.

    `write_rate` is the tier's write bandwidth in bytes per second, None if unknown; `free_bytes` is free device memory.
    """
    if isinstance(amount, int):
        return Plan(offload_bytes=amount)
    most = max(0, record.bytes - record.last_module_bytes)
    if amount == "all":
        return Plan(offload_bytes=most)
    kept = record.bytes - record.offloaded_bytes
    if free_bytes is not None and record.bytes < _NEEDS_NOTHING * (free_bytes + kept):
        return Plan(
            offload_bytes=0,
            reason=f"{record.bytes >> 20} MiB per forward pass fit in {(free_bytes + kept) >> 20} MiB of free memory: "
            "nothing is offloaded (amount='all' offloads all the same)",
        )
    if write_rate is None:
        return Plan(offload_bytes=most)
    return Plan(offload_bytes=min(most, int(_SHARE_OF_RATE * write_rate * record.forward_s)))
