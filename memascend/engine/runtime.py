"""The streaming engine: a plain PyTorch model is trained while its weights, gradients and states live on a tier.

    engine = StreamingEngine.start(model, folder, groups)          # or .resume, after a kill
    loss = model(...).loss; loss.backward()                        # blocks come and go; updates run meanwhile
    engine.finish_step()                                           # all is written and committed

Source: LoHan (arXiv 2403.06504), IV-C; the runtime of weights is `WeightStream`'s. Synchronous: parameters are those of
training in memory, to the bit where every sum is taken in the same order.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memascend.engine import home as homes
from memascend.engine.blocks import BlockRuntime, ModelUnits, NotStreamable, UnitWeights, stream_block
from memascend.engine.buffers import BLOCKS_IN_FLIGHT, STATE_SLOTS, EngineBuffers
from memascend.engine.contents import TierContents
from memascend.engine.home import StateHome
from memascend.engine.inputs import KeptInput, KeptInputs
from memascend.engine.layout import Kind, Layout, Part, Unit
from memascend.engine.limit import Limit, Rates, StepClock, adamw_rate, limit_of
from memascend.engine.mapped import TensorFile
from memascend.engine.matrices import StreamedRows, partial_key
from memascend.engine.one_version import GradientsAtHome, Redo, beside, versions_for
from memascend.engine.operators import Taken
from memascend.engine.protocols import Storage
from memascend.engine.swap import Decision, Swapping, link_rate
from memascend.engine.updates import ARMS, AdamSettings, Updates, gradient_key, gradient_numel
from memascend.engine.weights import WeightStream
from memascend.memory.pinned import Allocator, PageAlignedPinnedAllocator
from memascend.ops.rows import slice_module
from memascend.storage.direct_engine import DirectEngineConfig
from memascend.storage.engine_tiers import DirectTier
from memascend.storage.scratch import collect_scratch_files
from memascend.swapping import RULES
from memascend.swapping import Rates as SwapRates

log = logging.getLogger("memascend")

_WAIT_S = 3600.0  # for a slot: as long as the largest update may take, on the slowest disk


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How a model is streamed.

    `arm`: optimized, naive or none (`memascend.engine.updates`). `accumulate`: backward passes in a step; `clip`: the
    largest norm of all gradients, 0 for any. With either, gradients wait on the tier for the norm or for the others;
    `wait`: for a norm that is asked for later (`clip_grad_norm`). `checkpoints`: `tier` (inputs of blocks wait on the
    SSD) or `device`. `states`: dtype of moments and masters; `gradients`: of those that wait. `zero_missing`: see
    `Updates`. `piece_elements`: see `make_layout`. `measure`: find out how fast a step could be (`limit`). `swap`:
    results inside of blocks that are swapped rather than computed again, decided after the first step by a rule (best,
    algorithm 1 or released, see `memascend.swapping`), all, a number of bytes a pass, or a share such as 50%; None:
    none. `swap_room`: bytes of host memory that they may take before the SSD has them. `versions`: of the states on
    the tier, 2, or 1 with gradients that wait beside it (`memascend.engine.one_version`); None: two if the disk has
    room for them. `redo`: with one version, whether a step that is cut off can be done again; else nothing waits for
    it, a kill in the middle of a step leaves torn states (`TornStates`), and so do an error in a backward pass that
    uses gradients as they come and a gradient that is infinite or NaN there.
    """

    arm: str = "optimized"
    accumulate: int = 1
    clip: float = 0.0
    wait: bool = False
    checkpoints: str = "tier"
    states: torch.dtype = torch.float32
    gradients: torch.dtype = torch.float32
    zero_missing: bool = False
    measure: bool = False
    swap: str | None = None
    swap_room: int = 0
    blocks_in_flight: int = BLOCKS_IN_FLIGHT
    piece_elements: int | None = None
    versions: int | None = None
    redo: bool = True

    def __post_init__(self) -> None:
        if self.arm not in ARMS:
            raise ValueError(f"unknown arm {self.arm!r} of gradient offloading: use one of {', '.join(ARMS)}")
        if self.checkpoints not in ("tier", "device"):
            raise ValueError(f"checkpoints must be 'tier' or 'device', got {self.checkpoints!r}")
        if self.swap is not None and not (self.swap in (*RULES, "all") or self.swap.removesuffix("%").isdecimal()):
            known = f"{', '.join(RULES)}, 'all', bytes, or a share such as 50%"
            raise ValueError(f"swap must be one of {known}, got {self.swap!r}")
        if self.versions not in (None, 1, 2):
            raise ValueError(f"versions must be 1 or 2, or None for what the disk has room for, got {self.versions}")
        if not self.redo and self.versions == 2:
            raise ValueError("redo is of one version of the states, and versions is 2: leave redo out, or versions=1")
        if self.accumulate < 1 or not self.clip >= 0 or self.blocks_in_flight < 1:
            raise ValueError(
                f"accumulate {self.accumulate}, clip {self.clip}, blocks_in_flight {self.blocks_in_flight}: need at "
                "least 1, 0 and 1"
            )

    @property
    def profiles(self) -> bool:
        """Whether rates and the blocks' times are measured."""
        return self.measure or self.swap is not None

    @property
    def state_slots(self) -> int:
        return 1 if self.arm == "naive" else STATE_SLOTS

    @property
    def waits(self) -> bool:
        """Whether gradients wait on the tier until all of a step have come."""
        return self.arm == "none" or self.clip > 0 or self.wait or self.redoes

    @property
    def redoes(self) -> bool:
        """Whether a step replaces the states in parts, and is done again where that is cut off."""
        return self.versions == 1 and self.redo

    @property
    def tears(self) -> bool:
        """Whether a step replaces the states in parts, which are of no use where that is cut off."""
        return self.versions == 1 and not self.redo


