"""Run one training experiment in its own process(es), measure it, and write one immutable run record.

Out of memory and time-out under the stated limit are records; after a crash, the log is kept in ``<out>.crash.log`` and
the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from memascend.baselines.protocol import RunSpec, Sizes, load_system, scaled
from memascend.memory import account
from memascend.memory.resident import resident
from memascend.planner import model_spec
from memascend.planner.pool import streamed
from memascend.training import processes
from workflows import staleness
from workflows.refusals import ready
from workflows.run import children, provenance

MIB = 1 << 20
# Options of the command line that are part of a rank's job and of the record.
SETTINGS = ("ranks", "seed", "mode", "dtype", "steps", "sequence", "batch", "checkpointing", "device", "matmul")
SETTINGS += ("evaluate_every",)
# Fields of a rank's result that the record has unchanged.
COUNTED = ("shims", "losses", "skipped_steps", "parameter_tensors", "parameters_on_nvme", "denied_prefetches")
COUNTED += ("evicted_prefetches", "released_gathered", "buffers_beside_pool")
COUNTED += ("pool_fallbacks", "pool_fallback_wasted_bytes")
FREE_SPACE_FACTOR = 24  # bytes per parameter on the swap device: 18 are written each step, plus gradients and slack


# Options of a run -> arguments for argparse; help texts show the default.
OPTIONS: dict[str, dict[str, Any]] = {
    "run-id": {"required": True, "metavar": "ID", "help": "id of the run"},
    "system": {"required": True, "help": "a folder in baselines/"},
    "arm": {"required": True, "help": "variant of the system"},
    "model": {"required": True, "help": "built-in name of the model"},
    "k": {"required": True, "type": int, "metavar": "K", "help": "divide the model's widths by K, a power of two"},
    "dtype": {"choices": ("fp16", "bf16"), "default": "fp16"},
    "sequence": {"type": int, "default": 32, "metavar": "TOKENS", "help": "tokens per sequence"},
    "batch": {"type": int, "default": 1, "metavar": "N", "help": "sequences per rank"},
    "steps": {"type": int, "default": 3, "metavar": "N", "help": "training steps"},
    "seed": {"type": int, "default": 0, "metavar": "N", "help": "random seed"},
    "ranks": {"type": int, "default": 1, "metavar": "N", "help": "data-parallel processes"},
    "time-limit": {"type": float, "default": 900, "metavar": "SECONDS", "help": "limit on the run's time"},
    "mode": {"choices": ("memory", "time"), "default": "memory"},
    "nvme": {"default": os.environ.get("MEMASCEND_NVME", "nvme"), "metavar": "DIR", "help": "folder for swap files"},
    "checkpointing": {"choices": ("reentrant", "non-reentrant", "none"), "default": "reentrant"},
    "stacks": {"nargs": "+", "default": [], "metavar": "CHECKPOINTING:ATTENTION:LOSS"},
    "device": {"choices": ("cpu", "cuda"), "default": "cpu"},
    "matmul": {"choices": ("native", "fp32"), "default": "native"},
    "points": {"nargs": "+", "default": [], "metavar": "TOKENSxBATCH"},
    "gpus": {"type": int, "metavar": "N", "help": "GPUs whose sequences a step holds, for the record; None: --ranks"},
    "evaluate-every": {"type": int, "default": 0, "metavar": "STEPS", "help": "loss on held-out text; 0: never"},
    "no-gather-clone": {"action": "store_true", "help": "negative control: skip the CPU gather repair"},
    "out": {"required": True, "type": Path, "metavar": "FILE", "help": "run record to write"},
}
OPTIONS["mode"]["help"] = "memory: role-aware allocator and 1 ms sampling, slower steps; time: neither"
OPTIONS["checkpointing"]["help"] = "gradient checkpointing; DeepSpeed 0.16 runs out of pool buffers with non-reentrant"
OPTIONS["stacks"]["help"] = "run all points with each of these: none|plain|offloaded : eager|sdpa : plain|chunked"
OPTIONS["device"]["help"] = (
    "where GPU memory is allocated: cpu emulates it in host memory (tracked by role), cuda uses a GPU"
)
OPTIONS["matmul"]["help"] = "fp32: linear layers multiply in fp32 and round, as GPUs do; fp16 is far slower on a CPU"
OPTIONS["points"]["help"] = "several points in one process, --steps of each after the warm-up, with separate peaks"


def parser(text: str | None, *names: str, **changed: dict[str, Any]) -> argparse.ArgumentParser:
    """Return the parser of a program with these options; `changed` overrides or adds options."""
    p = argparse.ArgumentParser(description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name in (*names, *changed):
        own = changed.get(name, {})
        p.add_argument(f"--{name.replace('_', '-')}", **(OPTIONS.get(name.replace("_", "-"), {}) | own))
    return p


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    return parser(__doc__, *OPTIONS).parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return provenance.program("training", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Run the experiment and write its record; return the exit status: 0 also for a record without a result."""
    system = load_system(args.system, args.arm)
    if not hasattr(system, "deepspeed_config"):
        raise ValueError(
            f"system {args.system!r} does not run on DeepSpeed, and this program measures DeepSpeed only: use "
            "memascend train"
        )
    spec = RunSpec(**{f: getattr(args, f) for f in RunSpec.__dataclass_fields__})
    twin = model_spec(args.model).twin(args.k) if args.k > 1 else model_spec(args.model)
    points = [point(text) for text in args.points] or [(args.sequence, args.batch)]
    if min(s for s, _ in points) < 2 or min(b for _, b in points) < 1 or args.steps < 1 or args.ranks < 1:
        raise ValueError("--sequence must be at least 2; --steps, --batch and --ranks at least 1")
    children.require_device(args.device)
    ready(args.out.parent, "--out")
    swap = Path(args.nvme).absolute() / args.run_id
    sizes = sizes_of(twin, args.ranks)
    require_space(swap, sizes.parameters)
    config = system.deepspeed_config(spec, sizes, str(swap))
    with children.scratch_folder() as work:
        try:
            outcome = _train(args, twin, system.parts(args.arm), config, work)
        finally:
            shutil.rmtree(swap, ignore_errors=True)
    if outcome["status"] == "crash":
        log = args.out.with_suffix(".crash.log")
        log.write_text(outcome["log"])
        print(
            f"training: {args.run_id} crashed (exit {outcome['exit_code']}); see {log}\n{outcome['log'][-3000:]}",
            file=sys.stderr,
        )
        return 1
    samples = _write_trace(args.out, outcome)
    record = _record(args, twin, system, config, outcome | {"samples_sha256": samples})
    if record["status"] != "ok":
        print(f"{args.run_id}: {record['status']}: {record.get('reason', 'killed, or out of time')}")
        return 0
    print(
        f"{args.run_id}: {record['status']}  loss {record['losses'][-1]}  host peak net "
        f"{record.get('memory', {}).get('host_peak_net_bytes', 0) / MIB:.1f} MiB"
    )
    return 0


