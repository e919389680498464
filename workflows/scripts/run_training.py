"""Run one training experiment in its own process(es), measure it, and write one immutable run record.

Out of memory and time-out under the stated limit are records; a crash is kept aside (``<out>.crash.log``) and exits 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from baselines.protocol import RunSpec, Sizes, load_system, scaled
from memascend.planner import model_spec
from memascend.planner.pool import streamed
from workflows.scripts import memory_account, provenance

MIB = 1 << 20
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "2"}
FREE_SPACE_FACTOR = 24  # bytes a parameter on the swap device: 18 are written each step, plus gradients and slack


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--run-id", required=True)
    p.add_argument("--system", required=True, help="a folder in baselines/")
    p.add_argument("--arm", required=True)
    p.add_argument("--model", required=True)
    p.add_argument("--k", type=int, required=True, help="the twin's divisor, a power of two")
    p.add_argument("--dtype", choices=("fp16", "bf16"), default="fp16")
    p.add_argument("--sequence", type=int, default=32, help="tokens")
    p.add_argument("--batch", type=int, default=1, help="sequences a rank")
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--ranks", type=int, default=1)
    p.add_argument("--time-limit", type=float, default=900, help="seconds")
    p.add_argument(
        "--mode",
        choices=("memory", "time"),
        default="memory",
        help="memory: role-aware allocator and 1 ms samples, slower steps; time: neither",
    )
    p.add_argument("--nvme", default=os.environ.get("MEMASCEND_NVME", "nvme"), help="folder for swap files")
    p.add_argument(
        "--checkpointing",
        choices=("reentrant", "non-reentrant", "none"),
        default="reentrant",
        help="gradient checkpointing; DeepSpeed 0.16 runs out of pool buffers with non-reentrant",
    )
    p.add_argument("--no-gather-clone", action="store_true", help="negative control: leave out the CPU gather repair")
    p.add_argument("--out", required=True, type=Path)
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the children and their swap files go too
    try:
        return run(args)
    except (ValueError, OSError) as error:
        print(f"run_training: error: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    system = load_system(args.system, args.arm)
    spec = RunSpec(**{f: getattr(args, f) for f in RunSpec.__dataclass_fields__})
    twin = model_spec(args.model).twin(args.k) if args.k > 1 else model_spec(args.model)
    if args.sequence < 2 or args.steps < 1 or args.batch < 1 or args.ranks < 1:
        raise ValueError("--sequence must be at least 2; --steps, --batch and --ranks at least 1")
    _require_results_folder(args.out)
    swap = Path(args.nvme).absolute() / args.run_id
    sizes = _sizes(twin, args)
    _require_space(swap, sizes.parameters)
    config = system.deepspeed_config(spec, sizes, str(swap))
    with tempfile.TemporaryDirectory(prefix="memascend-run-") as work:
        try:
            outcome = _train(args, spec, twin, system, config, Path(work))
        finally:
            shutil.rmtree(swap, ignore_errors=True)
    if outcome["status"] == "crash":
        log = args.out.with_suffix(".crash.log")
        log.write_text(outcome["log"])
        print(
            f"run_training: {args.run_id} crashed (exit {outcome['exit_code']}); see {log}\n{outcome['log'][-3000:]}",
            file=sys.stderr,
        )
        return 1
    record = _record(args, spec, twin, system, config, outcome)
    _write_trace(args.out, outcome)
    provenance.write_json_atomically(args.out, record)
    print(
        f"{args.run_id}: {record['status']}  loss {record.get('losses', [None])[-1]}  host peak net "
        f"{record.get('memory', {}).get('host_peak_net_bytes', 0) / MIB:.1f} MiB"
    )
    return 0


def _sizes(twin: Any, args: argparse.Namespace) -> Sizes:
    tensors = twin.tensors()
    flow = streamed(tensors, element_bytes=2, ranks=args.ranks, threshold_bytes=scaled(MIB, args.k))
    return Sizes(
        largest_tensor=flow.largest,
        parameters=sum(_numel(t.shape) for t in tensors),
        pool_buffers=flow.monolithic_count(),
    )


def _numel(shape: Any) -> int:
    total = 1
    for dimension in shape:
        total *= int(dimension)
    return total


def _require_results_folder(out: Path) -> None:
    """Before hours of training, not after."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise ValueError(
            f"cannot write results into {out.parent}: {error.strerror}; name a writable folder with --out"
        ) from None


