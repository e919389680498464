"""The checks of `memascend doctor`: each returns ok, warn or fail, what was found, and the exact fix.

`fail` marks what makes training impossible (exit status 1), `warn` what makes it slower, larger or untested.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from memascend.doctor import kernel, probe
from memascend.doctor.nodes import NodeSpeed, chosen_placement, measure_nodes
from memascend.doctor.speed import DeviceSpeed, device_speed, takes_direct_io
from memascend.memory.cgroup import host_memory, ram_bytes
from memascend.memory.topology import Node, Topology
from memascend.storage.shared_memory import headroom

OK, WARN, FAIL = "ok", "warn", "fail"
GIB, MIB = 2**30, 2**20
# io_uring was added in Linux 5.1; 5.6 has every operation that the engine uses.
KERNEL_WITH_URING = (5, 6)
# Requests in flight of DeepSpeed's engine and ours: queue depth 32, one queue per thread, two swappers, with a reserve.
AIO_EVENTS_A_RANK = 1024
_AIO_LIMIT = 1048576  # for fs.aio-max-nr; it costs nothing until it is used
# Below this rate (a SATA drive or a network file system), a step of the smallest committed model waits for minutes.
SLOW_DRIVE_BYTES_PER_S = 1e9
_FULL = {os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT)}
IN_MEMORY = {"tmpfs", "ramfs", "ramdisk"}
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "ceph", "lustre"}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report. `fix` is empty if there is nothing to fix."""

    name: str
    status: str
    found: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes that the plan of a model needs; the checks take None if no model was named."""

    label: str
    host_bytes: int
    locked_bytes: int
    device_bytes: int
    ssd_bytes: int
    read_bytes: int
    write_bytes: int


def size(nbytes: float) -> str:
    """Format a number of bytes as GiB or MiB."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.0f} MiB"


def check_kernel() -> Check:
    """Check whether the running kernel has io_uring with every operation that the engine uses."""
    found, release = probe.kernel_version(), os.uname().release
    if found >= KERNEL_WITH_URING:
        return Check(name="kernel", status=OK, found=f"Linux {release}")
    wanted = ".".join(map(str, KERNEL_WITH_URING))
    return Check(
        name="kernel",
        status=WARN,
        found=f"Linux {release}: io_uring needs {wanted}; libaio is used instead",
        fix=f"install a kernel from {wanted} on",
    )


def check_memlock(needs: Needs | None, limit: int | None) -> Check:
    """Check the limit on locked memory, `limit` in bytes (None: unlimited), against the plan."""
    wanted = needs.locked_bytes if needs else None
    if limit is None:
        return Check(name="locked memory", status=OK, found="no limit")
    if wanted is not None and wanted <= limit:
        return Check(name="locked memory", status=OK, found=f"limit {size(limit)}, the plan locks {size(wanted)}")
    plan = f", the plan locks {size(wanted)}" if wanted else ""
    return Check(
        name="locked memory",
        status=WARN,
        found=f"limit {size(limit)}{plan}: buffers are touched instead of locked, and stock DeepSpeed aborts",
        fix="ulimit -l unlimited; for good: echo '* - memlock unlimited' | sudo tee "
        "/etc/security/limits.d/90-memlock.conf, and log in again; in Docker: --ulimit memlock=-1",
    )


def check_uring(error: int, disabled: str) -> Check:
    """Check io_uring; `error` is from `kernel.uring_error`, `disabled` is the text of kernel.io_uring_disabled."""
    if not error:
        return Check(name="io_uring", status=OK, found="set up and closed again")
    fix = "run outside the container, or with a seccomp profile that allows io_uring_setup"
    if disabled.strip() in ("1", "2"):
        fix = "sudo sysctl -w kernel.io_uring_disabled=0"
    elif error == errno.ENOSYS:
        fix = "install a kernel from 5.6 on"
    elif error == errno.ENOMEM:
        fix = "ulimit -l unlimited (kernels before 5.12 count rings as locked memory)"
    return Check(name="io_uring", status=WARN, found=f"{os.strerror(error)}; libaio is used instead", fix=fix)