def requested(args: argparse.Namespace) -> dict[str, Any]:
    """Return the record's fields that follow from the command line alone; None marks a field that must be absent."""
    fields = {name: getattr(args, name) for name in ("system", "arm", "model", *SETTINGS)}
    return fields | {
        "twin": {"k": args.k, "parameters": parameters_of(model_spec(args.model), args.k)},
        "parts": load_system(args.system, args.arm).parts(args.arm),
        "time_twin": None,
        "time_limit_s": args.time_limit,
        "stacks": [stack(text) for text in args.stacks],
        "points_requested": [list(point(text)) for text in args.points],
        "gpus": args.gpus or args.ranks,
    }


def parameters_of(spec: Any, k: int) -> int:
    """Return the number of parameters of a model divided by k."""
    return sum(tensor.numel for tensor in (spec.twin(k) if k > 1 else spec).tensors())


def point(text: str) -> tuple[int, int]:
    """Return (tokens, sequences) of a word such as 128x2."""
    tokens, x, batch = text.partition("x")
    if not (x and tokens.isdigit() and batch.isdigit()):
        raise ValueError(f"--points: {text!r} is no point; write tokens x sequences, such as 128x2")
    return int(tokens), int(batch)


def stack(text: str) -> dict[str, str]:
    """Parse a word such as offloaded:sdpa:chunked into memascend's options of a model."""
    words = text.split(":")
    if len(words) != 3:
        raise ValueError(f"--stacks: {text!r} is no stack; write checkpointing:attention:loss, as none:eager:plain")
    return dict(zip(("checkpointing", "attention", "loss"), words, strict=True))


