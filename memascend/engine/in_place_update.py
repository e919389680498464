"""One version of the states, where the disk has no space for two: a step that is killed can still be completed.

All gradients of a step are on the tier, with the settings that they are used with, before the first state is replaced.
From then on the step will be completed, if necessary by `StreamingEngine.resume`: unit by unit, each with its weights
and states in one commit, from the gradients that are still on the tier. This takes the space of one version, of the
gradients, and of the units in flight; a step writes and reads the gradients once more.

Without a redo, which is the user's choice, none of that is stored: a step replaces the states in parts, in the space of
two units. A kill in between leaves them incomplete, and training continues from a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memascend.engine.adam_settings import AdamSettings
from memascend.engine.layout import Layout, Unit, padded
from memascend.engine.options import EngineOptions
from memascend.engine.protocols import Completion, Storage
from memascend.engine.state_files import StoreSpace, in_chunks
from memascend.engine.state_store import StateStore
from memascend.engine.updates import Updates, gradient_key
from memascend.storage.freed_space import free_bytes

_GIB = 1 << 30


@dataclass(frozen=True)
class Versions:
    """The number of versions of the states that are kept, the bytes that this takes, and the reason in words."""

    count: int
    nbytes: int
    why: str


def versions_for(
    folder: str | os.PathLike[str],
    layout: Layout,
    options: EngineOptions,
    *,
    auxiliary_bytes: int = 0,
    released: int = 0,
) -> Versions:
    """Return what `options` ask for; by default two versions where they fit, else one (two if not even one fits).

    No space is taken: `StateStore.create` does that. `auxiliary_bytes`: bytes of the other files next to two versions,
    such as that of gradients, which are in the store with one version. `released`: bytes of the disk that are given
    back as the store is filled.
    """
    asked = options.versions if options.redo else 1
    two, one = (bytes_of(layout, count, options.gradients, options.state_slots, redo=options.redo) for count in (2, 1))
    if asked is not None:
        return Versions(asked, two if asked == 2 else one, "as asked for")
    parent = Path(folder)
    while not parent.exists():
        parent = parent.parent
    free = free_bytes(parent, two + auxiliary_bytes - released) + released
    if two + auxiliary_bytes <= free or one > free:
        return Versions(2, two, f"{free / _GIB:.2f} GiB are free")
    why = f"two take {(two + auxiliary_bytes) / _GIB:.2f} GiB and {free / _GIB:.2f} are free"
    return Versions(1, one, why)


def bytes_of(layout: Layout, versions: int, gradients: torch.dtype, slots: int, *, redo: bool = True) -> int:
    """Return the bytes of the store's file."""
    return store_space(layout, versions, gradients, slots, redo=redo).nbytes


def store_space(layout: Layout, versions: int, gradients: torch.dtype, slots: int, *, redo: bool = True) -> StoreSpace:
    """Return what the store's file has space for: the states and, with one version of them, the gradients for a redo
    and new copies of what is in flight."""
    if versions == 2:
        return StoreSpace(layout.nbytes)
    weights, states = layout.weights.itemsize, layout.stored_states.itemsize
    each = [padded(piece.numel, gradients) * gradients.itemsize for piece in layout.pieces] if redo else []
    of_piece = {piece.key: in_chunks(layout.states_numel(piece) * states) for piece in layout.pieces}
    units = [
        in_chunks(layout.unit_numel(unit) * weights) + sum(of_piece[piece.key] for piece in unit.pieces)
        for unit in layout.units
    ]
    in_flight = max(2 * max(units, default=0), sum(sorted(of_piece.values())[-slots:])) + sum(sorted(each)[-slots:])
    return StoreSpace(layout.nbytes, versions=1, single=each, slack=in_flight)


class GradientsInStore:
    """Storage for the stream of gradients. Those with one of `keys`, which a redo needs, are stored with the states;
    partial sums are on `scratch()`."""

    def __init__(self, store: StateStore, scratch: Callable[[], Storage], keys: set[str]) -> None:
        self._store, self._scratch, self._keys = store, scratch, keys

    def read(self, key: Hashable, tensor: torch.Tensor, *, priority: int = 0) -> Completion:
        return self._place(key).read(key, tensor, priority=priority)

    def write(self, key: Hashable, tensor: torch.Tensor, *, priority: int = 0) -> Completion:
        return self._place(key).write(key, tensor, priority=priority)

    def _place(self, key: Hashable) -> Storage:
        return self._store if key in self._keys else self._scratch()


class Redo:
    """The update of one step, as it is stored with its gradients until all of it is done.

    Settings are stored and not looked up again, since the loop may have changed them or no longer be running. `done`
    names units: a unit's weights and states change in one commit with it, so that a restart neither repeats an update
    nor leaves one out. AdamW is not idempotent: applying it twice would give another result.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.record = dict(record)

    @classmethod
    def of(cls, updates: Updates, settings: Sequence[AdamSettings], facts: dict[str, Any], kind: list[Any]) -> Redo:
        """Return the record of an update that is about to begin. `settings`: of each parameter, in the layout's order;
        `facts`: what `keep` will receive; `kind`: how the gradients are to be read."""
        different = list(dict.fromkeys(settings))
        return cls(
            {
                "facts": facts,
                "kind": kind,
                "settings": [[s.step, s.lr, *s.betas, s.eps, s.weight_decay, s.grad_factor] for s in different],
                "of": [different.index(s) for s in settings],
                **updates.waiting_facts(),
                "done": [],
            }
        )

    @property
    def facts(self) -> dict[str, Any]:
        """A copy of the facts that `keep` is to receive."""
        return dict(self.record["facts"])

    def settings(self, order: Sequence[str]) -> dict[str, AdamSettings]:
        """Return the recorded settings by parameter name; `order` is the layout's."""
        known = [
            AdamSettings(
                step=step,
                lr=lr,
                betas=(beta1, beta2),
                eps=eps,
                weight_decay=decay,
                grad_factor=factor[0] if factor else 1.0,
            )
            for step, lr, beta1, beta2, eps, decay, *factor in self.record["settings"]
        ]
        return {name: known[number] for name, number in zip(order, self.record["of"], strict=True)}

    def is_done(self, unit: Unit) -> bool:
        """Return whether the record names the unit's update as done."""
        return unit.key in self.record["done"]

    def did(self, unit: Unit) -> None:
        """Record the unit's update as done, for the commit that includes its weights and states."""
        self.record["done"].append(unit.key)

    def keys(self, layout: Layout) -> list[str]:
        """Return the keys of all gradients."""
        return [gradient_key(piece) for piece in layout.pieces]
