"""`memascend doctor`: each probe on files as on other machines, each
check's three answers, and the real probes here."""

import errno
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch  # noqa: F401  (first: the extension needs its libraries)

from memascend import _C
from memascend.cli import main
from memascend.doctor import checks, kernel, packages, probe
from memascend.doctor.checks import FAIL, OK, WARN, Needs
from memascend.doctor.local import local_machine
from memascend.doctor.nodes import NodeSpeed, measure_nodes
from memascend.doctor.speed import BLOCK_BYTES, device_speed, takes_direct_io, temporary_file
from memascend.memory.cgroup import host_memory

GIB = 2**30
NEEDS = Needs(
    label="a plan",
    host_bytes=40 * GIB,
    locked_bytes=30 * GIB,
    device_bytes=20 * GIB,
    ssd_bytes=100 * GIB,
    read_bytes=150 * GIB,
    write_bytes=137 * GIB,
)
A100 = probe.Gpu(name="NVIDIA A100-SXM4-40GB", memory_bytes=40 * GIB, flops_per_s=312e12, pcie_bytes_per_s=31.5e9)


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(total_gib: int, available_gib: int, swap_gib: int = 0) -> dict[str, str]:
    lines = (("MemTotal", total_gib), ("MemAvailable", available_gib), ("SwapTotal", swap_gib))
    return {"proc/meminfo": "".join(f"{name}: {size << 20} kB\n" for name, size in lines)}


def judged(check, status: str, *words: str) -> None:
    """Check the status, and words of the finding and of the fix; every status except ok has a fix."""
    assert check.status == status, check
    assert bool(check.fix) == (status != OK)
    for word in words:
        assert word in f"{check.found} {check.fix}"
    assert "\n" not in check.found + check.fix


def test_host_memory_above_cgroup_limit_fails_and_names_its_file(tmp_path):
    limit = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": str(32 * GIB)}
    root = files(tmp_path, meminfo(64, 60) | limit)
    judged(checks.check_memory(NEEDS, root), FAIL, "allows 32.0 GiB", "the plan needs 40.0 GiB", "memory.max")
    judged(checks.check_memory(None, root), OK, "control group (v2)")


def test_host_memory_check_warns_if_other_programs_use_it(tmp_path):
    judged(checks.check_memory(NEEDS, files(tmp_path, meminfo(64, 30))), WARN, "30.0 GiB available", "ps aux")


@pytest.mark.parametrize(("ram", "status"), [(32, FAIL), (64, OK)])
def test_host_memory_is_checked_against_the_plan(tmp_path, ram, status):
    judged(checks.check_memory(NEEDS, files(tmp_path, meminfo(ram, ram))), status)


def test_locked_memory():
    judged(checks.check_memlock(NEEDS, None), OK, "no limit")
    judged(checks.check_memlock(NEEDS, 31 * GIB), OK, "the plan locks 30.0 GiB")
    judged(checks.check_memlock(NEEDS, 8 << 20), WARN, "8 MiB", "ulimit -l unlimited", "memlock=-1")
    judged(checks.check_memlock(None, 8 << 20), WARN)


def test_swap(tmp_path):
    with_swap = files(tmp_path, meminfo(64, 60, swap_gib=8))
    judged(checks.check_swap(8 << 20, with_swap), WARN, "8.0 GiB", "swapoff")
    judged(checks.check_swap(None, with_swap), OK, "never swapped")
    judged(checks.check_swap(8 << 20, files(tmp_path / "other", meminfo(64, 60))), OK, "none")


@pytest.mark.parametrize(
    ("error", "disabled", "status", "words"),
    [
        (0, "0", OK, "set up"),
        (errno.EPERM, "2", WARN, "sysctl -w kernel.io_uring_disabled=0"),
        (errno.EPERM, "0", WARN, "seccomp"),
        (errno.ENOSYS, "", WARN, "kernel from 5.6"),
        (errno.ENOMEM, "0", WARN, "ulimit -l unlimited"),
    ],
)
def test_io_uring(error, disabled, status, words):
    judged(checks.check_uring(error, disabled), status, words)


