"""Benchmark of the time to move one tensor, by its size: the direct engine against DeepNVMe (MemAscend Fig. 14).

Several ways move the same bytes from and to the same locked memory, one tensor at a time, with the same block size and
depth. The time runs from submission to the end of the wait.

- ``engine``: a volatile direct engine on the device (a loop device with direct I/O, or a file);
- ``engine, file``: if the device is a loop device, additionally an engine in a file, without the loop layer;
- ``DeepNVMe``: `aio_handle` on the file behind that device, at the engine's offset, which isolates the cost of the
  software. DeepNVMe takes a file's size from stat(), so it cannot be given a device, nor a link to one;
- ``DeepNVMe, file per tensor``: `aio_handle` on a separate file on the same file system, as ZeRO-Infinity swaps.

All blocks are written beforehand and overwritten in place. The bytes that the disk's counters report are recorded with
each time and must match the requested bytes, so that no cache is measured.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from memascend.bench import nvme_target
from memascend.bench.rounds import ratios, spread
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.storage.commands import preallocate
from memascend.storage.direct_engine import DirectEngine, DirectEngineConfig, space_for
from memascend.storage.native import _C

ENGINE, IN_FILE, SAME_PLACE, FILE_PER_TENSOR = "engine", "engine, file", "DeepNVMe", "DeepNVMe, file per tensor"
OPS = ("write", "read")
_PATTERN_BYTES = 64 << 20
_WARM_BYTES = 256 << 20  # a larger tensor is its own warm-up
_LEAST_SHARE = 0.97  # least fraction of the requested bytes that the disk must have moved


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """Options of the measurement by size.

    For one size, a way moves at most `budget_bytes` and at most `repeats` tensors, but at least one tensor.
    """

    sizes: tuple[int, ...]
    block_bytes: int
    depth: int
    repeats: int
    budget_bytes: int
    workers: tuple[int, ...] = (1,)
    register: bool = True

    def rounds(self, size: int) -> int:
        """Return how often a tensor of `size` bytes is moved in each direction, at least once."""
        return max(1, min(self.repeats, self.budget_bytes // max(1, size)))


@dataclass(frozen=True)
class _Way:
    """One way to move the tensor, with a function for each direction."""

    name: str
    run: dict[str, Callable[[], None]]  # by op


def measure(options: SizeOptions, owner: str, path: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the points, and the reason for each missing peer.

    Raises OSError if a way reads back data that differ from what was written, or if a cache served the transfers.
    """
    points: list[dict[str, Any]] = []
    largest = max(options.sizes)
    handle, missing = _deepnvme(options, largest)
    memory = _memory(handle, largest)
    with contextlib.ExitStack() as stack:
        stack.callback(_free, handle, memory)
        engines = {}
        for count in options.workers:
            config = DirectEngineConfig(
                block_bytes=options.block_bytes, depth=options.depth, workers=count, volatile=True, check_devices=False
            )
            name = ENGINE if count == 1 else f"{ENGINE}, {count} workers"
            engines[name] = stack.enter_context(DirectEngine([path], owner, config))
        if nvme_target.file_below(path) != path:
            folder = Path(nvme_target.file_below(path)).parent
            config = DirectEngineConfig(block_bytes=options.block_bytes, depth=options.depth)
            engines[IN_FILE] = stack.enter_context(
                DirectEngine.create_file_store(folder, space_for([largest]), owner, config)
            )
        for engine in engines.values() if options.register else ():
            engine.register_buffer(memory)
        for size in sorted(options.sizes, reverse=True):
            with _ways(engines, handle, memory[:size], path) as ways:
                points += _rounds(options, ways, memory[:size], path)
    return points, missing


def _deepnvme(options: SizeOptions, largest: int) -> tuple[Any, dict[str, str]]:
    """Return DeepNVMe's handle, or None and the reason why it is missing."""
    if not _can_lock(largest):
        limit = _C.memlock_limit_bytes()
        return None, {"DeepNVMe": f"it locks its buffer, and the limit on locked memory is {limit} bytes (ulimit -l)"}
    try:
        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed's logger binds stdout at import
            from memascend.integrations.deepspeed.deepnvme import deepnvme_handle

            return deepnvme_handle(options.block_bytes, options.depth), {}
    except ImportError as error:
        return None, {"DeepNVMe": str(error)}


def _can_lock(size: int) -> bool:
    """Return whether `size` bytes can be locked: within the limit, or by privilege.

    Privilege shows when a buffer just over the limit can be locked.
    """
    limit = _C.memlock_limit_bytes()
    if limit < 0 or size <= limit:
        return True
    try:
        PageAlignedPinnedAllocator(require_lock=True).allocate(limit + 4096, torch.uint8, name="probe", owner="bench")
    except MemoryError:
        return False
    return True


def _memory(handle: Any, size: int) -> torch.Tensor:
    """Return a buffer of `size` bytes filled with an incompressible pattern.

    If there is a handle, the buffer is locked memory from DeepNVMe, which copies from any other memory; the engine
    accepts both.
    """
    if handle is None:
        memory = PageAlignedPinnedAllocator(lock=False).allocate(size, torch.uint8, name="bench", owner="bench")
    else:
        memory = handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
    pattern = _pattern()
    for part in memory.split(_PATTERN_BYTES):
        part.copy_(pattern[: len(part)])
    return memory


def _free(handle: Any, memory: torch.Tensor) -> None:
    if handle is not None:
        handle.free_cpu_locked_tensor(memory)


