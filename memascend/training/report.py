"""The report at the end of a run: what was trained, how fast, and what used every GiB of host memory."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch

from memascend.memory import tracking
from memascend.memory.ledger import LedgerEntry
from memascend.memory.resident import read_status
from memascend.planner.footprint import OWNER_METRICS
from memascend.training.progress import byte_count, duration

_OF_THE_PROCESS = {
    "later_libraries_bytes": "libraries loaded later",
    "object_bytes": "Python modules and objects, before the first step",
    "tensor_bytes": "tensors that a GPU would hold, at their peak",
}
_SUMMED = ("requested_bytes", "reserved_bytes", "locked_bytes", "pageable_bytes")


class ProcessMemory:
    """Memory of this rank's process that no ledger records: interpreter, libraries, tensors of PyTorch's allocator.

    Create it before the model. `on_cpu`: whether weights, activations and gradients are in host memory instead of on a
    GPU. Their bytes are then counted by :mod:`memascend.memory.tracking`, which replaces PyTorch's CPU allocator from
    the construction on.
    """

    def __init__(self, *, on_cpu: bool) -> None:
        self._on_cpu, self._idle = on_cpu, read_status()
        self._startup_peak = self._objects = 0
        if on_cpu:
            tracking.install(events=False)

    def training_begins(self, ledger: Any) -> None:
        """Measure the memory that came with the model, before the first step. `ledger`: the buffers made so far."""
        now = read_status()
        self._startup_peak = now["VmHWM"]
        known = sum(entry.reserved_bytes for entry in ledger.live("host") if not _by_pytorch(entry))
        known += self._idle["VmRSS"] + self._later_libraries(now) + tracking.live_bytes()["host"]
        self._objects = max(0, now["VmRSS"] - known)

    def _later_libraries(self, now: dict[str, int]) -> int:
        """Return the bytes of file-backed memory that were mapped after the idle process was measured."""
        return max(0, now["RssFile"] - self._idle["RssFile"])

    def measured(self) -> list[int]:
        """Return this rank's measurements in bytes, in the order that `memory_facts` expects.

        With a GPU, memory that CUDA maps cannot be distinguished from the rest, so the last three values are 0.
        """
        now, idle = read_status(), self._idle["VmRSS"]
        if not self._on_cpu:
            return [now["VmHWM"], self._startup_peak, torch.cuda.max_memory_allocated(), idle, 0, 0, 0]
        tensors = tracking.peak_bytes()["host"]
        return [now["VmHWM"], self._startup_peak, 0, idle, self._later_libraries(now), self._objects, tensors]


def _by_pytorch(entry: LedgerEntry) -> bool:
    """Return whether a buffer of the ledger is a pageable tensor, which PyTorch's allocator counts as well."""
    return "pageable" in entry.allocator


def ledger_rows(ledger: Any) -> list[dict[str, Any]]:
    """Return the bytes by owner at the instant of the ledger's peak, largest first."""
    rows: dict[str, dict[str, Any]] = {}
    for entry in ledger.peak("host", "reserved_bytes").entries:
        row = rows.setdefault(
            entry.owner,
            {"owner": entry.owner, "buffers": 0} | dict.fromkeys(_SUMMED, 0),
        )
        row["buffers"] += 1
        row["requested_bytes"] += entry.requested_bytes
        row["reserved_bytes"] += entry.reserved_bytes
        row["locked_bytes"] += entry.reserved_bytes if entry.locked else 0
        row["pageable_bytes"] += entry.reserved_bytes if _by_pytorch(entry) else 0
    return sorted(rows.values(), key=lambda row: -row["reserved_bytes"])


def memory_nodes(ledger: Any, placement: str) -> dict[str, Any]:
    """Return on which memory nodes this rank's buffers are, as reported by the kernel.

    `wrong` names the entries whose nodes differ from those in the ledger.
    """
    from memascend.memory.placement import bytes_by_class, verify_nodes

    checks = verify_nodes(ledger.live("host"))
    return {
        "placement": placement,
        "bytes": {name: dict(sorted(shares.items())) for name, shares in bytes_by_class(checks).items()},
        "wrong": [check.entry.name for check in checks if not check.agrees],
    }


