"""What becomes of each block's activations between forward and backward: the words that plan, train and cache share.

SSDTrain, Fig. 7: they are kept, computed again, or offloaded. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

FATES = ("keep", "recompute", "offload")
KEEP, RECOMPUTE, OFFLOAD = FATES

_PART = re.compile(r"\s*([a-z]+)\s*:\s*(\d+)\s*")
EXAMPLE = "offload:10,recompute:4,keep:2"


@dataclass(frozen=True)
class BlockFates:
    """`runs`: (fate, number of blocks) in the order of forward."""

    runs: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str, where: str) -> BlockFates:
        """Of a text such as `offload:10,recompute:4,keep:2`; ValueError, in one line that begins with `where`."""
        runs = []
        for part in text.split(","):
            found = _PART.fullmatch(part)
            if found is None or found.group(1) not in FATES:
                raise ValueError(
                    f"{where}: {part.strip()!r} is an invalid activation policy: expected {', '.join(FATES)}, each "
                    f"with a number of blocks in forward order, such as {EXAMPLE}"
                )
            runs.append((found.group(1), int(found.group(2))))
        return cls(tuple(runs))

    @classmethod
    def of(cls, fates: Iterable[str]) -> BlockFates:
        """Of one fate a block."""
        return cls(tuple((fate, len(list(run))) for fate, run in groupby(fates)))

    @staticmethod
    def is_meant(text: str) -> bool:
        """Whether a text that may be an amount of bytes names fates."""
        return ":" in text

    def __str__(self) -> str:
        return ",".join(f"{fate}:{count}" for fate, count in self.runs if count)

    def a_block(self, blocks: int, where: str) -> tuple[str, ...]:
        """The fate of each of `blocks` blocks; ValueError, in one line, for any other number of them."""
        fates = tuple(fate for fate, count in self.runs for _ in range(count))
        if len(fates) != blocks:
            raise ValueError(
                f"{where}: {self} covers {len(fates)} blocks and the model has {blocks}; cover all of them"
            )
        return fates
