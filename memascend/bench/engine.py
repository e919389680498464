"""Benchmark of a step of the streaming engine against one of plain PyTorch in memory, with the same model and tokens.

The in-memory step uses PyTorch's own means: transformers' checkpointing of every block and torch's fused AdamW. A
streamed step keeps everything on the SSD (LoHan, arXiv 2403.06504, IV-C), with one of the paper's three ways of using
gradients. Every way has its own model in one process and takes one step in each round, in shuffled order; ratios are
computed round by round. A streamed step is also compared with a bound for each phase (`memascend.engine.limit`).

With `device="cuda"` a GPU computes: the in-memory way has the whole model and AdamW's states on the GPU; the streamed
ways start with the model in host memory and run AdamW on the CPU.

With `cores="split"` this machine emulates a testbed: matrix products get one core, which plays the device, and updates,
I/O and everything else get the others. With `path_rate` the SSD is limited to that rate (`memascend.bench.rate_limit`),
and a simulated step is reported too; it is derived from the in-memory steps and the separately measured rate of AdamW
(`memascend.bench.predicted`). With `device_to_ssd` the rate is chosen to give a testbed's ratio of device to SSD time.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from memascend.bench.diffusion import HEADS, PATCH, STEPS, DiT
from memascend.bench.predicted import predicted_steps, rate_of_ratio
from memascend.bench.rate_limit import rate_limited
from memascend.bench.rounds import conditions, ratios, spread
from memascend.engine.device import synchronize
from memascend.memory.heap import MALLOC
from memascend.ops.adamw import adamw_
from memascend.ops.unscale import unscale_norm_overflow_

_STREAMED: dict[str, dict[str, Any]] = {
    "optimized": {},
    "naive": {"arm": "naive"},
    "none": {"arm": "none"},
    "as_published": {"swap": "algorithm 1"},
    "inputs": {"checkpoints": "device"},  # the inputs of blocks stay in memory
    "swapped": {"swap": "best"},
}
WAYS = ("memory", *_STREAMED)
_SHARE = re.compile(r"swap(\d{1,2}|100)")  # percentage of the products' results to swap
_DIT = re.compile(r"dit:(\d+)x(\d+)x(\d+)")
PHASES = ("forward_s", "backward_s", "optimizer_s")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ADAMW_ELEMENTS = 1 << 24
_RATED = 3  # in-memory steps from which the SSD's rate is derived
_WARM_UP = 2  # the first creates AdamW's states or the engine's profile, the second knows the order of the visits


@dataclass(frozen=True, kw_only=True)
class EngineBench:
    """Options of the benchmark.

    `contexts` are sequence lengths in tokens, with one sequence per step; `repeats` is the number of rounds at each.
    `model` is a name or path that :func:`memascend.planner.model_spec` accepts, or dit:LAYERSxWIDTHxPATCHES for a
    diffusion transformer (:class:`memascend.bench.diffusion.DiT`), whose `contexts` are images per step and whose steps
    are not simulated; its dimensions are divided by `twin`. `ways` are members of `WAYS`, and swap0 to swap100.
    `cores` is `shared` or `split` (see the module). `path_rate` is the SSD's rate in bytes per second, reads and writes
    together (0: unlimited). `device_to_ssd` is the time of the products, at the last context, divided by the SSD's time
    in an optimized step; it determines `path_rate`, from in-memory steps that run before all others.
    `trace` adds the events of one more step of each streamed way. `device` computes: cpu or cuda.
    """

    model: str
    folder: Path
    twin: int = 1
    contexts: tuple[int, ...] = (256,)
    ways: tuple[str, ...] = ("memory", "optimized")
    dtype: str = "fp32"
    repeats: int = 7
    threads: int = 2
    cores: str = "shared"
    path_rate: int = 0
    device_to_ssd: float = 0.0
    trace: bool = False
    device: str = "cpu"


def measure(options: EngineBench) -> dict[str, Any]:
    """Run the benchmark in a subprocess; return every round and a summary row for each context and way.

    Raises a one-line ValueError for invalid options, and RuntimeError if the subprocess fails.
    """
    unknown = next((way for way in options.ways if way not in WAYS and not _SHARE.fullmatch(way)), None)
    if unknown is not None or "memory" not in options.ways:
        wrong = f"unknown way {unknown!r}" if unknown else "without 'memory' there is nothing to compare with"
        raise ValueError(f"--ways: {wrong}; use memory and some of {', '.join(WAYS[1:])}, swap0 to swap100")
    if options.dtype not in _DTYPES:
        raise ValueError(f"--dtype {options.dtype}: use one of {', '.join(_DTYPES)}")
    if options.path_rate < 0:
        raise ValueError(f"--path-rate {options.path_rate}: use bytes per second, or omit it")
    if not options.device_to_ssd >= 0 or (options.device_to_ssd and options.path_rate):
        raise ValueError(f"--device-to-ssd {options.device_to_ssd:g}: use a ratio above 0, without --path-rate")
    if options.cores == "split" and len(os.sched_getaffinity(0)) < 2:
        raise ValueError(
            "--cores split: matrix products and everything else need a core each, but there is one: use --cores shared"
        )
    if options.device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"--device {options.device}: torch sees no GPU here; omit it to compute on the CPU")
    if options.device != "cpu" and (options.cores == "split" or options.path_rate or options.device_to_ssd):
        raise ValueError(
            "--device: with a GPU omit --cores, --path-rate and --device-to-ssd, which emulate one with a core"
        )
    dit = _dit(options)
    if options.device_to_ssd and dit is not None:
        raise ValueError("--device-to-ssd: no step of a diffusion transformer is simulated; use --path-rate")
    if dit is None:
        _spec(options)
    asked = asdict(options) | {"folder": str(options.folder)}
    threads = 1 if options.cores == "split" else options.threads
    environment = {**MALLOC, **os.environ, "OMP_NUM_THREADS": str(threads)}  # as in the ranks of train
    options.folder.mkdir(parents=True, exist_ok=True)
    # A folder of its own, so that files left by a killed benchmark do not interfere with another run.
    with tempfile.TemporaryDirectory(prefix="bench-engine-", dir=options.folder) as own:
        command = [sys.executable, "-m", "memascend.bench.engine", json.dumps(asked | {"folder": own})]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the benchmark's process ended with status {done.returncode}: see its error above")
    found = json.loads(done.stdout)
    heap = {name: environment[name] for name in MALLOC}
    waiting = {name: environment[name] for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY") if name in environment}
    said = {"threads": threads, "heap": heap} | ({"openmp": waiting} if waiting else {})
    if options.device != "cpu":
        said["gpu"] = torch.cuda.get_device_name()
    facts = {"benchmark": "engine", "conditions": conditions() | said}
    asked |= {"path_rate": found.pop("path_rate")}
    if asked["path_rate"] and dit is None:
        of_model = {"spec": _spec(options), "dtype": options.dtype, "path_rate": asked["path_rate"]}
        found["predicted"] = [
            each for point in found["points"] for each in predicted_steps(point, found["adamw"], **of_model)
        ]
        found["foretold"] = found["predicted"]  # name used in version 1.0; to be removed in 2.0
    return {**facts, "options": asked, **found, "summary": list(_rows(found["points"]))}


def _dit(options: EngineBench) -> tuple[int, int, int] | None:
    """Return the twin's layers, width and patches per image for a diffusion transformer; None for other models."""
    found = _DIT.fullmatch(options.model)
    if found is None:
        return None
    layers, width, patches = map(int, found.groups())
    if width % (HEADS * options.twin) or patches % options.twin or not layers * width * patches:
        raise ValueError(
            f"--model {options.model} --twin {options.twin}: use a width divisible by the twin and {HEADS} heads, and "
            "patches divisible by the twin, all above zero"
        )
    return layers, width // options.twin, patches // options.twin


