"""The direct engine against fio and DeepNVMe, on one file or loop device, each in turn in the same rounds.

Two questions. *Stream*: how much of fio's bandwidth at the same block size and depth, with the queue kept full for a
stated time. *Sizes*: how long one tensor takes from submission to the end of the wait, against DeepNVMe at the same
block size and depth.

All blocks are written beforehand. On a virtual machine's disk the place on the disk, and the place of the buffer in the
guest's memory, make a factor of two each; so all share both: fio's buffers and the engine's are one piece of shared
memory, DeepNVMe's locked tensor serves the engine too, and the peers read what the engine reads and write to a region
of the store that the engine has set aside. The sectors that the disk reports are kept beside the bytes moved.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memascend.bench.rounds import alternate, conditions, ratios, spread
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.storage.commands import preallocate
from memascend.storage.direct_engine import DirectEngine, DirectEngineConfig
from memascend.storage.native import _C

_TENSOR_BYTES = 2 << 20  # several at a time fill the queue
_SHARED_MEMORY = Path("/dev/shm")
_OWNER = "memascend bench"


@dataclass(frozen=True, kw_only=True)
class NvmeOptions:
    """`seconds`: how long each way streams in a round. `sizes`: tensor bytes of the second question."""

    folder: Path
    target: str = "file"  # or loop
    region_bytes: int = 512 << 20
    block_bytes: int = 1 << 20
    depth: int = 16
    seconds: float = 1.0
    repeats: int = 5
    sizes: tuple[int, ...] = (2 << 20, 8 << 20, 32 << 20, 128 << 20)


def measure(options: NvmeOptions) -> dict[str, Any]:
    """Both questions. Raises ValueError (no fio), OSError (no space, no loop device)."""
    if shutil.which("fio") is None:
        raise ValueError("bench nvme compares with fio, which is not installed: apt-get install fio")
    largest = max(options.sizes, default=0)
    if largest > options.region_bytes:
        raise ValueError(f"tensors of {largest} bytes do not fit the region: use a larger --region-mib")
    # fio's region, each tensor as committed and as written over it, and versions of the single tensor.
    size = 3 * options.region_bytes + 4 * largest + (256 << 20)
    with _target(options, size) as path:
        _C.storage_format([path], _OWNER, [], 1 << 20, 0)
        stream = _stream(options, path)
        sizes, missing = _sizes(options, path)
    return {
        "benchmark": "nvme",
        "target": options.target,
        "block_bytes": options.block_bytes,
        "depth": options.depth,
        "conditions": conditions() | {"fio": _output(["fio", "--version"]), "missing": missing},
        "points": stream + sizes,
        "summary": _stream_summary(stream) + _size_summary(sizes),
    }


@contextlib.contextmanager
def _target(options: NvmeOptions, size: int) -> Iterator[str]:
    """A file whose blocks are written, or a loop device on one with direct I/O asserted; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="bench-nvme-", dir=options.folder) as folder:
        path = str(Path(folder).resolve() / "device")
        preallocate(path, size)
        if options.target == "file":
            yield path
            return
        device = _output(["losetup", "--find", "--show", "--direct-io=on", path])
        try:
            if Path(f"/sys/block/{Path(device).name}/loop/dio").read_text().strip() != "1":
                raise OSError(f"{device}: the kernel refuses direct I/O on {options.folder}: a cache would be measured")
            yield device
        finally:
            subprocess.run(["losetup", "-d", device], check=True)


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


# ---------------------------------------------------------------------------------------------------------- stream


def _engines(options: NvmeOptions) -> dict[str, dict[str, Any]]:
    """Only one at a time may write: each is opened for its turn."""
    common = {"block_bytes": options.block_bytes, "depth": options.depth}
    wanted = {
        "engine io_uring": {"backend": "io_uring", "checksums": "full"},
        "engine io_uring, no checksums": {"backend": "io_uring", "checksums": "off"},
        "engine libaio": {"backend": "libaio", "checksums": "full"},
    }
    return {name: common | extra for name, extra in wanted.items() if not _C.aio_missing(extra["backend"])}


def _stream(options: NvmeOptions, path: str) -> list[dict[str, Any]]:
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
        if len(extents) != 1:  # fio works on one range
            raise OSError("the region for fio is in several pieces: use a smaller --region-mib")
    with tempfile.NamedTemporaryFile(prefix="bench-nvme-", dir=_SHARED_MEMORY) as shared:
        buffers = _shared_buffers(shared.name, options)
        for op in ("read", "write"):
            for name, config in _engines(options).items():
                engine_way = _engine_way(options, path, config, op, buffers, count)
                fio_way = _fio_way(options, path, config["backend"], op, extents[0][1], shared.name)
                points.append({"question": "stream", "method": name, "op": op, "engine": [], "fio": [], "order": []})
                points[-1] |= {"engine_device_share": [], "fio_device_share": []}
                ways.append((points[-1], {"engine": engine_way, "fio": fio_way}))
        for number in range(options.repeats):
            for point, pair in ways:
                _one_pair(path, point, pair, engine_first=number % 2 == 0)
    return points


