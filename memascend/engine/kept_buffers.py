"""A model's persistent buffers (running averages, codebooks), saved with its states by each step that changes them.

Buffers stay in memory while a model is trained. Without this, a run that continues in another process would have those
that the model was created with.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Iterator

import torch
from torch import nn

from memascend.engine.state_files import in_chunks
from memascend.engine.state_store import StateStore

log = logging.getLogger("memascend")
_SPACE_TO_GROW = 64 << 10  # bytes: for what torch.save adds, and counters that become tensors


class KeptBuffers:
    """The persistent buffers of one model in one store. Not thread-safe."""

    def __init__(self, model: nn.Module, store: StateStore) -> None:
        self._model, self._store = model, store
        self._reserved = 0  # bytes of one version
        self._digest: bytes | None = None  # digest of the buffers in the store

    def begin(self) -> None:
        """Write the current buffers to a new store, with its first commit."""
        self._reserved = buffer_space_bytes(self._model)
        self.write_changed()

    def restore(self) -> None:
        """Set the model's buffers to those of the last completed step."""
        raw = self._store.kept_buffers()
        here = {name: buffer for _, name, buffer in persistent_buffers(self._model)}
        if raw is None:
            if here:
                log.warning(
                    "memascend: %s holds no buffers (an earlier version created it): %d buffers of the model, such as "
                    "%s, have their initial values; load them yourself",
                    self._store.folder,
                    len(here),
                    next(iter(here)),
                )
            return
        self._reserved = in_chunks(len(raw))
        kept = torch.load(io.BytesIO(raw), weights_only=True)
        if others := sorted(kept.keys() ^ here.keys()):
            log.warning(
                "memascend: %d buffers are only in the model or only in %s, and stay as they are: %s",
                len(others),
                self._store.folder,
                ", ".join(others[:3]),
            )
        for owner, name, buffer in list(persistent_buffers(self._model)):
            if (values := kept.get(name)) is None:
                continue
            if buffer.shape == values.shape and buffer.dtype == values.dtype:
                buffer.data.copy_(values)  # `data`: allowed even if a graph has saved the buffer
            else:
                owner._buffers[name.rpartition(".")[2]] = values.to(buffer.device)
        self._digest = _digest(self._model)

    def write_changed(self) -> None:
        """Write the buffers to the store, with its next commit, if any has changed since the last one."""
        if not self._reserved or (digest := _digest(self._model)) == self._digest:
            return
        out = io.BytesIO()
        torch.save({name: buffer.detach().cpu().clone() for _, name, buffer in persistent_buffers(self._model)}, out)
        if out.tell() > self._reserved:
            log.warning(
                "memascend: the model's buffers take %d bytes by now, and %d were kept for them: a run that goes on "
                "later has them as the model is made",
                out.tell(),
                self._reserved,
            )
            self._store.write_buffers(None)
            self._reserved = 0
            return
        self._store.write_buffers(out.getbuffer())
        self._digest = digest

    def forget_written(self) -> None:
        """Forget what was written, since it was not committed."""
        self._digest = None


def buffer_space_bytes(model: nn.Module) -> int:
    """Return the bytes of one version in a store; 0 for a model without persistent buffers."""
    sizes = [buffer.nbytes for _, _, buffer in persistent_buffers(model)]
    return in_chunks(sum(sizes) + 1024 * len(sizes) + _SPACE_TO_GROW) if sizes else 0


def persistent_buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield (module, name in the model, buffer) for each persistent buffer once."""
    seen = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            if buffer.layout == torch.strided and not buffer.is_quantized and not buffer.is_meta:
                seen.add(id(buffer))
                yield module, f"{prefix}.{name}" if prefix else name, buffer


def _digest(model: nn.Module) -> bytes:
    """Return a digest of the buffers' values. An operator may change running averages unnoticed by autograd."""
    found = hashlib.blake2b(digest_size=16)
    for _, name, buffer in persistent_buffers(model):
        values = buffer.detach().cpu().contiguous().resolve_conj().resolve_neg()
        found.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        if values.numel():
            found.update(values.view(-1).view(torch.uint8).numpy().data)
    return found.digest()
