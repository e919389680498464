"""Benchmark of keeping, recomputing, copying or offloading activations: memory, time and waits for one model.

This covers SSDTrain, Figs. 6, 7 and 8a, compared with PyTorch's own means. A step is a forward and a backward pass.
Each turn consists of one untimed and one timed step; the order of the ways changes from round to round. All ways run in
one process, whose allocator returns large blocks to the system at once. Memory is reported as the kernel's high-water
mark minus the resident memory before the step, and as the cache's own account. The prediction simulates a pass that
keeps everything, with the bytes and times of each tensor that it saved, on a drive with the rates that a probe measured
before the first step.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from memascend.activation_policy import KEEP, OFFLOAD, RECOMPUTE, ActivationPolicy
from memascend.bench.rounds import conditions, ratios, spread
from memascend.memory.resident import resident_bytes

WAYS = ("keep", "recompute", "save_on_cpu", "ssd", "mix")
_MINIMUM_BYTES = 2 << 20  # of an offloaded tensor, the paper's 2^20 elements; divided by k^2 in a twin
_CHUNK_BYTES = 4 << 20  # of logits
_PROBED_BYTES, _PROBED_TENSORS = 8 << 20, 24
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "2"}


@dataclass(frozen=True, kw_only=True)
class ActivationOptions:
    """Options of the benchmark.

    `batches` are batch sizes, in sequences of `context` tokens. `mix` gives the block policies of the way of that name,
    in the format of :class:`ActivationPolicy` (default: the first half offloaded, the next block recomputed, the rest
    kept). `repeats` is the number of rounds per batch size. `model` is a name or path that
    :func:`memascend.planner.model_spec` accepts; its dimensions are divided by `twin`.
    """

    model: str
    folder: Path
    twin: int = 1
    context: int = 256
    batches: tuple[int, ...] = (16,)
    ways: tuple[str, ...] = WAYS
    mix: str | None = None
    repeats: int = 3
    threads: int = 1

    def spec(self) -> Any:
        """Return the specification of the model, with its dimensions divided by `twin`."""
        from memascend.planner import model_spec

        spec = model_spec(self.model)
        return spec.twin(self.twin) if self.twin > 1 else spec

    def policy(self, layers: int) -> ActivationPolicy:
        """Return the policy of the way `mix` for a model of `layers` blocks. Raises ValueError."""
        if self.mix is not None:
            return ActivationPolicy.parse(self.mix, "--mix")
        sent = layers // 2
        again = min(1, layers - sent - 1)
        return ActivationPolicy(((OFFLOAD, sent), (RECOMPUTE, again), (KEEP, layers - sent - again)))


def measure(options: ActivationOptions) -> dict[str, Any]:
    """Run the benchmark in a subprocess; return every round and a summary row for each batch size and way.

    Raises a one-line ValueError for invalid options, and RuntimeError if the subprocess fails.
    """
    unknown = next((way for way in options.ways if way not in WAYS), None)
    if unknown is not None or "keep" not in options.ways:
        wrong = f"unknown way {unknown!r}" if unknown else "without 'keep' there is nothing to compare with"
        raise ValueError(f"--ways: {wrong}; use keep and some of {', '.join(WAYS[1:])}")
    spec = options.spec()
    options.policy(spec.layers).per_block(spec.layers, "--mix")
    asked = asdict(options) | {"folder": str(options.folder)}
    command = [sys.executable, "-m", "memascend.bench.activations", json.dumps(asked)]
    environment = os.environ | _ALLOCATOR | {"OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the benchmark's process ended with status {done.returncode}: see its error above")
    found = json.loads(done.stdout)
    rows = [
        row
        for batch in options.batches
        for row in _rows(options, batch, [point for point in found["points"] if point["batch"] == batch], found)
    ]
    facts = {"benchmark": "activations", "conditions": conditions() | {"threads": options.threads}}
    return {**facts, "options": asked, **found, "summary": rows}


# -- the plan's prediction ---------------------------------------------------------------------------------------------


def _rows(
    options: ActivationOptions, batch: int, points: list[dict[str, Any]], found: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield a summary row for each way, with measured and predicted bytes and seconds."""
    ways = {point["method"]: point for point in points}
    kept = ways["keep"]
    kept_peak = spread(kept["peak_bytes"]).median
    kept_pass = found["kept_pass"][str(batch)]
    backward = spread([whole / part for whole, part in zip(kept["seconds"], kept["forward_s"], strict=True)]).median - 1
    for way, mine in ways.items():
        row: dict[str, Any] = {"batch": batch, "way": way, "gradients_equal": mine["sha256"] == kept["sha256"]}
        for name in ("seconds", "peak_bytes", "update_s"):
            row[name] = vars(spread(mine[name]))
        row["seconds_of_keeping"] = vars(ratios(mine["seconds"], kept["seconds"]))
        row["peak_reduction"] = 1.0 - row["peak_bytes"]["median"] / kept_peak
        for name in ("saved_peak_bytes", "host_copy_bytes", "written_bytes", "read_bytes", "forwarded_bytes"):
            row[name] = mine[name][-1]
        waited = [part / whole for part, whole in zip(mine["waited_s"], mine["seconds"], strict=True)]
        row["waited_share"] = vars(spread(waited))
        if way != "save_on_cpu":
            seconds, peak = _predicted(options, way, kept_pass, found["drive"], backward)
            all_s, all_peak = _predicted(options, "keep", kept_pass, found["drive"], backward)
            row["predicted_peak_reduction"] = (all_peak - peak) / kept_peak
            row["predicted_seconds_of_keeping"] = seconds / all_s
        yield row