def merged(rows_of_ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the rows of several ranks, summed by owner, largest first."""
    out: dict[str, dict[str, Any]] = {}
    for row in (row for rows in rows_of_ranks for row in rows):
        sums = out.setdefault(row["owner"], {"owner": row["owner"]} | {key: 0 for key in row if key != "owner"})
        for key, value in row.items():
            if key != "owner":
                sums[key] += value
    return sorted(out.values(), key=lambda row: -row["reserved_bytes"])


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise all rows of metrics.jsonl.

    The medians leave out the first step, which warms up, and all sums and medians of time and I/O leave out steps that
    a kill interrupted, which have neither seconds nor bytes.
    """
    steps = [row for row in rows if row["kind"] == "step"]
    measured = [row for row in steps if row["seconds"] is not None]
    steady = measured[1:] or measured
    evaluations = [row for row in rows if row["kind"] == "eval"]
    return {
        "steps": steps[-1]["step"] if steps else 0,
        "tokens": sum(row["tokens"] for row in steps),
        "skipped_steps": sum(row["skipped"] for row in steps),
        "first_loss": steps[0]["loss"] if steps else None,
        "last_loss": steps[-1]["loss"] if steps else None,
        "eval_loss": evaluations[-1]["loss"] if evaluations else None,
        "eval_step": evaluations[-1]["step"] if evaluations else None,
        "training_s": sum(row["seconds"] for row in measured),
        "median_step_s": statistics.median(row["seconds"] for row in steady) if steady else None,
        "median_tokens_per_s": statistics.median(row["tokens"] / row["seconds"] for row in steady) if steady else None,
        "read_bytes_per_step": statistics.median(row["read_bytes"] for row in steady) if steady else None,
        "written_bytes_per_step": statistics.median(row["written_bytes"] for row in steady) if steady else None,
        "written_bytes": sum(row["written_bytes"] for row in measured),
    }


def as_text(report: dict[str, Any]) -> str:
    """Return the report as Markdown that also reads well in a terminal."""
    s, memory = report["summary"], report["memory"]
    lines = [
        f"# {report['config']['model']}, {report['config']['system']}",
        "",
        f"- {s['steps']:,} steps, {s['tokens']:,} tokens in {duration(s['training_s'])}"
        + (f", {s['skipped_steps']} skipped for overflow" if s["skipped_steps"] else ""),
        *_losses(s),
        *_medians(s),
        "",
        "| host memory | buffers | GiB | share |",
        "|---|---:|---:|---:|",
    ]
    total = memory["host_peak_bytes"]
    named: dict[str, list[int]] = {}
    for row in report["ledger"]:
        sums = named.setdefault(OWNER_METRICS.get(row["owner"], row["owner"].replace("_", " ")), [0, 0])
        sums[0] += row["buffers"]
        sums[1] += row["reserved_bytes"]
    for name, (buffers, size) in sorted(named.items(), key=lambda item: -item[1][1]):
        lines.append(_row(name, buffers, size, total))
    lines.append(_row("interpreter and libraries, before the model", "", memory["idle_bytes"], total))
    for key, name in _OF_THE_PROCESS.items():
        if memory.get(key):
            lines.append(_row(name, "", memory[key], total))
    lines.append(_row(memory["rest_name"], "", memory["rest_bytes"], total))
    lines += [_row("**peak of resident memory**", "", total, total), ""]
    lines += _memory_nodes(report.get("memory_nodes"))
    lines += _divided_work(report.get("adamw_by_node"))
    lines.append(f"Start-up, before the first step: {byte_count(memory['startup_peak_bytes'])} at its peak.")
    if memory["device_peak_bytes"]:
        lines.append(f"GPU memory: {byte_count(memory['device_peak_bytes'])} at the peak, all ranks.")
    lines.append(memory["note"])
    return "\n".join(lines) + "\n"


def _losses(s: dict[str, Any]) -> list[str]:
    said = []
    if s["first_loss"] is not None:
        said.append(f"{s['first_loss']:.4f} at the first step, {s['last_loss']:.4f} at the last")
    if s["eval_loss"] is not None:
        when = "" if s["eval_step"] == s["steps"] or not s["steps"] else f" after step {s['eval_step']:,}"
        said.append(f"{s['eval_loss']:.4f} on the evaluation text{when}")
    return [f"- loss {'; '.join(said)}"] if said else []


def _medians(s: dict[str, Any]) -> list[str]:
    if s["median_step_s"] is None:  # the only step was interrupted by a kill
        return []
    return [
        f"- {s['median_step_s']:.2f} s per step, {s['median_tokens_per_s']:,.0f} tokens/s (medians)",
        f"- SSD: {byte_count(s['read_bytes_per_step'])} read and {byte_count(s['written_bytes_per_step'])} written per "
        f"step, {byte_count(s['written_bytes'])} written in total",
    ]


def _memory_nodes(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    lines = [f"Memory nodes at the end, as the kernel says (placement: {found['placement']}):", ""]
    for name, shares in found["bytes"].items():
        parts = ", ".join(f"{byte_count(size)} on node {node}" for node, size in shares.items())
        lines.append(f"- {name.replace('_', ' ')}: {parts}")
    if found["wrong"]:
        lines.append(f"- not where the ledger has them: {', '.join(found['wrong'])}")
    return [*lines, ""]


def _divided_work(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    near, chunks = found["near"], found["near"] + found["elsewhere"]
    said = "nothing was divided (one thread, less than a million elements at a time, or another optimizer)"
    if chunks:
        said = f"{near:,} of {chunks:,} chunks ({near / chunks:.1%}) were updated near their data"
    return [f"AdamW over nodes {', '.join(map(str, found['nodes']))}: {said}.", ""]


def _row(name: str, buffers: Any, size: int, total: int) -> str:
    """Return a row of the memory table in Markdown; `size` and `total` are in bytes."""
    return f"| {name} | {buffers} | {size / 2**30:.3f} | {size / total:.1%} |"


def memory_facts(rows: list[dict[str, Any]], measured: list[int]) -> dict[str, Any]:
    """Return the parts of the peak of resident memory, in bytes.

    `rows`: the ledger's rows of all ranks. `measured`: the results of `ProcessMemory.measured`, summed over all ranks.
    """
    host_peak, startup_peak, device_peak, idle, later, objects, tensors = measured
    ledger = sum(row["reserved_bytes"] for row in rows)
    # Pageable buffers of the ledger are PyTorch tensors as well: count them only once.
    tensors = max(0, tensors - sum(row["pageable_bytes"] for row in rows))
    on_cpu = device_peak == 0
    rest = host_peak - ledger - idle - later - objects - tensors
    if on_cpu:
        rest_name = "small tensors, scratch of products" if rest >= 0 else "not at the same instant"
    else:
        rest_name = "pageable memory and CUDA"
    return {
        "host_peak_bytes": host_peak,
        "startup_peak_bytes": startup_peak,
        "device_peak_bytes": device_peak,
        "idle_bytes": idle,
        "later_libraries_bytes": later,
        "object_bytes": objects,
        "ledger_bytes": ledger,
        "tensor_bytes": tensors,
        "rest_bytes": rest,
        "rest_name": rest_name,
        "note": (
            "No GPU: gathered weights, activations, gradients and logits are in host memory too, at their own peak, "
            "which need not be at the instant of the whole's."
            if on_cpu
            else "Pageable memory: Python objects, the heap, optimizer states of parameters too small for the SSD."
        ),
    }


def read(path: Path) -> dict[str, Any] | None:
    """Return the report of an earlier process of the run, or None if it does not exist or cannot be read."""
    import json

    try:
        found = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"config", "memory", "ledger", "summary"} <= found.keys() else None


def write(path: Path, report: dict[str, Any]) -> None:
    """Write the report to `path`.md and `path`.json."""
    import json

    from memascend.storage.atomic_write import write_atomically

    write_atomically(path.with_suffix(".json"), json.dumps(report, indent=1))
    write_atomically(path.with_suffix(".md"), as_text(report))
