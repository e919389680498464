"""The parts of an engine, and the state that all of its layers share (see `runtime` for their order)."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from memascend.engine.adam_settings import AdamSettings
from memascend.engine.block_runtime import PassInProgress
from memascend.engine.buffer_table import StreamOptions
from memascend.engine.buffers import EngineBuffers
from memascend.engine.contents import TierContents
from memascend.engine.device import Copies, DeviceWeights, GradientCopies
from memascend.engine.frozen import FrozenApart
from memascend.engine.gradient_views import StepGradients
from memascend.engine.groups import Groups, GroupsNow
from memascend.engine.hooks import HookedRuntime, ModelHooks
from memascend.engine.inputs import KeptInput, KeptInputs, is_dense
from memascend.engine.kept_buffers import KeptBuffers
from memascend.engine.layout import Unit
from memascend.engine.limit import Limit
from memascend.engine.model_units import ModelUnits
from memascend.engine.operators import Taken
from memascend.engine.options import EngineOptions
from memascend.engine.profile import StepProfile
from memascend.engine.scratch_storage import WAIT_S, AuxiliaryTiers
from memascend.engine.side_by_side import IndependenceCheck, SideBySide
from memascend.engine.speculation import Speculation
from memascend.engine.state_store import StateStore
from memascend.engine.swap import Decision, Swapping, link_rate
from memascend.engine.traffic import matrix_uses
from memascend.engine.unit_weights import UnitWeights
from memascend.engine.updates import Updates
from memascend.engine.weights import WeightStream
from memascend.memory.heap import HeapTrimmer
from memascend.memory.pinned import Allocator
from memascend.storage.completion import RequestCancelled
from memascend.storage.interrupts import whole
from memascend.swapping import Rates as SwapRates

log = logging.getLogger("memascend")


# Attributes that `close` deletes.
RELEASED = ("buffers", "updates", "weights", "_contents", "_stream", "_states", "_auxiliary", "_hooks")


class EngineState(HookedRuntime):
    """Buffers, streams, updates and hooks of one model in one store, and the counts of the step in progress."""

    def __init__(
        self,
        model: nn.Module,
        units: ModelUnits,
        store: StateStore,
        groups: Groups,
        options: EngineOptions,
        allocator: Allocator,
    ) -> None:
        self.model, self.options, self.state_store = model, options, store
        self.units, self.layout = units, units.layout
        self._groups = GroupsNow(groups, units.names)
        self._require_groups()
        self._closed, self._pid = False, os.getpid()
        self.buffers = EngineBuffers(
            self.layout,
            allocator,
            blocks_in_flight=options.blocks_in_flight,
            state_slots=options.state_slots,
            gradients=options.gradients,
        )
        self._make_streams()
        self._begin_counts()
        self._profile = StepProfile(
            self.layout, options.profiles, lambda: self.transferred, self._computed_again, units.device
        )
        self._swapping: Swapping | None = None
        if options.swap is not None:
            tier, host_bytes, device = self._auxiliary.swap_tier, int(options.swap_room), units.device
            self._swapping = Swapping(model, units.blocks, str(options.swap), tier, host_bytes, allocator, device)
        self._heap = HeapTrimmer()
        self._kept_buffers = KeptBuffers(model, store)
        self._hooks = ModelHooks(self, model, units, self.weights, self._contents, self._profile)

    def _require_groups(self) -> None:
        """Raise ValueError if a trained parameter is in no parameter group of the optimizer."""
        if missing := [name for name in self.layout.order if name not in self._groups]:
            raise ValueError(
                f"{missing[0]} requires a gradient but is in no param group of the optimizer ({len(missing)} such "
                "parameters): add it, or freeze it (requires_grad_(False))"
            )

    def _make_streams(self) -> None:
        """Create the streams between store, host buffers and device: weights, states, gradients, block inputs."""
        store, layout, options, device = self.state_store, self.layout, self.options, self.units.device
        on_device, gradients, inputs = None, None, None
        if device.type != "cpu":  # each kind of copies on a stream of its own
            on_device, inputs = DeviceWeights(layout, Copies(device)), Copies(device)
            gradients = GradientCopies(self.buffers.need_arrivals(), Copies(device))
        waits = StreamOptions(wait_s=WAIT_S, before_write=store.make_way)
        self._stream = WeightStream(FrozenApart(store, layout), pool=self.buffers.weights, options=waits)
        self._states: WeightStream | None = None
        if self.buffers.states is not None:
            self._states = WeightStream(store, pool=self.buffers.states, options=waits)
        for unit in layout.units:
            self._stream.register(unit.key, layout.unit_numel(unit))
            for piece in unit.pieces:
                assert self._states is not None  # the model trains something
                self._states.register(piece.key, layout.states_numel(piece))
        for tensor in self.buffers.streamed:
            store.register(tensor)
        self._auxiliary = AuxiliaryTiers(store, layout, self.buffers, redoes=options.redoes)
        self.weights = UnitWeights(self.units, self._stream, on_device)
        self.weights.require_usable = self._require_usable
        self._contents = TierContents(layout, self.weights, self._states, store.folder, self.require_completed_step)
        self.updates = Updates(
            layout,
            self.weights,
            self._states,
            self.gradient_stream,
            self._settings,
            arm=options.arm,
            zero_missing=options.zero_missing,
            copies=gradients,
        )
        scratch: Any = self._auxiliary.scratch  # a tier, whose keys are strings
        self._inputs = KeptInputs(self.buffers, scratch, WAIT_S, inputs)

    def _begin_counts(self) -> None:
        """Initialise the counts of steps and of the current step's passes."""
        # Steps by name of a trained parameter. As in torch.optim, a step in which it got no gradient does not count
        # (unless `zero_missing` is set).
        self.steps = dict.fromkeys(self.layout.order, 0)
        self._kept_steps = dict(self.steps)  # as of the last completed step
        # The loss scale, which is to be set before backward. Updates and norms divide by it.
        self.scale = 1.0
        self.at_work = PassInProgress()
        self._forwards = 0  # forward passes with a graph
        self._visits: list[str] | None = None  # keys of blocks in the order of this pass; None: no pass has begun
        self._pattern: list[str] = []
        self._passes = 0  # backward passes of this step that have ended
        self._clip, self._speculates = self.options.clip, False  # of this step
        self.speculation = Speculation(self.layout, self.options, matrix_uses(self.units))
        self.gradients = StepGradients()
        self._frozen = {p: name for p, name in self.units.names.items() if name not in self.steps and p.numel()}
        self._together: SideBySide | None = None  # micro-batches in progress side by side
        self._in_turn = False  # micro-batches of one call run one after the other
        self._looking: IndependenceCheck | None = None  # observes micro-batches that run one after the other
        self._in_forward = False  # the model's own forward pass is in progress

    # -- what the layers above do --------------------------------------------------------------------------------------

    def _require_usable(self) -> None:
        """Ensure before a forward pass that the weights are those of the last completed step, or raise."""
        raise NotImplementedError

    def require_completed_step(self) -> None:
        """Ensure that weights and states are those of the last completed step, or raise."""
        raise NotImplementedError

    # -- what is moved, and how fast -----------------------------------------------------------------------------------

    @property
    def transferred(self) -> tuple[int, int]:
        """Bytes read and written since the engine was created: states, waiting gradients, and activations."""
        read, written = (a + b for a, b in zip(self.state_store.transferred, self._auxiliary.transferred, strict=True))
        if self._swapping is not None and self._swapping.cache is not None:
            moved = self._swapping.cache.tier.transferred
            read, written = read + moved.bytes_read, written + moved.bytes_written
        return read, written

    @property
    def groups(self) -> Sequence[dict[str, Any]]:
        """The optimizer's parameter groups as they are now."""
        return self._groups.now()

    @property
    def limit(self) -> Limit | None:
        """The bound on the speed of the last step; None where it is not measured."""
        return self._profile.limit

    @property
    def decision(self) -> Decision | None:
        """Which activations are swapped; None if swapping was not requested, or before enough steps are profiled."""
        return self._swapping.decision if self._swapping is not None else None

    def passed(self, unit: Unit, forward_s: float, backward_s: float) -> None:
        self._profile.took(unit, forward_s, backward_s)

    def now(self) -> float:
        return self._profile.now()

    def _computed_again(self, unit: Unit) -> float:
        """Return the share of a block's products that backward recomputes."""
        return self._swapping.computed_again(unit.key) if self._swapping is not None else 1.0

    def computed_outside(self, seconds: float) -> None:
        """Record the seconds of a forward pass with a slice in memory; during backward nothing is recorded."""
        if not self.at_work.backward_begun:
            self._profile.outside_s += seconds

    @whole
    def keep_input(self, tensor: torch.Tensor) -> Any:
        goes = self.options.checkpoints == "tier" and tensor.numel() and is_dense(tensor)
        kept = self._inputs.keep(tensor) if goes else None
        return tensor if kept is None else kept

    @whole
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

    def left_by(self, stop: type[BaseException]) -> contextlib.AbstractContextManager[Any]:
        return self._hooks.left_by(stop)

    def _decide_on_swapping(self) -> None:
        """Decide once which activations to swap, when the profile is complete."""
        swapping, rates, blocks_s = self._swapping, self._profile.rates, self._profile.blocks_s()
        if swapping is None or swapping.decision is not None or rates is None or not swapping.is_profiled:
            return
        layout = self.layout
        weights = sum(layout.unit_numel(unit) for unit in layout.units) * layout.weights.itemsize
        trained = [unit for unit in layout.units if unit.trained]
        written = sum(map(layout.step_numel, trained)) * layout.weights.itemsize
        states = sum(map(layout.states_numel, layout.pieces)) * layout.stored_states.itemsize
        measured = SwapRates(
            gpu=swapping.flops / blocks_s,
            link=link_rate(self.units.device),
            read=rates.read,
            write=rates.write,
            host_bytes=int(self.options.swap_room),
        )
        decision = swapping.decide(
            measured,
            self._profile.outside_s / blocks_s,
            weights=weights,
            gradients=sum(piece.numel for piece in layout.pieces) * layout.weights.itemsize,
            update_read=weights + states,  # backward also reads frozen weights, to recompute their blocks
            update_written=written + states,
        )
        log.info("memascend: %s", decision)

    # -- the step in progress ------------------------------------------------------------------------------------------

    @property
    def _waits(self) -> bool:
        """Whether this step's gradients wait on the tier until all have arrived."""
        return self.options.waits and not self._speculates

    @property
    def _side_by_side(self) -> int:
        """The number of backward passes that are in progress together."""
        return 1 if self._together is None else self._together.count

    @property
    def _is_last(self) -> bool:
        """Whether the step has no backward pass after those in progress."""
        return self._passes + self._side_by_side >= self.options.accumulate

    def _require_no_function(self, call: str) -> None:
        """Raise RuntimeError if `call` was made inside the function of a micro-batch."""
        if self._together is not None or self._in_turn:
            raise RuntimeError(
                f"{call} was called inside the function of a micro-batch, whose gradients belong to the same step as "
                "the others': call it before or after session.accumulate(...)"
            )

    def require_open(self) -> None:
        """Raise RuntimeError after `close`."""
        if self._closed:
            folder = self.state_store.folder
            raise RuntimeError(
                f"this session ({folder}) is closed: open it again (streaming({str(folder)!r}, resume=True)) to "
                "continue"
            )

    def __getattr__(self, name: str) -> Any:
        if name in RELEASED:
            self.require_open()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _flush(self) -> None:
        """Wait for all writes of weights and states. Raises the first failure."""
        self._stream.flush()
        if self._states is not None:
            self._states.flush()

    def _close_streams(self) -> None:
        """Free every slot and wait for all transfers; the streams can be used again. Raises the first failure."""
        failures = []
        for stream in (self._stream, self._states, self._auxiliary.gradients):
            try:
                if stream is not None:
                    stream.close()
            except (OSError, RequestCancelled) as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _settings(self, name: str) -> AdamSettings:
        """Return the settings of a parameter's next update, from its group as it is now."""
        return AdamSettings.of(self._groups.of(name), self.steps[name] + 1, self.gradients.factors.get(name, 1.0))

    def gradient_stream(self) -> WeightStream:
        """Return the stream of gradients that wait on the tier. The first thread that needs it creates it."""
        return self._auxiliary.gradient_stream()