def _shared_buffers(path: str, options: NvmeOptions) -> list[torch.Tensor]:
    """As much memory as fio uses, depth times block, in tensors; fio maps the same file (and sets its length)."""
    size = max(options.depth * options.block_bytes, 2 * _TENSOR_BYTES)
    os.truncate(path, size)
    memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    memory.random_(0, 256, generator=torch.Generator().manual_seed(size))
    return list(memory.split(_TENSOR_BYTES))[: size // _TENSOR_BYTES]


def _one_pair(path: str, point: dict[str, Any], pair: dict[str, Any], engine_first: bool) -> None:
    """Side by side in time, since the disk of a virtual machine drifts; who goes first changes from round to round."""
    order = ("engine", "fio") if engine_first else ("fio", "engine")
    point["order"].append(order[0])
    for side in order:
        before = _sectors(path)
        bytes_per_second, total = pair[side]()
        point[side].append(bytes_per_second)
        point[f"{side}_device_share"].append((_sectors(path) - before) * 512 / total)


def _buffer(size: int) -> torch.Tensor:
    """Page-aligned, touched, with content that does not compress."""
    out = PageAlignedPinnedAllocator(lock=False).allocate(size, torch.uint8, name="bench", owner="bench")
    return out.random_(0, 256, generator=torch.Generator().manual_seed(size))


def _engine_way(
    options: NvmeOptions, path: str, config: dict[str, Any], op: str, buffers: list[torch.Tensor], count: int
) -> Callable[[], tuple[float, int]]:
    def run() -> tuple[float, int]:
        with DirectEngine([path], _OWNER, DirectEngineConfig(**config)) as engine:
            for buffer in buffers:
                engine.register_buffer(buffer)
            submit = engine.read if op == "read" else engine.write
            # The first lap is not timed: rings and buffers are then in use.
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
        # The last `wait` above ended `seconds`; what was still under way is not counted.
        return done / seconds, statistics.bytes_read + statistics.bytes_written

    return run


def _fio_way(
    options: NvmeOptions, path: str, backend: str, op: str, offset: int, memory: str
) -> Callable[[], tuple[float, int]]:
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
        job = json.loads(_output(command))["jobs"][0][op]
        moved = int(job["io_bytes"])
        return moved * 1000 / int(job["runtime"]), moved

    return run


def _sectors(path: str) -> int:
    """Read and written by the disk below, of all users."""
    status = os.stat(path)
    number = status.st_rdev or status.st_dev
    node = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if (node / "loop").exists():
        return _sectors((node / "loop/backing_file").read_text().strip())
    fields = (node / "stat").read_text().split() if node.exists() else ["0"] * 8
    return int(fields[2]) + int(fields[6])


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


# ----------------------------------------------------------------------------------------------------------- sizes


def _sizes(options: NvmeOptions, path: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Seconds of one tensor, written and read, alone."""
    points: list[dict[str, Any]] = []
    handle, missing = None, {}
    try:
        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed's logger takes what is standard output at its import
            from memascend.integrations.deepspeed.deepnvme import deepnvme_handle

            handle = deepnvme_handle(options.block_bytes, options.depth)
    except ImportError as error:
        missing["DeepNVMe"] = str(error)
    config = DirectEngineConfig(block_bytes=options.block_bytes, depth=options.depth)
    with DirectEngine([path], _OWNER, config) as engine:
        for size in options.sizes:
            contents = _buffer(size)
            # DeepNVMe copies unless the memory is of its own kind; the engine takes any.
            buffer = contents if handle is None else handle.new_cpu_locked_tensor(size, contents).copy_(contents)
            engine.wait(engine.write("one", buffer))
            for op in ("write", "read"):
                ways = {"engine": _one(engine, op, buffer)}
                if handle is not None:
                    ways["DeepNVMe"] = _one_deepnvme(handle, op, buffer, _file_below(path), _places(engine, op, size))
                for name, seconds in alternate(ways, options.repeats).items():
                    points.append({"question": "sizes", "method": name, "op": op, "bytes": size, "seconds": seconds})
                for name, way in ways.items() if op == "read" else ():
                    buffer.zero_()
                    way()
                    if not torch.equal(buffer, contents):
                        raise OSError(f"{name} read something else than was written to {path}: fast and wrong")
            if handle is not None:
                handle.free_cpu_locked_tensor(buffer)
    return points, missing


def _file_below(path: str) -> str:
    """DeepNVMe knows no devices: of a loop device it gets the file, so that a file system is set against a device."""
    backing = Path(f"/sys/block/{Path(path).name}/loop/backing_file")
    return backing.read_text().strip() if backing.exists() else path


def _places(engine: DirectEngine, op: str, size: int) -> Iterator[int]:
    """Where DeepNVMe goes: to read, where the engine reads; to write, from place to place, as the engine does."""
    if op == "read":
        return itertools.repeat(engine.info("one").extents[0][1])
    _, offset, length = engine.info("fio").extents[0]
    return itertools.cycle(range(offset, offset + length - size + 1, size))


def _one(engine: DirectEngine, op: str, buffer: torch.Tensor) -> Callable[[], None]:
    submit = engine.read if op == "read" else engine.write

    def run() -> None:
        engine.wait(submit("one", buffer))

    return run


def _one_deepnvme(handle: Any, op: str, buffer: torch.Tensor, path: str, places: Iterator[int]) -> Callable[[], None]:
    submit = handle.async_pread if op == "read" else handle.async_pwrite

    def run() -> None:
        submit(buffer, path, next(places))
        handle.wait()

    return run


def _size_summary(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by = {(point["method"], point["op"], point["bytes"]): point["seconds"] for point in points}
    out = []
    for (name, op, size), seconds in by.items():
        row = {"question": "sizes", "method": name, "op": op, "bytes": size, "seconds": vars(spread(seconds))}
        if name == "engine" and ("DeepNVMe", op, size) in by:
            row["times_faster_than_deepnvme"] = vars(ratios(by["DeepNVMe", op, size], seconds))
        out.append(row)
    return out
