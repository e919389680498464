"""An activation cache on a storage tier: saved tensors of forward are on the SSD until backward needs them.

SSDTrain, section III: saved tensors are packed to identifiers and written asynchronously; backward reads them back
ahead of their use, in reverse order. Tensors that are still being written are *forwarded* from memory. Weights stay
where they are. Regions of activation checkpointing are left to PyTorch: their recomputed tensors are needed at once.

One cache serves one process and any number of models, micro batches and threads.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from memascend.activation.gone import Gone
from memascend.activation.options import CacheOptions, CacheStatistics
from memascend.activation.record import Plan, Record, next_plan
from memascend.activation.saved import ActivationError, InMemory, Region, View, known_identity, span_of
from memascend.activation.staged import StagedTier
from memascend.activation.surroundings import calls_itself, device_in_use, device_named, free_device_bytes
from memascend.activation.sweep import Sweep
from memascend.activation.transfer import has_streams
from memascend.activation.weights import KnownWeights
from memascend.activation_policy import KEEP, OFFLOAD
from memascend.memory.pinned import Allocator
from memascend.storage.completion import Completion
from memascend.storage.tier import Tier

log = logging.getLogger("memascend")
_CLOSED_BEFORE = "the activation cache was closed before backward: call backward() inside of offload_activations"

REFUSES_COMPILE = (
    "activations of a model under torch.compile cannot be offloaded: its saved tensors never pass the hooks; leave out "
    "torch.compile or the offloading"
)


class ActivationCache:
    """Offloads the tensors that forward passes save while :meth:`active` is entered.

    Thread-safe: forward passes of several threads may use one cache. It tracks the position in a pass by torch's global
    module hooks, which `active` installs: meanwhile every module's forward in the process calls them, but they only act
    in threads that have entered it. The backward pass that needs a tensor raises an I/O error of it as ActivationError
    with the tensor's name.

    Args:
        tier: taken over: :meth:`close` closes it.
        options: selects what is offloaded; immutable.
        policies: if given, tensors saved by modules of policy OFFLOAD go to the tier, others stay; replaces `amount`.
        allocator: of page-locked memory for tensors of a device with streams (default: exact, no ledger).

    Attributes:
        plan: how many bytes of the next forward pass are offloaded, and why; with `amount="auto"` updated at the end of
            each pass of any thread, else as requested.
        record: what the last completed forward pass saved: names, bytes, seconds since its begin; None before the first
            one. With several threads, it is that of the pass that ended last; each record is complete in itself.

    Raises:
        ValueError: activations of this device cannot be offloaded.
    """

    def __init__(
        self,
        tier: Tier,
        options: CacheOptions | None = None,
        policies: Mapping[torch.nn.Module, str] | None = None,
        *,
        allocator: Allocator | None = None,
    ) -> None:
        self.options = options or CacheOptions()
        self._policies = None if policies is None else weakref.WeakKeyDictionary(policies)
        self.tier: Tier | StagedTier = tier
        self.plan = Plan(offload_bytes=self.options.amount if isinstance(self.options.amount, int) else None)
        self.record: Record | None = None  # of the last completed forward pass
        self._device = device_named(self.options.device) if self.options.device else device_in_use()
        if self._device != "cpu" and has_streams(self._device):
            self.tier = StagedTier(tier, allocator)
        elif self._device != "cpu":
            raise ValueError(
                f"activations on {self._device} cannot be offloaded yet: only CPU tensors and those of devices with "
                "torch streams can; use checkpointing 'offloaded' there"
            )
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._regions: dict[tuple[int, int, int, int], weakref.ref[Region]] = {}
        self._live: set[Region] = set()
        self._releasing: set[Region] = set()  # regions whose last transfer has not ended
        self._released = threading.Condition(self._lock)
        self._views: set[Gone] = set()
        self._let_go: deque[Gone] = deque()  # dead views, perhaps appended while our lock is taken
        self._local = threading.local()
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
        self._weights = KnownWeights()
        self._counts = CacheStatistics()
        self._read_ahead_bytes = 0
        self._resident = self._peak = 0
        self._warned: set[str] = set()
        self._closing = self._closed = False

    # -- context and close ---------------------------------------------------------------------------------------------

    @contextmanager
    def active(self) -> Iterator[ActivationCache]:
        """Context in which this thread's forward passes are offloaded. Contexts nest; the innermost cache is used.

        Installs global module hooks meanwhile (see the class). Raises RuntimeError for a closed cache.
        """
        if self._closing:
            raise RuntimeError("this activation cache is closed: create a new one")
        outer, self._local.stack = getattr(self._local, "stack", None), []
        before = torch_module.register_module_forward_pre_hook(self.enter_module)
        after = torch_module.register_module_forward_hook(self.leave_module, always_call=True)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                yield self
        finally:
            before.remove()
            after.remove()
            self._local.stack = outer

    def close(self) -> None:
        """Wait for transfers and close the tier; tensors on it that a live graph still needs are lost. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            waiting = [done for saved in self._live for done in (saved.writing, saved.reading) if done is not None]
        for completion in waiting:
            _settle(completion)
        with self._lock:
            self._release_unreferenced()
            self._released.wait_for(lambda: not self._releasing)
            for saved in self._live:
                if saved.memory is None and saved.error is None:
                    saved.error = RuntimeError(_CLOSED_BEFORE)
            self._live.clear()
            self._closed = True
        self.tier.close()

    @property
    def statistics(self) -> CacheStatistics:
        """A copy of the counters, after releasing regions that no graph references any more."""
        with self._lock:
            self._release_unreferenced()
            return replace(self._counts, live_tensors=len(self._live), resident=self._resident, peak=self._peak)

    def restart_peak(self) -> None:
        """Restart `statistics.peak` from what is in memory now. May be called from any thread."""
        with self._lock:
            self._release_unreferenced()
            self._peak = self._resident

    # -- tracking of modules -------------------------------------------------------------------------------------------

    def enter_module(self, module: torch.nn.Module, *_: Any) -> None:
        """Note that a module's forward begins in this thread; an outermost one starts a forward pass."""
        stack = getattr(self._local, "stack", None)
        if stack is None or not torch.is_grad_enabled() or self.in_backward():
            return
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise RuntimeError(REFUSES_COMPILE)
        if stack and stack[0] is module and not calls_itself(module):
            stack.clear()  # Ctrl-C ended its last pass without calling the hook
        if not stack:
            self._local.record, self._local.sweep = Record(), Sweep()
            if module not in self._names:
                self._names[module] = {id(part): name for name, part in module.named_modules()}
            self._local.names = self._names[module]
            with self._lock:
                self._weights.note(module)
        # Read here because autocast is off inside operators, where tensors are packed.
        self._local.autocast = torch.is_autocast_enabled(self._device)
        stack.append(module)

    def leave_module(self, module: torch.nn.Module, *_: Any) -> None:
        """Note that a module's forward ends. A repeated call, or one for a module not entered, has no effect."""
        stack = getattr(self._local, "stack", None)
        if not stack or stack[-1] is not module:
            return
        stack.pop()
        if not stack:
            self._end_of_forward(self._local.record)

    def _where(self) -> str:
        stack = getattr(self._local, "stack", None)
        if not stack:
            return "no module"
        return self._local.names.get(id(stack[-1])) or type(stack[-1]).__name__

    def _end_of_forward(self, record: Record) -> None:
        record.end()
        if not record.tensors:
            return
        with self._lock:
            self.record = record
            if self._policies is not None:
                return
            plan = next_plan(
                record, self.options.amount, self.tier.transferred.write_bytes_per_s, free_device_bytes(self._device)
            )
            if plan.reason and "declined" not in self._warned:
                self._warned.add("declined")
                log.warning("memascend: activations: %s", plan.reason)
            self.plan = plan

    @staticmethod
    def in_backward() -> bool:
        """Return whether this thread runs a backward pass, as it does when a checkpointed region is recomputed."""
        return torch._C._current_graph_task_id() != -1

    # -- forward: pack -------------------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> InMemory | View:
        """Return what autograd keeps in place of a tensor, and start writing its region if that is to be offloaded."""
        if getattr(self._local, "stack", None) is None and not self.in_backward():
            torch._C._autograd._pop_saved_tensors_default_hooks()  # left behind by Ctrl-C, after `active` has ended
            return InMemory(tensor, "")
        name = self._where()
        if not self._is_activation(tensor):
            # An alias, so that a streaming engine that counts references to a weight's memory also sees this one.
            return InMemory(tensor.detach(), name)
        storage = tensor.untyped_storage()
        with self._lock:
            self._release_unreferenced()
            saved = self._known(tensor, storage)
            if saved is None:
                begin, nbytes = span_of(tensor, storage)
                label = f"{name}[{len(self._local.record.tensors)}]" if self._recording() else name
                saved = Region(next(self._numbers), label, tensor, begin, nbytes)
                self._regions[saved.identity] = weakref.ref(saved)
                self._live.add(saved)
                self._account(saved.nbytes)
                self._note(saved)
                offloaded = self._is_to_be_offloaded(saved)
                if self._recording():
                    self._local.sweep.add(saved, offloaded=offloaded)
                if offloaded:
                    self._write(saved)
                else:
                    self._count(kept=saved.nbytes)
            else:
                self._count(deduplicated=tensor.nbytes)
            saved.references += 1
            saved.packs += 1
            view = View(self, saved, tensor)
            self._views.add(Gone(view, self._let_go, saved))
            return view

    def _is_activation(self, tensor: torch.Tensor) -> bool:
        """Return whether the cache may offload a saved tensor: large, dense, no weight, not in a backward pass."""
        if tensor.device.type != self._device or tensor.layout != torch.strided or self.in_backward():
            return False
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.numel() == 0:
            return False
        # An expanded tensor has more elements than its storage.
        if min(tensor.nbytes, tensor.untyped_storage().nbytes()) < self.options.minimum_bytes:
            return False
        running, casts = getattr(self._local, "stack", None) or (), getattr(self._local, "autocast", False)
        return not self._weights.include(tensor, running, casts=casts)

    def _known(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Region | None:
        """Return the region that contains `tensor`, if it has been saved at this version."""
        number = known_identity(storage)
        if number is None:
            return None
        for begin, nbytes in {(0, storage.nbytes()), span_of(tensor, storage)}:
            found = self._regions.get((number, tensor._version, begin, nbytes))
            saved = found() if found is not None else None
            if saved is not None and saved.error is None and self._may_share(saved, tensor):
                return saved if saved.is_version_of(tensor) else None
        return None

    def _may_share(self, saved: Region, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` may share a saved region. User data may change without a new version (NumPy memory, a
        loader's reused buffer, a leaf's `.data`): unless an operator produced it, data written to the tier is only
        shared within one forward pass."""
        same_pass = self._recording() and saved.sweep is self._local.sweep
        return tensor.grad_fn is not None or not saved.on_tier or same_pass

    def _recording(self) -> bool:
        return bool(getattr(self._local, "stack", None))

    def _note(self, saved: Region) -> None:
        if self._recording():
            self._local.record.add(saved.name, saved.nbytes)

    def _is_to_be_offloaded(self, saved: Region) -> bool:
        """Return whether a new region goes to the tier, by policy or plan, write budget and free space."""
        offloaded = self._local.record.offloaded_bytes if self._recording() else 0
        if self._policies is not None:
            if self._policy() != OFFLOAD:
                return False
        elif self.plan.offload_bytes is not None and offloaded + saved.nbytes > self.plan.offload_bytes:
            return False
        budget = self.options.write_budget_bytes
        if budget is not None and self._counts.written + saved.nbytes > budget:
            return self._stays("the write budget of %d bytes is used up", budget)
        if self.tier.free_bytes - saved.nbytes < self.options.reserve_bytes:
            return self._stays("less than reserve_bytes=%d would be left free", self.options.reserve_bytes)
        return True

    def _policy(self) -> str:
        """Return the policy of the innermost running block; outside of all blocks, KEEP."""
        stack = getattr(self._local, "stack", None) or ()
        return next((self._policies[module] for module in reversed(stack) if module in self._policies), KEEP)

    def _stays(self, reason: str, number: int) -> bool:
        if reason not in self._warned:
            self._warned.add(reason)
            log.warning("memascend: activations stay in memory from now on: " + reason, number)
        return False

    def _write(self, saved: Region) -> None:
        if self._recording():
            self._local.record.offloaded_bytes += saved.nbytes
        self._count(written=saved.nbytes)
        try:
            saved.writing = self.tier.write(saved.key, saved.memory)
        except OSError as error:
            saved.error = error.with_traceback(None)
            return
        saved.on_tier = True
        saved.writing.add_done_callback(lambda completion: self._written(saved, completion))

    def _written(self, saved: Region, completion: Completion) -> None:
        """Free the tensor's memory after its write; called by the dispatcher."""
        failure = _settle(completion)
        with self._lock:
            if failure is None:
                try:
                    saved.check_unchanged()
                except ActivationError as error:
                    failure = error
            saved.error = saved.error or failure
            saved.writing = None
            self._let_go_of_memory(saved)
            if saved.sweep is not None:
                saved.sweep.written(saved)

    # -- backward: unpack ----------------------------------------------------------------------------------------------

    def unpack(self, packed: View) -> torch.Tensor:
        """Return the saved tensor; called by autograd through its view."""
        saved = packed.saved
        with self._lock:
            self._release_unreferenced()
            memory = self._from_memory(saved)
            if memory is None:
                self._read(saved)
            self._read_ahead(saved)
            reading = saved.reading
        if memory is None:
            if reading is not None and not reading.done():
                begin = time.monotonic()
                _settle(reading)
                self._count(waited_s=time.monotonic() - begin)
            memory = self._arrived(saved, reading)
        with self._lock:
            saved.unpacks += 1
            if saved.on_tier and saved.writing is None and saved.unpacks >= saved.packs:
                self._let_go_of_memory(saved)  # autograd has its views; a second backward reads it again
        return packed.of(memory)

    def _from_memory(self, saved: Region) -> torch.Tensor | None:
        """Return the region's memory, or None if it must be read first. Raises ActivationError if it was lost."""
        if saved.error is not None:
            raise self._failure(saved)
        if saved.reading is not None or saved.memory is None:
            return None
        if saved.writing is not None:
            self._count(forwarded=saved.nbytes)
        return saved.memory

    def _failure(self, saved: Region) -> ActivationError:
        """Return a new exception each time: a stored traceback would keep the graph, and so the region, alive."""
        if isinstance(saved.error, ActivationError):
            return ActivationError(str(saved.error))
        error = ActivationError(f"activation {saved.name} ({saved.nbytes} bytes) is lost: {saved.error}")
        error.__cause__ = saved.error
        return error

    def _read(self, saved: Region) -> None:
        """Start reading a region, unless it is in memory, is being read or was lost. Requires the lock."""
        if saved.reading is not None or saved.memory is not None or saved.error is not None:
            return
        if self._closed:  # it was in memory at that time, until its write ended
            saved.error = RuntimeError(_CLOSED_BEFORE)
            return
        memory = torch.empty(saved.nbytes, dtype=torch.uint8, device=saved.device)
        try:
            saved.reading = self.tier.read(saved.key, memory)
        except (OSError, ValueError) as error:
            saved.error = error.with_traceback(None)
            return
        saved.memory = memory
        self._account(saved.nbytes)
        self._read_ahead_bytes += saved.nbytes
        self._count(read=saved.nbytes)

    def _arrived(self, saved: Region, reading: Completion | None) -> torch.Tensor:
        failure = _settle(reading) if reading is not None else None
        with self._lock:
            if saved.reading is not None and saved.reading is reading:
                saved.reading = None
                self._read_ahead_bytes -= saved.nbytes
                saved.error = saved.error or failure
            if saved.error is not None:
                raise self._failure(saved)
            return saved.memory

    def _read_ahead(self, saved: Region) -> None:
        """Start reading earlier regions in reverse order, up to `prefetch_bytes`, but always at least one."""
        sweep, most = saved.sweep, self.options.prefetch_bytes
        if sweep is None:
            return
        sweep.reach(saved, torch._C._current_graph_task_id())
        while self._read_ahead_bytes < most and (earlier := sweep.next()) is not None:
            if self._read_ahead_bytes and self._read_ahead_bytes + earlier.nbytes > most:
                return
            sweep.skip()
            self._read(earlier)

    # -- release -------------------------------------------------------------------------------------------------------

    def _release_unreferenced(self) -> None:
        """Release regions that no graph references any more. Requires the lock."""
        while self._let_go:
            gone = self._let_go.popleft()
            self._views.discard(gone)
            saved = gone.of
            saved.references -= 1
            if saved.references == 0:
                self._release(saved)

    def _release(self, saved: Region) -> None:
        self._live.discard(saved)
        known = self._regions.get(saved.identity)
        if known is not None and known() in (None, saved):
            del self._regions[saved.identity]  # at once, so that a released region is not found again
        transfer = saved.writing or saved.reading
        if transfer is not None:
            self._releasing.add(saved)
            transfer.add_done_callback(lambda _: self._erase(saved))
        else:
            self._erase(saved)

    def _erase(self, saved: Region) -> None:
        with self._lock:
            if saved.reading is not None:
                self._read_ahead_bytes -= saved.nbytes
            saved.reading = saved.writing = None
            self._let_go_of_memory(saved)
            if saved.on_tier and not self._closed:
                saved.on_tier = False
                try:
                    self.tier.erase(saved.key)
                except RuntimeError:
                    if not self._closing:  # else Ctrl-C interrupted `close`, and the tier was closed meanwhile
                        raise
            self._releasing.discard(saved)
            self._released.notify_all()

    def _account(self, nbytes: int) -> None:
        """Update the resident bytes and their peak. Requires the lock."""
        self._resident += nbytes
        self._peak = max(self._peak, self._resident)

    def _let_go_of_memory(self, saved: Region) -> None:
        if saved.memory is not None:
            saved.memory = None
            self._account(-saved.nbytes)

    def _count(self, **more: float) -> None:
        with self._lock:
            self._counts = replace(self._counts, **{name: getattr(self._counts, name) + n for name, n in more.items()})


def _unpack(packed: InMemory | View) -> torch.Tensor:
    return packed.unpack()


def _settle(completion: Completion) -> BaseException | None:
    """Wait, and return the error of a failed transfer, or None."""
    try:
        completion.wait()
    except Exception as error:
        return error.with_traceback(None)
    return None
