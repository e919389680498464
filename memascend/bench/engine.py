"""A step of the streaming engine against one of plain PyTorch in memory: the same model, tokens and products, in turns.

In memory is what PyTorch itself has: transformers' checkpointing of every block and torch's fused AdamW. Streamed,
everything is on the SSD (LoHan, arXiv 2403.06504, IV-C), in one of the paper's three ways of using gradients. Every way
has a model of its own in one process and takes a step in each round, the order shuffled; ratios are taken round by
round. Beside a streamed step stands how fast its phases could have been (`memascend.engine.limit`).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from memascend.bench.rounds import conditions, ratios, spread

_STREAMED: dict[str, dict[str, Any]] = {
    "optimized": {},
    "naive": {"arm": "naive"},
    "none": {"arm": "none"},
    "inputs": {"checkpoints": "device"},  # of blocks stay in memory
    "swapped": {"swap": "best"},
}
WAYS = ("memory", *_STREAMED)
PHASES = ("forward_s", "backward_s", "optimizer_s")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_WARM_UP = 2  # the first makes AdamW's states or the engine's profile, the second knows the order of the visits


@dataclass(frozen=True, kw_only=True)
class EngineBench:
    """`contexts`: tokens of a sequence, one sequence a step. `repeats`: rounds at each. `model`: as
    :func:`memascend.planner.model_spec` takes it, divided by `twin`."""

    model: str
    folder: Path
    twin: int = 1
    contexts: tuple[int, ...] = (256,)
    ways: tuple[str, ...] = ("memory", "optimized")
    dtype: str = "fp32"
    repeats: int = 7
    threads: int = 2


def measure(options: EngineBench) -> dict[str, Any]:
    """Every round, and a row for each length and way. ValueError, in one line, for what cannot be measured."""
    unknown = next((way for way in options.ways if way not in WAYS), None)
    if unknown is not None or "memory" not in options.ways:
        wrong = f"unknown way {unknown!r}" if unknown else "without 'memory' there is nothing to compare with"
        raise ValueError(f"--ways: {wrong}; use memory and some of {', '.join(WAYS[1:])}")
    if options.dtype not in _DTYPES:
        raise ValueError(f"--dtype {options.dtype}: use one of {', '.join(_DTYPES)}")
    _spec(options)
    asked = asdict(options) | {"folder": str(options.folder)}
    command = [sys.executable, "-m", "memascend.bench.engine", json.dumps(asked)]
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the benchmark's process ended with status {done.returncode}: see its error above")
    found = json.loads(done.stdout)
    facts = {"benchmark": "engine", "conditions": conditions() | {"threads": options.threads}}
    return {**facts, "options": asked, **found, "summary": list(_rows(found["points"]))}


def _spec(options: EngineBench) -> Any:
    from memascend.planner import model_spec

    spec = model_spec(options.model)
    return spec.twin(options.twin) if options.twin > 1 else spec


def _rows(points: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Seconds, their ratio to those in memory, and by phase how many seconds more they are."""
    for mine in points:
        memory = next(p for p in points if p["context"] == mine["context"] and p["method"] == "memory")
        row = {name: mine[name] for name in ("context", "method")}
        row["seconds"] = vars(spread(mine["seconds"]))
        row["of_memory"] = vars(ratios(mine["seconds"], memory["seconds"])) | {
            "least": min(a / b for a, b in zip(mine["seconds"], memory["seconds"], strict=True)),
            "most": max(a / b for a, b in zip(mine["seconds"], memory["seconds"], strict=True)),
        }
        for name in PHASES:
            row[f"more_{name}"] = spread([a - b for a, b in zip(mine[name], memory[name], strict=True)]).median
        row["bound_share"] = spread(mine["bound_share"]).median if mine["bound_share"][-1] else None
        row["bottleneck"] = mine["bottleneck"][-1]
        row["losses_apart"] = max(abs(a - b) / b for a, b in zip(mine["losses"], memory["losses"], strict=True))
        yield row


# -- the process that trains -------------------------------------------------------------------------------------------


class _Way:
    """One model in its way of training."""

    def __init__(self, way: str, options: EngineBench, ends: ExitStack) -> None:
        from memascend.engine.runtime import EngineOptions
        from memascend.engine.streaming import streaming
        from memascend.integrations.huggingface import causal_lm

        torch.manual_seed(0)
        config = _spec(options).hf_config_dict()
        config |= dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0) if "n_embd" in config else {}
        self.model = causal_lm(config, checkpointing="non-reentrant" if way == "memory" else "none")
        self.model.to(_DTYPES[options.dtype]).train()
        self.engine, settings = None, {"lr": 1e-5, "weight_decay": 0.01}
        if way == "memory":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **settings)
            return
        home = streaming(options.folder / way)
        ends.callback(home.remove)
        home.hook(self.model)
        chosen = EngineOptions(measure=True, **_STREAMED[way])
        self.optimizer = home.optimizer(torch.optim.AdamW, options=chosen, **settings)
        self.engine = home.engine

    def step(self, ids: torch.Tensor) -> dict[str, Any]:
        moved = self.engine.transferred if self.engine is not None else (0, 0)
        times = [time.perf_counter()]
        loss = self.model(input_ids=ids, labels=ids).loss
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad()
        times.append(time.perf_counter())
        phases = {name: after - before for name, before, after in zip(PHASES, times[:-1], times[1:], strict=True)}
        found = {"seconds": times[-1] - times[0], **phases, "losses": float(loss.detach()), "read": 0, "written": 0}
        limit = self.engine.limit if self.engine is not None else None
        if self.engine is not None:
            read, written = self.engine.transferred
            found |= {"read": read - moved[0], "written": written - moved[1]}
        found["bound_share"] = limit.share if limit is not None else None
        return found | {"bottleneck": limit.bottleneck if limit is not None else None}


def _worker(asked: dict[str, Any]) -> dict[str, Any]:
    options = EngineBench(**asked | {name: tuple(asked[name]) for name in ("contexts", "ways")})
    options = replace(options, folder=Path(options.folder))
    torch.set_num_threads(options.threads)
    points: dict[tuple[int, str], dict[str, Any]] = {}
    with ExitStack() as ends:
        ways = {way: _Way(way, options, ends) for way in options.ways}
        vocab, order = ways["memory"].model.config.vocab_size, random.Random(0)
        for context in options.contexts:
            generator = torch.Generator().manual_seed(context)
            for number in range(_WARM_UP + options.repeats):
                ids = torch.randint(0, vocab, (1, context), generator=generator)
                for way in order.sample(options.ways, len(options.ways)):
                    found = ways[way].step(ids)
                    mine = points.setdefault((context, way), {"context": context, "method": way})
                    for name, value in found.items() if number >= _WARM_UP else ():
                        mine.setdefault(name, []).append(value)
    return {"points": list(points.values())}


if __name__ == "__main__":
    result = _worker(json.loads(sys.argv[1]))
    print(json.dumps(result))
