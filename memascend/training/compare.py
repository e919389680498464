"""Comparison of two checkpoints of one model, tensor by tensor: weights, master weights and moments by parameter."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memascend.storage.tensor_file import TensorFileReader
from memascend.training.checkpoint import listed
from memascend.training.folder import RunFolder

WEIGHTS = "weights"
STATES = {
    "master": "master weights",
    "exp_avg": "first moments",
    "exp_avg_sq": "second moments",
    "scales": "scales of moments",  # of 8-bit moments, where each group is one parameter
}
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A tensor whose bits differ between two checkpoints.

    `largest`: the largest absolute difference; infinite if one of the two values is not finite. `index`: the first
    element that differs, in the flat tensor; `tested` and `reference` are its two values.
    """

    name: str
    elements: int
    different: int
    largest: float
    index: int
    tested: float
    reference: float

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Saved:
    """A checkpoint's tensors by kind and name. Keeps one group of states in memory at a time. Not thread-safe."""

    def __init__(self, checkpoint: Path) -> None:
        self._readers = {"model": TensorFileReader(checkpoint / "model" / "model.safetensors")}
        self._places: dict[str, dict[str, tuple[str, str, slice | None]]] = {WEIGHTS: {}}
        for name in self._readers["model"].names:
            self._places[WEIGHTS][name] = ("model", name, None)
        facts = json.loads((checkpoint / "state" / "trainer.json").read_text())
        for rank in sorted(facts, key=int):
            self._add_rank(checkpoint, rank, facts[rank]["groups"], several=len(facts) > 1)
        self._cached: tuple[tuple[str, str], torch.Tensor] | None = None

    def _add_rank(self, checkpoint: Path, rank: str, groups: list[Any], *, several: bool) -> None:
        """Add the states of one rank; several ranks have their number in the names of their parts."""
        file = f"rank{rank}"
        reader = self._readers[file] = TensorFileReader(checkpoint / "state" / f"{file}.safetensors")
        for index, group in enumerate(groups):
            place = 0
            for name, count in group:
                for state, kind in STATES.items():
                    if f"{index}.{state}" in reader.names:
                        label = f"{name} (rank {rank})" if several else name
                        part = slice(place, place + count) if state != "scales" else None
                        self._places.setdefault(kind, {})[label] = (file, f"{index}.{state}", part)
                place += count

    @classmethod
    def of_run(cls, folder: Path) -> Saved:
        """Open the newest checkpoint of a run. Raises ValueError if it has none."""
        found, refused = listed(RunFolder(folder).checkpoints)
        if not found:
            raise ValueError(f"{folder} holds no checkpoint{f' ({refused[0]})' if refused else ''}")
        return cls(found[-1].path)

    @property
    def kinds(self) -> list[str]:
        """Kinds of tensors in this checkpoint: `weights` and descriptions from `STATES`."""
        return list(self._places)

    def names(self, kind: str) -> list[str]:
        """Return the names of the tensors of a kind, in the model's order; empty for a kind that it lacks."""
        return list(self._places.get(kind, {}))

    def tensor(self, kind: str, name: str) -> torch.Tensor | None:
        """Return a tensor, valid until the next call, or None if this checkpoint has no tensor of that name."""
        place = self._places.get(kind, {}).get(name)
        if place is None:
            return None
        file, key, part = place
        if self._cached is None or self._cached[0] != (file, key):
            self._cached = None
            self._cached = (file, key), self._readers[file].read(key)
        whole = self._cached[1]
        return whole if part is None else whole[part]

    def __enter__(self) -> Saved:
        return self

    def __exit__(self, *_: Any) -> None:
        for reader in self._readers.values():
            reader.close()


def differences(tested: Saved, reference: Saved, kind: str) -> Iterator[Difference]:
    """Yield the differing tensors of `kind`, in the model's order.

    Raises ValueError if the two checkpoints do not have the same tensors.
    """
    ours, theirs = tested.names(kind), reference.names(kind)
    if odd := sorted(set(ours) ^ set(theirs)):
        raise ValueError(
            f"only one of the two runs has {kind} of {odd[0]} ({len(odd)} such tensors): the models differ"
        )
    for name in ours:
        mine, other = tested.tensor(kind, name), reference.tensor(kind, name)
        assert mine is not None, name
        assert other is not None, name
        found = difference(name, mine, other)
        if found is not None:
            yield found


def difference(name: str, tested: torch.Tensor, reference: torch.Tensor) -> Difference | None:
    """Return how two tensors differ, or None if every bit is equal. Raises ValueError if shape or dtype differ."""
    if (tested.shape, tested.dtype) != (reference.shape, reference.dtype):
        raise ValueError(
            f"{name} is {tested.dtype} of {tuple(tested.shape)} in the tested run and {reference.dtype} of "
            f"{tuple(reference.shape)} in the reference: these cannot be compared"
        )
    a, b = tested.reshape(-1), reference.reshape(-1)
    bits = _BITS[a.element_size()]
    other = (a.view(bits) != b.view(bits)).nonzero().reshape(-1)
    if not len(other):
        return None
    gaps = (a[other].double() - b[other].double()).abs().nan_to_num(torch.inf, torch.inf)
    first = int(other[0])
    return Difference(
        name=name,
        elements=a.numel(),
        different=len(other),
        largest=float(gaps.max()),
        index=first,
        tested=float(a[first]),
        reference=float(b[first]),
    )
