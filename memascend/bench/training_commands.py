"""Options and output of `memascend bench` for activations, the streaming engine, memory latency and placement."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from memascend.bench.arguments import Count, counts, in_memory_note, require_folder, show


def add_activations(parser: argparse.ArgumentParser, count: Count) -> None:
    """Add the options of `memascend bench activations`."""
    parser.add_argument(
        "--folder", type=Path, required=True, metavar="DIR", help="folder on the SSD; no files are left behind"
    )
    parser.add_argument("--model", default="llama3.2-1b", help="built-in name, or a config.json (default llama3.2-1b)")
    parser.add_argument(
        "--twin", type=count, default=16, metavar="K", help="divide the model's widths by K (default 16)"
    )
    parser.add_argument(
        "--context", type=count, default=256, metavar="TOKENS", help="tokens per sequence (default 256)"
    )
    parser.add_argument(
        "--batches", default="8", metavar="N,...", help="comma-separated numbers of sequences per step (default 8)"
    )
    parser.add_argument(
        "--mix", metavar="POLICY", help="policy per block, as plan prints it: offload:10,recompute:4,keep:2"
    )
    parser.add_argument(
        "--threads", type=count, default=1, metavar="N", help="compute threads; one more moves bytes (default 1)"
    )
    parser.add_argument(
        "--ways",
        default="keep,recompute,save_on_cpu,ssd,mix",
        metavar="NAME,...",
        help="comma-separated methods (default: all five)",
    )


def add_engine(parser: argparse.ArgumentParser, count: Count) -> None:
    """Add the options of `memascend bench engine`."""
    parser.add_argument(
        "--folder", type=Path, required=True, metavar="DIR", help="folder on the SSD; no files are left behind"
    )
    parser.add_argument(
        "--model",
        default="qwen2.5-7b",
        help="built-in name, a config.json, or dit:LAYERSxWIDTHxPATCHES, a diffusion transformer (default qwen2.5-7b)",
    )
    parser.add_argument(
        "--twin", type=count, default=16, metavar="K", help="divide the model's widths by K (default 16)"
    )
    parser.add_argument(
        "--contexts",
        default="256",
        metavar="TOKENS,...",
        help="comma-separated numbers of tokens per step (default 256)",
    )
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), default="fp32", help="dtype of weights and matrix products (default fp32)"
    )
    parser.add_argument("--threads", type=count, default=2, metavar="N", help="compute threads (default 2)")
    parser.add_argument(
        "--ways",
        default="memory,optimized",
        metavar="NAME,...",
        help="comma-separated, of memory, optimized, naive, none, inputs, swapped, and swap0 to swap100 (percent of "
        "the swappable activations) (default: the first two)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="compute device (default cpu)")
    parser.add_argument(
        "--cores",
        choices=("shared", "split"),
        default="shared",
        help="split: one core for matrix products, the others for updates and I/O, as with a GPU (default shared)",
    )
    parser.add_argument(
        "--path-rate",
        type=int,
        default=0,
        metavar="BYTES",
        help="limit the SSD to BYTES per second; also shows the simulated step",
    )
    parser.add_argument(
        "--device-to-ssd",
        type=float,
        default=0.0,
        metavar="RATIO",
        help="limit the SSD so that matrix products at the last of the contexts take RATIO times as long as its reads "
        "and writes; also shows the simulated step",
    )
    parser.add_argument(
        "--trace", type=int, choices=(0, 1), default=0, help="1: record the events of one more step per method"
    )


def add_placement(parser: argparse.ArgumentParser, count: Count) -> None:
    """Add the options of `memascend bench placement`."""
    parser.add_argument("--model", default="llama3.2-1b", help="built-in name, or a config.json (default llama3.2-1b)")
    parser.add_argument("--twin", type=count, default=4, metavar="K", help="divide the model's widths by K (default 4)")
    parser.add_argument(
        "--context", type=count, default=256, metavar="TOKENS", help="tokens per sequence (default 256)"
    )
    parser.add_argument("--batch", type=count, default=1, metavar="N", help="sequences per step (default 1)")
    parser.add_argument("--threads", type=count, default=2, metavar="N", help="compute threads (default 2)")
    parser.add_argument(
        "--placements",
        nargs="+",
        default=["latency_first", "interleave", "node"],
        metavar="PLACEMENT",
        help="placements as for train, or node: all on the nearest node (default latency_first interleave node)",
    )


def run_activations(options: argparse.Namespace, count: Count) -> tuple[dict[str, Any], list[str]]:
    """Run `memascend bench activations`; return its result as JSON types and the lines to print."""
    from memascend.bench import activations

    require_folder(options.folder)
    chosen = activations.ActivationOptions(
        model=options.model,
        folder=options.folder,
        twin=options.twin,
        context=options.context,
        batches=tuple(counts("--batches", options.batches, count)),
        ways=tuple(options.ways.split(",")),
        mix=options.mix,
        repeats=options.repeats,
        threads=options.threads,
    )
    result = activations.measure(chosen)
    lines = in_memory_note(options.folder)
    rates = [f"{name} {result['drive'][f'{name}_bytes_per_s'] / 1e9:.2f} GB/s" for name in ("write", "read")]
    lines += [f"drive: {', '.join(rates)}; peaks over what was resident before the step; medians with quartiles"]
    lines += ["way           batch   s per step  x of keeping (predicted)   peak MiB   less predicted  waited  equal"]
    for row in result["summary"]:
        is_predicted = "predicted_peak_reduction" in row
        planned = f"{row['predicted_peak_reduction']:>10.1%}" if is_predicted else f"{'':>10}"
        slower = f" ({row['predicted_seconds_of_keeping']:.2f})" if is_predicted else f"{'':>7}"
        lines.append(
            f"{row['way']:<12}{row['batch']:>7}{row['seconds']['median']:>12.3f}  {show(row['seconds_of_keeping'])}"
            f"{slower}{row['peak_bytes']['median'] / 2**20:>10.1f}{row['peak_reduction']:>7.1%} {planned}"
            f"{row['waited_share']['median']:>8.1%}  {'yes' if row['gradients_equal'] else 'no'}"
        )
    return result, lines


def run_engine(options: argparse.Namespace, count: Count) -> tuple[dict[str, Any], list[str]]:
    """Run `memascend bench engine`; return its result as JSON types and the lines to print."""
    from memascend.bench import engine

    require_folder(options.folder)
    chosen = engine.EngineBench(
        model=options.model,
        folder=options.folder,
        twin=options.twin,
        contexts=tuple(counts("--contexts", options.contexts, count)),
        ways=tuple(options.ways.split(",")),
        dtype=options.dtype,
        repeats=options.repeats,
        threads=options.threads,
        cores=options.cores,
        path_rate=options.path_rate,
        device_to_ssd=options.device_to_ssd,
        trace=bool(options.trace),
        device=options.device,
    )
    result = engine.measure(chosen)
    lines = in_memory_note(options.folder)
    if options.device_to_ssd:
        lines += [f"SSD limited to {result['options']['path_rate'] / 1e6:.0f} MB/s, read and written together"]
    lines += ["tokens  way         s per step  x of memory        more s: forward backward optimizer  of the bound"]
    for row in result["summary"]:
        more = "".join(f"{row[f'more_{name}']:>+9.3f}" for name in engine.PHASES)
        bound = f"{row['bound_share']:.0%}, {row['bottleneck']}" if row["bound_share"] else ""
        lines.append(
            f"{row['context']:>6}  {row['method']:<10}{row['seconds']['median']:>11.3f}  {show(row['of_memory'])}"
            f"{more:>38}  {bound}"
        )
    for row in result.get("predicted", ()):
        lines.append(f"{row['context']:>6}  {row['method']:<10}{row['seconds']:>11.3f}  simulated")
    return result, lines


def run_latency(options: argparse.Namespace, count: Count) -> tuple[dict[str, Any], list[str]]:
    """Run `memascend bench latency`; return its result as JSON types and the lines to print."""
    from memascend.bench import latency

    result = latency.measure(counts("--kib", options.kib, count), options.repeats)
    lines = ["a load that depends on the one before, by how much memory is walked through; medians with quartiles"]
    for row in result["summary"]:
        ns = {name: 1e9 * value for name, value in row["seconds"].items()}
        lines.append(f"node {row['node']}: {row['bytes'] >> 10:>8,} KiB {show(ns)} ns")
    return result, lines


def run_placement(options: argparse.Namespace, count: Count) -> tuple[dict[str, Any], list[str]]:
    """Run `memascend bench placement`; return its result as JSON types and the lines to print."""
    from memascend.bench import placement

    chosen = {name: getattr(options, name) for name in ("model", "twin", "context", "batch", "repeats", "threads")}
    result = placement.measure(placement.PlacementBench(placements=tuple(dict.fromkeys(options.placements)), **chosen))
    lines = [
        f"nodes {', '.join(map(str, result['nodes']))}; a step times one without placement; medians with quartiles"
    ]
    lines += [f"{'placement':<16}{'s/step':>9}  {'times':<18}{'optimizer s':>12}  {'times':<18}same bits"]
    for row in result["summary"]:
        same = "yes" if row["equal"] and row["losses_equal"] else "no"
        lines.append(
            f"{row['method']:<16}{row['seconds']['median']:>9.3f}  {show(row['seconds_of_none']):<18}"
            f"{row['optimizer_s']['median']:>12.3f}  {show(row['optimizer_s_of_none']):<18}{same}"
        )
    return result, lines


def add_latency(parser: argparse.ArgumentParser, count: Count) -> None:
    """Add the options of `memascend bench latency`."""
    sizes = "32,256,1024,4096,16384,65536,262144"
    parser.add_argument(
        "--kib", default=sizes, metavar="KIB,...", help=f"comma-separated sizes in KiB (default {sizes})"
    )
