"""Benchmark of the direct engine against fio and DeepNVMe, on one file or loop device, in turn in the same rounds.

It answers two questions. *Stream*: which fraction of fio's bandwidth the engine reaches at the same block size and
depth, with a full queue for a given time. *Sizes* (nvme_sizes.py): how long one tensor takes, compared with DeepNVMe.

All blocks are written beforehand. On a virtual machine's disk, the position on the disk and the position of the buffer
in the guest's memory can each change the rate by a factor of two. Therefore the engine and fio share both: their
buffers are the same piece of shared memory, and fio reads and writes a region of the store that the engine has set
aside. The sectors that the disk reports are recorded in addition to the bytes moved.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memascend.bench import nvme_sizes, nvme_target
from memascend.bench.rounds import conditions, ratios, spread
from memascend.storage.direct_engine import DirectEngine, DirectEngineConfig
from memascend.storage.native import _C

# Fig. 14 states the smallest and largest: a k projection of Llama3.2-1B in fp16 and the embedding of Qwen2.5-14B in
# fp32. Between them, in fp16: the k and q projections of Llama3.1-8B, a feed-forward matrix of Qwen2.5-7B, and its
# embedding, partitioned over two GPUs and whole.
FIG14_BYTES = (2097152, 8388608, 33554432, 135790592, 544997376, 1089994752, 3114270720)
QUESTIONS = ("stream", "sizes")
_TENSOR_BYTES = 2 << 20  # several tensors at a time fill the queue
_SHARED_MEMORY = Path("/dev/shm")
_OWNER = "memascend bench"


@dataclass(frozen=True, kw_only=True)
class NvmeOptions:
    """Options of the benchmark.

    `seconds` is the time for which each way streams in a round. `sizes` are the tensor sizes in bytes for the question
    `sizes`. For one size, a way moves at most `budget_bytes`, but at least one tensor (with 2 GiB, the largest of
    Fig. 14 once). `questions` are `stream` (which needs fio), `sizes`, or both.
    """

    folder: Path
    target: str = "file"  # auto: a loop device if one can be created (as root)
    region_bytes: int = 512 << 20
    block_bytes: int = 1 << 20
    depth: int = 16
    workers: tuple[int, ...] = (1,)
    seconds: float = 1.0
    repeats: int = 5
    sizes: tuple[int, ...] = (2 << 20, 8 << 20, 32 << 20, 128 << 20)
    budget_bytes: int = 2 << 30
    questions: tuple[str, ...] = QUESTIONS
    register: bool = True  # register the buffers with the rings (`DirectEngine.register_buffer`)


def measure(options: NvmeOptions) -> dict[str, Any]:
    """Run the benchmark and return points and summary.

    Raises ValueError (no fio, an unknown question, too little free space) or OSError (no loop device, a fragmented
    region, data that a cache served or that differ from what was written).
    """
    unknown = [name for name in options.questions if name not in QUESTIONS]
    if unknown or not options.questions:
        raise ValueError(f"--questions: unknown {unknown[0] if unknown else ''!r}: use {', '.join(QUESTIONS)}")
    streams = "stream" in options.questions
    if streams and shutil.which("fio") is None:
        raise ValueError("bench nvme compares with fio, which is not installed: apt-get install fio")
    by_size = nvme_sizes.SizeOptions(
        sizes=options.sizes if "sizes" in options.questions else (),
        block_bytes=options.block_bytes,
        depth=options.depth,
        repeats=options.repeats,
        budget_bytes=options.budget_bytes,
        workers=options.workers,
        register=options.register,
    )
    # fio's region, and two versions of each streamed tensor: the committed one and the one being written.
    size = (3 * options.region_bytes if streams else 0) + nvme_sizes.store_bytes(by_size) + (64 << 20)
    free = shutil.disk_usage(options.folder).free
    if free < size + nvme_sizes.disk_bytes(by_size):
        needed = size + nvme_sizes.disk_bytes(by_size)
        raise ValueError(f"--folder {options.folder} has {free} bytes free, {needed} are needed: use smaller sizes")
    missing: dict[str, str] = {}
    stream: list[dict[str, Any]] = []
    sizes: list[dict[str, Any]] = []
    with nvme_target.target(options.folder, options.target, size, written=streams) as path:
        _C.storage_format([path], _OWNER, [], 1 << 20, 0)
        kind = "file" if nvme_target.file_below(path) == path else "loop"
        if streams:
            stream = _stream(options, path)
        if by_size.sizes:
            sizes, missing = nvme_sizes.measure(by_size, _OWNER, path)
    fio = {"fio": nvme_target.output(["fio", "--version"])} if streams else {}
    return {
        "benchmark": "nvme",
        "target": kind,
        "block_bytes": options.block_bytes,
        "depth": options.depth,
        "registered": options.register,
        "conditions": conditions() | fio | {"missing": missing},
        "points": stream + sizes,
        "summary": _stream_summary(stream) + nvme_sizes.summary(sizes),
    }


# ---------------------------------------------------------------------------------------------------------- stream


def _engines(options: NvmeOptions) -> dict[str, dict[str, Any]]:
    """Return the engine configurations by name. Only one engine may write at a time, so each is opened for its turn."""
    common = {"block_bytes": options.block_bytes, "depth": options.depth}
    wanted = {
        "engine io_uring": {"backend": "io_uring", "checksums": "full"},
        "engine io_uring, no checksums": {"backend": "io_uring", "checksums": "off"},
        "engine libaio": {"backend": "libaio", "checksums": "full"},
        "engine libaio, no checksums": {"backend": "libaio", "checksums": "off"},
    }
    return {name: common | extra for name, extra in wanted.items() if not _C.aio_missing(extra["backend"])}


def _stream(options: NvmeOptions, path: str) -> list[dict[str, Any]]:
    """Return the points of the question `stream`: engine and fio in turn, for reads and writes, by engine
    configuration."""
    points: list[dict[str, Any]] = []
    ways: list[tuple[dict[str, Any], dict[str, Any]]] = []
    count = options.region_bytes // _TENSOR_BYTES
    with DirectEngine([path], _OWNER) as engine:
        engine.write("fio", torch.zeros(options.region_bytes, dtype=torch.uint8))
        for number in range(count):
            engine.write(f"t{number}", torch.zeros(_TENSOR_BYTES, dtype=torch.uint8))
        engine.wait()
        engine.commit()
        extents = engine.info("fio").extents
        if len(extents) != 1:  # fio needs one contiguous range
            raise OSError("the region for fio is fragmented: use a smaller --region-mib")
    with tempfile.NamedTemporaryFile(prefix="bench-nvme-", dir=_SHARED_MEMORY) as shared:
        buffers = _shared_buffers(shared.name, options)
        for op in ("read", "write"):
            for name, config in _engines(options).items():
                engine_way = _engine_way(options, path, config, op, buffers, count)
                fio_way = _fio_way(options, path, config["backend"], op, extents[0][1], shared.name)
                points.append({"question": "stream", "method": name, "op": op, "engine": [], "fio": [], "order": []})
                points[-1] |= {
                    "engine_device_share": [],
                    "fio_device_share": [],
                    "seconds": [options.seconds] * options.repeats,
                }
                ways.append((points[-1], {"engine": engine_way, "fio": fio_way}))
        for number in range(options.repeats):
            for point, pair in ways:
                _one_pair(path, point, pair, engine_first=number % 2 == 0)
    return points


def _shared_buffers(path: str, options: NvmeOptions) -> list[torch.Tensor]:
    """Return tensors over the shared file `path`, of as much memory as fio uses: depth times block size.

    fio maps the same file and sets its length.
    """
    size = max(options.depth * options.block_bytes, 2 * _TENSOR_BYTES)
    os.truncate(path, size)
    memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    memory.random_(0, 256, generator=torch.Generator().manual_seed(size))
    return list(memory.split(_TENSOR_BYTES))[: size // _TENSOR_BYTES]


def _one_pair(path: str, point: dict[str, Any], pair: dict[str, Any], engine_first: bool) -> None:
    """Measure the engine and fio one right after the other, since the rate of a virtual machine's disk drifts.

    Which one runs first alternates from round to round.
    """
    order = ("engine", "fio") if engine_first else ("fio", "engine")
    point["order"].append(order[0])
    for side in order:
        before = nvme_target.sectors(path)
        bytes_per_second, total = pair[side]()
        point[side].append(bytes_per_second)
        point[f"{side}_device_share"].append((nvme_target.sectors(path) - before) * 512 / total)


def _engine_way(
    options: NvmeOptions, path: str, config: dict[str, Any], op: str, buffers: list[torch.Tensor], count: int
) -> Callable[[], tuple[float, int]]:
    """Return a function that streams with the engine; it returns bytes per second and all bytes that were moved."""

    def run() -> tuple[float, int]:
        with DirectEngine([path], _OWNER, DirectEngineConfig(**config)) as engine:
            for buffer in buffers if options.register else ():
                engine.register_buffer(buffer)
            submit = engine.read if op == "read" else engine.write
            # The first lap over the buffers is untimed, so that rings and buffers are warm.
            waiting = [submit(f"t{number % count}", buffers[number]) for number in range(len(buffers))]
            number, done, begin = len(buffers), 0, None
            while begin is None or time.perf_counter() - begin < options.seconds:
                engine.wait(waiting.pop(0))
                done += 0 if begin is None else _TENSOR_BYTES
                begin = begin or time.perf_counter()
                waiting.append(submit(f"t{number % count}", buffers[number % len(buffers)]))
                number += 1
            seconds = time.perf_counter() - begin
            engine.wait()
            statistics = engine.statistics
        # Only transfers completed within `seconds` count; those still in flight do not.
        return done / seconds, statistics.bytes_read + statistics.bytes_written

    return run


def _fio_way(
    options: NvmeOptions, path: str, backend: str, op: str, offset: int, memory: str
) -> Callable[[], tuple[float, int]]:
    """Return a function that streams with fio at `offset` of the same device; results as of `_engine_way`."""
    command = [
        "fio",
        "--name=bench",
        f"--filename={path}",
        f"--rw={op}",
        f"--bs={options.block_bytes}",
        f"--iodepth={options.depth}",
        f"--ioengine={backend}",
        f"--offset={offset}",
        f"--size={options.region_bytes}",
        f"--runtime={round(options.seconds * 1000)}ms",
        "--time_based=1",
        f"--mem=mmapshared:{memory}",
        "--direct=1",
        "--thread=1",
        "--overwrite=1",
        "--fallocate=none",
        "--allow_file_create=0",
        "--output-format=json",
    ]

    def run() -> tuple[float, int]:
        job = json.loads(nvme_target.output(command))["jobs"][0][op]
        moved = int(job["io_bytes"])
        return moved * 1000 / int(job["runtime"]), moved

    return run


def _stream_summary(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "question": "stream",
            "method": point["method"],
            "op": point["op"],
            "bytes_per_second": vars(spread(point["engine"])),
            "fio_bytes_per_second": vars(spread(point["fio"])),
            "share_of_fio": vars(ratios(point["engine"], point["fio"])),
            "device_share": vars(spread(point["engine_device_share"])),
        }
        for point in points
    ]
