"""Host memory under control groups: files as on other machines, and a real group where one can be made."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from memascend.memory import cgroup
from memascend.memory.cgroup import host_memory, memory_groups, ram_bytes
from memascend.training import preflight
from memascend.training.config import TrainConfig

GIB = 2**30
NONE_V1 = str(2**63 - 4096)  # how the kernel writes that there is no limit


def machine(root: Path, contents: dict[str, str], total_gib: int = 64, available_gib: int = 60) -> Path:
    memory = f"MemTotal: {total_gib << 20} kB\nMemAvailable: {available_gib << 20} kB\n"
    for name, text in ({"proc/meminfo": memory} | contents).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_tightest_version_2_limit_among_the_ancestors_applies(tmp_path):
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/app\n",
            "sys/fs/cgroup/user.slice/app/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/memory.max": str(16 * GIB),
        },
    )
    memory = host_memory(root)
    assert (memory.limit_bytes, memory.limited_by.version) == (16 * GIB, 2)
    assert memory.limited_by.file == root / "sys/fs/cgroup/user.slice/memory.max"


def test_version_1_limit_is_found_among_other_controllers(tmp_path):
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/slurm/job_1\n0::/\n",
            "sys/fs/cgroup/memory/slurm/job_1/memory.limit_in_bytes": NONE_V1,
            "sys/fs/cgroup/memory/slurm/memory.limit_in_bytes": str(8 * GIB),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": NONE_V1,
        },
    )
    assert [(g.version, g.limit_bytes) for g in memory_groups(root)] == [(1, 8 * GIB)]
    assert host_memory(root).limit_bytes == 8 * GIB


def test_available_memory_follows_the_fullest_group_and_counts_page_cache(tmp_path):
    below, above = "sys/fs/cgroup/a/b", "sys/fs/cgroup/a"
    reclaimable = ("inactive_file", "active_file", "slab_reclaimable")
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            f"{below}/memory.max": str(8 * GIB),
            f"{below}/memory.current": str(1 * GIB),
            f"{above}/memory.max": str(16 * GIB),
            f"{above}/memory.current": str(14 * GIB),
            f"{above}/memory.stat": "".join(f"{name} {GIB}\n" for name in (*reclaimable, "anon")),
        },
    )
    memory = host_memory(root)
    assert (memory.limit_bytes, memory.limited_by.file) == (8 * GIB, root / below / "memory.max")
    assert (memory.available_bytes, memory.scarce_in.file) == (5 * GIB, root / above / "memory.max")


def test_version_1_availability_subtracts_the_groups_own_usage(tmp_path):
    group = "sys/fs/cgroup/memory/job"
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/job\n",
            f"{group}/memory.limit_in_bytes": str(8 * GIB),
            f"{group}/memory.usage_in_bytes": str(6 * GIB),
            f"{group}/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n",
        },
    )
    assert host_memory(root).available_bytes == 4 * GIB


def test_container_finds_its_own_group_mounted_at_the_top(tmp_path):
    """/proc/self/cgroup names the host's folder, but the mount shows that folder itself, at an unusual place."""
    mount = "35 31 0:32 /docker/abc /mnt/groups/memory ro shared:9 - cgroup cgroup rw,memory\n"
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc/inner\n",
            "proc/self/mountinfo": "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mount,
            "mnt/groups/memory/inner/memory.limit_in_bytes": NONE_V1,
            "mnt/groups/memory/memory.limit_in_bytes": str(4 * GIB),
        },
    )
    assert [g.file for g in memory_groups(root)] == [root / "mnt/groups/memory/memory.limit_in_bytes"]


def test_process_outside_its_namespace_gets_the_mounted_groups_limit(tmp_path):
    root = machine(
        tmp_path,
        {"proc/self/cgroup": "0::/../../other\n", "sys/fs/cgroup/memory.max": str(4 * GIB)},
    )
    assert host_memory(root).limit_bytes == 4 * GIB


def test_missing_or_larger_limit_falls_back_to_the_ram(tmp_path):
    root = machine(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": str(128 * GIB)})
    memory = host_memory(root)
    assert (memory.limit_bytes, memory.limited_by) == (64 * GIB, None)
    assert (memory.available_bytes, memory.scarce_in) == (60 * GIB, None)
    assert memory_groups(machine(tmp_path / "none", {})) == []


def test_missing_meminfo_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot read MemTotal"):
        ram_bytes(tmp_path)


def test_training_beyond_its_control_group_is_refused(tmp_path, monkeypatch):
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slurm/job_7\n",
            "sys/fs/cgroup/slurm/job_7/memory.max": str(GIB),
            "sys/fs/cgroup/slurm/job_7/memory.current": str(GIB // 2),
        },
    )
    monkeypatch.setattr(preflight, "host_memory", lambda: host_memory(root))
    prepared = {"planned_host_bytes": GIB, "planned_components": {"pool": GIB}, "parameters": 1}
    with pytest.raises(ValueError, match=r"512 MiB are available in the control group of .*job_7/memory.max"):
        preflight.check(TrainConfig(model="m", data=["d"]), prepared, tmp_path, None)


LIMIT_BYTES = 256 << 20
ALLOCATE_UNDER_A_LIMIT = """
import os, sys, torch
from memascend.memory.pinned import PageAlignedPinnedAllocator as Exact
group, steps = sys.argv[1], [int(size) for size in sys.argv[2].split(",")]
with open(group + "/cgroup.procs", "w") as members:
    members.write(str(os.getpid()))
kept = []
try:
    for size in steps:
        kept.append(Exact().allocate(size << 20, torch.uint8, name="pool", owner="test"))
except MemoryError as error:
    print(len(kept), error)
"""


@pytest.fixture
def group():
    """Make a memory control group with a limit of 256 MiB, below the group of this process; return its folder."""
    version, place = 2, Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            version, place = 1, Path("/sys/fs/cgroup/memory") / path.lstrip("/")
            break
    folder = place / f"memascend-test-{uuid.uuid4().hex}"
    try:
        folder.mkdir()
        (folder / cgroup._LIMIT[version]).write_text(str(LIMIT_BYTES))
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"no memory control group can be made here: {error.strerror}")
    yield folder
    folder.rmdir()


@pytest.mark.parametrize(
    ("steps", "allocated", "words"),
    [("512", "0", "MiB that"), ("192,192", "1", "leaves now"), (",".join(["48"] * 8), None, "leaves now")],
)
def test_allocation_beyond_a_real_group_limit_raises_without_a_kill(group, steps, allocated, words):
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATE_UNDER_A_LIMIT, str(group), steps],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode != -signal.SIGKILL, "the kernel killed it"
    assert (done.returncode, done.stderr) == (0, "")
    number, _, message = done.stdout.partition(" ")
    assert message.startswith("pinned buffer 'pool'")
    assert words in message
    assert str(group / cgroup._LIMIT[1 if (group / cgroup._LIMIT[1]).exists() else 2]) in message
    assert allocated is None or number == allocated
    assert os.path.isdir(group)
