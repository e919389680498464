"""Options and output of `memascend bench` for the kernels, pinned memory and the buffer pool."""

from __future__ import annotations

import argparse
from typing import Any

from memascend.bench.arguments import Count, amounts_of, counts, show


def run_overflow(options: argparse.Namespace, count: Count) -> tuple[dict[str, Any], list[str]]:
    """Run `memascend bench overflow`; return its result as JSON types and the lines to print."""
    from memascend.bench import overflow

    result = overflow.measure(dtypes_of(options), amounts_of("--numels", options.numels, "elements"), options.repeats)
    lines = ["share of the read limit (fastest reader), and times faster; medians with quartiles"]
    lines += [f"without {peer}: {reason}" for peer, reason in result["missing"].items()]
    return result, lines + _shares(result)


def run_unscale(options: argparse.Namespace, count: Count) -> tuple[dict[str, Any], list[str]]:
    """Run `memascend bench unscale`; return its result as JSON types and the lines to print."""
    from memascend.bench import unscale

    result = unscale.measure(dtypes_of(options), amounts_of("--numels", options.numels, "elements"), options.repeats)
    lines = [
        "share of the limit (fastest loop that reads and writes in place), and times faster; medians with quartiles"
    ]
    return result, lines + _shares(result)


def dtypes_of(options: argparse.Namespace) -> list[str]:
    """Return the names in --dtypes. Raises ValueError for an unknown one."""
    from memascend.bench.overflow import DTYPES

    dtypes = options.dtypes.split(",")
    unknown = [name for name in dtypes if name not in DTYPES]
    if unknown:
        raise ValueError(f"--dtypes: unknown {unknown[0]!r}: use {', '.join(DTYPES)}")
    return dtypes


def _shares(result: dict[str, Any]) -> list[str]:
    lines = []
    for row in result["summary"]:
        others = ", ".join(f"{name} {show(ratio)}" for name, ratio in row["times_faster_than"].items())
        lines.append(
            f"{row['dtype']} {row['numel']:>11,}: {show(row['share_of_limit'])} of {row['limit_gb_s']:.1f} GB/s"
            f" ({row['limit']}); {others}"
        )
    return lines


def run_adamw(options: argparse.Namespace, count: Count) -> tuple[dict[str, Any], list[str]]:
    """Run `memascend bench adamw`; return its result as JSON types and the lines to print."""
    from memascend.bench import adamw

    result = adamw.measure(amounts_of("--numels", options.numels, "elements"), options.repeats)
    lines = ["one step; limit: bytes over the bandwidth of the fastest in-place loop; medians with quartiles"]
    lines += [f"without {peer}: {reason}" for peer, reason in result["missing"].items()]
    for row in result["summary"]:
        others = ", ".join(f"{show(ratio)} x {name}" for name, ratio in row["times_faster_than"].items())
        lines.append(
            f"{row['numel']:>11,} {row['method']:<28} {row['seconds']['median'] * 1e3:8.2f} ms, limit"
            f" {row['limit_seconds'] * 1e3:8.2f} ms ({row['limit_gb_s']:.0f} GB/s); {others}"
        )
    return result, lines


def run_pinned(options: argparse.Namespace, count: Count) -> tuple[dict[str, Any], list[str]]:
    """Run `memascend bench pinned`; return its result as JSON types and the lines to print."""
    from memascend.bench import buffers

    result = buffers.measure_pinned([mib << 20 for mib in counts("--mib", options.mib, count)], options.repeats)
    lines = ["bytes reserved over bytes asked for, and seconds to allocate, lock and free"]
    for row in result["summary"]:
        lines.append(
            f"{row['requested_bytes'] >> 20:>6} MiB {row['method']:<24} {row['reserved_share']:.3f} x,"
            f" {row['seconds']['median'] * 1e3:.1f} ms,"
            f" {show(row['times_faster_than']['power_of_two'])} x power of two"
            f"{'' if row['locked'] else ' (touched, not locked)'}"
        )
    return result, lines


def run_pool(options: argparse.Namespace, count: Count) -> tuple[dict[str, Any], list[str]]:
    """Run `memascend bench pool`; return its result as JSON types and the lines to print."""
    from memascend.bench import buffers

    result = buffers.measure_pool(options.model, options.repeats)
    lines = [f"{options.model}: bytes of the pool at fp16 with one block in flight, and time of a lease and return"]
    for row in result["summary"]:
        lines.append(
            f"  {row['method']:<22} {row['reserved_bytes'] / 2**30:8.2f} GiB ({row['share_of_monolithic']:.1%}),"
            f" {row['seconds']['median'] * 1e6:.2f} us"
        )
    return result, lines


def add_overflow(parser: argparse.ArgumentParser, count: Count) -> None:
    """Add the options of `memascend bench overflow` and `unscale`."""
    add_numels(parser, count)
    parser.add_argument(
        "--dtypes", default="fp32,fp16,bf16", metavar="DTYPE,...", help="comma-separated (default: all three)"
    )


def add_numels(parser: argparse.ArgumentParser, count: Count) -> None:
    """Add --numels."""
    numels = "1000000,30000000"
    parser.add_argument(
        "--numels", default=numels, metavar="N,...", help=f"comma-separated element counts (default {numels})"
    )


def add_pinned(parser: argparse.ArgumentParser, count: Count) -> None:
    """Add the options of `memascend bench pinned`."""
    parser.add_argument("--mib", default="33,130,260", metavar="MIB,...", help="comma-separated sizes in MiB")


def add_pool(parser: argparse.ArgumentParser, count: Count) -> None:
    """Add the options of `memascend bench pool`."""
    parser.add_argument("--model", default="qwen2.5-7b", help="model that gives the tensor sizes (default qwen2.5-7b)")