def sizes_of(twin: Any, ranks: int) -> Sizes:
    """Return the sizes of the model that a system's configuration depends on."""
    tensors = twin.tensors()
    flow = streamed(tensors, element_bytes=2, ranks=ranks, threshold_bytes=scaled(MIB, twin.k))
    parameters = sum(tensor.numel for tensor in tensors)
    return Sizes(largest_tensor=flow.largest, parameters=parameters, pool_buffers=flow.monolithic_count())


def require_space(swap: Path, parameters: int) -> None:
    """Create the swap folder. Raises ValueError, with the fix, if it has other files or too little free space."""
    if swap.exists() and {p.name for p in swap.iterdir()} - {"zero_stage_3"}:
        raise ValueError(f"{swap} holds files that are not swap files; move them, or name another folder with --nvme")
    try:
        swap.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot make the swap folder {swap}: {error.strerror}; name a writable one with --nvme"
        ) from None
    free, need = shutil.disk_usage(swap).free, FREE_SPACE_FACTOR * parameters
    if free < need:
        with contextlib.suppress(OSError):
            swap.rmdir()
        raise ValueError(
            f"{swap} has {free / MIB:,.0f} MiB free, this run writes {need / MIB:,.0f} MiB; free space or name another "
            "folder with --nvme"
        )