def _predicted(
    options: ActivationOptions, way: str, kept_pass: Mapping[str, Any], drive: Mapping[str, float], backward: float
) -> tuple[float, float]:
    """Return the predicted seconds of a step and peak bytes of saved activations.

    `backward` is the time of the backward pass divided by that of the forward pass.
    """
    from memascend.activation.peak import predicted_peak
    from memascend.activation.record import Plan, Record, block_of

    record = Record([tuple(each) for each in kept_pass["tensors"]])
    record.forward_s = kept_pass["forward_s"]
    blocks = list(dict.fromkeys(filter(None, (block_of(name) for name, _, _ in record.tensors))))
    made = predicted_peak(
        record,
        Plan(),
        **drive,
        prefetch_bytes=kept_pass["prefetch_bytes"],
        backward_over_forward=backward,
        policies=dict(zip(blocks, _policies(options, way, len(blocks)), strict=True)),
        entry_bytes=kept_pass["entry_bytes"],
    )
    return made.seconds, made.peak_bytes


def _policies(options: ActivationOptions, way: str, layers: int) -> tuple[str, ...]:
    """Return the policy of each block in the order of forward, for one of the ways."""
    all_alike = {"keep": (KEEP,) * layers, "recompute": (RECOMPUTE,) * layers}
    all_alike["ssd"] = (OFFLOAD,) * (layers - 1) + (KEEP,)  # the cache's default behaviour
    return all_alike[way] if way in all_alike else options.policy(layers).per_block(layers, "--mix")


# -- the process that trains -------------------------------------------------------------------------------------------


