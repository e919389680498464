"""The streaming engine as a backend: weights, gradients and optimizer states on a storage tier, in one process.

The states of every finished step are kept on the tier, so that a killed run resumes after it rather than after the last
checkpoint. Gradient norms, clipping and updates use the same order of operations as the in-memory backend, so that the
results are bit-identical.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from memascend.engine import state_store
from memascend.engine.layout import numel_of_state
from memascend.engine.mmap_parameters import MmapValues
from memascend.engine.options import CHECKPOINTS, EngineOptions
from memascend.engine.runtime import StreamingEngine
from memascend.engine.saving import WEIGHTS, BackgroundSave, Target
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.memory.placement_policy import PlacementPolicy
from memascend.memory.topology import Topology
from memascend.ops.half_linear import choose_products
from memascend.simulator.recorder import Recorder, phase
from memascend.storage.tensor_file import Share, TensorFileReader, TensorLayout
from memascend.storage.tensor_parts import TensorPartsWriter
from memascend.training import random_state
from memascend.training.backends.loss_scale import LossScale
from memascend.training.backends.protocol import KeptStepIsPartial
from memascend.training.config import TrainConfig

log = logging.getLogger("memascend")

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int8": torch.int8}


class StreamingBackend:
    """Backend on the streaming engine; implements `memascend.training.backends.protocol.Backend`.

    `settings`: `folder` of the states and `arm` of gradient offloading; for `swap`, `swap_room`, `versions` and `redo`
    see EngineOptions.
    """

    def __init__(self, config: TrainConfig, settings: dict[str, Any], ledger: Ledger) -> None:
        self._config, self._settings, self.ledger = config, settings, ledger
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._folder = Path(settings["folder"])
        self._scale = LossScale.dynamic() if config.dtype == "fp16" else None
        self._steps = self._skipped = 0
        self._kept: int | None = None  # step of the states on the tier, once this process has kept or opened them
        self._finished = False  # whether a finished step has not been kept yet
        self._moved = (0, 0)
        self._reported = False
        self._undo = contextlib.ExitStack()
        self._recorder: Recorder | None = None

    @staticmethod
    def notes() -> list[str]:
        return []

    @staticmethod
    def start(threads: int) -> None:
        from memascend.integrations import pretrained  # noqa: F401  imported now, so that it counts as idle memory

        torch.set_num_threads(threads)

    # -- the model on its tier -----------------------------------------------------------------------------------------

    def _make_model(self, source: Path | dict[str, Any], *, values: bool = True) -> None:
        """Make the model (`values` false: for states that are on the tier already), its options and its parameter
        group."""
        from memascend.integrations.memory_options import MemoryOptions, apply_memory_options

        config = self._config
        self.model = self._filled_model(source) if values else self._hollow_model(source)
        self._undo.callback(choose_products(_DTYPES[config.dtype], config.matmul, self.device))
        options = MemoryOptions(attention=config.attention, loss=config.loss, checkpointing="none")
        self._options = apply_memory_options(self.model, options).chosen
        self._options["checkpointing"] = config.checkpointing
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._groups = [
            {
                "params": trained,
                "lr": 0.0,
                "betas": (config.beta1, config.beta2),
                "eps": config.eps,
                "weight_decay": config.weight_decay,
            }
        ]

    def _filled_model(self, source: Path | dict[str, Any]) -> Any:
        """Return the model with its values in files.

        It is never in memory as a whole, unless the checkpoint has a format that only transformers can load.
        """
        from memascend.integrations.lazy_loading import NotAsStored, lazy_model
        from memascend.integrations.pretrained import in_memory_model

        dtype = _DTYPES[self._config.dtype]
        if isinstance(source, Path):
            try:
                return lazy_model(source, dtype)
            except NotAsStored as reason:
                log.warning("memascend: the whole model is read into memory before training begins: %s", reason)
        with MmapValues(self._folder.parent) as spilled:
            return in_memory_model(source, dtype, spilled.take)

    def _hollow_model(self, source: Path | dict[str, Any]) -> Any:
        """Return the model without values, for values that are already on the tier."""
        from memascend.integrations.lazy_loading import model_without_values
        from memascend.integrations.pretrained import configuration

        return model_without_values(
            configuration(source) if isinstance(source, Path) else source, _DTYPES[self._config.dtype]
        )

    def _engine_options(self) -> EngineOptions:
        config = self._config
        return EngineOptions(
            arm=self._settings["arm"],
            device=self.device,
            accumulate=config.accumulate,
            clip=config.clip,
            checkpoints=CHECKPOINTS[config.checkpointing],
            states=_DTYPES[config.states],
            gradients=_DTYPES[config.gradients],
            zero_missing=True,
            measure=True,
            swap=self._settings.get("swap"),
            swap_room=self._settings.get("swap_room", 0),
            versions=self._settings.get("versions"),
            redo=(redo := self._settings.get("redo", True)),
            wait=not redo and self._scale is not None,  # an overflow of fp16 must change nothing
        )

    def _allocator(self) -> PageAlignedPinnedAllocator:
        """Return the allocator of host buffers, which puts each on the nodes that `placement` names for its class."""
        named = self._config.placement
        placement = PlacementPolicy.parse(named).resolve({}, Topology.read()) if named is not None else None
        return PageAlignedPinnedAllocator(self.ledger, placement=placement)

    def build(self, source: Path | dict[str, Any]) -> None:
        state_store.remove(
            self._folder
        )  # from an earlier run in this folder, or from this run if it resumes from a later checkpoint
        self._make_model(source)
        self.engine = StreamingEngine.start(
            self.model, self._folder, self._groups, self._engine_options(), allocator=self._allocator()
        )

    def kept_step(self) -> int | None:
        """Return the step of the kept states without opening them; other problems with them are reported by `go_on`."""
        if self._kept is not None:  # this process has the states open
            return self._kept
        try:
            return (
                state_store.kept_facts(self._folder).get("step", 0) if state_store.holds_states(self._folder) else None
            )
        except state_store.InterruptedUpdate as error:
            raise KeptStepIsPartial(
                "the states on the tier were left in the middle of a step (state_versions)"
            ) from error

    def go_on(self, source: Path | dict[str, Any]) -> dict[str, Any]:
        facts = self._resume(source, self._engine_options())
        self._take_over(facts["backend"])
        self._kept = facts["step"]
        return facts

    def open_kept(self, source: Path | dict[str, Any]) -> int:
        """Open the kept states only to read weights, without measuring or swapping; return their step.

        Close them with `close_kept`.
        """
        try:
            return self._resume(source, dataclasses.replace(self._engine_options(), measure=False, swap=None))["step"]
        except BaseException:
            self._undo.close()
            raise

    def _resume(self, source: Path | dict[str, Any], options: EngineOptions) -> dict[str, Any]:
        """Open the states on the tier for a model without values; return the facts that were kept with them."""
        self._make_model(source, values=False)
        self.engine, facts = StreamingEngine.resume(
            self.model, self._folder, self._groups, options, allocator=self._allocator()
        )
        return facts

    def keep(self, facts: dict[str, Any]) -> None:
        """Make the finished step permanent on the tier, with `facts` and the backend's own counters."""
        self.engine.keep(facts | {"backend": self._counters()})
        self._kept = facts.get("step", self._kept)
        self._finished = False

    def _facts_of_next(self, loss: torch.Tensor) -> dict[str, Any]:
        """Return the facts to store with the current step in case it completes; empty with two versions of the states.

        With one version, a step may become permanent before the rank calls `keep`: when a kill interrupts it after its
        update began and it is redone, or when the engine keeps it as soon as it is done. Such a step has no row in the
        metrics yet, so the row's contents are stored along with it.
        """
        if self.engine.options.versions == 2:
            return {}
        row = {"loss": float(loss), "learning_rate": self._groups[0]["lr"], "loss_scale": self.loss_scale()}
        scale = copy.copy(self._scale)
        if scale is not None:
            scale.after_step(False)
        counters = self._counters() | {"adam_step": self._steps + 1, "loss_scaler": scale.facts() if scale else {}}
        step = self._steps + self._skipped + 1
        return {"step": step, "random": random_state.as_json(), "backend": counters, "row": row}

    def _counters(self) -> dict[str, Any]:
        """Return the counters of steps, the loss scale and the state of clipping, as JSON types."""
        scale = self._scale.facts() if self._scale else {}
        counters = {"adam_step": self._steps, "skipped_steps": self._skipped, "loss_scaler": scale}
        return counters | {"clipping": self.engine.speculation.facts()}

    def _take_over(self, counters: dict[str, Any]) -> None:
        """Restore what `_counters` returned."""
        self._steps, self._skipped = counters["adam_step"], counters["skipped_steps"]
        if self._scale is not None:
            self._scale = LossScale(**counters["loss_scaler"])
        if (clipping := counters.get("clipping")) is not None:  # missing in runs of earlier versions
            self.engine.speculation.take_over(clipping)

    # -- training ------------------------------------------------------------------------------------------------------

    def trace(self, recorder: Recorder) -> None:
        from memascend.integrations.engine_trace import record_engine

        self._recorder = recorder
        record_engine(self.engine, recorder)

    def step(self, batches: Sequence[torch.Tensor], learning_rate: float) -> tuple[torch.Tensor, float | None]:
        if self._finished:  # the tier has space for only one step in addition to the kept one
            self.keep({})
        self._moved = self.engine.transferred
        self._groups[0]["lr"] = learning_rate
        scale = self._scale.value if self._scale else 1.0
        self.engine.scale = scale

        def accumulated(ids: torch.Tensor) -> torch.Tensor:
            with phase(self._recorder, "forward"):
                loss = self.model(input_ids=ids, labels=ids).loss
            with phase(self._recorder, "backward"):
                (loss / len(batches) * scale).backward()
            return loss.detach().float()

        # The phases of a trace are those of a single batch, so a traced step runs its batches in turn.
        in_turn = self._config.accumulation == "horizontal" or self._recorder is not None
        order = "horizontal" if in_turn else "vertical"
        loss = torch.stack(self.engine.accumulate(accumulated, batches, order=order, repeatable=True)).mean()
        with phase(self._recorder, "optimizer"):
            facts = self._facts_of_next(loss)
            norm = self.engine.finish_step(keep=False, facts=facts)
            # Keep the step now: otherwise a kill while a checkpoint is saved would find the states incomplete.
            if self.engine.options.replaces_without_redo and norm is not None:
                self.engine.keep(facts)
        self._finished = True
        if self._scale is not None:
            self._scale.after_step(norm is None)
        if norm is None:
            self._skipped += 1
        else:
            self._steps += 1
        return loss, norm

    @torch.no_grad()
    def evaluate(self, batch: torch.Tensor) -> float:
        self.model.eval()
        loss = float(self.model(input_ids=batch, labels=batch).loss)
        self.model.train()
        return loss

    def loss_scale(self) -> float | None:
        return self._scale.value if self._scale else None

    def remark(self) -> str | None:
        """Return how close the step was to its lower bound, and any change in whether gradients wait for their norm.

        After the first step it also says how many versions of the states are kept, which matrices are processed in
        slices, and what is swapped.
        """
        said = [] if self.engine.limit is None else [str(self.engine.limit)]
        slices = self.engine.units.matrices
        if not self._reported:
            said.append(f"{self._versions()} ({self.engine.versions_why})")
        if slices and not self._reported:
            said.append(f"{' and '.join(slices)} by {sum(map(len, slices.values()))} slices")
        if self.engine.decision is not None and not self._reported:
            said.append(str(self.engine.decision))
        said += self.engine.speculation.take_news()
        self._reported = True
        return "; ".join(said) or None

    def _versions(self) -> str:
        if self.engine.options.redoes:
            return "one version of the states, with saved gradients"
        if self.engine.options.replaces_without_redo:
            return "one version of the states; after a kill in the middle of a step on from the last checkpoint"
        return "two versions of the states"

    def statistics(self) -> dict[str, int]:
        read, written = self.engine.transferred
        return {"read_bytes": read - self._moved[0], "written_bytes": written - self._moved[1]}

    def facts(self) -> dict[str, Any]:
        decision = self.engine.decision
        facts = {"gradient_offloading": self._settings["arm"], "memory_options": self._options}
        versions = self.engine.options.versions
        facts["state_versions"] = {"count": versions, "why": self.engine.versions_why}
        if self.engine.accumulated is not None:
            facts["accumulation"] = dict(zip(("order", "why"), self.engine.accumulated, strict=True))
        if (speculation := self.engine.speculation).is_possible:
            done = {"speculated_steps": speculation.speculated, "done_again": speculation.done_again}
            facts["clipping"] = {"gradients": speculation.decision, **done}
        facts["state_versions"]["after_a_kill"] = "checkpoint" if self.engine.options.replaces_without_redo else "step"
        return facts | ({"activation_swapping": dataclasses.asdict(decision)} if decision is not None else {})

    def close(self) -> None:
        """Close the engine, and destroy the states if a full checkpoint of the last step replaces them."""
        self.engine.close(destroy=self._config.checkpoints == "full")
        self._undo.close()

    def close_kept(self) -> None:
        """Close what `open_kept` opened; the states are kept."""
        self.engine.close()
        self._undo.close()

    # -- weights and states --------------------------------------------------------------------------------------------

    def weight_layouts(self) -> list[TensorLayout]:
        from memascend.integrations.pretrained import persistent_buffers

        every = [*self.model.named_parameters(), *persistent_buffers(self.model)]
        return [TensorLayout(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in every]

    def weights(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        from memascend.integrations.pretrained import persistent_buffers

        yield from self.engine.read_weights([name for name, _ in self.model.named_parameters()])
        yield from persistent_buffers(self.model)

    def _state_names(self) -> tuple[str, ...]:
        moments = [state for state in self.engine.layout.state_names if state != "master"]
        return ("master", *moments) if self._steps else ("master",)

    def state_layouts(self) -> list[TensorLayout]:
        layout, sizes = self.engine.layout, self._sizes()
        return [
            TensorLayout(f"{index}.{state}", layout.dtype_of(state), (numel_of_state(state, numel),))
            for index, numel in enumerate(sizes.values())
            for state in self._state_names()
        ]

    def _sizes(self) -> dict[str, int]:
        """Return the elements of each trained parameter, by name, in the model's order."""
        return {name: p.numel() for name, p in self.model.named_parameters() if p.requires_grad}

    def states(self, share: Share | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for index, name in enumerate(self._sizes()):
            found = self.engine.read_states(name)
            for state in self._state_names():
                yield f"{index}.{state}", found[state]

    def save_meanwhile(
        self,
        weights: TensorPartsWriter,
        states: TensorPartsWriter | None,
        end: Callable[[], None],
        give_up: Callable[[BaseException], BaseException],
    ) -> BackgroundSave:
        """Fill the files `weights` and `states` (None: no states) while training continues; see `StreamingEngine.save`.

        Their contents are described by `weight_layouts` and `state_layouts`. `end` is called when the files are
        complete, `give_up` after an error.
        """
        from memascend.integrations.pretrained import persistent_buffers

        targets = {(name, WEIGHTS): [Target(weights, name)] for name, _ in self.model.named_parameters()}
        for name, buffer in persistent_buffers(self.model):  # written at once, since training may change them
            weights.write(name, buffer.cpu())
        for index, name in enumerate(self._sizes() if states is not None else ()):
            targets |= {(name, state): [Target(states, f"{index}.{state}")] for state in self._state_names()}
        return self.engine.save(targets, end, give_up, what="the checkpoint")

    def state_facts(self) -> dict[str, Any]:
        return {**self._counters(), "groups": [[(name, numel)] for name, numel in self._sizes().items()]}

    def restore(self, reader: TensorFileReader, facts: dict[str, Any]) -> None:
        self._take_over(facts)
        numbers = {name: index for index, name in enumerate(self._sizes())}

        def states_of(name: str) -> dict[str, torch.Tensor]:
            return {state: reader.read(f"{numbers[name]}.{state}") for state in self._state_names()}

        self.engine.write_states(states_of, dict.fromkeys(numbers, self._steps))