class StreamingEngine(BlockRuntime):
    """One process, one device: the CPU. Not thread-safe.

    The model's parameters are its from `start` or `resume` on to `close`: empty but for the moments in which they are
    needed. `groups`: as torch.optim's (`params`, `lr`, `betas`, `eps`, `weight_decay`), read anew at each update.
    """

    def __init__(
        self,
        model: nn.Module,
        units: ModelUnits,
        home: StateHome,
        groups: Sequence[dict[str, Any]],
        options: EngineOptions,
        allocator: Allocator,
    ) -> None:
        self.model, self.options, self.home, self.groups = model, options, home, groups
        self.units, self.layout = units, units.layout
        self._group_of = {units.names[p]: group for group in groups for p in group["params"]}
        if missing := [name for name in self.layout.order if name not in self._group_of]:
            raise ValueError(f"{missing[0]} is trained and in no group of the optimizer ({len(missing)} such): add it")
        self.buffers = EngineBuffers(
            self.layout,
            allocator,
            blocks_in_flight=options.blocks_in_flight,
            state_slots=options.state_slots,
            gradients=options.gradients,
        )
        self._stream = WeightStream(home, pool=self.buffers.weights, wait_s=_WAIT_S)
        self._states: WeightStream | None = None
        if self.buffers.states is not None:
            self._states = WeightStream(home, pool=self.buffers.states, wait_s=_WAIT_S)
        for unit in self.layout.units:
            self._stream.register(unit.key, self.layout.unit_numel(unit))
            for piece in unit.pieces:
                self._states.register(piece.key, self.layout.states_numel(piece))
        for tensor in self.buffers.streamed:
            home.register(tensor)
        self._booked: list[int] = []  # ledger entries of memory that is not the allocator's
        self._of_home = self._book_bounce_buffers(home.bounce_buffers)
        self.weights = UnitWeights(units, self._stream)
        self._contents = TierContents(self.layout, self.weights, self._states, home.folder)
        self.updates = Updates(
            self.layout,
            self.weights,
            self._states,
            self.gradient_stream,
            self._settings,
            arm=options.arm,
            zero_missing=options.zero_missing,
        )
        self.steps = dict.fromkeys(self.layout.order, 0)  # of each parameter, as torch.optim counts them
        self.scale = 1.0  # that the loss is multiplied by before backward
        self._scratch: DirectTier | None = None
        self._gradients: WeightStream | None = None
        self._making = threading.Lock()
        self._matrices: list[StreamedRows] = []
        self._inputs = KeptInputs(self.buffers, self._scratch_tier, _WAIT_S)
        self._uses: dict[str, int] = {}
        self._visits: list[str] = []
        self._pattern: list[str] = []
        self._clip = options.clip  # of this step
        self._passes = 0  # backward passes of this step that have ended
        self._backward_begun = False
        self._kept: dict[str, Unit] = {}  # held units whose backward has not come
        self.limit: Limit | None = None  # of the last step, where that is measured
        self._rates: Rates | None = None
        self._block_seconds: dict[tuple[int, int], tuple[float, float]] = {}  # forward, backward
        self._outside_s = 0.0  # of the modules outside of the blocks, in this forward pass
        self._entered_s: dict[str, float] = {}
        self._clock = StepClock(lambda: self.transferred)
        self._undo: list[Callable[[], None]] = []
        self._swapping: Swapping | None = None
        if options.swap is not None:
            self._swapping = Swapping(model, units.blocks, options.swap, self._swap_tier, options.swap_room, allocator)
        self._unfinished: str | None = None  # what is to be done about an update that is half on the tier
        self._restored = False
        self.versions_why = "as an earlier run began it"  # so many of the states
        self._closed = False
        self._attach()
        for key, slices in units.matrices.items():
            log.info("memascend: %s goes by %d slices: sums over its rows are taken slice by slice", key, len(slices))

    # -- begin and end -------------------------------------------------------------------------------------------------

    @property
    def transferred(self) -> tuple[int, int]:
        """Bytes read and written since the engine was made: states, waiting gradients, activation checkpoints."""
        read, written = self.home.transferred
        if self._scratch is not None:
            moved = self._scratch.transferred
            read, written = read + moved.bytes_read, written + moved.bytes_written
        if self._swapping is not None and self._swapping.cache is not None:
            moved = self._swapping.cache.tier.transferred
            read, written = read + moved.bytes_read, written + moved.bytes_written
        return read, written

    @property
    def decision(self) -> Decision | None:
        """What is swapped of activations; None: it has not been asked for, or the first step is not done."""
        return self._swapping.decision if self._swapping is not None else None

    @classmethod
    def start(
        cls,
        model: nn.Module,
        folder: str | os.PathLike[str],
        groups: Sequence[dict[str, Any]],
        options: EngineOptions | None = None,
        *,
        blocks: Sequence[nn.Module] | None = None,
        allocator: Allocator | None = None,
        owner: str = "",
        facts: dict[str, Any] | None = None,
        config: DirectEngineConfig | None = None,
        faults: Any = None,
    ) -> StreamingEngine:
        """Move a model in memory to a new home in `folder`, unit by unit; its parameters are empty afterwards.

        `facts` are kept with step 0. Raises NotStreamable, StorageError (no room, with the bytes that are missing),
        MemoryError for host buffers; the model is then as it was.
        """
        options = options or EngineOptions()
        units = _units(model, blocks, options)
        layout, slots = units.layout, options.state_slots
        asked = options.versions if options.redo else 1
        chosen = versions_for(folder, layout, asked, options.gradients, slots, redo=options.redo)
        options = replace(options, versions=chosen.count)
        extra = beside(layout, chosen.count, options.gradients, slots, redo=options.redo)
        home = StateHome.create(
            folder, _owner(owner, layout), layout.nbytes, versions=chosen.count, **extra, config=config, faults=faults
        )
        if options.redoes:
            log.info(
                "memascend: one version of the states (%s): gradients wait beside it, so that a step that is cut off "
                "can be done again; a step writes and reads them once more",
                chosen.why,
            )
        if options.tears:
            log.info(
                "memascend: one version of the states (%s) and nothing to do a step again from: after a kill in the "
                "middle of a step training goes on from the last checkpoint",
                chosen.why,
            )
        try:
            engine = cls(model, units, home, groups, options, allocator or PageAlignedPinnedAllocator())
            engine.versions_why = chosen.why
            try:
                engine._move_in(facts or {})
            except BaseException:
                engine._detach()
                engine._stop()
                raise
            return engine
        except BaseException:
            with contextlib.suppress(OSError):
                home.destroy()
            raise

    @classmethod
    def resume(
        cls,
        model: nn.Module,
        folder: str | os.PathLike[str],
        groups: Sequence[dict[str, Any]],
        options: EngineOptions | None = None,
        *,
        blocks: Sequence[nn.Module] | None = None,
        allocator: Allocator | None = None,
        owner: str = "",
        config: DirectEngineConfig | None = None,
        faults: Any = None,
    ) -> tuple[StreamingEngine, dict[str, Any]]:
        """Go on after the last completed step of a home; also the facts that were kept with it.

        `model` is of the same architecture; its values are dropped. Raises NotThisModel where the home holds another
        model or layout, or no completed step; TornStates.
        """
        options = options or EngineOptions()
        units = _units(model, blocks, options)
        collect_scratch_files(folder, os.fspath(folder))
        home = StateHome.open(folder, _owner(owner, units.layout), config=config, faults=faults)
        try:
            kept = home.completed()
            if kept is None:
                raise homes.NotThisModel(f"{folder} holds no completed step: remove it and start anew")
            options = replace(options, versions=kept.get("versions", 2), redo=kept.get("redoes", True))
            engine = cls(model, units, home, groups, options, allocator or PageAlignedPinnedAllocator())
        except BaseException:
            home.close()
            raise
        engine.steps = dict(zip(engine.layout.order, kept["steps"], strict=True))
        engine.weights.empty_all()
        facts = kept["facts"]
        if (record := kept.get("redo")) is not None:
            try:
                facts = engine._complete(Redo(record))
            except BaseException:
                engine._detach()
                engine._stop()
                home.close()
                raise
        engine._be_ready()
        return engine, facts

    @torch.no_grad()
    def _move_in(self, facts: dict[str, Any]) -> None:
        """Weights, zero moments and masters to the tier; parameters go empty only when all of it is committed."""
        layout = self.layout
        for unit in layout.units:
            slot = self._stream.put(unit.key)
            slot.zero_()
            for part, values in self.units.values(unit):
                slot[part.first : part.first + part.numel].copy_(values)
                self.units.looked_at(part)
            for piece in unit.pieces:
                states = self._states.put(piece.key)
                states.zero_()
                if not layout.own_masters:
                    states[: piece.numel].copy_(slot[piece.first : piece.first + piece.numel])
                self._states.write(piece.key)
                self._states.release(piece.key)
            self._stream.write(unit.key)
            self._stream.release(unit.key)
        self._flush()
        self._commit(facts)
        self._be_ready()
        self.weights.empty_all()

    def _be_ready(self) -> None:
        if self.options.tears:
            room = beside(self.layout, 1, self.options.gradients, self.options.state_slots, redo=False)["slack"]
            self.home.replace_within(room)
        if self.options.profiles and self._states is not None:
            self._rates = self._measure_rates()

    def _flush(self) -> None:
        self._stream.flush()
        if self._states is not None:
            self._states.flush()

    def _commit(self, facts: dict[str, Any], redo: Redo | None = None) -> None:
        whole = {"steps": list(self.steps.values()), "versions": self.options.versions, "facts": facts}
        if self.options.tears:
            whole["redoes"] = False
        self.home.commit(whole if redo is None else {**whole, "redo": redo.record})

    def close(self, *, destroy: bool = False) -> None:
        """Give the model its own forward back and let go of everything; a step that is not finished is forgotten.

        The home stays for `resume`, unless `destroy`. Parameters stay empty. Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        self._detach()
        self._stop()
        if destroy:
            self.home.destroy()
        else:
            self.home.close()

    def _stop(self) -> None:
        if self._swapping is not None:
            with contextlib.suppress(OSError):
                self._swapping.close()
        self.updates.abandon()
        self.updates.close()
        for stream in (self._stream, self._states):
            if stream is not None:
                with contextlib.suppress(OSError, RuntimeError):
                    stream.close()
        if self._scratch is not None:
            with contextlib.suppress(OSError):
                self._scratch.close()
        while self._booked:
            self.buffers.allocator.ledger.close(self._booked.pop())
        # The buffers go with whoever holds them; the model's graphs may hold this object.
        del self.buffers, self.updates, self.weights, self._contents, self._stream, self._states, self._gradients
        del self._matrices
        self._inputs.drop()

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        for key, slices in self.units.matrices.items():
            rows = StreamedRows(weakref.proxy(self), self.units.matrix(key), slices)
            self._matrices.append(rows)
            self._undo += [slice_module(module, rows) for module in self.units.modules[key]]
        for unit in self.layout.units:
            for module in self.units.modules[unit.key] if unit.kind is not Kind.SLICE else ():
                if unit.kind is Kind.BLOCK:
                    self._undo.append(stream_block(module, unit, self))
                else:
                    before = module.register_forward_pre_hook(self._fetcher(unit))
                    after = module.register_forward_hook(self._releaser(unit), always_call=True)
                    self._undo += [before.remove, after.remove]
            for part, parameter in self.units.pairs(unit):
                if part.trained:
                    hook = parameter.register_post_accumulate_grad_hook(self._collector(unit, part))
                    self._undo.append(hook.remove)
        before = self.model.register_forward_pre_hook(self._model_begins)
        after = self.model.register_forward_hook(self._model_ends)
        saved = self.model.register_state_dict_post_hook(functools.partial(self._fill_state_dict))
        self._undo += [before.remove, after.remove, saved.remove]

    def _detach(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _fetcher(self, unit: Unit) -> Callable[..., None]:
        def fetch(*_: Any) -> None:
            self.weights.take(unit)
            self._entered_s[unit.key] = time.perf_counter()

        return fetch

    def _releaser(self, unit: Unit) -> Callable[..., None]:
        """Held units stay for their backward pass, where there will be one."""

        def release(*_: Any) -> None:
            if not self.weights.is_held(unit):  # its fetch has failed
                return
            self._outside_s += time.perf_counter() - self._entered_s[unit.key]
            if unit.kind is Kind.HELD and torch.is_grad_enabled() and unit.key not in self._kept:
                self._kept[unit.key] = unit
            else:
                self.weights.give_back(unit)

        return release

    def _model_begins(self, *_: Any) -> None:
        """A forward pass: without optimizer.step() (LoHan, Fig. 4b) it is also the end of the step before."""
        if self.updates.failure_was_told or self._backward_begun:  # an error in the loop that the user has seen
            log.warning("memascend: the step under way was given up after an error; it begins anew from the one before")
            self.give_up()
        self._require_whole()
        self.updates.raise_failure()
        if not torch.is_grad_enabled():
            self._stream.read_ahead(self._pattern[: len(self._pattern) // 2])
            return
        if self._passes >= self.options.accumulate:
            self.finish_step()
        self._visits = []
        self._outside_s = 0.0
        if self.options.profiles:
            self._clock.begin()
        self._stream.read_ahead(self._pattern)

    def _model_ends(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            self._stream.release_idle()
            return
        self._clock.end("forward", compute_s=self._outside_s + self._of_blocks())
        if not self.options.waits and self._passes + 1 == self.options.accumulate:
            self.updates.expect()

    def _collector(self, unit: Unit, part: Part) -> Callable[[nn.Parameter], None]:
        engine = weakref.ref(self)

        def collect(parameter: nn.Parameter) -> None:
            self = engine()
            if unit.kind is not Kind.BLOCK:
                self.backward_begins()
            if self._uses.get(unit.key, 0) <= 1:  # else the same layer comes again: autograd adds up meanwhile
                self._arrive_from(part, parameter)

        return collect

    def _arrive_from(self, part: Part, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        self.arrive(part, gradient)

    def arrive(self, part: Part, gradient: torch.Tensor) -> None:
        """A gradient of this pass, whole."""
        if gradient.layout != torch.strided:
            raise NotStreamable(f"the gradient of {part.name} is sparse: use a dense one (sparse=False)")
        last = self._passes + 1 >= self.options.accumulate
        self.updates.arrive(part, gradient, wait=self.options.waits or not last, last=last)

    def backward_begins(self) -> None:
        """In the user's backward pass, not in a block's own: `_backward_ends` follows, if no error does."""
        if not self._backward_begun:
            self._backward_begun = True
            self.updates.scale = self.scale
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        for unit in self.layout.units:
            for part, parameter in self.units.pairs(unit):
                if part.trained and parameter.grad is not None:
                    self._arrive_from(part, parameter)
        for rows in self._matrices:
            rows.end_of_backward()
        compute = 2 * self._outside_s + self._of_blocks(backward=True)  # twice forward, as products are
        self._clock.end("backward", compute_s=compute)
        last = self._passes + 1 >= self.options.accumulate
        self.updates.end_pass(wait=self.options.waits or not last, last=last)
        self._backward_begun = False
        self._passes += 1
        self._pattern = self._visits
        self._give_back_kept()

    def _give_back_kept(self) -> None:
        while self._kept:
            self.weights.give_back(self._kept.popitem()[1])

    def wants_profile(self, unit: Unit) -> bool:
        return self.options.profiles and self._alike(unit) not in self._block_seconds

    def profiled(self, unit: Unit, forward_s: float, backward_s: float) -> None:
        if not self.options.profiles:
            return
        known = self._block_seconds.get(self._alike(unit))
        if known is None:
            self._clock.begin()  # what the profile took belongs to no phase
            self._block_seconds[self._alike(unit)] = forward_s, backward_s
        else:
            self._block_seconds[self._alike(unit)] = min(known[0], forward_s), min(known[1], backward_s)

    @staticmethod
    def _alike(unit: Unit) -> tuple[int, int]:
        """The same for blocks that take the same time."""
        return unit.numel, len(unit.parts)

    def _of_blocks(self, *, backward: bool = False) -> float:
        """Seconds of one pass through all blocks, as profiled; `backward` with what is computed again."""
        total = 0.0
        for unit in self.layout.units:
            if unit.kind is Kind.BLOCK:
                forward_s, backward_s = self._block_seconds.get(self._alike(unit), (0.0, 0.0))
                again = self._swapping.computed_again(unit.key) if self._swapping is not None else 1.0
                total += backward_s + again * forward_s if backward else forward_s
        return total

    def entered(self, unit: Unit) -> None:
        self._uses[unit.key] = self._uses.get(unit.key, 0) + 1
        self._visits.append(unit.key)

    def recomputes(self, unit: Unit) -> None:
        self.backward_begins()
        self._visits.append(unit.key)

    def computed_outside(self, seconds: float) -> None:
        if not self._backward_begun:
            self._outside_s += seconds

    def left(self, unit: Unit) -> None:
        self._uses[unit.key] = max(0, self._uses.get(unit.key, 0) - 1)

    def _fill_state_dict(self, model: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """The model's state_dict() has its weights, in a file's memory; a tied one is one tensor under two names."""
        names = self.units.names
        keys: dict[str, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if prefix + name in state and parameter in names:
                keys.setdefault(names[parameter], []).append(prefix + name)
        parts = [part.name for unit in self.layout.units for part in unit.parts]
        wanted = [name for name in dict.fromkeys(parts) if name in keys]
        shapes = {name: parameter.shape for parameter, name in names.items()}
        sizes = [shapes[name].numel() * self.layout.weights.itemsize for name in wanted]
        file = TensorFile(self.home.folder, sizes)
        for name, values in self.read_weights(wanted):
            copy = file.put(values)
            for key in keys[name]:
                state[key] = copy

    def keep_input(self, tensor: torch.Tensor) -> Any:
        return self._inputs.keep(tensor) if self.options.checkpoints == "tier" and tensor.numel() else tensor

    def bring_back(self, kept: Any) -> torch.Tensor:
        return kept.tensor() if isinstance(kept, KeptInput) else kept

    def taking(self, unit: Unit, inputs: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Taken]:
        if self._swapping is None:
            return super().taking(unit, inputs)
        return self._swapping.forward(unit.key, inputs)

    def replaying(self, unit: Unit, taken: Taken) -> contextlib.AbstractContextManager[Any]:
        if self._swapping is None:
            return super().replaying(unit, taken)
        return self._swapping.backward(unit.key, taken)

    def _decide_on_swapping(self) -> None:
        """Once, when the first step's profile is complete."""
        swapping, rates, blocks_s = self._swapping, self._rates, self._of_blocks()
        if swapping is None or swapping.decision is not None or rates is None or not swapping.flops:
            return
        layout = self.layout
        weights = sum(layout.unit_numel(unit) for unit in layout.units) * layout.weights.itemsize
        states = sum(map(layout.states_numel, layout.pieces)) * layout.states.itemsize
        measured = SwapRates(
            gpu=swapping.flops / blocks_s,
            link=link_rate(),
            read=rates.read,
            write=rates.write,
            room=self.options.swap_room,
        )
        decision = swapping.decide(
            measured,
            self._outside_s / blocks_s,
            weights=weights,
            gradients=weights,
            update_read=weights + states,
            update_written=weights + states,
        )
        log.info("memascend: %s", decision)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def finish_step(self, *, keep: bool = True, facts: dict[str, Any] | None = None) -> float | None:
        """Until everything of this step is updated and written; the norm of all gradients, loss scale out.

        None: a gradient was infinite or NaN, and nothing was changed since the last `keep`. With `keep` the step is
        completed; else the caller does that before the next one. `facts`: what the step is kept with where a kill cuts
        it off and `resume` completes it (`keep` gets the same). Raises what failed, StorageError, TornStates and
        others; the step is then given up (see `give_up`).
        """
        self._require_whole()
        try:
            self.updates.raise_failure()
            if self._backward_begun:
                raise RuntimeError("the last backward pass ended in an error: its step cannot be finished, do it again")
            norm = self._finish(facts or {}) if self.updates.pending else 0.0
            self._give_back_kept()
            if keep:
                self.keep(facts or {})
        except BaseException as error:
            self._give_up_after(error)
            raise
        return norm

    def keep(self, facts: dict[str, Any]) -> None:
        """The finished step outlives the process from here on, with `facts` (JSON) for `resume`; StorageError."""
        self._require_whole()
        self._commit(facts)
        self._restored = False
        if self.home.all_compared:
            self._close_streams()
            self.home.compare_no_more()
            self._home_was_opened_again()

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """As torch.nn.utils.clip_grad_norm_ over all parameters, for the step under way; the norm of all gradients
        (fp32, 0-d, loss scale out). They are scaled when they are used. RuntimeError where they have been used already.
        """
        if not self.options.waits:
            raise RuntimeError(
                "the gradients of a streamed model are used as they come, before all of them have a norm: let them "
                "wait for it (clip=... or wait=True when the optimizer is made)"
            )
        self.updates.raise_failure()
        self.updates.sum_waiting()
        self._clip = max_norm
        return self.updates.sums.norm(self.layout.order) / self.scale

    def _finish(self, facts: dict[str, Any]) -> float | None:
        updates, options = self.updates, self.options
        updates.scale = self.scale
        waited = options.waits or self._passes < options.accumulate
        if waited:
            updates.sum_waiting()
        else:
            updates.finish_direct()
        norm = updates.sums.norm(self.layout.order)
        if not bool(torch.isfinite(norm)):
            try:
                self._take_back(written=not waited or options.redoes)
            except homes.TornStates as torn:
                torn.args = (f"a gradient was infinite or NaN; {torn}",)
                raise
            return None
        if waited and self._clip > 0:
            updates.scale *= max(1.0, (float(norm) / self.scale + 1e-6) / self._clip)
        if options.redoes:
            self._gradients.flush()
            settings = [self._settings(name) for name in self.steps]
            self._update_in_parts(Redo.of(updates, settings, facts, self._kind_of_gradients()))
        elif waited:
            updates.finish_waiting()
        self._flush()
        self._count_step()
        self._end_of_clock(waited)
        self._decide_on_swapping()
        updates.end_step()
        self._passes, self._clip = 0, options.clip
        return float(norm / self.scale)

    def _count_step(self) -> None:
        for name in self.steps:
            if self.options.zero_missing or name in self.updates.arrived:
                self.steps[name] += 1

    def _require_whole(self) -> None:
        if self._unfinished is not None:
            raise RuntimeError(self._unfinished)

    def _update_in_parts(self, redo: Redo) -> None:
        """Each unit's weights and states with one commit, that says so; gradients go with the step's own."""
        self._unfinished = "a step's update was cut off: close the engine, and resume, which completes it"
        self._commit({}, redo)

        def after(unit: Unit) -> None:
            self._flush()
            redo.did(unit)
            self._commit({}, redo)

        left = [unit for unit in reversed(self.layout.units) if not redo.is_done(unit)]
        self.updates.finish_waiting(left, after=after)
        self._unfinished = None
        self.home.erase(redo.keys(self.layout))

    def _kind_of_gradients(self) -> list[Any]:
        return [str(self.options.gradients), self.options.zero_missing]

    def _complete(self, redo: Redo) -> dict[str, Any]:
        """The step that an earlier process has begun to use its gradients for; the facts that it is kept with."""
        if redo.record["kind"] != self._kind_of_gradients():
            raise homes.NotThisModel(
                f"{self.home.folder} holds gradients of a step that is to be completed as {redo.record['kind']}, and "
                f"{self._kind_of_gradients()} was asked for (gradients, zero_missing): go on with the same options once"
            )
        log.info("memascend: a step's update was cut off: it is completed from its gradients")
        self.gradient_stream()
        self.updates.take_up(redo.record, redo.settings(self.layout.order))
        self._update_in_parts(redo)
        self._flush()
        self._count_step()
        self.updates.end_step()
        self._commit(redo.facts)
        return redo.facts

    def _end_of_clock(self, waited: bool) -> None:
        """Updates without a phase of their own ran in backward."""
        updated = sum(piece.numel for piece in self.layout.pieces)
        self._clock.end("optimizer" if waited else "backward", compute_s=0.0, updated=updated)
        phases = self._clock.take()
        if phases and self._rates is not None:
            moved = self.home.since_opened
            self._rates = self._rates.at_least(
                read=moved.read_bytes_per_s, write=moved.write_bytes_per_s, adamw=self.updates.fastest
            )
            self.limit = limit_of(phases, self._rates)
            log.info("memascend: step %d: %s", max(self.steps.values(), default=0), self.limit)

    def _measure_rates(self) -> Rates:
        """Of the states' path with as much under way as the slots hold. Between steps: what is written is forgotten."""
        pieces = sorted(self.layout.pieces, key=self.layout.states_numel)[-self.options.state_slots :]
        keys = [piece.key for piece in pieces]
        nbytes = sum(self.layout.states_numel(piece) for piece in pieces) * self.layout.states.itemsize
        best = [float("inf")] * 2
        for _ in range(3):
            times = [time.perf_counter()]
            self._states.fetch(keys)
            times.append(time.perf_counter())
            for completion in [self._states.write(key) for key in keys]:
                completion.wait()
            times.append(time.perf_counter())
            for key in keys:
                self._states.release(key)
            self._states.flush()
            self.home.roll_back()
            best = [min(b, after - before) for b, before, after in zip(best, times[:-1], times[1:], strict=True)]
        adamw = adamw_rate(max(piece.numel for piece in pieces), self.layout.states)
        return Rates(read=nbytes / best[0], write=nbytes / best[1], adamw=adamw)

    def _take_back(self, *, written: bool) -> None:
        """Nothing of this step stays: what is in memory or written may be half of it."""
        self.updates.abandon()
        self._kept.clear()
        self.weights.abandon()
        with contextlib.suppress(OSError):
            self._close_streams()
        if written:
            try:
                self.home.roll_back()
            except homes.TornStates as error:
                self._unfinished = str(error)
                raise
            self._home_was_opened_again()
        self._passes, self._clip = 0, self.options.clip

    def _close_streams(self) -> None:
        """Every slot is free, and nothing is under way; all of them can be used again. Raises the first failure."""
        failures = []
        for stream in (self._stream, self._states, self._gradients):
            try:
                if stream is not None:
                    stream.close()
            except OSError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def give_up(self) -> None:
        """After an error in the loop: forget the step under way. Everything is as after the last completed one.

        Raises TornStates where that cannot be (`EngineOptions.redo`): the engine can then only be closed."""
        if self._closed:
            return
        self._backward_begun = False
        for owned in self.units.parameters.values():
            for parameter in owned:
                parameter.grad = None
        for rows in self._matrices:
            rows.forget()
        with contextlib.suppress(OSError):
            self._inputs.give_back()
        self._uses.clear()
        self._take_back(written=True)

    def _give_up_after(self, error: BaseException) -> None:
        try:
            self.give_up()
        except Exception as another:
            error.add_note(f"and what was written of the step could not be taken back: {another}")

    def _settings(self, name: str) -> AdamSettings:
        group = self._group_of[name]
        return AdamSettings(
            step=self.steps[name] + 1,
            lr=float(group["lr"]),
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )

    def _book_bounce_buffers(self, buffers: Sequence[tuple[int, int]]) -> list[int]:
        """They live as long as the engine below: this one's life, or until the home is opened again."""
        ledger = self.buffers.allocator.ledger
        entries = [
            ledger.record("bounce buffers", "nvme_engine_buffers", size, allocator="direct engine", address=address)
            for address, size in (buffers if ledger is not None else ())
        ]
        self._booked += entries
        return entries

    def _home_was_opened_again(self) -> None:
        for entry in self._of_home:
            self._booked.remove(entry)
            self.buffers.allocator.ledger.close(entry)
        self._of_home = self._book_bounce_buffers(self.home.bounce_buffers)

    # -- further streams -----------------------------------------------------------------------------------------------

    def _scratch_tier(self) -> DirectTier:
        if self._scratch is None:
            config = DirectEngineConfig(control_folder=os.fspath(self.home.folder))
            self._scratch = DirectTier.in_file(self.home.folder, "gradients and activations", config)
            self._book_bounce_buffers(self._scratch.engine.bounce_buffers)
        return self._scratch

    def _swap_tier(self) -> DirectTier:
        config = DirectEngineConfig(control_folder=os.fspath(self.home.folder))
        tier = DirectTier.in_file(self.home.folder, "swapped activations", config)
        self._book_bounce_buffers(tier.engine.bounce_buffers)
        return tier

    def gradient_stream(self) -> WeightStream:
        """Of gradients that wait on the tier; made by whichever thread asks first."""
        with self._making:
            if self._gradients is None:
                pool = self.buffers.need_gradients()
                stream = WeightStream(self._gradient_storage(), pool=pool, wait_s=_WAIT_S)
                for piece in self.layout.pieces:
                    for key in (gradient_key(piece), partial_key(piece)):
                        stream.register(key, gradient_numel(piece, self.buffers.gradient_dtype))
                self._gradients = stream
        return self._gradients

    def _gradient_storage(self) -> Storage:
        if not self.options.redoes:
            return self._scratch_tier()
        return GradientsAtHome(self.home, self._scratch_tier, {gradient_key(piece) for piece in self.layout.pieces})

    # -- contents ------------------------------------------------------------------------------------------------------

    def read_weights(self, order: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, values) of every parameter, see `TierContents`. Not while a step is under way."""
        return self._contents.read_weights(order)

    def read_states(self, name: str) -> dict[str, torch.Tensor]:
        """A trained parameter's states, see `TierContents`."""
        return self._contents.read_states(name)

    def write_states(self, name: str, states: dict[str, torch.Tensor], *, step: int) -> None:
        """The reverse, after `step` steps of this parameter; `keep` completes it. With one version of the states there
        is no completed step from the first of them until then."""
        if self.options.versions == 1 and not self._restored:
            self._restored = True
            self.home.forget_step()
        self._contents.write_states(name, states)
        self.steps[name] = step
        if self.options.versions == 1:
            self.home.commit_parts()


def _units(model: nn.Module, blocks: Sequence[nn.Module] | None, options: EngineOptions) -> ModelUnits:
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        raise NotStreamable("the streaming engine computes on the CPU so far: leave the model there (model.cpu())")
    return ModelUnits(model, blocks, states=options.states, piece_elements=options.piece_elements)


def _owner(owner: str, layout: Layout) -> str:
    return f"{owner or 'streaming engine'} {layout.digest}"
