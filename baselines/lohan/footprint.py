"""Host buffers of the streaming engine, made by its own class over the plan's counting allocator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baselines.lohan.schedule import SWAPPING_ARMS

if TYPE_CHECKING:
    from memascend.engine.layout import Layout
    from memascend.planner.footprint import RankFootprint

_ENGINES = 2  # one for the states, one for what waits: gradients and inputs of blocks; another for what is swapped


def footprint(build: RankFootprint) -> None:
    """A few slots each for weights, states, inputs of blocks, and gradients that wait (with clipping, the default)."""
    from memascend.engine.buffers import EngineBuffers
    from memascend.storage.direct_engine import DirectEngineConfig

    work, arm = build.work, build.work.arm_name
    buffers = EngineBuffers(
        layout_of(build), build.swapped, state_slots=1 if arm == "naive" else None, gradients=build.gradient_dtype
    )
    buffers.need_gradients()
    if work.gpu:
        buffers.need_arrivals()
    swaps = work.stack.checkpointing == "ssd"
    if (work.offloads_checkpoints or swaps) and work.context:
        buffers.need_checkpoints(work.batch * work.context * work.spec.hidden, build.dtype)
    engines = _ENGINES + (swaps or arm in SWAPPING_ARMS)
    for _ in range(engines if work.sizes.bounce_buffers else 0):
        config = DirectEngineConfig()
        for _ in range(config.workers):
            build.ledger.record(
                build.named("bounce buffers"), "nvme_engine_buffers", config.bounce_bytes, allocator="direct engine"
            )


def layout_of(build: RankFootprint) -> Layout:
    """The layout that a run finds in the model's modules, from the names of its tensors."""
    from memascend.engine.layout import Kind, UnitParameters, make_layout

    tensors = build.work.spec.tensors()
    modules: dict[str, list[tuple[str, tuple[int, ...], bool]]] = {}
    kinds: dict[str, Kind] = {}
    matrices: dict[str, str] = {}
    for tensor in tensors:
        module = tensor.name.rpartition(".")[0]
        key = f"block {tensor.block}" if tensor.block is not None else module
        looked_up = ("embed" in module or module.endswith(("wte", "wpe"))) and len(tensor.shape) == 2
        tied = build.work.spec.tied and tensor is tensors[0]
        kinds[key] = Kind.BLOCK if tensor.block is not None else Kind.LOOKED_UP if looked_up and not tied else Kind.HELD
        modules.setdefault(key, []).append((tensor.name, tensor.shape, True))
        if tensor.block is None and len(tensor.shape) == 2:  # embeddings, and the head
            matrices[key] = tensor.name
    return make_layout(
        [
            UnitParameters(key=key, kind=kinds[key], parameters=parts, rows_of=matrices.get(key))
            for key, parts in modules.items()
        ],
        [(tensor.name, tensor.numel) for tensor in tensors],
        weights=build.dtype,
        states=build.states,
    )
