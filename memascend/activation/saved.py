"""What stands on autograd's graph in the place of a saved tensor, and the region of a storage that it is a view of."""

from __future__ import annotations

import itertools
from typing import Any, Protocol

import torch

from memascend.storage.completion import Completion

_IDENTITY = "_memascend_activation"  # attribute of an untyped storage: a number that no other storage of a process has
_storage_numbers = itertools.count(1)


class ActivationError(RuntimeError):
    """A saved activation that backward needs is lost or was changed; the message names it."""


class Version:
    """How often a tensor had been changed in place when it was saved; the memory is not held.

    What torch does not count is not seen: changes through `.data` or NumPy, and of tensors made in inference mode.
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
        """Return whether changes of `tensor` are counted here: those of views and aliases are, but tensors may share
        memory and count for themselves (`.data`, chunks of `torch.unsafe_chunk` as in a GRU's cell)."""
        if self._probe is None or tensor.is_inference():
            return False
        before = tensor._version
        with torch.autograd._unsafe_preserve_version_counter(self._probe):  # type: ignore[attr-defined]
            torch.autograd.graph.increment_version(self._probe)
            return tensor._version != before

    def check(self, what: str) -> None:
        """Raise ActivationError where the tensor, or one that shares its memory, was changed in place since."""
        if self._probe is not None and self._probe._version != self._expected:
            raise ActivationError(
                f"{what} was modified in place after it had been saved for backward (version {self._probe._version}, "
                f"expected {self._expected}): use the out-of-place operation"
            )


class Region:
    """Bytes [begin, begin + nbytes) of a storage at one version.

    `memory`: the region as a uint8 tensor while it is in memory. Until the region has been written it shares the
    storage of what was saved, so its storage offset is `begin`; once read back it has its own storage and offset 0.
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
        self.place = -1  # in that pass
        self.identity = (identity_of(tensor.untyped_storage()), tensor._version, begin, nbytes)

    @property
    def key(self) -> str:
        return f"activation-{self.number}"

    def is_version_of(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor`, of the same storage and version number, cannot have other values here."""
        return self._version.counts(tensor)

    def check_unchanged(self) -> None:
        """Raise ActivationError where the tensor was changed in place after it had been saved: what was written
        meanwhile is of no use to any view."""
        self._version.check(f"activation {self.name}")


class InMemory:
    """A tensor that the cache leaves in memory. Autograd does not check versions under hooks, so this does."""

    __slots__ = ("name", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self.tensor, self.version, self.name = tensor, tensor._version, name

    def unpack(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise ActivationError(
                f"a tensor saved in {self.name} ({tuple(self.tensor.shape)}, {self.tensor.dtype}) was modified in "
                f"place before backward used it (version {self.tensor._version}, expected {self.version}): use the "
                "out-of-place operation"
            )
        return self.tensor


class Owner(Protocol):
    """What a view asks of its cache."""

    def unpack(self, view: View) -> torch.Tensor:
        """Return the saved tensor, for backward."""


class View:
    """A saved tensor as a view of its region. Its cache releases the region with the last view.

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
        self._version = Version(tensor)  # a tensor made with `.data` shares the region but counts for itself
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()
        self.conj, self.neg = tensor.is_conj(), tensor.is_neg()  # lazy: the bytes in the storage lack them
        self.offset_bytes = tensor.storage_offset() * tensor.element_size() - saved.begin

    def unpack(self) -> torch.Tensor:
        self._version.check(f"activation {self.saved.name} ({tuple(self.shape)}, {self.dtype})")
        return self._owner.unpack(self)

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor as it was saved, over `memory` (the region as uint8; its storage may begin before the region)."""
        found = torch.empty(0, dtype=self.dtype, device=memory.device)
        begin = memory.storage_offset() + self.offset_bytes
        found.set_(memory.untyped_storage(), begin // found.element_size(), self.shape, self.stride)
        found = torch._conj(found) if self.conj else found
        return torch._neg_view(found) if self.neg else found


def identity_of(storage: torch.UntypedStorage) -> int:
    """Return a number that stays with a storage for its life; an address would be used again."""
    number = getattr(storage, _IDENTITY, None)
    if number is None:
        number = next(_storage_numbers)
        setattr(storage, _IDENTITY, number)
    return number


def known_identity(storage: torch.UntypedStorage) -> int | None:
    """Return the storage's number if it has one."""
    return getattr(storage, _IDENTITY, None)


def span_of(tensor: torch.Tensor, storage: torch.UntypedStorage) -> tuple[int, int]:
    """(first byte, bytes) of the storage to save for `tensor`: all of it where the tensor covers half or more, so that
    other views find it there, else the tensor's own span."""
    size = tensor.element_size()
    begin = tensor.storage_offset() * size
    span = (1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))) * size
    return (0, storage.nbytes()) if 2 * span >= storage.nbytes() else (int(begin), span)


def _bytes_of(tensor: torch.Tensor, begin: int, nbytes: int) -> torch.Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), begin, (nbytes,), (1,))
