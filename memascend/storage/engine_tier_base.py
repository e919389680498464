"""Common implementation of the tiers over the two engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from memascend.storage.completion import Completion
from memascend.storage.direct_engine import space_for
from memascend.storage.engine import StorageEngine
from memascend.storage.engine_requests import Requests, Transfer
from memascend.storage.interrupts import whole
from memascend.storage.key_queue import KeyQueue, Turn
from memascend.storage.tier import Transferred
from memascend.storage.tier_base import TierBase, require_memory


class EngineTier(TierBase):
    """Base of the tiers over engines: submits requests to one or more engines and settles their completions."""

    def __init__(self, place: str, engines: Sequence[StorageEngine], *, ordered: bool) -> None:
        """Create an empty tier. `place` names it in messages. `ordered`: the engines order a key's transfers."""
        super().__init__(place)
        self._all = [Requests(engine) for engine in engines]
        self._queue = None if ordered else KeyQueue()
        self._broken: set[str] = set()  # keys whose last write failed or was cancelled

    # -- operations that depend on the engine --------------------------------------------------------------------------

    def _submit_write(self, key: str, tensor: torch.Tensor, offset: int, priority: int) -> int:
        """Submit a write of the tensor, or of a part from byte `offset` on; return the request's number."""
        raise NotImplementedError

    def _submit_read(self, key: str, tensor: torch.Tensor, offset: int, priority: int) -> int:
        """Submit a read from byte `offset` of the tensor on; return the request's number."""
        raise NotImplementedError

    def _forget(self, key: str) -> None:
        """Remove a tensor from the engine. Its transfers have ended, or the engine orders them itself."""
        raise NotImplementedError

    def _make_space(self, key: str, nbytes: int, before: int | None) -> None:
        """Provide space before a tensor of `nbytes` replaces one of `before`. Requires `_lock`. Raises StorageError."""

    def _count_space(self, before: int | None, nbytes: int | None) -> None:
        """Account for a tensor of `before` bytes that now has `nbytes`; None: there is none. Requires `_lock`."""

    # -- the protocol --------------------------------------------------------------------------------------------------

    @whole
    def write(self, key: str, tensor: torch.Tensor, *, offset: int = 0, priority: int = 0) -> Completion:
        require_memory(key, tensor)
        with self._lock:
            self._require_open()
            if offset:
                self._require_part(key, tensor.nbytes, offset)
            before = self._sizes.get(key)
            if not offset and before != tensor.nbytes:
                self._make_space(key, tensor.nbytes, before)
                self._note_size(key, tensor.nbytes)
            try:
                part = bool(offset)
                return self._begin("write", key, lambda: self._submit_write(key, tensor, offset, priority), part)
            except BaseException:
                if before is None:
                    self._forget_size(key)
                elif not offset:  # the engine keeps the previous tensor
                    self._note_size(key, before)
                raise

    @whole
    def read(self, key: str, tensor: torch.Tensor, *, offset: int = 0, priority: int = 0) -> Completion:
        require_memory(key, tensor)
        with self._lock:
            self._require_open()
            self._require_readable(key, tensor.nbytes, offset)
            return self._begin("read", key, lambda: self._submit_read(key, tensor, offset, priority))

    @whole
    def erase(self, key: str) -> bool:
        with self._lock:
            if self._left is not None:
                return False
            self._require_open()
            if key not in self._sizes:
                return False
            self._forget_size(key)
            if (queue := self._queue) is None:
                self._forget(key)
                return True

            def forget() -> None:
                try:
                    self._forget(key)
                finally:
                    queue.leave(key, turn)

            turn = queue.enter(key, True, forget)
        if turn.begun:
            forget()
        else:
            self._watch()
        return True

    def reserve(self, more_bytes: int) -> None:
        self._require_open()

    def register(self, tensor: torch.Tensor) -> bool:
        return False

    def unregister(self, tensor: torch.Tensor) -> None:
        pass

    @property
    def free_bytes(self) -> int:
        raise NotImplementedError

    @property
    def transferred(self) -> Transferred:
        self._require_open()
        counted = [requests.engine.statistics for requests in self._all]
        return Transferred(
            sum(each.bytes_read for each in counted),
            sum(each.bytes_written for each in counted),
            sum(each.reading_s for each in counted),
            sum(each.writing_s for each in counted),
        )

    @property
    def used_bytes(self) -> int:
        """Bytes of the tensors, rounded up to allocation units."""
        with self._lock:
            return sum(space_for([size]) for size in self._sizes.values())

    def _release(self) -> None:
        for requests in self._all:
            requests.close()

    def progress(self) -> object:
        return [requests.progress() for requests in self._all]

    def _leave(self) -> None:
        for requests in self._all:
            requests.leave()

    # ------------------------------------------------------------------------------------------------------------------

    def _note_size(self, key: str, nbytes: int | None) -> None:
        """Record a tensor's new size, or with None its removal. Requires `_lock`."""
        self._count_space(self._sizes.get(key), nbytes)
        if nbytes is None:
            self._sizes.pop(key, None)
        else:
            self._sizes[key] = nbytes

    def _forget_size(self, key: str) -> None:
        """Remove a tensor from the tier's records. Requires `_lock`."""
        self._note_size(key, None)
        self._broken.discard(key)

    def _requests_for(self, verb: str) -> Requests:
        """Return the requests of the engine that does transfers of kind `verb` (read or write)."""
        return self._all[0]

    def _begin(self, verb: str, key: str, submit: Callable[[], int], part: bool = False) -> Completion:
        """Submit a transfer, such as a write of a `part`, or queue it for its key. Requires `_lock`.

        Raises what `submit` raises in this call.
        """
        turn: Turn | None = None
        queue = self._queue

        def at_end(error: BaseException | None) -> None:
            self._at_end(verb, key, transfer, error, part)
            if queue is not None and turn is not None:
                queue.leave(key, turn)

        requests = self._requests_for(verb)
        transfer = Transfer(f"{verb} of '{key}'", requests, at_end)
        if queue is not None:
            turn = queue.enter(key, verb == "write", lambda: transfer.begin(submit))
        self._pending.add(transfer)
        if turn is not None and not turn.begun:
            self._watch()
            return transfer
        try:
            requests.submit(transfer, submit)
        except BaseException:
            self._pending.discard(transfer)
            if queue is not None and turn is not None:
                queue.leave(key, turn)
            raise
        return transfer

    def _at_end(self, verb: str, key: str, transfer: Transfer, error: BaseException | None, part: bool) -> None:
        """Record the end of a transfer: after a failed write, reads of the key fail until all is written again."""
        with self._lock:
            if verb == "write" and error is not None:
                self._broken.add(key)
            elif verb == "write" and not part:
                self._broken.discard(key)
            self._ended(transfer, error)

    def _watch(self) -> None:
        """Let the dispatcher report the ends of transfers from now on."""
        for requests in self._all:
            requests.watch()
