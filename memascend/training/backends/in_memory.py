"""Plain PyTorch with nothing offloaded, the reference of all other systems: 16- or 32-bit weights, fp32 masters, AdamW.

Gradients are accumulated in fp32 (or bf16) as they arrive. Norms, clipping and updates proceed group by group in the
order of ZeRO-3 with an optimizer in CPU memory, so that every system with that order produces the same bits. A
parameter that got no gradient in a step is updated with a gradient of zero, as in ZeRO's flat groups; torch.optim would
skip it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from memascend.memory.classes import GRADIENTS, MASTERS, MOMENTUM, VARIANCE, WEIGHTS, ByClass
from memascend.memory.ledger import Ledger
from memascend.memory.placement_policy import PlacementPolicy
from memascend.memory.topology import Topology
from memascend.ops.adamw8 import BLOCK, scales_shape
from memascend.ops.half_linear import choose_products
from memascend.simulator.recorder import Recorder, phase
from memascend.storage.tensor_file import Share, TensorFileReader, TensorLayout
from memascend.training.backends.groups import Group
from memascend.training.backends.loss_scale import LossScale
from memascend.training.backends.placed import class_sizes, place_weights
from memascend.training.backends.updates import Update, make_update
from memascend.training.config import TrainConfig

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_MOMENTS = ("exp_avg", "exp_avg_sq", "scales")


class InMemoryBackend:
    """Backend in one process; implements `memascend.training.backends.protocol.Backend`.

    States are on the device of the weights, or on the CPU if the update requires it. `settings`: `update`,
    `group_elements`, `activations_folder`, and `vocabulary_slices`: sum over the vocabulary in the order of a streamed
    model.
    """

    def __init__(self, config: TrainConfig, settings: dict[str, Any], ledger: Ledger) -> None:
        self._config, self._settings, self.ledger = config, settings, ledger
        self._scale = LossScale.dynamic() if config.dtype == "fp16" else None
        self._steps = self._skipped = 0
        self._recorder: Recorder | None = None
        self._filled: set[torch.nn.Parameter] = set()
        self._undo: list[Callable[[], None]] = []

    @staticmethod
    def notes() -> list[str]:
        return []

    @staticmethod
    def start(threads: int) -> None:
        from memascend.integrations import pretrained  # noqa: F401  imported now, so that it counts as idle memory

        torch.set_num_threads(threads)

    def build(self, source: Path | dict[str, Any]) -> None:
        from memascend.integrations.pretrained import apply_options, in_memory_model
        from memascend.memory.pinned import PageAlignedPinnedAllocator

        config = self._config
        gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")
        self.model = in_memory_model(source, _DTYPES[config.dtype]).to(self.device)
        self._undo.append(choose_products(_DTYPES[config.dtype], config.matmul, self.device))
        self._update: Update = make_update(self._settings["update"], config)
        self._allocator = PageAlignedPinnedAllocator(self.ledger, placement=self._placement())
        self._options = apply_options(self.model, config, self._allocator, self._settings.get("activations_folder"))
        self._undo.append(self._options.undo)
        if self._settings.get("vocabulary_slices"):
            from memascend.engine.matrices import slice_in_memory

            self._undo.append(slice_in_memory(self.model))
        if self._allocator.placement is not None and self.device.type == "cpu":
            place_weights(self.model, self._allocator)
        self._groups = self._make_groups()
        for group in self._groups:
            for _, parameter in group.parameters:
                parameter.register_post_accumulate_grad_hook(self._collect)

    def _placement(self) -> ByClass | None:
        """Return the memory nodes of each class of tensors, by the run's `placement` and the sizes of the classes."""
        if self._config.placement is None:
            return None
        policy, topology = PlacementPolicy.parse(self._config.placement), Topology.read()
        on_cpu = self._update.on_cpu or self.device.type == "cpu"
        return policy.resolve(class_sizes(self.model, self._config, states_on_cpu=on_cpu), topology)

    def _make_groups(self) -> list[Group]:
        """Group the parameters in the model's order; a group closes when it has `group_elements` (None: one group).

        With 8-bit moments every parameter is a group that starts at a block boundary.
        """
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        limit, groups, open_group, first = self._settings["group_elements"], [], [], 0
        if eight := self._config.states == "int8":
            limit = 1
        for name, parameter in trained:
            open_group.append((name, parameter))
            count = sum(p.numel() for _, p in open_group)
            if (limit and count >= limit) or parameter is trained[-1][1]:
                groups.append(self._make_group(open_group, first))
                open_group, first = [], first + (scales_shape(count)[0] * BLOCK if eight else count)
        return groups

    def _make_group(self, parameters: list[tuple[str, torch.nn.Parameter]], first: int) -> Group:
        """Allocate the flat tensors of a group, named by its first element, and copy the weights into the masters. A
        parameter of the masters' dtype and device becomes a view of them, so that its values exist once."""
        config, count = self._config, sum(p.numel() for _, p in parameters)
        device = torch.device("cpu") if self._update.on_cpu else self.device
        states = torch.float32 if config.states == "fp32" else torch.bfloat16
        moments = torch.uint8 if config.states == "int8" else states

        def flat(owner: str, dtype: torch.dtype, count: int = count, what: str = "") -> torch.Tensor:
            name = f"{owner} {what}{first}"
            if device.type == "cpu" and self._allocator.placement is not None:
                return self._allocator.allocate(count, dtype, name=name, owner=owner)
            role = "host" if device.type == "cpu" else "device"
            self.ledger.record(name, owner, count * dtype.itemsize, role=role)
            return torch.zeros(count, dtype=dtype, device=device)

        gradient = flat(GRADIENTS, torch.bfloat16 if config.gradients == "bf16" else torch.float32)
        master = flat(MASTERS, states)
        exp_avg, exp_avg_sq = (flat(owner, moments) for owner in (MOMENTUM, VARIANCE))
        group = Group(parameters, first, master, gradient, exp_avg, exp_avg_sq)
        if moments == torch.uint8:
            group.scales = flat(VARIANCE, moments, math.prod(scales_shape(count)), "scales ")
        place = 0
        for _, parameter in parameters:
            part = slice(place, place + parameter.numel())
            group.slices[parameter] = gradient[part]
            master[part].copy_(parameter.data.reshape(-1))
            if self._is_its_own_master(group, parameter):
                parameter.data = master[part].view(parameter.shape)
            place = part.stop
        return group

    @staticmethod
    def _is_its_own_master(group: Group, parameter: torch.nn.Parameter) -> bool:
        """Return whether a parameter needs no copy of the masters: dtype and device are the same."""
        return (parameter.dtype, parameter.device) == (group.master.dtype, group.master.device)

    def _collect(self, parameter: torch.nn.Parameter) -> None:
        """Accumulate a parameter's gradient and release it; called by autograd when the gradient is complete."""
        view = next(group.slices[parameter] for group in self._groups if parameter in group.slices)
        gradient = parameter.grad.reshape(-1)
        if parameter in self._filled:
            view.add_(gradient.to(view.device, view.dtype))
        else:
            view.copy_(gradient)
            self._filled.add(parameter)
        parameter.grad = None

    # -- training ------------------------------------------------------------------------------------------------------

    def trace(self, recorder: Recorder) -> None:
        from memascend.integrations.block_spans import record_activations, record_blocks

        self._recorder = recorder
        record_blocks(self.model, recorder)
        record_activations(self._options, recorder)

    def step(self, batches: Sequence[torch.Tensor], learning_rate: float) -> tuple[torch.Tensor, float | None]:
        self._filled.clear()
        self._options.begin_step()
        scale, losses = self._scale.value if self._scale else 1.0, []
        for ids in batches:
            with phase(self._recorder, "forward"):
                loss = self.model(input_ids=ids, labels=ids).loss
            with phase(self._recorder, "backward"):
                (loss / len(batches) * scale).backward()
            losses.append(loss.detach().float())
        mean = torch.stack(losses).mean()
        with torch.no_grad(), phase(self._recorder, "optimizer"):
            norm = self._norm()
            overflow = not bool(torch.isfinite(norm))
            if self._scale is not None:
                self._scale.after_step(overflow)
            if overflow:
                self._skipped += 1
                return mean, None
            self._steps += 1
            for group in self._groups:
                self._update.apply(group, self._steps, learning_rate, scale=scale, norm=norm)
                self._copy_weights(group)
        return mean, float(norm / scale)

    def _norm(self) -> torch.Tensor:
        """Return the norm of the scaled gradients: fp32, 0-d, infinite if any element is infinite or NaN."""
        norms = []
        # With int8 a group is one parameter, and the sum is taken in the order of a single group.
        eight = self._config.states == "int8"
        for groups in [self._groups] if eight else [[group] for group in self._groups]:
            total = 0.0
            for view, parameter in ((g.slices[p], p) for g in groups for _, p in g.parameters):
                if parameter in self._filled:
                    total = total + self._update.norm(view) ** 2
                else:
                    view.zero_()
            norms.append(torch.tensor([float(total)])[0] ** 0.5)
        combined = torch.linalg.vector_norm(torch.stack(norms))
        return torch.where(torch.isfinite(combined), combined, torch.inf)

    def _copy_weights(self, group: Group) -> None:
        """Copy the updated masters into the weights, except where a parameter is a view of them."""
        place = 0
        for _, parameter in group.parameters:
            part = group.master[place : place + parameter.numel()]
            if not self._is_its_own_master(group, parameter):
                parameter.data.copy_(part.view(parameter.shape))
            place += parameter.numel()

    @torch.no_grad()
    def evaluate(self, batch: torch.Tensor) -> float:
        self.model.eval()
        loss = float(self.model(input_ids=batch, labels=batch).loss)
        self.model.train()
        return loss

    def loss_scale(self) -> float | None:
        return self._scale.value if self._scale else None

    def kept_step(self) -> int | None:
        return None

    def keep(self, facts: dict[str, Any]) -> None:
        pass

    def remark(self) -> str | None:
        return None

    def statistics(self) -> dict[str, int]:
        return self._options.moved()

    def facts(self) -> dict[str, Any]:
        return {
            "update": self._settings["update"],
            "memory_options": self._options.chosen,
            **self._options.activation_facts(),
        }

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()

    # -- weights and states --------------------------------------------------------------------------------------------

    def weight_layouts(self) -> list[TensorLayout]:
        return [TensorLayout(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._saved()]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._saved():
            yield name, tensor.detach().cpu()

    def _saved(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of everything that a model's file contains, in the model's order."""
        from memascend.integrations.pretrained import persistent_buffers

        yield from self.model.named_parameters()
        yield from persistent_buffers(self.model)

    def _states(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of the states that a checkpoint contains; before the first step these are the
        masters."""
        for index, group in enumerate(self._groups):
            yield f"{index}.master", group.master
            for name in _MOMENTS if self._steps else ():
                if (moments := getattr(group, name)) is not None:
                    yield f"{index}.{name}", moments

    def by_class(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (class, tensor) of everything that persists between steps; the tensors are views, not copies.

        The classes are those of `memascend.memory.classes`.
        """
        yield from ((WEIGHTS, parameter.detach()) for parameter in self.model.parameters())
        for group in self._groups:
            yield MASTERS, group.master
            yield MOMENTUM, group.exp_avg
            yield VARIANCE, group.exp_avg_sq
            if group.scales is not None:
                yield VARIANCE, group.scales
            yield GRADIENTS, group.gradient

    def state_layouts(self) -> list[TensorLayout]:
        return [TensorLayout(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._states()]

    def states(self, share: Share | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._states():
            yield name, tensor.cpu()

    def state_facts(self) -> dict[str, Any]:
        return {
            "adam_step": self._steps,
            "skipped_steps": self._skipped,
            "loss_scaler": self._scale.facts() if self._scale else {},
            "groups": [[(name, p.numel()) for name, p in group.parameters] for group in self._groups],
        }

    @torch.no_grad()
    def restore(self, reader: TensorFileReader, facts: dict[str, Any]) -> None:
        self._steps, self._skipped = facts["adam_step"], facts["skipped_steps"]
        if self._scale is not None:
            self._scale = LossScale(**facts["loss_scaler"])
        for name, tensor in self._states():
            tensor.copy_(reader.read(name))
        for group in self._groups:
            self._copy_weights(group)
        self._update.replay(self._steps)
