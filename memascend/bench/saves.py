"""Benchmark of the time for which training stops for a checkpoint, saved in the foreground or in the background.

One training of the streaming engine runs in rounds: some steps without a save, the same number after a foreground save,
and the same number during a background save, in shuffled order. So drift and other load affect all alike. The data are
random tokens, since the loss is not used.
"""

from __future__ import annotations

import io
import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from memascend import systems
from memascend.bench.rounds import conditions, spread
from memascend.doctor.checks import file_system
from memascend.memory.ledger import Ledger
from memascend.planner.spec import model_spec
from memascend.training.backends.streaming import StreamingBackend
from memascend.training.config import TrainConfig
from memascend.training.folder import RunFolder
from memascend.training.progress import Progress, read_metrics
from memascend.training.worker import Worker

NONE, FOREGROUND, BACKGROUND = WAYS = ("none", "foreground", "background")


@dataclass(frozen=True, kw_only=True)
class SaveBench:
    """Options of the benchmark: `repeats` rounds are timed, with `steps` steps for each way in a round.

    The model's dimensions are divided by `twin`.
    """

    folder: Path
    model: str = "llama3.2-1b"
    twin: int = 4
    context: int = 256
    steps: int = 2
    repeats: int = 7


class _Training(Worker):
    """The training whose checkpoints are timed."""

    def __init__(self, options: SaveBench, folder: Path) -> None:
        spec = model_spec(options.model).twin(options.twin)
        self.config = TrainConfig(
            model=options.model, data=["random"], system="lohan", context=options.context, keep=1, output=str(folder)
        )
        self.folder, self.rank, self.ranks, self.step = RunFolder(folder), 0, 1, 0
        self.folder.tokenizer.mkdir(parents=True)
        self.progress = Progress(io.StringIO(), self.folder.metrics, terminal=False, steps=1, log_every=1)
        settings = systems.load("lohan").trainer(self.config, {}, "bench", "").settings
        self.backend = StreamingBackend(self.config, settings, Ledger())
        torch.manual_seed(0)
        self.backend.build(spec.hf_config_dict())
        self._shape, self._vocabulary = (self.config.batch, options.context), spec.vocab

    def steps_made(self, count: int) -> list[float]:
        """Run `count` steps and return the seconds of each."""
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            self.backend.step([torch.randint(0, self._vocabulary, self._shape)], 1e-4)
            self.step += 1
            self._keep()
            seconds.append(time.perf_counter() - begin)
        return seconds

    def round_of(self, way: str, steps: int) -> dict[str, float]:
        """Start a save unless `way` is none, run `steps` steps, and return the seconds until both are done."""
        begin = time.perf_counter()
        if way != NONE:
            self._save(meanwhile=way == BACKGROUND)
        made = self.steps_made(steps)
        whole = self.saving is None or self.saving.done()
        self._end_saving()
        found = {"seconds": time.perf_counter() - begin, "steps_s": sum(made)}
        if way != NONE:
            row = read_metrics(self.folder.metrics)[-1]
            found |= {"save_s": row["seconds"], "stood_still_s": row["stood_still_s"], "within_the_steps": whole}
        return found

    def close(self) -> None:
        """Close the metrics, and destroy the states."""
        self.progress.close()
        self.backend.engine.close(destroy=True)


def measure(options: SaveBench) -> dict[str, Any]:
    """Run the benchmark; return a point for each way, with the numbers of every round, and a summary by way."""
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    order = random.Random(0)
    with TemporaryDirectory(dir=options.folder) as folder:
        training = _Training(options, Path(folder, "run"))
        try:
            training.steps_made(2)
            training.round_of(BACKGROUND, options.steps)  # allocates the buffer
            for _ in range(options.repeats):
                for way in order.sample(WAYS, len(WAYS)):
                    rounds[way].append(training.round_of(way, options.steps))
            manifest = json.loads(next(training.folder.checkpoints.glob("step-*/manifest.json")).read_text())
        finally:
            training.close()
    asked = {name: getattr(options, name) for name in ("model", "twin", "context", "steps", "repeats")}
    points = {way: {name: [each[name] for each in found] for name in found[0]} for way, found in rounds.items()}
    size = sum(entry["size"] for name, entry in manifest["files"].items() if name.endswith(".safetensors"))
    return {
        "benchmark": "saves",
        "conditions": conditions() | asked,
        "points": [{"method": way, **series} for way, series in points.items()],
        "summary": [_summary(way, points) for way in WAYS],
        "checkpoint_bytes": size,
        "parameters": model_spec(options.model).twin(options.twin).parameters,
        "file_system": file_system(options.folder.resolve()),
    }


def _summary(way: str, points: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Return medians with quartiles. `more_s` is the extra time relative to the steps without a save in that round."""
    mine = points[way]
    found: dict[str, Any] = {"method": way, "seconds": vars(spread(mine["seconds"]))}
    if way == NONE:
        return found
    for name in ("save_s", "stood_still_s"):
        found[name] = vars(spread(mine[name]))
    pairs = zip(mine["seconds"], points[NONE]["seconds"], strict=True)
    found["more_s"] = vars(spread([seconds - without for seconds, without in pairs]))
    found["within_the_steps"] = statistics.fmean(mine["within_the_steps"])
    return found