def _require_space(swap: Path, parameters: int) -> None:
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


def _train(
    args: argparse.Namespace, spec: RunSpec, twin: Any, system: Any, config: dict[str, Any], work: Path
) -> dict[str, Any]:
    from memascend.integrations.huggingface import token_file

    threads = max(1, (os.cpu_count() or 1) // args.ranks)
    cache = provenance.cache_dir()
    tokens = token_file(cache / "text", min(4096, twin.vocab))
    children = []
    for rank in range(args.ranks):
        job = {
            "rank": rank,
            "ranks": args.ranks,
            "threads": threads,
            "seed": args.seed,
            "mode": args.mode,
            "dtype": args.dtype,
            "steps": args.steps,
            "sequence": args.sequence,
            "batch": args.batch,
            "token_file": str(tokens),
            "model_config": twin.hf_config_dict(),
            "deepspeed_config": config,
            "parts": system.parts(args.arm),
            "minimum_swap_bytes": scaled(MIB, args.k),
            "gather_clone": not args.no_gather_clone,
            "checkpointing": args.checkpointing,
            "hash_master_weights": True,
        }
        (work / f"job{rank}.json").write_text(json.dumps(job))
    port = _free_port()
    started = time.monotonic()
    for rank in range(args.ranks):
        environment = _environment(rank, args.ranks, port, threads)
        log = (work / f"rank{rank}.log").open("w")
        children.append(
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "workflows.scripts.training_child",
                    "--job",
                    str(work / f"job{rank}.json"),
                    "--result",
                    str(work / f"result{rank}.json"),
                ],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )
    try:
        samples, status = _watch(children, started + args.time_limit, args.mode == "memory")
    finally:
        _remove_shared_buffers(port)
    logs = "".join((work / f"rank{r}.log").read_text() for r in range(args.ranks))
    results = [json.loads(p.read_text()) for p in sorted(work.glob("result*.json"))]
    if status == "ok" and len(results) < args.ranks:
        status = "oom" if any(c.returncode == -signal.SIGKILL for c in children) else "crash"
    if status == "ok" and any(r.get("status") == "oom" for r in results):
        status = "oom"
    return {
        "status": status,
        "samples": samples,
        "results": results,
        "log": logs,
        "exit_code": [c.returncode for c in children],
        "wall_s": time.monotonic() - started,
    }


def _remove_shared_buffers(port: int) -> None:
    """DeepSpeed's shared-memory all-reduce leaves 66 MiB a run in /dev/shm, named after the rendezvous port."""
    for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_127.0.0.1_{port}_*"):
        buffer.unlink(missing_ok=True)


def _environment(rank: int, ranks: int, port: int, threads: int) -> dict[str, str]:
    return {
        **os.environ,
        **MALLOC,
        "DS_ACCELERATOR": "cpu",
        "LOCAL_RANK": str(rank),
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONHASHSEED": "0",
    }


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _watch(children: list[subprocess.Popen], deadline: float, fine: bool) -> tuple[list[tuple], str]:
    """Sample every child's memory until all have ended. Rows: (t_s, rss, anon, file, shmem, locked), sums."""
    reader = memory_account.sum_of_pss if len(children) > 1 else memory_account.sum_of_status
    interval, samples, status = (0.001 if fine else 0.05), [], "ok"
    try:
        while any(c.poll() is None for c in children):
            now = time.monotonic()
            row = reader([c.pid for c in children])
            if row is not None:
                samples.append((now, *row))
            if now > deadline:
                status = "timeout"
                break
            if any(c.returncode not in (None, 0) for c in children):
                break
            time.sleep(interval)
    finally:
        for child in children:
            if child.poll() is None:
                if status == "ok" and all(c.returncode in (None, 0) for c in children):
                    child.wait()
                    continue
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return samples, status


