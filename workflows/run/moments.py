"""Compare training with 8-bit moments and with fp32 states: one model, each format of the states, several seeds.

usage: python -m workflows.run.moments --size 10m --folder .cache/moments --out results/raw/moments-10m.json
Text: Python's standard library. A seed determines initial weights and data, the same for every format, so formats
are also compared seed by seed. All formats compute alike, from bf16 weights, in float32 or with torch.autocast to bf16,
with gradients rounded to bf16; only the states and their rounding differ. The learning rate warms up over a twentieth
of the steps and falls to a tenth by a cosine; gradients are clipped to norm one.

Repeating the command continues an interrupted run from its last checkpoint in --folder and skips finished runs. One
record, kind ``moments``, with every run's losses, and for each format the mean over seeds and whether it lies within
the spread of the fp32 seeds. `workflows.derive.moments` draws it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memascend.integrations.huggingface import token_file
from memascend.ops.adamw import adamw_
from memascend.ops.adamw8 import BLOCK, adamw8_, scales_shape
from workflows import staleness
from workflows.run import provenance

FORMATS = ("fp32", "bf16", "int8")
EVALUATED = 64  # number of held-out sequences
OPTIONS: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """Size of a Llama model with tied embeddings; each head has `head` elements."""

    width: int
    layers: int
    intermediate: int
    vocabulary: int = 8192
    head: int = 64
    tokens: int = 8_000_000


SIZES = {
    "tiny": Size(width=32, layers=2, intermediate=96, vocabulary=512, head=16, tokens=100_000),
    "1m": Size(width=128, layers=4, intermediate=352, vocabulary=1024, head=32),
    "10m": Size(width=256, layers=10, intermediate=704),
    "30m": Size(width=448, layers=11, intermediate=1216),
    "60m": Size(width=576, layers=14, intermediate=1536),
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--size", choices=SIZES, default="10m", help="number of parameters (default 10m)")
    p.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="formats of the states (default: all)"
    )
    p.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], metavar="N", help="(default 0 1 2 3 4)")
    p.add_argument("--steps", type=int, default=2000, metavar="N", help="training steps (default 2000)")
    p.add_argument("--batch", type=int, default=8, metavar="N", help="sequences per step (default 8)")
    p.add_argument("--context", type=int, default=256, metavar="TOKENS", help="tokens per sequence (default 256)")
    p.add_argument("--lr", type=float, default=1e-3, metavar="RATE", help="peak learning rate (default 0.001)")
    p.add_argument(
        "--every",
        type=int,
        default=100,
        metavar="STEPS",
        help="steps between evaluations and checkpoints (default 100)",
    )
    p.add_argument(
        "--compute",
        choices=("fp32", "bf16"),
        default="fp32",
        help="products in float32, or as torch.autocast has them in bf16, which processors with bf16 do several times "
        "faster (default fp32)",
    )
    p.add_argument("--device", default="cpu", help="compute device; updates run on the host (default cpu)")
    p.add_argument(
        "--folder", type=Path, required=True, metavar="DIR", help="folder for text, checkpoints and finished runs"
    )
    p.add_argument("--out", type=Path, required=True, metavar="FILE", help="run record to write")
    args = p.parse_args(argv)
    if min(args.steps, args.batch, args.context, args.every) < 1:
        p.error("--steps, --batch, --context and --every are at least one")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    size = SIZES[args.size]
    tokens = np.load(token_file(args.folder, size.vocabulary, size.tokens))
    runs = []
    for seed in args.seeds:
        for states in args.formats:
            runs.append(done := _run(args, states, seed, tokens))
            print(f"{args.size} {states} seed {seed}: held-out loss {done['evaluated'][-1]:.4f}", flush=True)
    asked = {key: value for key, value in vars(args).items() if key not in ("size", "folder", "out")}
    fields = {"size": args.size, "model": vars(size), "points_requested": asked | {"options": OPTIONS}}
    fields |= {"points": runs, "summary": summary(runs)}
    code = staleness.digest("workflows.run.moments")
    record = provenance.write_record(args.out, args.out.stem, "moments", code, fields)
    for row in record["summary"]:
        print(
            f"{row['states']}: {row['mean']:.4f} ± {row['deviation']:.4f} over {row['seeds']} seeds, fp32's seeds from"
            f" {row['fp32_lowest']:.4f} to {row['fp32_highest']:.4f}: {'within' if row['within'] else 'outside'}"
        )
    return 0


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each format the final held-out loss over its seeds, and the range of the fp32 seeds."""
    ends = {(run["states"], run["seed"]): run["evaluated"][-1] for run in runs}
    reference = {seed: loss for (states, seed), loss in ends.items() if states == "fp32"}
    out = []
    for states in dict.fromkeys(run["states"] for run in runs) if reference else ():
        here = {seed: loss for (name, seed), loss in ends.items() if name == states}
        mean = statistics.mean(here.values())
        lowest, highest = min(reference.values()), max(reference.values())
        out.append(
            {
                "states": states,
                "seeds": len(here),
                "mean": mean,
                "deviation": statistics.stdev(here.values()) if len(here) > 1 else 0.0,
                "fp32_lowest": lowest,
                "fp32_highest": highest,
                "within": lowest <= mean <= highest,
                "differences_from_fp32": [here[seed] - reference[seed] for seed in here if seed in reference],
            }
        )
    return out


# ------------------------------------------------------------------------------------------------------- one run


