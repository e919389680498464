"""Micro-benchmarks that the simulator's rates of this machine come from: a decoder block and what lies outside of the
blocks, each by itself and in memory, and AdamW."""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from memascend.bench.rounds import alternate
from memascend.integrations.huggingface import causal_lm
from memascend.integrations.memory_options import MemoryOptions, apply_memory_options
from memascend.planner.options import Stack
from memascend.planner.pieces import forward_flops
from memascend.planner.spec import ModelSpec

_ADAM_NUMEL, ROUNDS = 30_000_000, 15


def adamw_rate() -> float:
    """Bytes per second of DeepSpeed's AdamW over fp32 states, by `memascend bench adamw`: 28 per element."""
    command = [sys.executable, "-m", "memascend.cli", "bench", "adamw", "--json"]
    command += ["--numels", str(_ADAM_NUMEL), "--repeats", "5"]
    done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    point = next(each for each in done["points"] if each["method"] == "deepspeed")
    return point["bytes"] / statistics.median(point["seconds"])


def device_seconds(spec: ModelSpec, context: int, batch: int) -> dict[str, Any]:
    """Seconds forward, and forward with backward, in memory: of one decoder block, and of what lies outside the blocks
    (embedding, output matrix and the loss in chunks, as `train` computes it)."""
    one = dataclasses.replace(spec, layers=1).hf_config_dict()
    model = causal_lm(one, checkpointing="none").to(torch.bfloat16)
    apply_memory_options(model, MemoryOptions(loss=Stack().loss))
    layer = model.model.layers[0]
    hidden = torch.randn(batch, context, spec.hidden, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(context)[None]
    rotary = model.model.rotary_emb(hidden, positions)
    ids = torch.arange(batch * context).reshape(batch, context) % spec.vocab

    def block() -> Any:
        made = layer(hidden, position_embeddings=rotary, position_ids=positions)
        return (made if isinstance(made, torch.Tensor) else made[0]).sum()

    def outside() -> Any:
        return model(input_ids=ids, labels=ids).loss

    found: dict[str, Any] = {"k": spec.k, "context": context, "batch": batch}
    head = 2.0 * batch * context * spec.vocab * spec.hidden
    found["block_flops"] = (forward_flops(spec, batch, context) - head) / spec.layers
    found |= _both_ways("block", block)
    model.model.layers = torch.nn.ModuleList()
    model.model.config.num_hidden_layers = 0
    return found | _both_ways("outside", outside)


def _both_ways(name: str, forward: Callable[[], Any]) -> dict[str, float]:
    """`forward` returns a loss, and computes what its gradients need: the loss in chunks computes them there."""
    seconds = alternate({"forward": forward, "both": lambda: forward().backward()}, ROUNDS)
    forward_s, both_s = (statistics.median(seconds[way]) for way in ("forward", "both"))
    return {f"{name}_forward_s": forward_s, f"{name}_both_s": max(forward_s, both_s)}
