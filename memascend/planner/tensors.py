"""A model's parameters by name, shape and transformer block, where the block is derived from the name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_OUTSIDE = re.compile(r"embed|wte|wpe|lm_head|norm|ln_f|output")


@dataclass(frozen=True)
class TensorSpec:
    """One parameter. `block`: the index of its transformer block; None for embedding, output matrix and last norm."""

    name: str
    shape: tuple[int, ...]
    block: int | None

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether it has at least two dimensions."""
        return len(self.shape) >= 2


def named_tensors(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> Iterator[TensorSpec]:
    """Yield the TensorSpecs of any model's named parameters.

    Raises a ValueError that names a tensor which is in no block and is no embedding, output matrix or norm.
    """
    for name, shape in shapes:
        match = _BLOCK.search(name)
        if match is None and not _OUTSIDE.search(name):
            raise ValueError(
                f"cannot class the tensor {name} {tuple(shape)}: it is in no block (layers.N, h.N, blocks.N) and is "
                "neither an embedding, an output matrix nor a norm"
            )
        yield TensorSpec(name, tuple(shape), int(match.group(1)) if match else None)
