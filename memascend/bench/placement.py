"""Benchmark of a training step under several NUMA placements against one without, with the same model and tokens.

Every way is a separate backend in one process: 16-bit weights, offloaded checkpoints, fp32 masters and moments in host
memory, and our AdamW. Each takes one step in every round, in shuffled order; ratios are computed round by round. The
way `again` has no placement either, but memory of its own; its difference from `none` is the resolution of the
comparison. On a machine with one node, every placement uses the same memory as no placement, so all ways should take
the same time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from operator import neg
from typing import Any

import torch

from memascend import _C
from memascend.bench.rounds import conditions, ratios, spread
from memascend.memory.classes import CLASSES
from memascend.memory.ledger import Ledger
from memascend.memory.placement_policy import PROCESS_INTERLEAVE, PlacementPolicy
from memascend.memory.topology import Topology
from memascend.ops.adamw import chunk_counts, divided_work

NONE, AGAIN, NODE = "none", "again", "node"
PHASES = ("forward", "backward", "optimizer")
_WARM_UP = 2  # the first step allocates the buffers of the checkpoints


@dataclass(frozen=True, kw_only=True)
class PlacementBench:
    """Options of the benchmark.

    `placements` have the format of a run's `placement`; `node` puts everything on the nearest node with processors. A
    step has `batch` sequences of `context` tokens. `model` is a name or path that
    :func:`memascend.planner.model_spec` accepts; its dimensions are divided by `twin`.
    """

    model: str
    placements: tuple[str, ...]
    twin: int = 1
    context: int = 256
    batch: int = 1
    repeats: int = 7
    threads: int = 2


def measure(options: PlacementBench) -> dict[str, Any]:
    """Run the benchmark; return every round and a summary row for each way.

    Raises a one-line ValueError for placements that cannot be measured.
    """
    texts = {NONE: None, AGAIN: None} | {name: _placement(name) for name in options.placements}
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        ways = {name: _Way(text, options) for name, text in texts.items()}
        points = _rounds(ways, options)
        same = {name: _same_bits(way, ways[NONE]) for name, way in ways.items()}
        placed = {name: way.placed() for name, way in ways.items()}
        return {
            "benchmark": "placement",
            "conditions": conditions(),
            "options": asdict(options),
            "nodes": [node.number for node in Topology.read().nodes.values() if node.total_bytes],
            "points": points,
            "summary": [row | {"equal": same[row["method"]]} | placed[row["method"]] for row in _rows(points)],
        }
    finally:
        torch.set_num_threads(before)


def _placement(name: str) -> str:
    """Return the value of a run's `placement` for an entry of `--placements`."""
    if name == NODE:
        nearest = Topology.read().with_cpus[0].number
        return PlacementPolicy.parse(dict.fromkeys(CLASSES, nearest)).as_text()
    policy = PlacementPolicy.parse(name, "--placements")
    if policy.kind == PROCESS_INTERLEAVE:
        raise ValueError(f"--placements: {name} applies to the whole process, which all methods share here: remove it")
    return policy.as_text()


class _Way:
    """One model, trained in memory under one placement."""

    def __init__(self, placement: str | None, options: PlacementBench) -> None:
        from memascend.planner import model_spec
        from memascend.simulator.recorder import Recorder
        from memascend.training.backends.in_memory import InMemoryBackend
        from memascend.training.config import TrainConfig

        spec = model_spec(options.model)
        config = (spec.twin(options.twin) if options.twin > 1 else spec).hf_config_dict()
        common = {"context": options.context, "batch": options.batch, "placement": placement}
        how = {"system": "in_memory", "loss": "plain", "checkpointing": "offloaded", "dtype": "bf16"}
        train = TrainConfig(model=options.model, data=[""], **how, **common)
        self.backend = InMemoryBackend(train, {"update": "memascend", "group_elements": None}, Ledger())
        torch.manual_seed(0)
        self.backend.build(config)
        self.vocabulary = config["vocab_size"]
        self._recorder = Recorder()
        self.backend.trace(self._recorder)
        self._chunks = [0, 0]

    def step(self, ids: torch.Tensor) -> dict[str, float]:
        """Take a step on the token ids; return its seconds, those of its phases, and the loss."""
        from memascend.simulator.recorder import MAIN
        from memascend.simulator.trace import busy_s

        before = chunk_counts()
        begin = time.perf_counter()
        loss, _ = self.backend.step([ids], 1e-5)
        took = {"seconds": time.perf_counter() - begin, "losses": float(loss)}
        busy = busy_s(self._recorder.take())
        self._chunks = [sum(counts) for counts in zip(self._chunks, chunk_counts(), map(neg, before), strict=True)]
        return took | {f"{name}_s": busy[name][MAIN] for name in PHASES}

    def placed(self) -> dict[str, Any]:
        """Return the bytes of each class, and its resident bytes on each node as reported by the kernel.

        If several nodes have processors, the result also says how AdamW's work was divided over them.
        """
        nbytes: dict[str, int] = {}
        resident: dict[str, dict[int, int]] = {}
        for name, tensor in self.backend.by_class():
            size = tensor.numel() * tensor.element_size()
            nbytes[name] = nbytes.get(name, 0) + size
            for node, pages in _C.pages_by_node(tensor.data_ptr(), size).items():
                shares = resident.setdefault(name, {})
                shares[node] = shares.get(node, 0) + pages * _C.PAGE_BYTES
        divided = divided_work(*self._chunks, Topology.read())
        return {"bytes": nbytes, "resident": resident} | ({"adamw_by_node": divided} if divided else {})


def _rounds(ways: dict[str, _Way], options: PlacementBench) -> list[dict[str, Any]]:
    """Run all rounds in shuffled order; return a point for each way."""
    points: dict[str, dict[str, Any]] = {name: {"method": name} for name in ways}
    generator, order = torch.Generator().manual_seed(options.context), random.Random(0)
    for number in range(_WARM_UP + options.repeats):
        ids = torch.randint(0, ways[NONE].vocabulary, (options.batch, options.context), generator=generator)
        for name in order.sample(list(ways), len(ways)):
            found = ways[name].step(ids)
            for key, value in found.items() if number >= _WARM_UP else ():
                points[name].setdefault(key, []).append(value)
    return list(points.values())


def _rows(points: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield, for each way, the seconds of a step and of its phases, and their ratios to those without placement."""
    none = next(point for point in points if point["method"] == NONE)
    for mine in points:
        row: dict[str, Any] = {"method": mine["method"]}
        for name in ("seconds", *(f"{phase}_s" for phase in PHASES)):
            row[name] = vars(spread(mine[name]))
            row[f"{name}_of_none"] = vars(ratios(mine[name], none[name]))
        yield row | {"losses_equal": mine["losses"] == none["losses"]}


def _same_bits(way: _Way, none: _Way) -> bool:
    """Return whether weights, masters and moments of both ways are bit-identical."""
    pairs = zip(way.backend.by_class(), none.backend.by_class(), strict=True)
    return all(torch.equal(mine, other) for (_, mine), (_, other) in pairs)