def check_libaio(error: int, most: str, used: str, ranks: int) -> Check:
    """Check libaio for `ranks` processes.

    `error` is from `kernel.libaio_error`; `most` and `used` are the texts of fs.aio-max-nr and fs.aio-nr.
    """
    wanted = AIO_EVENTS_A_RANK * ranks
    free = int(most) - int(used) if most.strip().isdecimal() and used.strip().isdecimal() else None
    if not error and (free is None or free >= wanted):
        note = f", {free:,} of fs.aio-max-nr free" if free is not None else ""
        return Check(name="libaio", status=OK, found=f"set up and destroyed again{note}")
    if error == errno.EAGAIN or (free is not None and free < wanted):
        enough = _AIO_LIMIT
        while free is not None and enough - int(used) < wanted:
            enough *= 2
        left = "too few" if free is None else f"{free:,}"
        return Check(
            name="libaio",
            status=WARN,
            found=f"{left} requests of fs.aio-max-nr are free, {wanted:,} may be needed; stock DeepSpeed aborts then",
            fix=f"sudo sysctl -w fs.aio-max-nr={enough}; for good: echo fs.aio-max-nr={enough} | sudo tee "
            "/etc/sysctl.d/90-aio.conf",
        )
    return Check(
        name="libaio",
        status=WARN,
        found=f"{os.strerror(error)}; io_uring is what remains",
        fix="run on x86_64 or aarch64, outside a sandbox that forbids io_setup",
    )


def check_memory(needs: Needs | None, root: Path = Path("/")) -> Check:
    """Check host memory, with the limit of the control group, against the plan."""
    total, free = ram_bytes(root)
    memory = host_memory(root)
    where, group = f"{size(total)} of RAM, {size(free)} available", memory.limited_by
    if group is not None:
        where += f"; control group (v{group.version}) allows {size(group.limit_bytes)}"
    if memory.scarce_in is not None:
        where += f", of which {size(memory.available_bytes)} are left"
    if needs is None:
        return Check(name="host memory", status=OK, found=where)
    found = f"{where}; the plan needs {size(needs.host_bytes)}"
    if needs.host_bytes > memory.limit_bytes:
        fix = "see docs/how-to/when-it-does-not-fit.md"
        if group is not None and needs.host_bytes <= total:
            fix = f"raise the limit in {group.file} (in Docker: --memory; under Slurm: --mem)"
        return Check(name="host memory", status=FAIL, found=found, fix=fix)
    if needs.host_bytes > memory.available_bytes:
        fix = "end other programs first: ps aux --sort=-rss | head shows the largest"
        return Check(name="host memory", status=WARN, found=found, fix=fix)
    return Check(name="host memory", status=OK, found=found)


def check_shared_memory(ranks: int, folder: Path = Path("/dev/shm")) -> Check:
    """Check whether /dev/shm has space for the buffers of DeepSpeed's ranks on a CPU."""
    left = headroom(ranks, folder)
    if left.suffices:
        return Check(name="shared memory", status=OK, found=f"{size(left.free_bytes)} free in {folder}")
    found = f"{size(left.free_bytes)} free in {folder}; DeepSpeed on a CPU takes {size(left.needed_bytes)}"
    return Check(name="shared memory", status=WARN, found=found, fix=left.FIX)


def check_swap(limit: int | None, root: Path = Path("/")) -> Check:
    """Check for swap, which is harmful if buffers are not locked: the kernel may then swap them out during training.

    `limit` is the limit on locked memory in bytes (None: unlimited).
    """
    swap = probe.swap_bytes(root)
    if not swap:
        return Check(name="swap", status=OK, found="none")
    if limit is None:
        return Check(name="swap", status=OK, found=f"{size(swap)}; locked buffers are never swapped")
    return Check(
        name="swap",
        status=WARN,
        found=f"{size(swap)}, and buffers cannot be locked: the kernel may swap them out",
        fix="raise the limit on locked memory (above), or sudo swapoff -a while training",
    )


