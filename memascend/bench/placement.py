"""A training step under placements of its tensors against one without: the same model and tokens, in turns.

Every way is a backend of its own in one process: 16-bit weights, offloaded checkpoints, fp32 masters and moments in
host memory, our AdamW. Each takes a step in every round, the order shuffled; ratios are taken round by round. `again`
has no placement either, in memory of its own: what differs between it and `none` is what such a comparison cannot
resolve. On a machine with one node every placement lies where no placement does, so all should take the same time.
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
_WARM_UP = 2  # the first makes the checkpoints' buffers


@dataclass(frozen=True, kw_only=True)
class PlacementBench:
    """`placements`: as a run's `placement`, or `node`: all of it on the nearest node with processors. `context` tokens
    of `batch` sequences per step. `model`: as :func:`memascend.planner.model_spec` takes it, divided by `twin`."""

    model: str
    placements: tuple[str, ...]
    twin: int = 1
    context: int = 256
    batch: int = 1
    repeats: int = 7
    threads: int = 2


def measure(options: PlacementBench) -> dict[str, Any]:
    """Every round, and a row for each way. ValueError, in one line, for what cannot be measured."""
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
    """What the run's option says for it."""
    if name == NODE:
        nearest = Topology.read().with_cpus[0].number
        return PlacementPolicy.parse(dict.fromkeys(CLASSES, nearest)).as_text()
    policy = PlacementPolicy.parse(name, "--placements")
    if policy.kind == PROCESS_INTERLEAVE:
        raise ValueError(f"--placements: {name} applies to the whole process, which all methods share here: remove it")
    return policy.as_text()


class _Way:
    """One model under its placement."""

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
        """Bytes by class, and where the kernel says that they lie: resident bytes by class and node. On several nodes
        with processors, how AdamW's work was divided over them."""
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
    """Seconds of a step and of its phases, and their ratios to those without placement."""
    none = next(point for point in points if point["method"] == NONE)
    for mine in points:
        row: dict[str, Any] = {"method": mine["method"]}
        for name in ("seconds", *(f"{phase}_s" for phase in PHASES)):
            row[name] = vars(spread(mine[name]))
            row[f"{name}_of_none"] = vars(ratios(mine[name], none[name]))
        yield row | {"losses_equal": mine["losses"] == none["losses"]}


def _same_bits(way: _Way, none: _Way) -> bool:
    """Of weights, masters and moments."""
    pairs = zip(way.backend.by_class(), none.backend.by_class(), strict=True)
    return all(torch.equal(mine, other) for (_, mine), (_, other) in pairs)
