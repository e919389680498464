"""The activation policy of a model: what happens to each block's activations between forward and backward.

They are kept, recomputed or offloaded (SSDTrain, Fig. 7). Planning, training and the cache share these words. No torch
here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

POLICIES = ("keep", "recompute", "offload")
KEEP, RECOMPUTE, OFFLOAD = POLICIES

_PART = re.compile(r"\s*([a-z]+)\s*:\s*(\d+)\s*")
EXAMPLE = "offload:10,recompute:4,keep:2"


@dataclass(frozen=True)
class ActivationPolicy:
    """`runs`: (policy, number of blocks) in the order of forward."""

    runs: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str, where: str) -> ActivationPolicy:
        """Of a text such as `offload:10,recompute:4,keep:2`; ValueError, in one line that begins with `where`."""
        runs = []
        for part in text.split(","):
            found = _PART.fullmatch(part)
            if found is None or found.group(1) not in POLICIES:
                raise ValueError(
                    f"{where}: {part.strip()!r} is an invalid activation policy: expected {', '.join(POLICIES)}, each "
                    f"with a block count, in forward order, such as {EXAMPLE}"
                )
            runs.append((found.group(1), int(found.group(2))))
        return cls(tuple(runs))

    @classmethod
    def of(cls, policies: Iterable[str]) -> ActivationPolicy:
        """From one policy per block."""
        return cls(tuple((policy, len(list(run))) for policy, run in groupby(policies)))

    @staticmethod
    def looks_like_policy(text: str) -> bool:
        """Whether a text that may be an amount of bytes names policies."""
        return ":" in text

    def __str__(self) -> str:
        return ",".join(f"{policy}:{count}" for policy, count in self.runs if count)

    def per_block(self, blocks: int, where: str) -> tuple[str, ...]:
        """The policy of each of `blocks` blocks; ValueError, in one line, for any other number of them."""
        policies = tuple(policy for policy, count in self.runs for _ in range(count))
        if len(policies) != blocks:
            raise ValueError(
                f"{where}: {self} covers {len(policies)} blocks and the model has {blocks}; cover all of them"
            )
        return policies
