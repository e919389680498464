"""The activation policy of a model: what happens to each block's activations between forward and backward.

They are kept, recomputed or offloaded (SSDTrain, Fig. 7). The planner, the trainer and the activation cache share these
terms. This module does not import torch.
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
    """An activation policy for every block; `runs` holds (policy, number of blocks) pairs in forward order."""

    runs: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str, where: str) -> ActivationPolicy:
        """Parse a text such as `offload:10,recompute:4,keep:2`; raise a one-line ValueError that begins with `where`
        if it is invalid."""
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
        """Build the policy from one word per block, in forward order."""
        return cls(tuple((policy, len(list(run))) for policy, run in groupby(policies)))

    @staticmethod
    def looks_like_policy(text: str) -> bool:
        """Return whether `text` names policies, rather than a number of bytes."""
        return ":" in text

    def __str__(self) -> str:
        return ",".join(f"{policy}:{count}" for policy, count in self.runs if count)

    def per_block(self, blocks: int, where: str) -> tuple[str, ...]:
        """Return the policy of each of the `blocks` blocks; raise a one-line ValueError if the counts do not add up
        to `blocks`."""
        policies = tuple(policy for policy, count in self.runs for _ in range(count))
        if len(policies) != blocks:
            raise ValueError(
                f"{where}: {self} covers {len(policies)} blocks and the model has {blocks}; cover all of them"
            )
        return policies
