"""Options and output of `memascend bench` for drives, tiers and checkpoints."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from statistics import median
from typing import Any

from memascend.bench.arguments import Count, amounts_of, counts, in_memory_note, require_folder, show


def add_nvme(parser: argparse.ArgumentParser, count: Count) -> None:
    """Add the options of `memascend bench nvme`."""
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


def add_tiers(parser: argparse.ArgumentParser, count: Count) -> None:
    """Add the options of `memascend bench tiers`."""
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


def add_checkpoints(parser: argparse.ArgumentParser, count: Count) -> None:
    """Add the options of `memascend bench checkpoints`."""
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


def add_saves(parser: argparse.ArgumentParser, count: Count) -> None:
    """Add the options of `memascend bench saves`."""
    parser.add_argument(
        "--folder", type=Path, required=True, metavar="DIR", help="folder on the SSD; no files are left behind"
    )
    parser.add_argument("--model", default="llama3.2-1b", help="built-in name (default llama3.2-1b)")
    parser.add_argument(
        "--twin", type=count, default=4, metavar="K", help="divide the model's widths by K, a power of two (default 4)"
    )
    parser.add_argument("--context", type=count, default=256, metavar="TOKENS", help="tokens of a step (default 256)")
    parser.add_argument("--steps", type=count, default=2, metavar="N", help="steps after each save (default 2)")


def run_nvme(options: argparse.Namespace, count: Count) -> tuple[dict[str, Any], list[str]]:
    """Run `memascend bench nvme`; return its result as JSON types and the lines to print."""
    from memascend.bench import nvme

    require_folder(options.folder)
    sizes = tuple(mib << 20 for mib in counts("--mib", options.mib, count))
    if options.bytes is not None:
        sizes = (
            nvme.FIG14_BYTES
            if options.bytes == "fig14"
            else tuple(amounts_of("--bytes", options.bytes, "bytes", ", or fig14"))
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
        workers=tuple(counts("--workers", options.workers, count)),
        budget_bytes=options.budget_mib << 20,
        questions=tuple(options.questions.split(",")),
        register=not options.no_register,
    )
    result = nvme.measure(chosen)
    lines = in_memory_note(options.folder)
    lines += [f"{result['target']}, blocks of {options.block_kib} KiB, depth {options.depth}; medians with quartiles"]
    lines += [f"without {peer}: {reason}" for peer, reason in result["conditions"]["missing"].items()]
    for row in result["summary"]:
        if row["question"] == "stream":
            speed, fio = (row[name]["median"] / 1e9 for name in ("bytes_per_second", "fio_bytes_per_second"))
            share = show(row["share_of_fio"])
            lines.append(f"{row['op']:<6} {row['method']:<30} {speed:6.2f} GB/s, {share} of fio's {fio:.2f}")
        else:
            against = "".join(f", {show(ratio)} x {peer}" for peer, ratio in row["times_faster_than"].items())
            seconds = row["seconds"]["median"]
            lines.append(
                f"{row['op']:<6} {row['bytes'] / 2**20:>7.1f} MiB {row['method']:<26} {seconds * 1e3:8.2f} ms"
                f" {row['bytes'] / seconds / 1e9:6.2f} GB/s{against}"
            )
    return result, lines


def run_checkpoints(options: argparse.Namespace, count: Count) -> tuple[dict[str, Any], list[str]]:
    """Run `memascend bench checkpoints`; return its result as JSON types and the lines to print."""
    from memascend.bench import checkpoints

    require_folder(options.folder)
    chosen = {name: getattr(options, name) for name in ("folder", "model", "twin", "context", "repeats", "system")}
    result = checkpoints.measure(checkpoints.CheckpointBench(**chosen))
    lines = [f"{options.folder} ({result['file_system']}); medians, of the seconds with quartiles"]
    for row in result["summary"]:
        written, shared = (row[f"{name}_bytes"] / 2**20 for name in ("written", "shared"))
        took = "{median:.2f} s ({low:.2f} to {high:.2f})".format(**row["seconds"])
        moved = f"{written:.1f} MiB written, {shared:.1f} shared"
        lines.append(f"{row['method']:<7}{took}, {moved}; the drive takes {row['limit_s']:.2f} s for its bytes")
    return result, lines


def run_saves(options: argparse.Namespace, count: Count) -> tuple[dict[str, Any], list[str]]:
    """Run `memascend bench saves`; return its result as JSON types and the lines to print."""
    from memascend.bench import saves

    require_folder(options.folder)
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


def _processes(text: str, count: Count) -> tuple[int, ...]:
    """Parse --processes: a list such as 1,2,4, or a range such as 1..4."""
    first, dots, last = text.partition("..")
    if not dots:
        return tuple(counts("--processes", text, count))
    begin, end = counts("--processes", f"{first},{last}", count)
    return tuple(range(begin, end + 1))


def _simplex(options: argparse.Namespace, count: Count) -> tuple[tuple[float, float], ...] | None:
    """Return the (read, write) rates of each path in bytes per second, or None without `--simplex`."""
    if not options.simplex:
        return None
    pairs = [tuple(1e6 * rate for rate in counts("--simplex", text, count)) for text in options.simplex]
    pairs *= len(options.tiers) if len(pairs) == 1 else 1
    folders = not any(Path(path).is_block_device() for path in options.tiers)
    if not folders or len(pairs) != len(options.tiers) or any(len(pair) != 2 for pair in pairs):
        said = " ".join(options.simplex)
        raise ValueError(f"--simplex: expected READ,WRITE in MB/s, once or per folder, such as 69,53; got {said}")
    return tuple((pair[0], pair[1]) for pair in pairs)


def run_tiers(options: argparse.Namespace, count: Count) -> tuple[dict[str, Any], list[str]]:
    """Run `memascend bench tiers`; return its result as JSON types and the lines to print."""
    from memascend.bench import tiers

    for path in options.tiers:
        if not Path(path).is_block_device():
            require_folder(Path(path), "--tiers")
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
    lines = [line for path in options.tiers if os.path.isdir(path) for line in in_memory_note(Path(path))]
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
