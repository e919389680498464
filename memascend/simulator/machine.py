"""The machine on which simulated tasks run: resources with rates, memory pools and locks.

A resource is *FIFO* (one task at a time, in the order in which tasks became ready: a CUDA stream, a drive, the CPU
optimizer) or *shared* (tasks run concurrently and get max-min fair shares of the rate: PCIe, DRAM, a CXL node). A
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
    """A resource that serves one task at a time, `rate` units of work per second."""

    rate: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A resource that serves tasks concurrently, together at most `rate` units of work per second."""

    rate: float


@dataclass(frozen=True, kw_only=True)
class Drive:
    """Storage with a read and a write rate, in bytes per second. Tasks need `NAME.read` or `NAME.write`, in bytes.

    `duplex`: each direction has its own rate, independent of the other (as Linux throttles a block device); otherwise
    they share the drive's time, as the models of LoHan and MLP-Offload assume.
    """

    read: float
    write: float
    duplex: bool = False


Resource = Fifo | Shared | Drive


@dataclass(frozen=True)
class Server:
    """A unit that is busy or idle: a resource or one direction of a duplex drive. `shared`: it serves several tasks."""

    name: str
    shared: bool


@dataclass(frozen=True, kw_only=True)
class ResourceModel:
    """A machine: resources by name, sizes of memory pools by name (`math.inf` never fills), and the names of locks."""

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
        """Return the names that `Task.needs` may use: `NAME.read` and `NAME.write` for a drive."""
        names = []
        for name, resource in self.resources.items():
            names += [f"{name}.read", f"{name}.write"] if isinstance(resource, Drive) else [name]
        return names

    def serve(self, work: str) -> tuple[Server, float]:
        """Return the server of a kind of work and its rate in units per second.

        Raises ValueError, naming the machine and the kinds of work that it has, if it has no such resource.
        """
        resource = self.resources.get(work)
        if isinstance(resource, Fifo | Shared):
            return Server(work, isinstance(resource, Shared)), resource.rate
        name, _, direction = work.rpartition(".")
        drive = self.resources.get(name)
        if isinstance(drive, Drive) and direction in ("read", "write"):
            return Server(work if drive.duplex else name, False), getattr(drive, direction)
        raise ValueError(f"machine {self.name} has no {work!r}; it has {', '.join(self.work_names())}")