def _record(
    args: argparse.Namespace, spec: RunSpec, twin: Any, system: Any, config: dict[str, Any], outcome: dict[str, Any]
) -> dict[str, Any]:
    record = provenance.record_header(args.run_id, "training")
    parameters = sum(_numel(t.shape) for t in twin.tensors())
    record |= {
        "status": outcome["status"],
        "system": args.system,
        "arm": args.arm,
        "parts": system.parts(args.arm),
        "model": args.model,
        "twin": {"k": args.k, "parameters": parameters, "config": twin.hf_config_dict()},
        "dtype": args.dtype,
        "ranks": args.ranks,
        "sequence": args.sequence,
        "batch": args.batch,
        "steps": args.steps,
        "seed": args.seed,
        "mode": args.mode,
        "time_limit_s": args.time_limit,
        "wall_s": outcome["wall_s"],
        "checkpointing": args.checkpointing,
        "environment": MALLOC,
        "config": json.loads(json.dumps(config).replace(str(Path(args.nvme).absolute()), "NVME")),
    }
    if outcome["status"] == "ok":
        record |= _results(args, outcome)
    record["key"] = provenance.record_key(record)
    return record


def _results(args: argparse.Namespace, outcome: dict[str, Any]) -> dict[str, Any]:
    first = outcome["results"][0]
    fields: dict[str, Any] = {
        "shims": first["shims"],
        "losses": first["losses"],
        "loss_checksum": provenance.digest_of(first["losses"]),
        "master_weights_sha256": first.get("master_weights_sha256", ""),
        "skipped_steps": first["skipped_steps"],
        "parameter_tensors": first["parameter_tensors"],
        "parameters_on_nvme": first["parameters_on_nvme"],
        "denied_prefetches": first["denied_prefetches"],
        "evicted_prefetches": first["evicted_prefetches"],
        "released_gathered": first["released_gathered"],
        "phases": [{k: p[k] for k in ("name", "role", "seconds", "hwm_bytes")} for p in first["phases"]],
        "overflow_check_seconds": [c["end_s"] - c["begin_s"] for c in first["overflow_checks"]],
        "io": {
            "read_bytes_per_step": [
                sum(r["io_steps"][i]["bytes_read"] for r in outcome["results"]) for i in range(args.steps)
            ],
            "written_bytes_per_step": [
                sum(r["io_steps"][i]["bytes_written"] for r in outcome["results"]) for i in range(args.steps)
            ],
            "realigned_reads_per_step": [s["realigned_reads"] for s in first["io_steps"]],
        },
    }
    if args.mode == "memory":
        fields |= memory_account.account(outcome["results"], outcome["samples"])
    return fields


def _write_trace(out: Path, outcome: dict[str, Any]) -> None:
    """All samples, thinned to every 10 ms plus each 10 ms window's largest."""
    path = out.with_suffix(".trace.csv")
    rows = memory_account.thin(outcome["samples"], 0.010)
    phases = outcome["results"][0].get("phases", []) if outcome["results"] else []
    start = outcome["samples"][0][0] if outcome["samples"] else 0.0
    with path.open("w") as f:
        f.write("t_s,phase,rss,rss_anon,rss_file,rss_shmem,locked\n")
        for t, *values in rows:
            name = next((p["name"] for p in phases if p["begin_s"] <= t <= p["end_s"]), "")
            f.write(f"{t - start:.4f},{name},{','.join(str(v) for v in values)}\n")


if __name__ == "__main__":
    sys.exit(main())