def _spec(options: EngineBench) -> Any:
    from memascend.planner import model_spec

    spec = model_spec(options.model)
    return spec.twin(options.twin) if options.twin > 1 else spec


def _rows(points: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each point: seconds, their ratio to the in-memory way, and the extra seconds of each phase."""
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
        # Blocks are profiled at the first context only, so the other contexts have no bound.
        profiled = mine["context"] == points[0]["context"] and mine["bound_share"][-1]
        row["bound_share"] = spread(mine["bound_share"]).median if profiled else None
        row["bottleneck"] = mine["bottleneck"][-1] if profiled else None
        row["swapping"] = mine["swapping"][-1]
        row["losses_apart"] = max(abs(a - b) / b for a, b in zip(mine["losses"], memory["losses"], strict=True))
        yield row


# -- the process that trains -------------------------------------------------------------------------------------------


class _Way:
    """A model that is trained in one way, with its engine unless that way is in memory."""

    def __init__(self, way: str, options: EngineBench, ends: ExitStack, *, measure: bool = True) -> None:
        from memascend.engine.options import EngineOptions
        from memascend.engine.streaming import streaming
        from memascend.integrations.huggingface import causal_lm

        torch.manual_seed(0)
        self.dtype, self.dit = _DTYPES[options.dtype], _dit(options)
        if self.dit is None:
            config = _spec(options).hf_config_dict()
            config |= dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0) if "n_embd" in config else {}
            self.model = causal_lm(config, checkpointing="non-reentrant" if way == "memory" else "none")
        else:
            self.model = DiT(*self.dit[:2])
        self.model.to(self.dtype).train()
        self.device = torch.device(options.device)
        self.engine, settings = None, {"lr": 1e-5, "weight_decay": 0.01}
        if way == "memory":
            self.model.to(self.device)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **settings)
            return
        session = streaming(options.folder / way)
        ends.callback(session.remove)
        session.hook(self.model, device=self.device)
        share = _SHARE.fullmatch(way)
        chosen = EngineOptions(measure=measure, **({"swap": f"{share[1]}%"} if share else _STREAMED[way]))
        self.optimizer = session.optimizer(torch.optim.AdamW, options=chosen, **settings)
        self.engine = session.engine

    def batch(self, generator: torch.Generator, context: int, sequences: int = 1) -> dict[str, torch.Tensor]:
        """Return the model's arguments for one step: `sequences` of `context` tokens, or `context` images."""
        if self.dit is None:
            ids = torch.randint(0, self.model.config.vocab_size, (sequences, context), generator=generator)
            ids = ids.to(self.device)
            return {"input_ids": ids, "labels": ids}
        images, noise = torch.randn(2, context, self.dit[2], PATCH, generator=generator).to(self.device, self.dtype)
        steps = torch.randint(0, STEPS, (context,), generator=generator).to(self.device)
        return {"images": images, "noise": noise, "steps": steps}

    def step(self, batch: dict[str, torch.Tensor], cores: Sequence[int] = ()) -> dict[str, Any]:
        """Run one step and return its phase times, loss, bytes moved and bound.

        If `cores` are given, the first one plays the device; a streamed step's work after backward runs on the others.
        """
        moved = self.engine.transferred if self.engine is not None else (0, 0)
        times = [self._now()]
        loss = self.model(**batch).loss
        times.append(self._now())
        loss.backward()
        times.append(self._now())
        with _on(cores[1:] if self.engine is not None else ()):
            self.optimizer.step()
            self.optimizer.zero_grad()
        times.append(self._now())
        phases = {name: after - before for name, before, after in zip(PHASES, times[:-1], times[1:], strict=True)}
        found = {"seconds": times[-1] - times[0], **phases, "losses": float(loss.detach()), "read": 0, "written": 0}
        limit = self.engine.limit if self.engine is not None else None
        if self.engine is not None:
            read, written = self.engine.transferred
            found |= {"read": read - moved[0], "written": written - moved[1]}
        found["bound_share"] = limit.share if limit is not None else None
        decision = self.engine.decision if self.engine is not None else None
        found["swapping"] = asdict(decision) if decision is not None else None
        return found | {"bottleneck": limit.bottleneck if limit is not None else None}

    def _now(self) -> float:
        """Wait until the device has finished its queued work, and return the time in seconds."""
        synchronize(self.device)
        return time.perf_counter()

    def traced(self, batch: dict[str, torch.Tensor], cores: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Run one step and return its events, with times from the start of the step. `cores` is as in `step`."""
        from memascend.integrations.engine_trace import record_engine
        from memascend.simulator.recorder import Recorder, from_zero

        recorder = Recorder()
        record_engine(self.engine, recorder)
        with recorder.phase("forward"):
            loss = self.model(**batch).loss
        with recorder.phase("backward"):
            loss.backward()
        with recorder.phase("optimizer"), _on(cores[1:]):
            self.optimizer.step()
        return [asdict(event) for event in from_zero(recorder.take())]


def take_turns(asked: dict[str, Any], turn_fd: int, done_fd: int) -> dict[str, Any]:
    """Run steps of the first way on request, until `turn_fd` reaches its end; return an empty dict.

    For each line with numbers of tokens and sequences read from `turn_fd`, one step runs, and its phase times and bytes
    are written to `done_fd` as a line of JSON. `asked` holds the fields of `EngineBench`.
    """
    options = EngineBench(**asked | {"ways": tuple(asked["ways"]), "folder": Path(asked["folder"])})
    torch.set_num_threads(options.threads)
    names = {**{name: name for name in PHASES}, "read": "bytes_read", "written": "bytes_written"}
    with ExitStack() as ends, os.fdopen(turn_fd) as turns, os.fdopen(done_fd, "w", buffering=1) as done:
        way = _Way(options.ways[0], options, ends, measure=False)
        done.write("ready none\n")
        for number, line in enumerate(turns):
            tokens, sequences = map(int, line.split())
            generator = torch.Generator().manual_seed(number)
            found = way.step(way.batch(generator, tokens, sequences))
            done.write(json.dumps({said: found[name] for name, said in names.items()}) + "\n")
    return {}


def _worker(asked: dict[str, Any]) -> dict[str, Any]:
    """Run all rounds in this process; `asked` has the fields of `EngineBench` as JSON types."""
    options = EngineBench(**asked | {name: tuple(asked[name]) for name in ("contexts", "ways")})
    options = replace(options, folder=Path(options.folder))
    split = sorted(os.sched_getaffinity(0)) if options.cores == "split" else ()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    adamw = _updates_rate(_DTYPES[options.dtype])
    points: dict[tuple[int, str], dict[str, Any]] = {}
    traces: dict[str, Any] = {}
    if options.device_to_ssd:
        options = replace(options, path_rate=_rate_of_ratio(options, adamw, split))
    with ExitStack() as ends:
        server = ends.enter_context(rate_limited(options.path_rate)) if options.path_rate else None
        ways = {way: _Way(way, options, ends) for way in options.ways}
        order = random.Random(0)
        for context in options.contexts:
            generator = torch.Generator().manual_seed(context)
            for number in range(_WARM_UP + options.repeats):
                batch = ways["memory"].batch(generator, context)
                for way in order.sample(options.ways, len(options.ways)):
                    if split:
                        _split(split)
                    found = ways[way].step(batch, split)
                    mine = points.setdefault((context, way), {"context": context, "method": way})
                    for name, value in found.items() if number >= _WARM_UP else ():
                        mine.setdefault(name, []).append(value)
        if options.trace:
            traces = {way: ways[way].traced(batch, split) for way in options.ways if way != "memory"}
        late = {"late_share": server.late_share} if server is not None else {}
    found = {"adamw": adamw, "path_rate": options.path_rate, "points": list(points.values()), **late}
    return found | ({"traces": traces} if traces else {})


def _rate_of_ratio(options: EngineBench, adamw: float, cores: Sequence[int]) -> int:
    """Return the `path_rate` that gives `device_to_ssd`, from a few in-memory steps."""
    context = options.contexts[-1]
    memory: dict[str, Any] = {"context": context, "method": "memory"} | {name: [] for name in PHASES}
    with ExitStack() as ends:
        way = _Way("memory", options, ends)
        generator = torch.Generator().manual_seed(context)
        for number in range(_WARM_UP + _RATED):
            if cores:
                _split(cores)
            found = way.step(way.batch(generator, context), cores)
            for name in PHASES if number >= _WARM_UP else ():
                memory[name].append(found[name])
    of_model = {"spec": _spec(options), "dtype": options.dtype, "ratio": options.device_to_ssd}
    return round(rate_of_ratio(memory, adamw, **of_model))


def _updates_rate(dtype: torch.dtype) -> float:
    """Return the elements per second of an update as the engine does it: overflow check and norm, then AdamW.

    The tensors are larger than the caches; the best of five rounds counts.
    """
    gradient, weights = (torch.ones(_ADAMW_ELEMENTS, dtype=dtype) for _ in range(2))
    states = [torch.ones(_ADAMW_ELEMENTS) for _ in range(3)]
    best = float("inf")
    for step in range(1, 6):
        before = time.perf_counter()
        unscale_norm_overflow_(gradient, 1.0)
        adamw_(states[0], gradient, *states[1:], None if dtype == torch.float32 else weights, step=step)
        best = min(best, time.perf_counter() - before)
    return _ADAMW_ELEMENTS / best


@contextmanager
def _on(cores: Sequence[int]) -> Iterator[None]:
    """Run this thread on `cores`, if any, inside the context, and restore its affinity afterwards."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _split(cores: Sequence[int]) -> None:
    """Pin the main thread to the first core and all other threads of the process to the remaining cores."""
    for task in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(task, cores[:1] if task == os.getpid() else cores[1:])


if __name__ == "__main__":
    result = _worker(json.loads(sys.argv[1]))
    print(json.dumps(result))
