"""The command `memascend bench PART [--json] [--out FILE]`; `PARTS` lists the parts."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memascend.bench import kernel_commands as kernels
from memascend.bench import storage_commands as storage
from memascend.bench import training_commands as training
from memascend.bench.arguments import Count


@dataclass(frozen=True)
class Part:
    """One benchmark: its name, the function that runs it, its help text, and a function that adds its own options."""

    name: str
    run: Callable[..., tuple[dict[str, Any], list[str]]]
    text: str
    add: Callable[[argparse.ArgumentParser, Count], None]


PARTS = (
    Part(
        "overflow",
        kernels.run_overflow,
        "overflow check: fraction of the read limit, speed-up over the isinf/isnan chain, DeepSpeed and torch",
        kernels.add_overflow,
    ),
    Part(
        "unscale",
        kernels.run_unscale,
        "unscale, norm and overflow: fraction of the limit, speed-up over torch",
        kernels.add_overflow,
    ),
    Part(
        "adamw",
        kernels.run_adamw,
        "AdamW: speed-up over DeepSpeedCPUAdam and torch, and the roofline",
        kernels.add_numels,
    ),
    Part(
        "pinned",
        kernels.run_pinned,
        "pinned memory: exact allocation against rounding to powers of two",
        kernels.add_pinned,
    ),
    Part("pool", kernels.run_pool, "buffer pool: adaptive against monolithic", kernels.add_pool),
    Part(
        "nvme",
        storage.run_nvme,
        "direct engine: fraction of fio's bandwidth, speed-up over DeepNVMe",
        storage.add_nvme,
    ),
    Part(
        "checkpoints",
        storage.run_checkpoints,
        "a checkpoint of train: sharing the blocks of the swap files against copying them",
        storage.add_checkpoints,
    ),
    Part(
        "saves",
        storage.run_saves,
        "streaming engine: for how long training stands still for a checkpoint",
        storage.add_saves,
    ),
    Part(
        "tiers",
        storage.run_tiers,
        "several drives in parallel, with one and several processes: fraction of the formula, fairness",
        storage.add_tiers,
    ),
    Part(
        "activations",
        training.run_activations,
        "activations kept, recomputed, copied to host memory or offloaded to the SSD: peak memory, time, waits",
        training.add_activations,
    ),
    Part(
        "engine",
        training.run_engine,
        "streaming engine: step time relative to training in memory, fraction of its bound",
        training.add_engine,
    ),
    Part(
        "latency",
        training.run_latency,
        "memory nodes: latency of dependent loads by working-set size",
        training.add_latency,
    ),
    Part(
        "placement",
        training.run_placement,
        "memory nodes: step time under each placement, relative to none",
        training.add_placement,
    ),
)


def add_benchmarks(parts: Any, count: Count) -> None:
    """Add one parser for each part; `count` parses a positive integer. The benchmarks themselves are imported later."""
    for part in PARTS:
        parser = parts.add_parser(part.name, help=part.text)
        parser.add_argument("--json", action="store_true", help="machine-readable output with every round")
        parser.add_argument("--out", type=Path, metavar="FILE", help="write the same JSON to FILE")
        parser.add_argument("--repeats", type=count, default=7, metavar="N", help="rounds (default 7)")
        part.add(parser, count)
        parser.set_defaults(run=_runner(part.run, count))


def _runner(run: Callable[..., tuple[dict[str, Any], list[str]]], count: Count) -> Callable[..., str]:
    """Return a function that runs a part, writes the file of --out atomically, and returns the text to print."""

    def run_and_write(options: argparse.Namespace) -> str:
        if options.out is not None and not options.out.parent.is_dir():
            raise ValueError(f"--out {options.out}: the folder {options.out.parent} does not exist")
        result, lines = run(options, count)
        text = json.dumps(result, indent=1)
        if options.out is not None:
            partial = options.out.with_name(f".{options.out.name}.{os.getpid()}")
            partial.write_text(text + "\n")
            partial.replace(options.out)
        return text if options.json else "\n".join(lines)

    return run_and_write
