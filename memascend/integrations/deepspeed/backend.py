"""The DeepSpeed backend of `memascend train` (memascend.training.backends.protocol), loaded by its name.

Weights are saved and restored tensor by tensor, states sub-group by sub-group. States go through the optimizer's own
swap-in and swap-out, so that all replacements of the swappers are saved and restored alike, with one sub-group in host
memory at a time. The states of an uninterrupted run are restored bit for bit, including those that DeepSpeed keeps
outside its tensors (`replay_bias_corrections`).
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memascend.integrations.block_spans import record_activations, record_blocks
from memascend.integrations.deepspeed import ops
from memascend.integrations.deepspeed.recorded import record_step
from memascend.integrations.pretrained import apply_options, partitioned_model, persistent_buffers
from memascend.memory.ledger import Ledger
from memascend.ops.half_linear import choose_products
from memascend.simulator.recorder import Recorder, phase
from memascend.storage.tensor_file import Share, TensorFileReader, TensorLayout

_MOMENTS = ("exp_avg", "exp_avg_sq")
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _choose_accelerator() -> None:
    """Choose DeepSpeed's accelerator; must be called before DeepSpeed is imported."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # DeepSpeed's Muon would load the compiler, for seconds


class DeepSpeedBackend:
    """A DeepSpeed engine configured with the parts of a system of `baselines/`."""

    def __init__(self, config: Any, settings: dict[str, Any], ledger: Ledger) -> None:
        self._config, self._settings, self.ledger = config, settings, ledger
        self._recorder: Recorder | None = None
        self._undo_products: Callable[[], None] = lambda: None

    @staticmethod
    def notes() -> list[str]:
        _choose_accelerator()
        ops.refuse_abandoned_locks()
        missing = ops.not_compiled()
        return [f"DeepSpeed compiles {', '.join(missing)} now, once; this takes some minutes"] if missing else []

    @staticmethod
    def start(threads: int) -> None:
        """Import DeepSpeed, set the number of threads and initialise the process group.

        torch._dynamo and transformers are imported first, because importing them fails under zero.Init, which replaces
        torch.Tensor.new_tensor.
        """
        _choose_accelerator()
        ops.readable_architectures()
        importlib.import_module("torch._dynamo")
        importlib.import_module("transformers.models.auto.modeling_auto")
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        torch.set_num_threads(threads)
        deepspeed.utils.logger.setLevel(logging.ERROR)
        get_accelerator().set_device(int(deepspeed.comm.get_local_rank() or 0) if torch.cuda.is_available() else 0)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        deepspeed.init_distributed(dist_backend=backend, verbose=False, auto_mpi_discovery=False)

    def build(self, source: Path | dict[str, Any]) -> None:
        """Enable the parts, build the model of `source` under zero.Init, apply the memory options and make the
        engine."""
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        import memascend
        from memascend.memory.pinned import PageAlignedPinnedAllocator, PowerOfTwoPinnedAllocator

        ds_config = self._settings["deepspeed_config"]
        self._enabled = memascend.enable(
            ds_config,
            **self._settings["parts"],
            minimum_swap_bytes=self._settings["minimum_swap_bytes"],
            ledger=self.ledger,
        )
        self.model = partitioned_model(source, ds_config, _DTYPES[self._config.dtype])
        rounding = self._enabled.parts.pinned == "power_of_two"  # offloaded checkpoints use the system's own allocator
        allocator = (PowerOfTwoPinnedAllocator if rounding else PageAlignedPinnedAllocator)(self.ledger)
        folder = self._settings.get("activations_folder")
        self._options = apply_options(self.model, self._config, allocator, folder)
        self._engine, *_ = deepspeed.initialize(
            model=self.model, model_parameters=self.model.parameters(), config=ds_config
        )
        self.device = torch.device(get_accelerator().current_device_name())
        if self._config.dtype == "bf16":  # memascend.enable already handles fp16
            self._undo_products = choose_products(torch.bfloat16, self._config.matmul, self.device)

    # -- training ------------------------------------------------------------------------------------------------------

    def trace(self, recorder: Recorder) -> None:
        self._recorder = recorder
        record_blocks(self.model, recorder)
        record_activations(self._options, recorder)
        record_step(self._engine, self._enabled, recorder)

    def step(self, batches: Sequence[torch.Tensor], learning_rate: float) -> tuple[torch.Tensor, float | None]:
        engine = self._engine
        self._enabled.io.reset()
        self._options.begin_step()
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate
        skipped, losses = engine.skipped_steps, []
        for ids in batches:
            with phase(self._recorder, "forward"):
                loss = engine(input_ids=ids, labels=ids).loss
            with phase(self._recorder, "backward"):
                engine.backward(loss)
            with phase(self._recorder, "optimizer"):
                engine.step()
            losses.append(loss.detach().float())
        norm = None if engine.skipped_steps > skipped else float(engine.get_global_grad_norm())
        return torch.stack(losses).mean(), norm

    @torch.no_grad()
    def evaluate(self, batch: torch.Tensor) -> float:
        self._engine.eval()
        loss = float(self._engine(input_ids=batch, labels=batch).loss)
        self._engine.train()
        return loss

    def loss_scale(self) -> float | None:
        return float(self._engine.optimizer.loss_scale) if self._engine.fp16_enabled() else None

    def kept_step(self) -> int | None:
        """Return None: between checkpoints DeepSpeed keeps nothing from which a run could go on."""
        return None

    def keep(self, facts: dict[str, Any]) -> None:
        pass

    def remark(self) -> str | None:
        return None

    def statistics(self) -> dict[str, int]:
        activations = self._options.moved()
        return {
            "read_bytes": self._enabled.io.bytes_read + activations["read_bytes"],
            "written_bytes": self._enabled.io.bytes_written + activations["written_bytes"],
        }

    def facts(self) -> dict[str, Any]:
        return {
            "deepspeed_config": self._settings["deepspeed_config"],
            "parts": self._settings["parts"],
            "shims": self._enabled.shims,
            "memory_options": self._options.chosen,
            **self._options.activation_facts(),
        }

    def close(self) -> None:
        """Restore what `build` replaced and close the swap store, which removes its files."""
        self._undo_products()
        self._options.undo()
        if self._enabled.store is not None:
            self._enabled.store.close()

    # -- weights -------------------------------------------------------------------------------------------------------

    def weight_layouts(self) -> list[TensorLayout]:
        layouts = [TensorLayout(n, p.dtype, tuple(p.ds_shape)) for n, p in self.model.named_parameters()]
        return layouts + [TensorLayout(n, b.dtype, tuple(b.shape)) for n, b in persistent_buffers(self.model)]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of every parameter, gathered one at a time and copied to the CPU, and of every
        buffer."""
        import deepspeed

        for name, parameter in self.model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=None):
                yield name, parameter.detach().cpu()
        for name, buffer in persistent_buffers(self.model):
            yield name, buffer.detach().cpu()

    # -- optimizer states ----------------------------------------------------------------------------------------------

    def _adam_step(self) -> int:
        """Return the number of updates applied so far. Raises ValueError if sub-groups differ in it."""
        optimizer = self._engine.optimizer
        states = (optimizer.optimizer.state.get(p, {}) for p in optimizer.fp32_partitioned_groups_flat)
        steps = {int(state.get("step", 0)) for state in states}
        if len(steps) != 1:
            raise ValueError(f"the optimizer's sub-groups have made different numbers of steps ({sorted(steps)})")
        return steps.pop()

    def state_layouts(self) -> list[TensorLayout]:
        optimizer = self._engine.optimizer
        optimizer._partition_all_parameters()
        layouts = []
        for index, parameter in enumerate(optimizer.fp32_partitioned_groups_flat):
            shape = (int(optimizer.fp16_partitioned_groups_flat_numel[index]),)
            layouts.append(TensorLayout(f"{index}.master", optimizer.master_weights_and_grads_dtype, shape))
            state = optimizer.optimizer.state.get(parameter, {})
            layouts += [TensorLayout(f"{index}.{name}", state[name].dtype, shape) for name in _MOMENTS if state]
        return layouts

    def states(self, share: Share | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of this rank's states, one sub-group in memory at a time. A tensor is valid until the
        next one is requested. States that `share` puts into the checkpoint without a copy are left out."""
        from .swapped_states import ExactCheckpoints

        optimizer = self._engine.optimizer
        optimizer._partition_all_parameters()
        if share is not None and isinstance(optimizer, ExactCheckpoints):
            optimizer.settle_states()
        for index, parameter in enumerate(optimizer.fp32_partitioned_groups_flat):
            swapped = optimizer._swappable_optimizer_subgroup(index)
            names = ["master", *(_MOMENTS if optimizer.optimizer.state.get(parameter) else ())]
            if swapped and share is not None:
                names = names[self._shared(index, names, share) :]
            if swapped and names:
                optimizer._optimizer_states_and_gradient_swap_in(index)
            state = optimizer.optimizer.state.get(parameter, {})
            for name in names:
                yield f"{index}.{name}", parameter.data if name == "master" else state[name]
            if swapped and names:
                optimizer._release_swap_buffers(index)
        optimizer.checkpoint_event_epilogue()

    def _shared(self, index: int, names: Sequence[str], share: Share) -> int:
        """Share a sub-group's states with a checkpoint, in order; return how many could be shared before the first that
        could not."""
        from .swapped_states import ExactCheckpoints

        optimizer = self._engine.optimizer
        paths = optimizer.swapped_paths(index) if isinstance(optimizer, ExactCheckpoints) else {}
        numel, dtype = optimizer.fp16_partitioned_groups_flat_numel[index], optimizer.master_weights_and_grads_dtype
        nbytes = int(numel) * dtype.itemsize
        for count, name in enumerate(names):
            path = paths.get(name)
            if path is None or not share(f"{index}.{name}", partial(optimizer.share_swapped, path, nbytes)):
                return count
        return len(names)

    def state_facts(self) -> dict[str, Any]:
        """Return the step counts, the loss scaler's state and the partition of the groups; all are JSON."""
        optimizer = self._engine.optimizer
        scaler = vars(optimizer.loss_scaler)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return {
            "adam_step": self._adam_step(),
            "loss_scaler": {k: v for k, v in scaler.items() if isinstance(v, int | float | bool)},
            "counters": {name: getattr(self._engine, name) for name in _COUNTERS},
            "groups": [[(names[id(p)], int(p.partition_numel())) for p in group] for group in optimizer.fp16_groups],
        }

    def restore(self, reader: TensorFileReader, facts: dict[str, Any]) -> None:
        """Read masters and moments of this rank from `reader`, swap them out, and restore the counters in `facts`."""
        from .swapped_states import replay_bias_corrections

        optimizer, steps = self._engine.optimizer, facts["adam_step"]
        optimizer._partition_all_parameters()
        for index, parameter in enumerate(optimizer.fp32_partitioned_groups_flat):
            swapped = optimizer._swappable_optimizer_subgroup(index)
            if swapped:
                optimizer._optimizer_states_and_gradient_swap_in(index)
            reader.read_into(f"{index}.master", parameter.data)
            if steps:
                moments = {name: reader.read(f"{index}.{name}") for name in _MOMENTS}
                optimizer.optimizer.state[parameter] = {"step": steps, **moments}
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
            if swapped:
                optimizer._optimizer_states_and_gradient_swap_out(index)
        optimizer.checkpoint_event_epilogue()
        replay_bias_corrections(optimizer)
        vars(optimizer.loss_scaler).update(facts["loss_scaler"])
        for name, value in facts["counters"].items():
            setattr(self._engine, name, value)