def job_of(twin: Any, parts: dict[str, str], config: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Return the job file of one rank, which `workflows.run.child` reads; ``settings`` override the defaults."""
    from memascend.integrations.huggingface import token_file

    tokens = token_file(provenance.cache_dir() / "text", min(4096, twin.vocab))
    return {
        "rank": 0,
        "ranks": 1,
        "seed": 0,
        "mode": "memory",
        "steps": 1,
        "sequence": 32,
        "batch": 1,
        "points": [],
        "token_file": str(tokens),
        "model_config": twin.hf_config_dict(),
        "deepspeed_config": config,
        "parts": parts,
        "minimum_swap_bytes": scaled(MIB, twin.k),
        "gather_clone": True,
        "checkpointing": "reentrant",
        "stacks": [],
        "device": "cpu",
        "matmul": "native",
        "evaluate_every": 0,
        "hash_master_weights": True,
        "record_step": False,
        "turn_fd": None,
        "done_fd": None,
        "rate_limits": {},
        **settings,
    }


def _train(
    args: argparse.Namespace, twin: Any, parts: dict[str, str], config: dict[str, Any], work: Path
) -> dict[str, Any]:
    """Run the ranks to their end; return status, samples, results and logs."""
    threads = max(1, len(os.sched_getaffinity(0)) // args.ranks)
    settings = {name: getattr(args, name) for name in SETTINGS} | {"threads": threads}
    settings |= {"points": list(map(point, args.points)), "stacks": list(map(stack, args.stacks))}
    job = job_of(twin, parts, config, **settings, gather_clone=not args.no_gather_clone)
    port = processes.free_port()
    started = time.monotonic()
    ranks = []
    for rank in range(args.ranks):
        env = children.environment(rank, args.ranks, port, threads, args.device, args.mode)
        ranks.append(children.start({**job, "rank": rank}, work, str(rank), env))
    try:
        samples, status = _watch(ranks, started + args.time_limit, args.mode == "memory")
    finally:
        processes.remove_shared_buffers(port)
    logs = "".join((work / f"log{r}.txt").read_text() for r in range(args.ranks))
    results = [json.loads(p.read_text()) for p in sorted(work.glob("result*.json"))]
    if status == "ok" and len(results) < args.ranks:
        status = "oom" if any(c.returncode == -signal.SIGKILL for c in ranks) else "crash"
    if status == "ok" and any(r.get("status") == "oom" for r in results):
        status = "oom"
    return {
        "status": status,
        "samples": samples,
        "results": results,
        "log": logs,
        "exit_code": [c.returncode for c in ranks],
        "wall_s": time.monotonic() - started,
    }


def _watch(ranks: list[children.Run], deadline: float, fine: bool) -> tuple[list[tuple], str]:
    """Sample every rank's memory until all have ended; return the samples and the status.

    A sample is (time in seconds, rss, anon, file, shmem, locked), in bytes, summed over ranks.
    """
    interval, samples, status = (0.001 if fine else 0.05), [], "ok"
    try:
        while any(c.poll() is None for c in ranks):
            now = time.monotonic()
            row = resident([c.pid for c in ranks])
            if row is not None:
                samples.append((now, *row))
            if now > deadline:
                status = "timeout"
                break
            if any(c.returncode not in (None, 0) for c in ranks):
                break
            time.sleep(interval)
    finally:
        for child in ranks:
            if child.poll() is None:
                if status == "ok" and all(c.returncode in (None, 0) for c in ranks):
                    child.wait()
                    continue
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return samples, status


def _record(
    args: argparse.Namespace, twin: Any, system: Any, config: dict[str, Any], outcome: dict[str, Any]
) -> dict[str, Any]:
    """Write the record of a run that did not crash, and return it."""
    parameters = sum(tensor.numel for tensor in twin.tensors())
    fields = {name: value for name, value in requested(args).items() if value is not None} | {
        "status": outcome["status"],
        "twin": {"k": args.k, "parameters": parameters, "config": twin.hf_config_dict()},
        "wall_s": outcome["wall_s"],
        "samples_sha256": outcome["samples_sha256"],
        "environment": children.settings(args.mode),
        "config": json.loads(json.dumps(config).replace(str(Path(args.nvme).absolute()), "NVME")),
    }
    if outcome["status"] == "ok":
        fields |= _results(args, outcome)
    elif reasons := [result["reason"] for result in outcome["results"] if "reason" in result]:
        fields["reason"] = reasons[0]
    code = staleness.digest("workflows.run.training", [args.system], [args.model])
    return provenance.write_record(args.out, args.run_id, "training", code, fields)


def _results(args: argparse.Namespace, outcome: dict[str, Any]) -> dict[str, Any]:
    """Return the record's fields from the results of a run that was ok."""
    first = outcome["results"][0]
    fields: dict[str, Any] = {name: first[name] for name in COUNTED} | {
        "loss_checksum": provenance.digest_of(first["losses"]),
        "master_weights_sha256": first.get("master_weights_sha256", ""),
        "phases": [{k: p[k] for k in ("name", "role", "seconds", "hwm_bytes")} for p in first["phases"]],
        "overflow_check_seconds": [c["end_s"] - c["begin_s"] for c in first["overflow_checks"]],
        "io": {
            "read_bytes_per_step": _summed(outcome["results"], "bytes_read"),
            "written_bytes_per_step": _summed(outcome["results"], "bytes_written"),
            "realigned_reads_per_step": [s["realigned_reads"] for s in first["io_steps"]],
        },
    }
    if "direct_io" in first:  # only our direct engine reports whether it bypasses the page cache
        fields["io"]["direct"] = all(result["direct_io"] for result in outcome["results"])
    if "adamw_chunks" in first:  # chunks near their data and elsewhere, on machines where several NUMA nodes have cores
        fields["adamw_chunks"] = [sum(counts) for counts in zip(*(r["adamw_chunks"] for r in outcome["results"]))]
    if "cuda_peak_bytes" in first:
        fields["cuda_peak_bytes"] = max(r["cuda_peak_bytes"] for r in outcome["results"])
    if "evaluation" in first:
        fields["evaluation"] = first["evaluation"]
    if args.mode == "memory":
        fields |= account.account(outcome["results"], outcome["samples"])
    if args.mode == "memory" and (args.points or args.stacks):
        fields["points"] = account.points(outcome["results"], outcome["samples"])
    return fields


def _summed(results: list[dict[str, Any]], count: str) -> list[int]:
    """Return a counter of each step, summed over ranks."""
    return [sum(step[count] for step in steps) for steps in zip(*(r["io_steps"] for r in results), strict=True)]


def _write_trace(out: Path, outcome: dict[str, Any]) -> str:
    """Write the samples, thinned to one per 10 ms plus each window's largest, and return the SHA-256 of the file."""
    path = out.with_suffix(".trace.csv")
    rows = account.thin(outcome["samples"], 0.010)
    phases = outcome["results"][0].get("phases", []) if outcome["results"] else []
    start = outcome["samples"][0][0] if outcome["samples"] else 0.0
    with path.open("w") as f:
        f.write("t_s,phase,rss,rss_anon,rss_file,rss_shmem,locked\n")
        for t, *values in rows:
            name = next((p["name"] for p in phases if p["begin_s"] <= t <= p["end_s"]), "")
            f.write(f"{t - start:.4f},{name},{','.join(str(v) for v in values)}\n")
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