def check_huge_pages(root: Path = Path("/")) -> Check:
    """Check whether transparent huge pages are switched on."""
    text = probe.read_text(root / "sys/kernel/mm/transparent_hugepage/enabled").strip()
    if "[never]" in text:
        return Check(
            name="huge pages",
            status=WARN,
            found="transparent huge pages are switched off: large buffers cost more page-table walks",
            fix="echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )
    return Check(name="huge pages", status=OK, found=f"transparent: {text}" if text else "the kernel does not say")


def check_numa(ranks: int, root: Path = Path("/"), speeds: Sequence[NodeSpeed] = ()) -> Check:
    """Check the memory nodes: size, free memory, distances and rates of each, on which placement decisions depend."""
    topology = Topology.read(root)
    with_cpus = topology.with_cpus
    measured = {speed.number: speed for speed in speeds}
    what = "; ".join(_node_line(node, measured.get(node.number)) for node in topology.nodes.values())
    if len(topology.nodes) <= 1:
        return Check(name="NUMA", status=OK, found=f"one node{': ' + what if speeds else ''}")
    what += f"; {chosen_placement(topology, list(speeds))}"
    if topology.memory_only or len(with_cpus) > ranks:
        nearest = with_cpus[0].number if with_cpus else 0
        placed = "memascend train --placement latency_first; docs/how-to/a-machine-with-several-memory-nodes.md"
        bound = f"numactl --cpunodebind={nearest} --preferred={nearest} memascend train ..."
        return Check(
            name="NUMA",
            status=WARN,
            found=f"{what}; buffers may land far from the cores that stream them",
            fix=placed if topology.memory_only else bound,
        )
    return Check(name="NUMA", status=OK, found=what)


def _node_line(node: Node, speed: NodeSpeed | None = None) -> str:
    """Describe a memory node: size, free memory, distances, and rates by the firmware and as measured."""
    distances = ", ".join(f"{far} to {number}" for number, far in node.distances.items() if number != node.number)
    line = (
        f"node {node.number}: {size(node.total_bytes)}{' without CPUs' if node.memory_only else ''}, "
        f"{size(node.available_bytes)} free" + (f", distance {distances}" if distances else "")
    )
    if node.bandwidth_bytes_per_s and node.latency_ns:
        line += f", by the firmware {node.latency_ns:.0f} ns and {node.bandwidth_bytes_per_s / 1e9:.0f} GB/s"
    if node.weight is not None:
        line += f", weight {node.weight}"
    if speed is not None:
        line += (
            f", a load {speed.latency_ns:.0f} ns, copies {speed.copy_bytes_per_s / 1e9:.1f} GB/s, AdamW "
            f"{speed.adamw_bytes_per_s / 1e9:.1f} GB/s"
        )
    return line


def check_gpu(needs: Needs | None, cuda: tuple[bool, str], found: list[probe.Gpu]) -> Check:
    """Check the GPUs. `cuda`: whether torch sees CUDA, and its version; `found`: the GPUs that nvidia-smi lists."""
    usable, version = cuda
    if usable and found:
        gpu = found[0]
        text = f"{len(found)} x {gpu.name}, {size(gpu.memory_bytes)}, CUDA {version}"
        if needs and needs.device_bytes > gpu.memory_bytes:
            return Check(
                name="GPU",
                status=FAIL,
                found=f"{text}; the plan needs {size(needs.device_bytes)}",
                fix="a smaller --batch or --context: memascend plan --gpu-memory says the largest",
            )
        return Check(name="GPU", status=OK, found=text)
    if found:
        return Check(
            name="GPU",
            status=WARN,
            found=f"{len(found)} x {found[0].name}, but this torch ({version}) cannot use it",
            fix="make setup CUDA=1",
        )
    return Check(
        name="GPU",
        status=WARN,
        found=f"none (torch {version}): training runs on the CPU, to try things out on small models",
        fix="a machine with an NVIDIA GPU and its driver; nvidia-smi must list it",
    )


def file_system(folder: Path, root: Path = Path("/")) -> str:
    """Return the type of the file system that holds `folder`, found by the longest mount point above it."""
    best = ("", "")
    for line in probe.read_text(root / "proc/self/mounts").splitlines():
        fields = line.split()
        if len(fields) > 2:
            point = fields[1].replace("\\040", " ")
            inside = point == "/" or folder == Path(point) or Path(point) in folder.parents
            if inside and len(point) >= len(best[0]):
                best = (point, fields[2])
    return best[1]


def check_folder(folder: Path, kind: str, option: str = "--nvme") -> Check:
    """Check whether swap files can be created in `folder` with O_DIRECT; `kind` is from :func:`file_system`.

    `option` named the folder, for the fix.
    """
    name, where = "O_DIRECT", f"{folder} ({kind or 'unknown file system'})"
    if not folder.is_dir():
        fix = "the folder that it lies in, or another" if folder.exists() else f"mkdir -p {folder}"
        return Check(name=name, status=FAIL, found=f"{folder} is no folder", fix=fix)
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return Check(
            name=name,
            status=FAIL,
            found=f"{where} is mounted read-only",
            fix=f"sudo mount -o remount,rw the file system (dmesg says why it is not), or {option} with another folder",
        )
    if not os.access(folder, os.W_OK):
        return Check(
            name=name,
            status=FAIL,
            found=f"{folder} cannot be written",
            fix=f"sudo chown $USER {folder}, or another folder",
        )
    if kind in IN_MEMORY:
        return Check(
            name=name,
            status=FAIL,
            found=f"{where} lies in memory itself",
            fix=f"{option} with a folder on the SSD: df -h",
        )
    refused = takes_direct_io(folder)
    if refused in _FULL:
        fix = f"free some space, or {option} with another folder"
        return Check(name=name, status=FAIL, found=f"{where}: {refused}", fix=fix)
    if refused:
        return Check(
            name=name,
            status=FAIL,
            found=f"{where}: {refused}",
            fix=f"{option} with a folder on ext4 or XFS on the SSD itself: df -hT lists them",
        )
    if kind in _NETWORK:
        return Check(name=name, status=WARN, found=f"{where}: a network file system", fix=f"{option} with a local SSD")
    return Check(name=name, status=OK, found=f"{where}: written and read back")


def check_space(folder: Path, needs: Needs | None) -> Check:
    """Check the free space of a folder against the plan."""
    free = shutil.disk_usage(folder).free
    if needs is None:
        return Check(name="free space", status=OK, found=f"{size(free)} in {folder}")
    found = f"{size(free)} in {folder}; the plan needs {size(needs.ssd_bytes)}"
    if needs.ssd_bytes > free:
        short = needs.ssd_bytes - free
        fix = (
            f"free {size(short)} there, or --nvme with another folder (du -sh {folder}/* shows what earlier runs left)"
        )
        return Check(name="free space", status=FAIL, found=found, fix=fix)
    return Check(name="free space", status=OK, found=found)


def check_speed(folder: Path, needs: Needs | None, option: str = "--nvme") -> tuple[Check, DeviceSpeed | None]:
    """Measure the drive for a few seconds, with an unnamed file of at most 1 GiB and a tenth of the free space.

    `option` named the folder, for the fix.
    """
    try:
        free = shutil.disk_usage(folder).free
        speed = device_speed(folder, min(1 << 30, free // 10))
    except OSError as error:
        fix = f"free some space, or {option} with another folder"
        return Check(name="drive speed", status=FAIL, found=f"{folder}: {error.strerror}", fix=fix), None
    found = (
        f"writes {speed.write_bytes_per_s / 1e9:.2f} GB/s, reads {speed.read_bytes_per_s / 1e9:.2f} GB/s "
        f"({size(speed.tried_bytes)} by O_DIRECT)"
    )
    if needs and needs.write_bytes:
        seconds = needs.read_bytes / speed.read_bytes_per_s + needs.write_bytes / speed.write_bytes_per_s
        found += f"; a step of the plan would spend {seconds:,.3g} s on it"
    if min(speed.write_bytes_per_s, speed.read_bytes_per_s) < SLOW_DRIVE_BYTES_PER_S:
        return Check(
            name="drive speed",
            status=WARN,
            found=found,
            fix="an NVMe SSD on PCIe: docs/how-to/choose-and-prepare-an-ssd.md says what to look for",
        ), speed
    return Check(name="drive speed", status=OK, found=found), speed


def check_all(
    folder: Path | None, needs: Needs | None, ranks: int, *, try_speed: bool = True, other_paths: bool = False
) -> Iterator[Check]:
    """Yield every check of this machine, in the order of the report; those of packages are in `packages`.

    With `other_paths`, paths that are checked elsewhere take the place of `folder`, which may then be None.
    """
    proc = Path("/proc/sys")
    limit = kernel.lockable_bytes()
    yield check_kernel()
    yield check_memory(needs)
    yield check_memlock(needs, limit)
    yield check_shared_memory(ranks)
    yield check_swap(limit)
    yield check_huge_pages()
    yield check_numa(ranks, speeds=measure_nodes() if try_speed else ())
    yield check_uring(kernel.uring_error(), probe.read_text(proc / "kernel/io_uring_disabled"))
    events = AIO_EVENTS_A_RANK * ranks
    most, used = (probe.read_text(proc / "fs" / name) for name in ("aio-max-nr", "aio-nr"))
    yield check_libaio(kernel.libaio_error(events), most, used, ranks)
    if folder is None:
        if not other_paths:
            fix = "memascend doctor --nvme FOLDER"
            yield Check(name="O_DIRECT", status=WARN, found="not tried: no folder was named", fix=fix)
        return
    folder = folder.absolute()
    in_folder = check_folder(folder, file_system(folder.resolve()))
    yield in_folder
    if in_folder.status == FAIL:
        return
    yield check_space(folder, needs)
    if try_speed:
        yield check_speed(folder, needs)[0]
