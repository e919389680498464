"""What tasks run on: resources with rates, memory pools, locks.

A resource is *FIFO* (one task at a time, in the order in which tasks became ready: a CUDA stream, a drive, the CPU
optimizer) or *shared* (tasks run side by side and get max-min fair shares of the rate: PCIe, DRAM, a CXL node). A
`Drive` is a drive or a mount with a rate for reads and one for writes: `duplex` drives serve the two directions at the
same time, `simplex` drives one after the other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Fifo:
    """One task at a time, `rate` units of work a second."""

    rate: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Tasks side by side, together at most `rate` units of work a second."""

    rate: float


@dataclass(frozen=True, kw_only=True)
class Drive:
    """Storage; tasks need `NAME.read` or `NAME.write`, in bytes. Rates in bytes per second.

    `duplex`: each direction has its rate by itself (as Linux throttles a block device); otherwise they share the
    drive's time, as the models of LoHan and MLP-Offload assume.
    """

    read: float
    write: float
    duplex: bool = False


Resource = Fifo | Shared | Drive


@dataclass(frozen=True)
class Server:
    """One thing that is busy or not. `shared`: it serves several tasks at a time."""

    name: str
    shared: bool


@dataclass(frozen=True, kw_only=True)
class ResourceModel:
    """Resources by name, pools (name to size; `math.inf` never fills), names of locks."""

    name: str
    resources: Mapping[str, Resource]
    pools: Mapping[str, float] = field(default_factory=dict)
    locks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, resource in self.resources.items():
            for what, rate in dataclasses.asdict(resource).items():
                if what != "duplex" and not 0 < rate < math.inf:
                    raise ValueError(f"machine {self.name}: {what} of {name!r} must be a positive number, got {rate!r}")
        for name, size in self.pools.items():
            if not size >= 0:
                raise ValueError(f"machine {self.name}: the size of pool {name!r} must be >= 0, got {size!r}")
            if name in self.locks:
                raise ValueError(f"machine {self.name}: {name!r} is a pool and a lock; give them two names")

    def work_names(self) -> list[str]:
        """What `Task.needs` may name."""
        names = []
        for name, resource in self.resources.items():
            names += [f"{name}.read", f"{name}.write"] if isinstance(resource, Drive) else [name]
        return names

    def serve(self, work: str) -> tuple[Server, float]:
        """Who serves a kind of work, and at how many units per second.

        Raises ValueError that names the machine and what it lacks.
        """
        resource = self.resources.get(work)
        if isinstance(resource, Fifo | Shared):
            return Server(work, isinstance(resource, Shared)), resource.rate
        name, _, direction = work.rpartition(".")
        drive = self.resources.get(name)
        if isinstance(drive, Drive) and direction in ("read", "write"):
            return Server(work if drive.duplex else name, False), getattr(drive, direction)
        raise ValueError(f"machine {self.name} has no {work!r}; it has {', '.join(self.work_names())}")

    def with_pools(self, size: float = math.inf) -> ResourceModel:
        """The same machine with pools of another size, by default ones that never fill."""
        return dataclasses.replace(self, pools=dict.fromkeys(self.pools, size))
