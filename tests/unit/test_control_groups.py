"""Limits on I/O and CPU work with both versions of the kernel's control groups."""

import os

import pytest

from hardware import control_groups
from hardware.control_groups import CannotThrottleError, Controller, find_controller

# A folder replaces the kernel's hierarchy here, and the tests check what is written. That versions 1 and 2 really limit
# is tested on machines that have one of them: tests/unit/test_time_twin.py, tests/integration/test_several_paths.py.


@pytest.fixture
def second(tmp_path, monkeypatch):
    """Make a machine with version 2 only; return its root."""
    root = tmp_path / "cgroup"
    root.mkdir()
    (root / "cgroup.controllers").write_text("cpuset cpu io memory\n")
    (root / "cgroup.subtree_control").write_text("memory\n")
    (tmp_path / "mounts").write_text(f"proc /proc proc rw 0 0\ncgroup2 {root} cgroup2 rw,nosuid 0 0\n")
    (tmp_path / "mine").write_text("0::/user.slice\n")
    monkeypatch.setattr(control_groups, "V1_ROOTS", tmp_path / "none")
    monkeypatch.setattr(control_groups, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(control_groups, "MINE", tmp_path / "mine")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return root


def test_version_2_is_used_where_version_1_is_missing(second):
    assert find_controller("io") == Controller("io", second, 2)
    assert find_controller("cpu") == Controller("cpu", second, 2)


def test_version_1_is_used_where_its_controller_is_mounted(second, tmp_path, monkeypatch):
    monkeypatch.setattr(control_groups, "V1_ROOTS", tmp_path / "v1")
    (tmp_path / "v1" / "blkio").mkdir(parents=True)
    (tmp_path / "v1" / "blkio" / "blkio.throttle.read_bps_device").touch()
    assert find_controller("io") == Controller("io", tmp_path / "v1" / "blkio", 1)
    assert find_controller("cpu").version == 2


def test_missing_controllers_or_privileges_are_refused(second, monkeypatch):
    (second / "cgroup.controllers").write_text("memory\n")
    with pytest.raises(CannotThrottleError, match=r"the kernel's io controller: neither .*blkio \(cgroup v1\) nor "):
        find_controller("io")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CannotThrottleError, match="limits on cpu need root"):
        find_controller("cpu")


def test_version_2_limits_are_written_in_kernel_format(second):
    io, cpu = find_controller("io"), find_controller("cpu")
    control_groups.limit_io(io, second, "7:3", 1e6, 0)
    assert (second / "io.max").read_text() == "7:3 rbps=1000000 wbps=max"
    control_groups.limit_cpu(cpu, second, 0.25)
    assert (second / "cpu.max").read_text() == "2500 10000"
    control_groups.limit_cpu(cpu, second, 0)
    assert (second / "cpu.max").read_text() == "max 10000"


def test_version_2_io_bytes_are_counted_per_device(second):
    (second / "io.stat").write_text(
        "8:0 rbytes=1 wbytes=2 rios=1 wios=1 dbytes=0 dios=0\n7:3 rbytes=40 wbytes=2\n7:4\n"
    )
    assert control_groups.io_bytes(find_controller("io"), second, "7:3") == 42
    assert control_groups.io_bytes(find_controller("io"), second, "7:4") == 0
    assert control_groups.io_bytes(find_controller("io"), second, "9:9") == 0


def test_version_2_group_enables_its_controller_and_is_reused_inside(second, tmp_path, monkeypatch):
    monkeypatch.setattr(control_groups, "_dissolve", lambda group, home: homes.append(home))
    homes = []
    (second / "user.slice").mkdir()
    with control_groups.group_of(find_controller("io")) as outer:
        assert (second / "cgroup.subtree_control").read_text() == "+io"
        (tmp_path / "mine").write_text(f"0::/{outer.name}\n")
        with control_groups.group_of(find_controller("cpu")) as inner:
            assert inner == outer
        assert homes == []
    assert homes == [second / "user.slice"]


def test_unwritable_hierarchy_is_refused(second):
    (second / "cgroup.subtree_control").unlink()
    with (
        pytest.raises(CannotThrottleError, match=r"cannot make the control group .*: No such file"),
        control_groups.group_of(find_controller("io")),
    ):
        pass
