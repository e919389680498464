"""A tier over paths with separate faults, for the tests of what happens to its tensors."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from memascend import _C
from memascend.storage.direct_engine import DirectEngineConfig
from memascend.storage.engine_tiers import DirectTier, FileTier
from memascend.storage.multi_path import MultiPathTier, StoragePath
from memascend.storage.tier import Transferred

MAX_S = 60
# HANG_S is longer than a transfer of a healthy disk on a busy machine, which may take half a second
HANG_S, HANGS_US = 2, 5_000_000
NUMEL = 20_000


def group_of(key: str) -> str:
    return key.rpartition("-")[2]


class Paths:
    """A tier over paths `a`, `b` …, each with a separate fault layer."""

    def __init__(self, folder: Path, names: str = "ab", kind: str = "direct", **options) -> None:
        self.folder = folder
        self.faults = {name: _C.FaultLayer() for name in names}
        rates, fixed_rate = options.pop("rates", {}), options.pop("fixed_rate", None)
        for name in names:
            (folder / name).mkdir()
        tiers = {name: self._tier(name, kind) for name in names}
        self.fixed_rate = {name: FixedRate(tier, fixed_rate) for name, tier in tiers.items() if fixed_rate is not None}
        ways = [StoragePath(name, (self.fixed_rate or tiers)[name], rates.get(name)) for name in names]
        self.tier = MultiPathTier(ways, group_of=group_of, **options)

    def _tier(self, name: str, kind: str):
        if kind == "files":
            return FileTier(self.folder / name, "tests", block_bytes=1 << 16, faults=self.faults[name])
        config = DirectEngineConfig(control_folder=str(self.folder), block_bytes=1 << 16)
        return DirectTier.in_file(self.folder / name, "tests", config, self.faults[name])

    def write(self, groups: int, value: float = 0.0) -> None:
        for group in range(groups):
            for moment in ("", "exp_avg-"):
                self.tier.write(f"{moment}{group}", tensor(group + value))
        self.tier.wait(MAX_S)

    def check(self, groups: int, value: float = 0.0) -> None:
        for group in range(groups):
            self.tier.read(f"exp_avg-{group}", out := torch.empty(NUMEL)).wait(MAX_S)
            assert torch.equal(out, tensor(group + value)), group

    def places(self, groups: int) -> str:
        return "".join(self.tier.path_of(str(group)) for group in range(groups))


def tensor(value: float) -> torch.Tensor:
    return torch.full((NUMEL,), float(value))


class FixedRate:
    """A tier that reports that it moved its bytes at `rate`, however long they
    took, so that a busy machine changes no placement."""

    def __init__(self, tier, rate: float) -> None:
        self._tier, self.rate = tier, rate
        self._seen, self._seconds = tier.transferred, [0.0, 0.0]

    def __getattr__(self, name):
        return getattr(self._tier, name)

    @property
    def transferred(self):
        now = self._tier.transferred
        since, self._seen = now - self._seen, now
        self._seconds = [s + n / self.rate for s, n in zip(self._seconds, vars(since).values(), strict=False)]
        return Transferred(now.bytes_read, now.bytes_written, *self._seconds)


@contextlib.contextmanager
def made_in(folder: Path) -> Iterator[Callable[..., Paths]]:
    """Yield a maker of `Paths`. They are closed at the end, when transfers that hung have ended."""
    with contextlib.ExitStack() as stack:

        def make(names: str = "ab", **options) -> Paths:
            made = Paths(folder, names, **options)
            stack.callback(made.tier.close)
            stack.callback(lambda: [each.clear() for each in made.faults.values()])
            return made

        yield make
    for thread in threading.enumerate():
        if thread.name.startswith("memascend-close-"):
            thread.join(MAX_S)