def _run(args: argparse.Namespace, states: str, seed: int, tokens: np.ndarray) -> dict[str, Any]:
    """Return the run of one format and seed, from its file if that exists."""
    words = [args.size, states, seed, args.steps, args.batch, args.context, args.lr, args.every, args.compute]
    name = "-".join(str(word) for word in words)
    finished, checkpoint = args.folder / f"{name}.json", args.folder / f"{name}.pt"
    if finished.exists():
        return json.loads(finished.read_text())
    training = _Training(args, states, seed, tokens)
    if checkpoint.exists():
        training.load(torch.load(checkpoint))
    for step in range(training.step + 1, args.steps + 1):
        training.advance(step)
        if step % args.every == 0 or step == args.steps:
            training.evaluate()
            provenance.atomically(checkpoint, lambda path: torch.save(training.saved(), path))
    provenance.atomically(finished, lambda path: path.write_text(json.dumps(training.result)))
    checkpoint.unlink()
    return training.result


class _Training:
    """One run: the model in bf16, and its parameters and states in the format that is compared."""

    def __init__(self, args: argparse.Namespace, states: str, seed: int, tokens: np.ndarray) -> None:
        self.args, self.states, self.seed, self.step = args, states, seed, 0
        held_out = EVALUATED * args.context + 1
        if len(tokens) < 2 * held_out:
            raise ValueError(
                f"{len(tokens)} tokens are too few for {EVALUATED} held-out sequences: use a shorter --context"
            )
        self.train, self.held_out = tokens[:-held_out], tokens[-held_out:]
        self.model = _model(SIZES[args.size], seed).to(args.device)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.kept = [_kept(p.detach().cpu(), states) for p in self.parameters]
        self._give_weights()
        numel = sum(p.numel() for p in self.parameters)
        self.result: dict[str, Any] = {"states": states, "seed": seed, "parameters": numel, "seconds": 0.0}
        self.result |= {"losses": [], "evaluated": [], "evaluated_after": []}

    def advance(self, step: int) -> None:
        """Take step number `step`, counted from 1."""
        began = time.monotonic()
        draws = np.random.Generator(np.random.PCG64([self.seed, step]))
        first = draws.integers(0, len(self.train) - self.args.context, self.args.batch)
        loss = self._loss(np.stack([self.train[i : i + self.args.context + 1] for i in first]))
        loss.backward()
        # One transfer of each kind per step: each one waits for a GPU that several runs share.
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in self.parameters]).item()
        flat = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
        gradients = flat.to(torch.bfloat16).cpu().split([parameter.numel() for parameter in self.parameters])
        for parameter, grad, (number, kept) in zip(self.parameters, gradients, _numbered(self.kept), strict=True):
            options = {"step": step, "lr": self._lr(step), "grad_scale": 1 / max(1.0, norm)}
            options |= {"seed": self.seed, "element_offset": number}
            update = adamw8_ if self.states == "int8" else adamw_
            update(kept["param"], grad, *kept["states"], **options, **OPTIONS)
            parameter.grad = None
        self._give_weights()
        self.step = step
        self.result["losses"].append(loss.item())
        self.result["seconds"] += time.monotonic() - began

    @torch.no_grad()
    def evaluate(self) -> None:
        """Append the mean loss over the held-out sequences to the result."""
        size = self.args.context
        rows = np.stack([self.held_out[i * size : (i + 1) * size + 1] for i in range(EVALUATED)])
        parts = np.array_split(rows, math.ceil(EVALUATED / self.args.batch))
        losses = [self._loss(part).item() * len(part) for part in parts]
        self.result["evaluated"].append(sum(losses) / EVALUATED)
        self.result["evaluated_after"].append(self.step)

    def saved(self) -> dict[str, Any]:
        """Return all that a checkpoint of the run needs."""
        return {"step": self.step, "kept": self.kept, "result": self.result}

    def load(self, saved: dict[str, Any]) -> None:
        """Restore what `saved` returned."""
        self.step, self.kept, self.result = saved["step"], saved["kept"], saved["result"]
        self._give_weights()

    def _lr(self, step: int) -> float:
        """Return the learning rate of a step."""
        warm = max(1, self.args.steps // 20)
        return self.args.lr * min(1, step / warm) * (0.55 + 0.45 * math.cos(math.pi * step / self.args.steps))

    def _loss(self, rows: np.ndarray) -> torch.Tensor:
        """Return the mean loss of sequences, given as rows with one token more than the context."""
        ids = torch.from_numpy(rows.astype(np.int64)).to(self.args.device)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.args.compute == "bf16"):
            logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    @torch.no_grad()
    def _give_weights(self) -> None:
        """Copy the weights to the model in bf16, which it computes with in every format."""
        flat = torch.cat([kept["param"].bfloat16() for kept in self.kept]).to(self.args.device)
        weights = flat.split([parameter.numel() for parameter in self.parameters])
        for parameter, weight in zip(self.parameters, weights, strict=True):
            parameter.copy_(weight.view(parameter.shape))


def _kept(weight: torch.Tensor, states: str) -> dict[str, Any]:
    """Return the flat parameter and states of one tensor."""
    numel = weight.numel()
    if states == "int8":
        shapes: list[Any] = [(numel,), (numel,), scales_shape(numel)]
        return {"param": weight.flatten().bfloat16(), "states": [torch.zeros(s, dtype=torch.uint8) for s in shapes]}
    dtype = torch.float32 if states == "fp32" else torch.bfloat16
    return {
        "param": weight.flatten().to(dtype, copy=True),
        "states": [torch.zeros(numel, dtype=dtype) for _ in range(2)],
    }


def _numbered(kept: list[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each tensor with the index of its first element; every tensor begins a new block."""
    first = 0
    for one in kept:
        yield first, one
        first += -(-one["param"].numel() // BLOCK) * BLOCK


def _model(size: Size, seed: int) -> torch.nn.Module:
    """Return the initial model, which depends on size and seed only."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = size.width // size.head
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float()


if __name__ == "__main__":
    sys.exit(provenance.program("moments", main))