class _Trainer:
    """One model and the ways in which it trains; each way is active for one turn at a time."""

    def __init__(self, options: ActivationOptions) -> None:
        from memascend.activation import ActivationCache, CacheOptions
        from memascend.activation.mix import block_policies, recompute_blocks
        from memascend.storage.engine_tiers import DirectTier

        self.options, spec = options, options.spec()
        self.model = _model(spec)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)  # moves an update's bytes, changes no weight
        self._copied = 0
        self._ends = ExitStack()

        def cache(policies: Mapping[torch.nn.Module, str] | None, prefetch: int) -> ActivationCache:
            chosen = CacheOptions(
                amount="all",
                minimum_bytes=max(1, _MINIMUM_BYTES // options.twin**2),
                prefetch_bytes=max(1, prefetch),
                reserve_bytes=0,
                device="cpu",
            )
            made = ActivationCache(DirectTier.in_file(options.folder, owner="memascend bench"), chosen, policies)
            self._ends.callback(made.close)
            return made

        piece = _piece_bytes(options, max(options.batches))
        mix = block_policies(self.model, options.policy(spec.layers), "--mix")
        alone = dict.fromkeys(mix, RECOMPUTE)
        self._checkpointed: dict[str, Callable[[], None]] = {
            "recompute": lambda: recompute_blocks(self.model, alone, {"use_reentrant": False}),
            "mix": lambda: recompute_blocks(self.model, mix, {"use_reentrant": False}),
        }
        self.caches = {"ssd": cache(None, piece), "mix": cache(mix, piece), "account": cache({}, piece)}

    def close(self) -> None:
        """Close the caches, which removes their files."""
        self._ends.close()

    @contextmanager
    def entered(self, way: str) -> Iterator[None]:
        """Train in a way inside the context; afterwards no block is recomputed."""
        self._checkpointed.get(way, lambda: None)()
        try:
            with self._context(way):
                yield
        finally:
            for module in self.model.modules():
                if getattr(module, "gradient_checkpointing", False):
                    module.gradient_checkpointing = False

    def _context(self, way: str) -> AbstractContextManager[Any]:
        if way == "save_on_cpu":
            return self._on_cpu()
        return self.caches[way].active() if way in self.caches else nullcontext()

    def _on_cpu(self) -> AbstractContextManager[Any]:
        """Return PyTorch's `save_on_cpu` with its copied bytes counted; a copy lives until backward has used it."""
        stock = torch.autograd.graph.save_on_cpu()

        def pack(tensor: torch.Tensor) -> Any:
            self._copied += tensor.nbytes
            return stock.pack_hook(tensor)

        return torch.autograd.graph.saved_tensors_hooks(pack, stock.unpack_hook)

    def step(self, ids: torch.Tensor) -> dict[str, float]:
        """Run a forward pass, a backward pass and an update; return their seconds and the peak bytes of the passes."""
        self.model.zero_grad(set_to_none=False)
        self._copied = 0
        gc.collect()
        before = resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        begin = time.perf_counter()
        loss = self.model(input_ids=ids, labels=ids).loss
        forward_s = time.perf_counter() - begin
        loss.backward()
        seconds = time.perf_counter() - begin
        del loss
        peak = resident_bytes("VmHWM") - before
        begin = time.perf_counter()
        self.optimizer.step()
        update_s = time.perf_counter() - begin
        return {"seconds": seconds, "forward_s": forward_s, "peak_bytes": peak, "update_s": update_s}

    def turn(self, way: str, ids: torch.Tensor) -> dict[str, Any]:
        """Take an untimed and a timed step in a way; return the latter's numbers and the hash of its gradients."""
        cache = self.caches.get(way)
        with self.entered(way):
            self.step(ids)
            if cache is not None:
                cache.restart_peak()
                cache.tier.wait()
            before = cache.statistics if cache is not None else None
            found = self.step(ids)
        moved = dict.fromkeys(("waited_s", "written_bytes", "read_bytes", "forwarded_bytes"), 0)
        if cache is not None:
            after = cache.statistics
            moved = {"waited_s": after.waited_s - before.waited_s, "written_bytes": after.written - before.written}
            moved |= {"read_bytes": after.read - before.read, "forwarded_bytes": after.forwarded - before.forwarded}
        peak = cache.statistics.peak if cache is not None else None
        return found | moved | {"saved_peak_bytes": peak, "host_copy_bytes": self._copied, "sha256": self._digest()}

    def kept_pass(self, ids: torch.Tensor) -> dict[str, Any]:
        """Return the cache's account of a step that keeps everything: (name, bytes, seconds) of each saved tensor."""
        cache = self.caches["account"]
        with cache.active():
            for _ in range(2):  # the first pass is slow
                cache.restart_peak()
                self.step(ids)
        record = cache.record
        return {
            "saved_bytes": cache.statistics.peak,
            "tensors": record.tensors,
            "forward_s": record.forward_s,
            "prefetch_bytes": cache.options.prefetch_bytes,
            "entry_bytes": 2 * ids.numel() * self.options.spec().hidden,
        }

    def _digest(self) -> str:
        """Return the SHA-256 of all gradients, by which ways are compared."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.grad.view(torch.uint8).numpy().data)
        return digest.hexdigest()


def _model(spec: Any) -> Any:
    """Build the model without dropout and with a chunked loss.

    Without dropout every way does the same work. The chunked loss never materializes all logits, whose memory would
    otherwise be the peak of the ways that recompute blocks.
    """
    from memascend.integrations.huggingface import causal_lm
    from memascend.integrations.memory_options import MemoryOptions, apply_memory_options

    config = spec.hf_config_dict()
    config |= dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0) if "n_embd" in config else {}
    torch.manual_seed(0)
    model = causal_lm(config | {"dtype": "bfloat16"}, checkpointing="none").to(torch.bfloat16).train()
    apply_memory_options(model, MemoryOptions(loss="chunked"), chunk_bytes=_CHUNK_BYTES)
    return model


def _piece_bytes(options: ActivationOptions, batch: int) -> int:
    """Return the bytes that a quarter of a block saves, which is how far the plan reads ahead."""
    from memascend.planner.gpu_memory import block_bytes_per_token
    from memascend.planner.pieces import PIECES_PER_BLOCK

    a_token = block_bytes_per_token(options.spec(), options.context, flash=True, fused=False)
    return batch * options.context * a_token // PIECES_PER_BLOCK


def _drive(folder: Path) -> dict[str, float]:
    """Return the bytes per second at which tensors of 8 MiB are written and then read, one direction at a time."""
    from memascend.storage.engine_tiers import DirectTier

    tensor = torch.ones(_PROBED_BYTES, dtype=torch.uint8)
    rates = {}
    with DirectTier.in_file(folder, owner="memascend bench") as tier:
        tier.reserve(_PROBED_BYTES * _PROBED_TENSORS)
        for move in ("write", "read"):
            begin = time.perf_counter()
            for number in range(_PROBED_TENSORS):
                getattr(tier, move)(str(number), tensor if move == "write" else tensor.clone())
            tier.wait()
            rates[f"{move}_bytes_per_s"] = _PROBED_BYTES * _PROBED_TENSORS / (time.perf_counter() - begin)
    return rates


def _worker(asked: dict[str, Any]) -> dict[str, Any]:
    """Run all rounds in this process; `asked` has the fields of `ActivationOptions` as JSON types."""
    options = ActivationOptions(**asked | {name: tuple(asked[name]) for name in ("batches", "ways")})
    options = replace(options, folder=Path(options.folder))
    torch.set_num_threads(options.threads)
    drive, trainer, points = _drive(options.folder), _Trainer(options), {}
    vocab, order, passes = trainer.model.config.vocab_size, random.Random(0), {}
    for batch in options.batches:
        generator = torch.Generator().manual_seed(batch)
        ids = torch.randint(0, vocab, (batch, options.context), generator=generator)
        passes[str(batch)] = trainer.kept_pass(ids)
        for _ in range(options.repeats):
            for way in order.sample(options.ways, len(options.ways)):
                mine = points.setdefault((batch, way), {"batch": batch, "method": way})
                for name, value in trainer.turn(way, ids).items():
                    mine.setdefault(name, []).append(value)
    trainer.close()
    return {"drive": drive, "kept_pass": passes, "points": list(points.values())}


if __name__ == "__main__":
    result = _worker(json.loads(sys.argv[1]))
    print(json.dumps(result))