@pytest.mark.parametrize(
    ("error", "most", "used", "status", "words"),
    [
        (0, "65536", "128", OK, "65,408"),
        (0, "65536", "65000", WARN, "fs.aio-max-nr=1048576"),
        (errno.EAGAIN, "65536", "65536", WARN, "fs.aio-max-nr=1048576"),
        (errno.EAGAIN, "", "", WARN, "too few requests of fs.aio-max-nr are free"),
        (0, "1048576", "1048500", WARN, "fs.aio-max-nr=2097152"),
        (errno.ENOSYS, "", "", WARN, "io_uring is what remains"),
    ],
)
def test_libaio(error, most, used, status, words):
    judged(checks.check_libaio(error, most, used, ranks=1), status, words)


def test_kernel_versions(monkeypatch):
    assert probe.kernel_version("5.4.0-42-generic") == (5, 4)
    assert probe.kernel_version("unknown") == (0, 0)
    monkeypatch.setattr(probe, "kernel_version", lambda: (5, 4))
    judged(checks.check_kernel(), WARN, "io_uring needs 5.6")


@pytest.mark.parametrize(
    ("text", "status"), [("always [madvise] never", OK), ("always madvise [never]", WARN), ("", OK)]
)
def test_huge_pages(tmp_path, text, status):
    judged(checks.check_huge_pages(files(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": text})), status)


def numa(root: Path, *cpus: str) -> Path:
    node = "sys/devices/system/node/node"
    for number, listed in enumerate(cpus):
        files(
            root,
            {f"{node}{number}/cpulist": listed, f"{node}{number}/meminfo": f"Node {number} MemTotal: {32 << 20} kB"},
        )
    return root


def test_numa(tmp_path):
    judged(checks.check_numa(1, numa(tmp_path / "one", "0-7")), OK, "one node")
    judged(checks.check_numa(1, numa(tmp_path / "two", "0-7", "8-15")), WARN, "numactl --cpunodebind=0")
    judged(checks.check_numa(2, numa(tmp_path / "ranks", "0-7", "8-15")), OK)
    card = checks.check_numa(1, numa(tmp_path / "cxl", "0-7", ""))
    judged(card, WARN, "node 1: 32.0 GiB without CPUs", "latency_first fills node 0", "--placement latency_first")


def test_numa_reports_measured_speeds_next_to_firmware_values(tmp_path):
    root = numa(tmp_path, "0-7", "")
    for number, (latency, bandwidth) in enumerate(((100, 200_000), (250, 27_000))):
        node = f"sys/devices/system/node/node{number}"
        files(root, {f"{node}/access0/initiators/read_latency": f"{latency}\n"})
        files(root, {f"{node}/access0/initiators/read_bandwidth": f"{bandwidth}\n"})
        files(root, {f"sys/kernel/mm/mempolicy/weighted_interleave/node{number}": f"{7 - 6 * number}\n"})
    card = NodeSpeed(number=1, latency_ns=251.4, copy_bytes_per_s=2.5e10, adamw_bytes_per_s=2.7e10)
    judged(
        checks.check_numa(1, root, [card]),
        WARN,
        "by the firmware 100 ns and 200 GB/s, weight 7",
        "by the firmware 250 ns and 27 GB/s, weight 1, a load 251 ns, copies 25.0 GB/s, AdamW 27.0 GB/s",
        "divided 200 : 27 (GB/s of the firmware; AdamW measured 27.0)",
    )


def test_nodes_of_this_machine_are_measured():
    (*speeds,) = measure_nodes(bytes_at_most=16 << 20)
    assert len(speeds) >= 1
    for speed in speeds:
        assert speed.latency_ns > 0
        assert speed.copy_bytes_per_s > 0
        assert speed.adamw_bytes_per_s > 0


def test_numa_reports_free_memory_and_distance_of_each_node(tmp_path):
    root = numa(tmp_path, "0-7", "")
    for number, row in enumerate(("10 24", "24 10")):
        folder = root / f"sys/devices/system/node/node{number}"
        (folder / "distance").write_text(row)
        free = f"Node {number} MemFree: {(number + 1) * 4 << 20} kB"
        (folder / "meminfo").write_text(f"Node {number} MemTotal: {32 << 20} kB\n{free}\n")
    judged(
        checks.check_numa(1, root),
        WARN,
        "node 0: 32.0 GiB, 4.0 GiB free, distance 24 to 1; node 1: 32.0 GiB without CPUs, 8.0 GiB free, ",
        "distance 24 to 0",
    )


def test_gpu():
    judged(checks.check_gpu(NEEDS, (True, "12.8"), [A100]), OK, "A100", "CUDA 12.8")
    judged(checks.check_gpu(NEEDS, (False, "2.13.0+cpu"), [A100]), WARN, "make setup CUDA=1")
    judged(checks.check_gpu(None, (False, "2.13.0+cpu"), []), WARN, "on the CPU")
    small = probe.Gpu(name="RTX", memory_bytes=8 * GIB, flops_per_s=None, pcie_bytes_per_s=None)
    judged(checks.check_gpu(NEEDS, (True, "12.8"), [small]), FAIL, "the plan needs 20.0 GiB", "--batch")


def test_gpus_are_read_from_nvidia_smi():
    def query():
        return "NVIDIA H100 PCIe, 81559, 5, 16\nUnheard-of 9000, 1024, [N/A], [N/A]\n"

    h100, other = probe.gpus(query)
    assert (h100.flops_per_s, h100.memory_bytes) == (756e12, 81559 << 20)
    assert h100.pcie_bytes_per_s == pytest.approx(63e9, rel=0.01)
    assert (other.flops_per_s, other.pcie_bytes_per_s) == (None, None)


@pytest.mark.parametrize("error", [FileNotFoundError(), subprocess.CalledProcessError(9, "nvidia-smi")])
def test_a_machine_without_a_driver_has_no_gpu(error):
    def query():
        raise error

    assert probe.gpus(query) == []


def test_the_file_system_is_that_of_the_longest_mount_point(tmp_path):
    mounts = "rootfs / ext4 rw 0 0\nnvme /mnt/nvme xfs rw 0 0\nshm /mnt/nvme/ram\\040disk tmpfs rw 0 0\n"
    root = files(tmp_path, {"proc/self/mounts": mounts})
    assert checks.file_system(Path("/mnt/nvme/swap"), root) == "xfs"
    assert checks.file_system(Path("/mnt/nvme/ram disk"), root) == "tmpfs"
    assert checks.file_system(Path("/mnt/other"), root) == "ext4"


def test_folders_that_cannot_hold_swap_files_fail(tmp_path):
    judged(checks.check_folder(tmp_path / "none", "ext4"), FAIL, "no folder", "mkdir -p")
    (tmp_path / "file").write_text("")
    judged(checks.check_folder(tmp_path / "file", "ext4"), FAIL, "no folder", "the folder that it lies in, or another")
    judged(checks.check_folder(tmp_path, "tmpfs"), FAIL, "lies in memory itself")


def test_file_system_that_refuses_o_direct_fails_with_a_fix(tmp_path, monkeypatch):
    real = os.open

    def refusing(name, flags, *more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(name, flags, *more)

    monkeypatch.setattr(os, "open", refusing)
    judged(checks.check_folder(tmp_path, "fuse"), FAIL, "EINVAL", "ext4 or XFS")
    assert list(tmp_path.iterdir()) == []


def test_full_and_read_only_drives_get_a_matching_fix(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "takes_direct_io", lambda _: os.strerror(errno.ENOSPC))
    judged(checks.check_folder(tmp_path, "ext4", "--tiers"), FAIL, "free some space, or --tiers with another")
    volume = SimpleNamespace(f_flag=os.ST_RDONLY)
    monkeypatch.setattr(os, "statvfs", lambda _: volume)
    judged(checks.check_folder(tmp_path, "ext4"), FAIL, "is mounted read-only", "remount,rw")


def test_the_temporary_file_has_no_name_while_it_is_used(tmp_path):
    with temporary_file(tmp_path) as descriptor:
        assert list(tmp_path.iterdir()) == []
        assert os.write(descriptor, b"x") == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_free_space(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    too_much = Needs(**{**vars(NEEDS), "ssd_bytes": 2 * free + GIB})
    judged(checks.check_space(tmp_path, too_much), FAIL, "the plan needs")
    judged(checks.check_space(tmp_path, Needs(**{**vars(NEEDS), "ssd_bytes": 1})), OK)
    judged(checks.check_space(tmp_path, None), OK)


@pytest.fixture
def direct(tmp_path):
    """Return a folder whose file system accepts O_DIRECT."""
    refused = takes_direct_io(tmp_path)
    if refused:
        pytest.skip(f"{tmp_path}: {refused}")
    return tmp_path


def test_o_direct_accepted_but_served_by_page_cache_fails(direct, monkeypatch):
    monkeypatch.setattr(_C, "direct_limits", lambda path: (False, 1))
    judged(checks.check_folder(direct, "ext4"), FAIL, "goes through the page cache all the same")


def test_drive_speed_is_measured_and_leaves_no_file(direct):
    speed = device_speed(direct, 8 * BLOCK_BYTES)
    assert speed.tried_bytes == 8 * BLOCK_BYTES
    assert min(speed.write_bytes_per_s, speed.read_bytes_per_s) > 0
    assert list(direct.iterdir()) == []


def test_slow_drive_warns_and_seconds_of_the_plan_are_given(direct, monkeypatch):
    for rate, status in ((0.2e9, WARN), (5e9, OK)):
        made = checks.DeviceSpeed(write_bytes_per_s=rate, read_bytes_per_s=rate, tried_bytes=GIB)
        monkeypatch.setattr(checks, "device_speed", lambda folder, size, made=made: made)
        seconds = (NEEDS.read_bytes + NEEDS.write_bytes) / rate
        check, _ = checks.check_speed(direct, NEEDS)
        judged(check, status, f"would spend {seconds:,.3g} s")


def test_a_full_drive_is_a_failure_with_a_fix(direct, monkeypatch):
    def full(folder, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checks, "device_speed", full)
    judged(checks.check_speed(direct, None)[0], FAIL, "No space left", "another folder")


def test_probes_query_the_real_kernel():
    assert kernel.uring_error() in {0, errno.EPERM, errno.ENOSYS, errno.ENOMEM}
    assert kernel.uring_error(entries=0) != 0  # a ring without entries is refused wherever rings are allowed
    assert kernel.libaio_error(16) in {0, errno.EAGAIN, errno.ENOSYS, errno.EPERM}
    limit = kernel.lockable_bytes()
    assert limit is None or limit >= 0


def test_packages(tmp_path):
    judged(packages.check_torch(None), FAIL, "not installed")
    judged(packages.check_torch("2.1.0"), WARN, "not been tried")
    judged(packages.check_deepspeed(None, ("0.19.8",)), WARN, "only lohan, in_memory and ssdtrain train")
    judged(packages.check_deepspeed("0.15.0", ("0.16.7", "0.19.8")), WARN, "tried: 0.16.7, 0.19.8", "==0.19.8")
    judged(packages.check_deepspeed("0.19.8", ("0.19.8",)), OK)
    judged(packages.check_transformers("4.40.1"), WARN, "older than 4.51")
    judged(packages.check_transformers(None), WARN, "huggingface")
    judged(packages.check_ops(tmp_path), WARN, "async_io, cpu_adam not compiled")
    files(tmp_path, {f"{path}.cpython-311.so": "" for path in packages.OPS.values()})
    judged(packages.check_ops(tmp_path), OK)
    judged(packages.check_ops(tmp_path, gpu=True), WARN, "not compiled for the GPU", "--load-ops")
    judged(packages.check_ops(tmp_path, ["async_io"], gpu=True), WARN, "cpu_adam not compiled for the GPU")
    judged(packages.check_ops(tmp_path, ["async_io", "cpu_adam"], gpu=True), OK)
    judged(packages.check_ops(None, ["async_io", "cpu_adam"]), OK)
    locks = {"cpu_adam": tmp_path / "lock"}
    judged(packages.check_ops(None, ["async_io", "cpu_adam"], locks=locks), FAIL, "cpu_adam would wait", "lock, unless")
    judged(packages.check_ops(tmp_path, locks=locks), OK)  # prebuilt: nothing is loaded from this folder


def test_the_command_prints_every_check_and_its_status(capsys, direct):
    status = main(["doctor", "--nvme", str(direct), "--no-speed", "--json"])
    made = json.loads(capsys.readouterr().out)
    names = [check["name"] for check in made["checks"]]
    ops = ["DeepSpeed ops"] if packages.version("deepspeed") else []
    assert names == [
        "kernel", "host memory", "locked memory", "shared memory", "swap", "huge pages", "NUMA", "io_uring", "libaio",
        "O_DIRECT", "free space", "GPU", "extension", "torch", "DeepSpeed", *ops, "transformers",
    ]  # fmt: skip
    assert {check["status"] for check in made["checks"]} <= {OK, WARN, FAIL}
    assert all(bool(check["fix"]) for check in made["checks"] if check["status"] != OK)
    assert made["failed"] == (status == 1) == any(check["status"] == FAIL for check in made["checks"])


def test_a_plan_that_cannot_fit_ends_in_status_1(capsys, direct):
    status = main(["doctor", "--nvme", str(direct), "--no-speed", "--model", "qwen2.5-32b", "--batch", "1000"])
    captured = capsys.readouterr()
    assert (status, captured.err) == (1, "")
    assert "against the plan: MemAscend, Qwen2.5-32B" in captured.out
    assert "fail  host memory" in captured.out
    assert "fix: " in captured.out


def test_without_a_folder_o_direct_is_not_tried(capsys):
    main(["doctor"])
    out = capsys.readouterr().out
    assert "warn  O_DIRECT        not tried: no folder was named" in out
    assert "drive speed" not in out


def test_folders_of_tiers_count_as_named(capsys, direct):
    main(["doctor", "--no-speed", "--tiers", str(direct)])
    out = capsys.readouterr().out
    assert f"ok    path            {direct}" in out
    assert "no folder was named" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch", "8"], "--batch belongs to the plan of --model: add --model, or leave --batch out"),
        (["--model", "gpt-5"], "unknown model 'gpt-5'"),
        (["--model", "llama3.2-1b", "--system", "floppy"], "unknown system 'floppy'"),
        (["--gpus", "none"], "'none' is not a positive whole number"),
        (["--fix"], "--fix"),
    ],
)
def test_bad_input_gives_a_one_line_error(capsys, arguments, words):
    status = main(["doctor", *arguments])
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_this_machine_is_described_for_the_planner(direct):
    machine = local_machine(None)
    assert machine.ram_bytes == host_memory().limit_bytes
    assert machine.memory_bytes_per_s > 0
    assert machine.ssd_read_bytes_per_s is None
    assert set(machine.sources) >= {"memory_bytes_per_s"}


def test_missing_folder_gives_a_clear_error(tmp_path):
    with pytest.raises(ValueError, match="cannot test the SSD in"):
        local_machine(tmp_path / "none")
