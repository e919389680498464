"""What `memascend train` asks of DeepSpeed: start-up, one engine, weights tensor by tensor, states group by group.

States go through the optimizer's own swap-in and swap-out, one sub-group at a time, so that whatever stands in the
swappers' places is saved and restored alike and host memory holds one sub-group. What an uninterrupted run would have
in memory is restored to the bit, and so is what DeepSpeed keeps outside its tensors (`replay_bias_corrections`).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memascend.training.tensor_file import TensorFileReader, TensorFileWriter, TensorLayout

_MOMENTS = ("exp_avg", "exp_avg_sq")


def ops_not_compiled() -> list[str]:
    """DeepSpeed's ops that will be compiled on first use, for minutes."""
    from deepspeed.git_version_info import installed_ops

    return [op for op in ("async_io", "cpu_adam") if not installed_ops.get(op)]


def start(threads: int) -> None:
    """Import everything quietly and join the other ranks, as the environment says (RANK, WORLD_SIZE, MASTER_ADDR).

    torch._dynamo and transformers come first: under zero.Init, which replaces torch.Tensor.new_tensor, they fail.
    """
    import deepspeed
    import torch._dynamo
    from deepspeed.accelerator import get_accelerator
    from transformers import AutoModelForCausalLM  # noqa: F401

    torch.set_num_threads(threads)
    deepspeed.utils.logger.setLevel(logging.ERROR)
    get_accelerator().set_device(int(deepspeed.comm.get_local_rank() or 0) if torch.cuda.is_available() else 0)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    deepspeed.init_distributed(dist_backend=backend, verbose=False, auto_mpi_discovery=False)


def build_engine(model: torch.nn.Module, ds_config: dict[str, Any]) -> Any:
    """The DeepSpeed engine of `model`, which was constructed under zero.Init."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    return engine


def device() -> torch.device:
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())


def set_learning_rate(engine: Any, value: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = value


def loss_scale(engine: Any) -> float | None:
    """The fp16 loss scale; None in bf16."""
    return float(engine.optimizer.loss_scale) if engine.fp16_enabled() else None


# -- weights -----------------------------------------------------------------------------------------------------------


def weight_layouts(engine: Any) -> list[TensorLayout]:
    """Parameters (a tied one once) and persistent buffers of the module, in its order."""
    layouts = [TensorLayout(n, p.dtype, tuple(p.ds_shape)) for n, p in engine.module.named_parameters()]
    return layouts + [TensorLayout(n, b.dtype, tuple(b.shape)) for n, b in _persistent_buffers(engine.module)]


def _persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def gathered_weights(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of every layout of :func:`weight_layouts`, one in memory at a time.

    All ranks iterate together. A tensor is valid until the next one is asked for.
    """
    import deepspeed

    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=None):
            yield name, parameter.detach().cpu()
    for name, buffer in _persistent_buffers(engine.module):
        yield name, buffer.detach().cpu()


# -- optimizer states --------------------------------------------------------------------------------------------------


def _adam_step(optimizer: Any) -> int:
    """Updates applied so far, the same in every sub-group; ValueError otherwise: that optimizer is not ours to save."""
    states = (optimizer.optimizer.state.get(p, {}) for p in optimizer.fp32_partitioned_groups_flat)
    steps = {int(state.get("step", 0)) for state in states}
    if len(steps) != 1:
        raise ValueError(f"the optimizer's sub-groups have made different numbers of steps ({sorted(steps)})")
    return steps.pop()


def _state_layouts(optimizer: Any) -> list[TensorLayout]:
    layouts = []
    for index, parameter in enumerate(optimizer.fp32_partitioned_groups_flat):
        shape = (int(optimizer.fp16_partitioned_groups_flat_numel[index]),)
        layouts.append(TensorLayout(f"{index}.master", optimizer.master_weights_and_grads_dtype, shape))
        state = optimizer.optimizer.state.get(parameter, {})
        layouts += [TensorLayout(f"{index}.{name}", state[name].dtype, shape) for name in _MOMENTS if state]
    return layouts


def _random_states() -> dict[str, torch.Tensor]:
    states = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["random.cuda"] = torch.cuda.get_rng_state()
    return states


def save_states(engine: Any, path: Path) -> tuple[int, dict[str, Any]]:
    """Write this rank's master weights, moments and random state to `path`; returns (crc32, what goes into JSON)."""
    optimizer = engine.optimizer
    optimizer._partition_all_parameters()
    random_states = _random_states()
    layouts = _state_layouts(optimizer)
    layouts += [TensorLayout(name, value.dtype, tuple(value.shape)) for name, value in random_states.items()]
    with TensorFileWriter(path, layouts) as writer:
        for index, parameter in enumerate(optimizer.fp32_partitioned_groups_flat):
            swapped = optimizer._swappable_optimizer_subgroup(index)
            if swapped:
                optimizer._optimizer_states_and_gradient_swap_in(index)
            writer.write(f"{index}.master", parameter.data)
            state = optimizer.optimizer.state.get(parameter, {})
            for name in _MOMENTS if state else ():
                writer.write(f"{index}.{name}", state[name])
            if swapped:
                optimizer._release_swap_buffers(index)
        for name, value in random_states.items():
            writer.write(name, value)
    optimizer.checkpoint_event_epilogue()
    version, words, gauss = random.getstate()
    return writer.checksum, {
        "adam_step": _adam_step(optimizer),
        "loss_scaler": {k: v for k, v in vars(optimizer.loss_scaler).items() if isinstance(v, int | float | bool)},
        "counters": {name: getattr(engine, name) for name in _COUNTERS},
        "python_random": [version, list(words), gauss],
        "numpy_random": [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
    }


_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def restore_states(engine: Any, path: Path, facts: dict[str, Any]) -> None:
    """Bring the engine to what :func:`save_states` wrote: weights, moments, scaler, counters, random state."""
    from .swapped_states import replay_bias_corrections

    optimizer, steps = engine.optimizer, facts["adam_step"]
    optimizer._partition_all_parameters()
    with TensorFileReader(path) as reader:
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
        _restore_random(reader, facts)
    optimizer.checkpoint_event_epilogue()
    replay_bias_corrections(optimizer)
    vars(optimizer.loss_scaler).update(facts["loss_scaler"])
    for name, value in facts["counters"].items():
        setattr(engine, name, value)


def _restore_random(reader: TensorFileReader, facts: dict[str, Any]) -> None:
    for name, value in _random_states().items():
        reader.read_into(name, value)
        (torch.set_rng_state if name == "random.cpu" else torch.cuda.set_rng_state)(value)
    version, words, gauss = facts["python_random"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(facts["numpy_random"]))
