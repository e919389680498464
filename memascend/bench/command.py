"""`memascend bench PART [--json] [--out FILE]`; `add_benchmarks` lists the parts."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

_Count = Callable[[str], int]
_LARGEST_AMOUNT = 2**63  # a size in the kernel's words


def add_benchmarks(parts: Any, count: _Count) -> None:
    """Add one parser for each part; `count` reads a positive whole number. Nothing heavy is imported here."""
    for name, run, text, numels in (
        (
            "overflow",
            _overflow,
            "overflow check: fraction of the read limit, speed-up over the isinf/isnan chain, DeepSpeed and torch",
            "1000000,30000000",
        ),
        (
            "unscale",
            _unscale,
            "unscale, norm and overflow: fraction of the limit, speed-up over torch",
            "1000000,30000000",
        ),
        ("adamw", _adamw, "AdamW: speed-up over DeepSpeedCPUAdam and torch, and the roofline", "1000000,30000000"),
        ("pinned", _pinned, "pinned memory: exact allocation against rounding to powers of two", None),
        ("pool", _pool, "buffer pool: adaptive against monolithic", None),
        ("nvme", _nvme, "direct engine: fraction of fio's bandwidth, speed-up over DeepNVMe", None),
        (
            "checkpoints",
            _checkpoints,
            "a checkpoint of train: sharing the blocks of the swap files against copying them",
            None,
        ),
        ("saves", _saves, "streaming engine: for how long training stands still for a checkpoint", None),
        (
            "tiers",
            _tiers,
            "several drives in parallel, with one and several processes: fraction of the formula, fairness",
            None,
        ),
        (
            "activations",
            _activations,
            "activations kept, recomputed, copied to host memory or offloaded to the SSD: peak memory, time, waits",
            None,
        ),
        ("engine", _engine, "streaming engine: step time relative to training in memory, fraction of its bound", None),
        ("latency", _latency, "memory nodes: latency of dependent loads by working-set size", None),
        ("placement", _placement, "memory nodes: step time under each placement, relative to none", None),
    ):
        parser = parts.add_parser(name, help=text)
        parser.add_argument("--json", action="store_true", help="machine-readable output with every round")
        parser.add_argument("--out", type=Path, metavar="FILE", help="write the same JSON to FILE")
        parser.add_argument("--repeats", type=count, default=7, metavar="N", help="rounds (default 7)")
        if numels:
            parser.add_argument(
                "--numels", default=numels, metavar="N,...", help=f"comma-separated element counts (default {numels})"
            )
        if name in ("overflow", "unscale"):
            parser.add_argument(
                "--dtypes", default="fp32,fp16,bf16", metavar="DTYPE,...", help="comma-separated (default: all three)"
            )
        if name == "pinned":
            parser.add_argument("--mib", default="33,130,260", metavar="MIB,...", help="comma-separated sizes in MiB")
        if name == "pool":
            parser.add_argument(
                "--model", default="qwen2.5-7b", help="model that gives the tensor sizes (default qwen2.5-7b)"
            )
        if name == "nvme":
            _add_nvme(parser, count)
        if name == "tiers":
            _add_tiers(parser, count)
        if name == "checkpoints":
            _add_checkpoints(parser, count)
        if name == "saves":
            _add_saves(parser, count)
        if name == "activations":
            _add_activations(parser, count)
        if name == "engine":
            _add_engine(parser, count)
        if name == "latency":
            sizes = "32,256,1024,4096,16384,65536,262144"
            parser.add_argument(
                "--kib", default=sizes, metavar="KIB,...", help=f"comma-separated sizes in KiB (default {sizes})"
            )
        if name == "placement":
            _add_placement(parser, count)
        parser.set_defaults(run=_runner(run, count))


def _add_nvme(parser: argparse.ArgumentParser, count: _Count) -> None:
    parser.add_argument(
        "--folder",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder on the drive to measure; no files are left behind",
    )
    parser.add_argument(
        "--target",
        choices=("auto", "file", "loop"),
        default="file",
        help="loop needs root; auto: loop if root, else file (default file)",
    )
    parser.add_argument("--block-kib", type=count, default=1024, metavar="KIB", help="block size (default 1024)")
    parser.add_argument(
        "--depth", type=count, default=16, metavar="N", help="queue depth: commands in flight (default 16)"
    )
    parser.add_argument(
        "--region-mib", type=count, default=512, metavar="MIB", help="region that is streamed over (default 512)"
    )
    parser.add_argument(
        "--ms", type=count, default=700, metavar="MS", help="duration of a stream per round (default 700)"
    )
    parser.add_argument(
        "--mib",
        default="2,8,32,128",
        metavar="MIB,...",
        help="comma-separated tensor sizes in MiB (default 2,8,32,128)",
    )
    parser.add_argument(
        "--bytes", metavar="BYTES,...", help="comma-separated tensor sizes in bytes instead; fig14: those of Fig. 14"
    )
    parser.add_argument(
        "--budget-mib", type=count, default=2048, metavar="MIB", help="data moved per method and size (default 2048)"
    )
    parser.add_argument(
        "--workers", default="1", metavar="N,...", help="comma-separated numbers of engine threads (default 1)"
    )
    parser.add_argument(
        "--no-register", action="store_true", help="do not register the buffers: every transfer looks up its pages"
    )
    parser.add_argument(
        "--questions",
        default="stream,sizes",
        metavar="NAME,...",
        help="stream (against fio), sizes (against DeepNVMe) (default: both)",
    )


def _add_tiers(parser: argparse.ArgumentParser, count: _Count) -> None:
    parser.add_argument(
        "--tiers",
        nargs="+",
        required=True,
        metavar="PATH",
        help="folders and formatted devices, each on its own drive; no files are left behind in folders",
    )
    parser.add_argument(
        "--processes",
        default="1,2",
        metavar="N,...",
        help="numbers of processes that share them: 1,2,4 or 1..4 (default 1,2)",
    )
    parser.add_argument("--groups", type=count, default=12, metavar="N", help="sub-groups per process (default 12)")
    parser.add_argument("--mib", type=count, default=32, metavar="MIB", help="size of a sub-group (default 32)")
    parser.add_argument(
        "--held", type=count, metavar="N", help="sub-groups in memory at a time (default: two per path, plus one)"
    )
    parser.add_argument(
        "--simplex",
        nargs="+",
        metavar="READ,WRITE",
        help="limit each path to these MB/s, shared by reads and writes; one for all or one per path",
    )
    parser.add_argument(
        "--halve",
        type=count,
        default=0,
        metavar="PASSES",
        help="then halve the rate of the first path for PASSES more passes",
    )
    parser.add_argument(
        "--apart", action="store_true", help="also measure each direction alone, one sub-group at a time"
    )
    parser.add_argument("--predict", action="store_true", help="only simulate the passes over --simplex")


def _add_checkpoints(parser: argparse.ArgumentParser, count: _Count) -> None:
    parser.add_argument(
        "--folder",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder on the file system to measure; no files are left behind",
    )
    parser.add_argument("--model", default="qwen2.5-0.5b", help="built-in name, or a folder (default qwen2.5-0.5b)")
    parser.add_argument(
        "--twin", type=count, default=4, metavar="K", help="divide the model's widths by K, a power of two (default 4)"
    )
    parser.add_argument("--context", type=count, default=64, metavar="TOKENS", help="tokens per sequence (default 64)")
    parser.add_argument("--system", default="memascend", help="system, as in memascend train (default memascend)")


def _add_saves(parser: argparse.ArgumentParser, count: _Count) -> None:
    parser.add_argument(
        "--folder", type=Path, required=True, metavar="DIR", help="folder on the SSD; no files are left behind"
    )
    parser.add_argument("--model", default="llama3.2-1b", help="built-in name (default llama3.2-1b)")
    parser.add_argument(
        "--twin", type=count, default=4, metavar="K", help="divide the model's widths by K, a power of two (default 4)"
    )
    parser.add_argument("--context", type=count, default=256, metavar="TOKENS", help="tokens of a step (default 256)")
    parser.add_argument("--steps", type=count, default=2, metavar="N", help="steps after each save (default 2)")


def _add_activations(parser: argparse.ArgumentParser, count: _Count) -> None:
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


def _add_engine(parser: argparse.ArgumentParser, count: _Count) -> None:
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
        "--trace", type=int, choices=(0, 1), default=0, help="1: record the events of one more step per method"
    )


def _add_placement(parser: argparse.ArgumentParser, count: _Count) -> None:
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


def _runner(run: Callable[..., tuple[dict[str, Any], list[str]]], count: _Count) -> Callable[..., str]:
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


def _counts(option: str, text: str, count: _Count) -> list[int]:
    try:
        return [count(part) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{option}: {error}") from None


def _amounts(option: str, text: str, unit: str, other: str = "") -> list[int]:
    """Elements or bytes: beyond what a count may be, since tensors are; 3e7 is 30000000."""
    amounts = []
    for part in text.split(","):
        amount = float(part) if re.fullmatch(r"\d+(\.\d+)?e\d+", part) else int(part) if part.isdecimal() else 0
        if not 0 < amount < _LARGEST_AMOUNT or amount != int(amount):
            raise ValueError(
                f"{option}: {part!r} is not a number of {unit}: use comma-separated numbers above zero, such as "
                f"1e6{other}"
            )
        amounts.append(int(amount))
    return amounts


def _show(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _overflow(options: argparse.Namespace, count: _Count) -> tuple[dict[str, Any], list[str]]:
    from memascend.bench import overflow

    result = overflow.measure(_dtypes(options), _amounts("--numels", options.numels, "elements"), options.repeats)
    lines = ["share of the read limit (fastest reader), and times faster; medians with quartiles"]
    lines += [f"without {peer}: {reason}" for peer, reason in result["missing"].items()]
    return result, lines + _shares(result)


def _unscale(options: argparse.Namespace, count: _Count) -> tuple[dict[str, Any], list[str]]:
    from memascend.bench import unscale

    result = unscale.measure(_dtypes(options), _amounts("--numels", options.numels, "elements"), options.repeats)
    lines = [
        "share of the limit (fastest loop that reads and writes in place), and times faster; medians with quartiles"
    ]
    return result, lines + _shares(result)


def _dtypes(options: argparse.Namespace) -> list[str]:
    from memascend.bench.overflow import DTYPES

    dtypes = options.dtypes.split(",")
    unknown = [name for name in dtypes if name not in DTYPES]
    if unknown:
        raise ValueError(f"--dtypes: unknown {unknown[0]!r}: use {', '.join(DTYPES)}")
    return dtypes


def _shares(result: dict[str, Any]) -> list[str]:
    lines = []
    for row in result["summary"]:
        others = ", ".join(f"{name} {_show(ratio)}" for name, ratio in row["times_faster_than"].items())
        lines.append(
            f"{row['dtype']} {row['numel']:>11,}: {_show(row['share_of_limit'])} of {row['limit_gb_s']:.1f} GB/s"
            f" ({row['limit']}); {others}"
        )
    return lines


def _adamw(options: argparse.Namespace, count: _Count) -> tuple[dict[str, Any], list[str]]:
    from memascend.bench import adamw

    result = adamw.measure(_amounts("--numels", options.numels, "elements"), options.repeats)
    lines = ["one step; limit: bytes over the bandwidth of the fastest in-place loop; medians with quartiles"]
    lines += [f"without {peer}: {reason}" for peer, reason in result["missing"].items()]
    for row in result["summary"]:
        others = ", ".join(f"{_show(ratio)} x {name}" for name, ratio in row["times_faster_than"].items())
        lines.append(
            f"{row['numel']:>11,} {row['method']:<28} {row['seconds']['median'] * 1e3:8.2f} ms, limit"
            f" {row['limit_seconds'] * 1e3:8.2f} ms ({row['limit_gb_s']:.0f} GB/s); {others}"
        )
    return result, lines


def _pinned(options: argparse.Namespace, count: _Count) -> tuple[dict[str, Any], list[str]]:
    from memascend.bench import buffers

    result = buffers.measure_pinned([mib << 20 for mib in _counts("--mib", options.mib, count)], options.repeats)
    lines = ["bytes reserved over bytes asked for, and seconds to allocate, lock and free"]
    for row in result["summary"]:
        lines.append(
            f"{row['requested_bytes'] >> 20:>6} MiB {row['method']:<24} {row['reserved_share']:.3f} x,"
            f" {row['seconds']['median'] * 1e3:.1f} ms,"
            f" {_show(row['times_faster_than']['power_of_two'])} x power of two"
            f"{'' if row['locked'] else ' (touched, not locked)'}"
        )
    return result, lines


def _pool(options: argparse.Namespace, count: _Count) -> tuple[dict[str, Any], list[str]]:
    from memascend.bench import buffers

    result = buffers.measure_pool(options.model, options.repeats)
    lines = [f"{options.model}: bytes of the pool at fp16 with one block in flight, and time of a lease and return"]
    for row in result["summary"]:
        lines.append(
            f"  {row['method']:<22} {row['reserved_bytes'] / 2**30:8.2f} GiB ({row['share_of_monolithic']:.1%}),"
            f" {row['seconds']['median'] * 1e6:.2f} us"
        )
    return result, lines


def _require_folder(folder: Path, option: str = "--folder") -> None:
    if not folder.is_dir():
        raise ValueError(f"{option} {folder} is not a folder: create it first, on the drive to measure")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{option} {folder} cannot be written: make it writable, or name another on that drive")


def _in_memory(folder: Path) -> list[str]:
    """A line where there is no disk below the folder."""
    from memascend.doctor.checks import IN_MEMORY, file_system

    kind = file_system(folder.resolve())
    return [f"{folder} ({kind}) is in memory: these are not a drive's rates"] if kind in IN_MEMORY else []


def _nvme(options: argparse.Namespace, count: _Count) -> tuple[dict[str, Any], list[str]]:
    from memascend.bench import nvme

    _require_folder(options.folder)
    sizes = tuple(mib << 20 for mib in _counts("--mib", options.mib, count))
    if options.bytes is not None:
        sizes = (
            nvme.FIG14_BYTES
            if options.bytes == "fig14"
            else tuple(_amounts("--bytes", options.bytes, "bytes", ", or fig14"))
        )
    chosen = nvme.NvmeOptions(
        folder=options.folder,
        target=options.target,
        region_bytes=options.region_mib << 20,
        block_bytes=options.block_kib << 10,
        depth=options.depth,
        seconds=options.ms / 1000,
        repeats=options.repeats,
        sizes=sizes,
        workers=tuple(_counts("--workers", options.workers, count)),
        budget_bytes=options.budget_mib << 20,
        questions=tuple(options.questions.split(",")),
        register=not options.no_register,
    )
    result = nvme.measure(chosen)
    lines = _in_memory(options.folder)
    lines += [f"{result['target']}, blocks of {options.block_kib} KiB, depth {options.depth}; medians with quartiles"]
    lines += [f"without {peer}: {reason}" for peer, reason in result["conditions"]["missing"].items()]
    for row in result["summary"]:
        if row["question"] == "stream":
            speed, fio = (row[name]["median"] / 1e9 for name in ("bytes_per_second", "fio_bytes_per_second"))
            share = _show(row["share_of_fio"])
            lines.append(f"{row['op']:<6} {row['method']:<30} {speed:6.2f} GB/s, {share} of fio's {fio:.2f}")
        else:
            against = "".join(f", {_show(ratio)} x {peer}" for peer, ratio in row["times_faster_than"].items())
            seconds = row["seconds"]["median"]
            lines.append(
                f"{row['op']:<6} {row['bytes'] / 2**20:>7.1f} MiB {row['method']:<26} {seconds * 1e3:8.2f} ms"
                f" {row['bytes'] / seconds / 1e9:6.2f} GB/s{against}"
            )
    return result, lines


def _activations(options: argparse.Namespace, count: _Count) -> tuple[dict[str, Any], list[str]]:
    from memascend.bench import activations

    _require_folder(options.folder)
    chosen = activations.ActivationOptions(
        model=options.model,
        folder=options.folder,
        twin=options.twin,
        context=options.context,
        batches=tuple(_counts("--batches", options.batches, count)),
        ways=tuple(options.ways.split(",")),
        mix=options.mix,
        repeats=options.repeats,
        threads=options.threads,
    )
    result = activations.measure(chosen)
    lines = _in_memory(options.folder)
    rates = [f"{name} {result['drive'][f'{name}_bytes_per_s'] / 1e9:.2f} GB/s" for name in ("write", "read")]
    lines += [f"drive: {', '.join(rates)}; peaks over what was resident before the step; medians with quartiles"]
    lines += ["way           batch   s per step  x of keeping (predicted)   peak MiB   less predicted  waited  equal"]
    for row in result["summary"]:
        told = "predicted_peak_reduction" in row
        planned = f"{row['predicted_peak_reduction']:>10.1%}" if told else f"{'':>10}"
        slower = f" ({row['predicted_seconds_of_keeping']:.2f})" if told else f"{'':>7}"
        lines.append(
            f"{row['way']:<12}{row['batch']:>7}{row['seconds']['median']:>12.3f}  {_show(row['seconds_of_keeping'])}"
            f"{slower}{row['peak_bytes']['median'] / 2**20:>10.1f}{row['peak_reduction']:>7.1%} {planned}"
            f"{row['waited_share']['median']:>8.1%}  {'yes' if row['gradients_equal'] else 'no'}"
        )
    return result, lines


def _engine(options: argparse.Namespace, count: _Count) -> tuple[dict[str, Any], list[str]]:
    from memascend.bench import engine

    _require_folder(options.folder)
    chosen = engine.EngineBench(
        model=options.model,
        folder=options.folder,
        twin=options.twin,
        contexts=tuple(_counts("--contexts", options.contexts, count)),
        ways=tuple(options.ways.split(",")),
        dtype=options.dtype,
        repeats=options.repeats,
        threads=options.threads,
        cores=options.cores,
        path_rate=options.path_rate,
        trace=bool(options.trace),
        device=options.device,
    )
    result = engine.measure(chosen)
    lines = _in_memory(options.folder)
    lines += ["tokens  way         s per step  x of memory        more s: forward backward optimizer  of the bound"]
    for row in result["summary"]:
        more = "".join(f"{row[f'more_{name}']:>+9.3f}" for name in engine.PHASES)
        bound = f"{row['bound_share']:.0%}, {row['bottleneck']}" if row["bound_share"] else ""
        lines.append(
            f"{row['context']:>6}  {row['method']:<10}{row['seconds']['median']:>11.3f}  {_show(row['of_memory'])}"
            f"{more:>38}  {bound}"
        )
    for row in result.get("predicted", ()):
        lines.append(f"{row['context']:>6}  {row['method']:<10}{row['seconds']:>11.3f}  simulated")
    return result, lines


def _latency(options: argparse.Namespace, count: _Count) -> tuple[dict[str, Any], list[str]]:
    from memascend.bench import latency

    result = latency.measure(_counts("--kib", options.kib, count), options.repeats)
    lines = ["a load that depends on the one before, by how much memory is walked through; medians with quartiles"]
    for row in result["summary"]:
        ns = {name: 1e9 * value for name, value in row["seconds"].items()}
        lines.append(f"node {row['node']}: {row['bytes'] >> 10:>8,} KiB {_show(ns)} ns")
    return result, lines


def _placement(options: argparse.Namespace, count: _Count) -> tuple[dict[str, Any], list[str]]:
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
            f"{row['method']:<16}{row['seconds']['median']:>9.3f}  {_show(row['seconds_of_none']):<18}"
            f"{row['optimizer_s']['median']:>12.3f}  {_show(row['optimizer_s_of_none']):<18}{same}"
        )
    return result, lines


def _checkpoints(options: argparse.Namespace, count: _Count) -> tuple[dict[str, Any], list[str]]:
    from memascend.bench import checkpoints

    _require_folder(options.folder)
    chosen = {name: getattr(options, name) for name in ("folder", "model", "twin", "context", "repeats", "system")}
    result = checkpoints.measure(checkpoints.CheckpointBench(**chosen))
    lines = [f"{options.folder} ({result['file_system']}); medians, of the seconds with quartiles"]
    for row in result["summary"]:
        written, shared = (row[f"{name}_bytes"] / 2**20 for name in ("written", "shared"))
        took = "{median:.2f} s ({low:.2f} to {high:.2f})".format(**row["seconds"])
        moved = f"{written:.1f} MiB written, {shared:.1f} shared"
        lines.append(f"{row['method']:<7}{took}, {moved}; the drive takes {row['limit_s']:.2f} s for its bytes")
    return result, lines


def _saves(options: argparse.Namespace, count: _Count) -> tuple[dict[str, Any], list[str]]:
    from memascend.bench import saves

    _require_folder(options.folder)
    chosen = {name: getattr(options, name) for name in ("folder", "model", "twin", "context", "steps", "repeats")}
    result = saves.measure(saves.SaveBench(**chosen))
    size = result["checkpoint_bytes"] / 2**20
    lines = [f"{options.folder} ({result['file_system']}); a checkpoint of {size:.0f} MiB; medians with quartiles"]
    for row in result["summary"]:
        if "more_s" not in row:
            continue
        show = "{median:.2f} s ({low:.2f} to {high:.2f})".format
        still, more, took = (show(**row[name]) for name in ("stood_still_s", "more_s", "save_s"))
        lines.append(
            f"{row['method']:<11}training stands still for {still}; the save and its steps take {more} longer than "
            f"such steps alone; the save takes {took}"
        )
    return result, lines


def _processes(text: str, count: _Count) -> tuple[int, ...]:
    first, dots, last = text.partition("..")
    if not dots:
        return tuple(_counts("--processes", text, count))
    begin, end = _counts("--processes", f"{first},{last}", count)
    return tuple(range(begin, end + 1))


def _simplex(options: argparse.Namespace, count: _Count) -> tuple[tuple[float, float], ...] | None:
    """Of each path."""
    if not options.simplex:
        return None
    pairs = [tuple(1e6 * rate for rate in _counts("--simplex", text, count)) for text in options.simplex]
    pairs *= len(options.tiers) if len(pairs) == 1 else 1
    folders = not any(Path(path).is_block_device() for path in options.tiers)
    if not folders or len(pairs) != len(options.tiers) or any(len(pair) != 2 for pair in pairs):
        said = " ".join(options.simplex)
        raise ValueError(f"--simplex: expected READ,WRITE in MB/s, once or per folder, such as 69,53; got {said}")
    return tuple((pair[0], pair[1]) for pair in pairs)


def _tiers(options: argparse.Namespace, count: _Count) -> tuple[dict[str, Any], list[str]]:
    from memascend.bench import tiers

    for path in options.tiers:
        if not Path(path).is_block_device():
            _require_folder(Path(path), "--tiers")
    simplex = _simplex(options, count)
    if options.predict and (simplex is None or options.apart or options.halve):
        raise ValueError("--predict: give the rates of the paths with --simplex, without --apart and --halve")
    if options.halve and simplex is None:
        raise ValueError("--halve: give the rates of the paths with --simplex")
    chosen = tiers.TierOptions(
        simplex=simplex,
        paths=tuple(options.tiers),
        processes=_processes(options.processes, count),
        groups=options.groups,
        group_bytes=options.mib << 20,
        held=options.held,
        repeats=options.repeats,
        apart=options.apart,
        halved=options.halve,
    )
    result = tiers.predict(chosen) if options.predict else tiers.measure(chosen)
    lines = [line for path in options.tiers if os.path.isdir(path) for line in _in_memory(Path(path))]
    for path, (read, write) in result["rates"].items():
        lines.append(f"{path}: read {read / 1e9:.2f} GB/s, written {write / 1e9:.2f} GB/s, each alone")
    if options.simplex:
        lines.append(f"held to {', '.join(options.simplex)} MB/s by a token bucket that reads and writes share")
    lines.append("a pass reads and writes every sub-group; formula: bytes over the rates, directions apart or at once")
    for row in result["summary"]:
        shares = row["share_of_formula"]
        lines.append(
            f"{row['processes']} processes, {row['way']:<9} {row['seconds']['median']:8.3f} s per pass, "
            f"{row['bytes_per_second'] / 1e9:6.2f} GB/s in and out, {shares['simplex']:.2f} of the formula (duplex "
            f"{shares['duplex']:.2f}), fairness {row['fairness']:.2f}"
        )
    for row in result.get("halved", []):
        shares = ", ".join(f"{share:.2f}" for share in row["share_of_formula"])
        lines.append(f"{row['processes']} processes, {row['way']}, {row['path']} halved: {shares} of the new formula")
    for row in result["apart"]:
        rate, latency = (median(row[name]) for name in ("bytes_per_second", "latency_s"))
        lines.append(
            f"{row['processes']} processes, {row['direction']} alone: {rate / 1e9:.3f} GB/s of all, "
            f"{latency:.3f} s per sub-group"
        )
    return result, lines