def _pattern() -> torch.Tensor:
    """Return incompressible bytes, the same in every call."""
    out = torch.empty(_PATTERN_BYTES, dtype=torch.uint8)
    return out.random_(0, 256, generator=torch.Generator().manual_seed(_PATTERN_BYTES))


@contextlib.contextmanager
def _ways(engines: dict[str, DirectEngine], handle: Any, tensor: torch.Tensor, path: str) -> Iterator[list[_Way]]:
    """Yield the ways, each with space on the disk to which `tensor` has been written; release it afterwards."""
    ways = [_Way(name, {op: _engine_call(engine, op, tensor) for op in OPS}) for name, engine in engines.items()]
    for way in ways:
        way.run["write"]()
    below = nvme_target.file_below(path)
    own = Path(below).with_name("tensor")
    try:
        if handle is not None:
            extents = next(iter(engines.values())).info("one").extents
            if len(extents) != 1:
                raise OSError(f"{path}: no room for {tensor.nbytes} bytes in one piece: use fewer or smaller sizes")
            preallocate(str(own), tensor.nbytes, written=False)  # the first write below does that
            places = {SAME_PLACE: (below, extents[0][1]), FILE_PER_TENSOR: (str(own), 0)}
            for name, (file, offset) in places.items():
                ways.append(_Way(name, {op: _deepnvme_call(handle, op, tensor, file, offset) for op in OPS}))
                ways[-1].run["write"]()
        yield ways
    finally:
        own.unlink(missing_ok=True)
        for engine in engines.values():
            engine.erase("one")


def _engine_call(engine: DirectEngine, op: str, tensor: torch.Tensor) -> Callable[[], None]:
    submit = engine.read if op == "read" else engine.write

    def run() -> None:
        engine.wait(submit("one", tensor))

    return run


def _deepnvme_call(handle: Any, op: str, tensor: torch.Tensor, file: str, offset: int) -> Callable[[], None]:
    submit = handle.async_pread if op == "read" else handle.async_pwrite

    def run() -> None:
        submit(tensor, file, offset)
        handle.wait()

    return run


def _rounds(options: SizeOptions, ways: list[_Way], tensor: torch.Tensor, path: str) -> list[dict[str, Any]]:
    """Time all ways in shuffled rounds; return their points. Raises OSError for wrong data, or if a cache was
    measured."""
    points = {
        (way.name, op): {"question": "sizes", "method": way.name, "op": op, "bytes": tensor.nbytes, "seconds": [],
                         "device_share": []}
        for op in OPS for way in ways
    }  # fmt: skip
    order = random.Random(0)
    for number in range(options.rounds(tensor.nbytes)):
        for op in OPS:
            order.shuffle(ways)
            for way in ways:
                if tensor.nbytes <= _WARM_BYTES:
                    way.run[op]()
                if number == 0 and op == "read":
                    _blank(tensor)
                _time(points[way.name, op], way.run[op], path)
                if number == 0 and op == "read" and not _is_pattern(tensor):
                    raise OSError(f"{way.name} read back other data than was written to {path}")
    for point in points.values():
        if median(point["device_share"]) < _LEAST_SHARE and nvme_target.sectors(path):
            share = 100 * median(point["device_share"])
            what = f"{point['method']}, {point['op']} of {point['bytes']} bytes"
            raise OSError(f"{what}: the drive moved {share:.0f} % of them, so a cache was measured: use another folder")
    return list(points.values())


def _time(point: dict[str, Any], run: Callable[[], None], path: str) -> None:
    """Time one transfer, and the share of its bytes that the disk reports."""
    before = nvme_target.sectors(path)
    begin = time.perf_counter()
    run()
    point["seconds"].append(time.perf_counter() - begin)
    point["device_share"].append((nvme_target.sectors(path) - before) * 512 / point["bytes"])


def _edges(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the parts to check: all of a small tensor; start, middle and end of one that takes seconds to compare."""
    parts = list(tensor.split(_PATTERN_BYTES))
    return parts if len(parts) <= 4 else [parts[0], parts[len(parts) // 2], parts[-1]]


def _blank(tensor: torch.Tensor) -> None:
    """Overwrite the checked parts, so that a read that does nothing is noticed."""
    for part in _edges(tensor):
        part.zero_()


def _is_pattern(tensor: torch.Tensor) -> bool:
    """Return whether the checked parts have the pattern."""
    pattern = _pattern()
    return all(torch.equal(part, pattern[: len(part)]) for part in _edges(tensor))


def summary(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return medians with quartiles, and the speed-up, by round, over DeepNVMe at the same offset and in files."""
    by = {(point["method"], point["op"], point["bytes"]): point for point in points}
    out = []
    for (name, op, size), point in sorted(by.items(), key=lambda item: (item[0][1], item[0][2], item[0][0])):
        seconds = point["seconds"]
        row = {"question": "sizes", "method": name, "op": op, "bytes": size, "seconds": vars(spread(seconds))}
        row["device_share"] = vars(spread(point["device_share"]))
        peers = (SAME_PLACE, FILE_PER_TENSOR) if name.startswith(ENGINE) else ()
        row["times_faster_than"] = {
            peer: vars(ratios(by[peer, op, size]["seconds"], seconds)) for peer in peers if (peer, op, size) in by
        }
        out.append(row)
    return out


def store_bytes(options: SizeOptions) -> int:
    """Return the bytes that the store must hold."""
    return max(options.sizes, default=0) * len(options.workers) + (64 << 20)


def disk_bytes(options: SizeOptions) -> int:
    """Return the bytes needed on the disk in addition to the store."""
    return 2 * max(options.sizes, default=0) + (16 << 20)
