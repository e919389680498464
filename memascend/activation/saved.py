"""Placeholders for saved tensors in autograd's graph, and the storage regions that they are views of."""

from __future__ import annotations

import itertools
from typing import Any, Protocol

import torch

from memascend.storage.completion import Completion

_IDENTITY = "_memascend_activation"  # attribute of an untyped storage: a number that is unique within the process
_storage_numbers = itertools.count(1)


class ActivationError(RuntimeError):
    """A saved activation that backward needs was lost or modified; the message names it."""


class Version:
    """The version counter of a tensor when it was saved, without keeping its memory alive.

    Changes that torch does not count are not detected: those through `.data` or NumPy, and of inference tensors.
    """

    __slots__ = ("_expected", "_probe")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._probe: torch.Tensor | None = None
        if not tensor.is_inference():
            # An alias shares the counter with its source and all views of it, and keeps it when its data are replaced.
            self._probe = tensor.detach()
            self._probe.data = tensor.new_empty(0)
            self._expected = self._probe._version

    def counts(self, tensor: torch.Tensor) -> bool:
        """Return whether changes of `tensor` are counted here.

        Those of views and aliases are. But tensors may share memory and have separate counters (`.data`, chunks of
        `torch.unsafe_chunk` as in a GRU cell).
        """
        if self._probe is None or tensor.is_inference():
            return False
        before = tensor._version
        with torch.autograd._unsafe_preserve_version_counter(self._probe):  # type: ignore[attr-defined]
            torch.autograd.graph.increment_version(self._probe)
            return tensor._version != before

    def check(self, what: str) -> None:
        """Raise ActivationError if the tensor, or one that shares its counter, was changed in place since."""
        if self._probe is not None and self._probe._version != self._expected:
            raise ActivationError(
                f"{what} was modified in place after it had been saved for backward (version {self._probe._version}, "
                f"expected {self._expected}): use the out-of-place operation"
            )


class Region:
    """Bytes [begin, begin + nbytes) of a storage at one version.

    `memory` is the region as a uint8 tensor while it is in memory. Until the region has been written, it shares the
    storage of the saved tensor, so its storage offset is `begin`; once read back, it has its own storage and offset 0.
    """

    def __init__(self, number: int, name: str, tensor: torch.Tensor, begin: int, nbytes: int) -> None:
        self.number, self.name, self.nbytes = number, name, nbytes
        self.begin, self.device = begin, tensor.device
        self._version = Version(tensor)
        self.memory: torch.Tensor | None = _bytes_of(tensor, begin, nbytes)
        self.writing: Completion | None = None
        self.reading: Completion | None = None
        self.on_tier = False
        self.error: BaseException | None = None
        self.references = self.packs = self.unpacks = 0
        self.sweep: Any = None  # the `Sweep` of the forward pass that saved it
        self.place = -1  # its position in that pass
        self.identity = (identity_of(tensor.untyped_storage()), tensor._version, begin, nbytes)

    @property
    def key(self) -> str:
        """The region's name on the tier."""
        return f"activation-{self.number}"

    def is_version_of(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor`, of the same storage and version number, must have the same values here."""
        return self._version.counts(tensor)

    def check_unchanged(self) -> None:
        """Raise ActivationError if the tensor was changed in place after it had been saved.

        The data written meanwhile is then invalid for every view.
        """
        self._version.check(f"activation {self.name}")


class InMemory:
    """A saved tensor that stays in memory. Autograd does not check versions under hooks, so this class does."""

    __slots__ = ("name", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self.tensor, self.version, self.name = tensor, tensor._version, name

    def unpack(self) -> torch.Tensor:
        """Return the tensor. Raises ActivationError if it was changed in place since it was saved."""
        if self.tensor._version != self.version:
            raise ActivationError(
                f"a tensor saved in {self.name} ({tuple(self.tensor.shape)}, {self.tensor.dtype}) was modified in "
                f"place before backward used it (version {self.tensor._version}, expected {self.version}): use the "
                "out-of-place operation"
            )
        return self.tensor


class Owner(Protocol):
    """The interface that a view needs of its cache."""

    def unpack(self, view: View) -> torch.Tensor:
        """Return the saved tensor, for backward."""


class View:
    """A saved tensor as a view of its region. The cache releases the region with its last view.

    Autograd does not check versions under hooks, so `unpack` does, wherever the region is by then.
    """

    __slots__ = (
        "__weakref__",
        "_owner",
        "_version",
        "conj",
        "dtype",
        "neg",
        "offset_bytes",
        "saved",
        "shape",
        "stride",
    )

    def __init__(self, owner: Owner, saved: Region, tensor: torch.Tensor) -> None:
        self._owner, self.saved = owner, saved
        self._version = Version(tensor)  # a tensor made with `.data` shares the region but has its own counter
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()
        self.conj, self.neg = tensor.is_conj(), tensor.is_neg()  # lazy flags: the stored bytes do not include them
        self.offset_bytes = tensor.storage_offset() * tensor.element_size() - saved.begin

    def unpack(self) -> torch.Tensor:
        """Return the saved tensor, for autograd. Raises ActivationError if it was lost, or changed in place since."""
        self._version.check(f"activation {self.saved.name} ({tuple(self.shape)}, {self.dtype})")
        return self._owner.unpack(self)

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the saved tensor over `memory` (the region as uint8; its storage may begin before the region)."""
        found = torch.empty(0, dtype=self.dtype, device=memory.device)
        begin = memory.storage_offset() + self.offset_bytes
        found.set_(memory.untyped_storage(), begin // found.element_size(), self.shape, self.stride)
        found = torch._conj(found) if self.conj else found
        return torch._neg_view(found) if self.neg else found


def identity_of(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage for its lifetime; addresses are reused."""
    number = getattr(storage, _IDENTITY, None)
    if number is None:
        number = next(_storage_numbers)
        setattr(storage, _IDENTITY, number)
    return number


def known_identity(storage: torch.UntypedStorage) -> int | None:
    """Return the storage's number, or None if it has none yet."""
    return getattr(storage, _IDENTITY, None)


def span_of(tensor: torch.Tensor, storage: torch.UntypedStorage) -> tuple[int, int]:
    """Return (first byte, bytes) of the storage to save for `tensor`.

    That is the whole storage if the tensor spans half of it or more, so that other views find it, else its own span.
    """
    size = tensor.element_size()
    begin = tensor.storage_offset() * size
    span = (1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))) * size
    return (0, storage.nbytes()) if 2 * span >= storage.nbytes() else (int(begin), span)


def _bytes_of(tensor: torch.Tensor, begin: int, nbytes: int) -> torch.Tensor:
    """Return `nbytes` of the tensor's storage from byte `begin` on, as a uint8 view."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), begin, (nbytes,), (1,))
