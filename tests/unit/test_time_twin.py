"""A time twin's length and rates follow from the lengths that were tried and from the testbed's seconds."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

import pytest

from hardware import control_groups, throttled
from hardware.registry import load_testbed
from memascend.planner.machine import machine_from_testbed
from workflows.run import time_twin

ARMS = ["zero_infinity:as_published_direct:fp16", "memascend:memascend:fp16"]
CELL = ["--run-id", "x", "--model", "llama3.1-8b", "--k", "4", "--out", "x.json", "--arms", *ARMS]


@pytest.fixture(scope="module")
def c1():
    return machine_from_testbed(load_testbed("memascend-c1"))


def test_length_is_interpolated_between_two_tried_lengths():
    tried = [(32, 2.0), (128, 5.0)]
    assert time_twin.tokens_for(3.5, tried) == 80
    assert time_twin.tokens_for(0.1, tried) == 8  # below the floor: the shortest


def test_rates_match_the_wanted_seconds_and_the_testbeds_ratio(c1):
    read, write = time_twin.rates_for(20.0, 10e9, 9e9, c1)
    assert 10e9 / read + 9e9 / write == pytest.approx(20.0)
    assert read / write == pytest.approx(14 / 9.5)


def test_target_device_time_scales_with_batch_and_transfers_do_not(c1):
    small = time_twin.target_ratios(
        time_twin.parse([*CELL, "--testbed", "memascend-c1", "--ranks", "2", "--batch", "8"]), c1
    )
    large = time_twin.target_ratios(
        time_twin.parse([*CELL, "--testbed", "memascend-c1", "--ranks", "2", "--batch", "80"]), c1
    )
    assert large["device"] == pytest.approx(10 * small["device"], rel=0.01)
    assert large["ssd"] == small["ssd"] > small["host"] == large["host"] > 0


def test_arm_is_compared_with_the_first_round_by_round():
    labels = {"system": "s", "arm": "a", "dtype": "fp16"}
    rest = {"overflow_check_s": [2.0, 2.0], "host_s": [3.0, 3.0]}
    first = {**labels, "forward_s": [1.0, 1.0], "backward_s": [2.0, 3.0], "optimizer_s": [9.0, 8.0], **rest}
    other = {**labels, "forward_s": [1.0, 1.0], "backward_s": [2.0, 3.0], "optimizer_s": [7.0, 6.0], **rest}
    found = time_twin.against(first, other)
    assert found["improvement_percent"] == [pytest.approx(20.0), pytest.approx(20.0)]
    assert found["fewer_seconds"]["optimizer_s"] == 2.0
    assert found["fewer_seconds"]["forward_s"] == 0


def test_kernel_enforces_the_cpu_share():
    try:
        with throttled.limited_cpu() as limit:
            limit(0.2)
            (group,) = control_groups.find_controller("cpu").root.glob(f"memascend-{os.getpid()}")
            end = time.process_time() + 0.05
            while time.process_time() < end:
                pass
            counted = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    except throttled.CannotThrottleError as reason:
        pytest.skip(str(reason))
    assert int(counted["nr_throttled"]) > 0
    assert not group.exists()


def _throttled_paths(folder):
    return throttled.throttled_paths(folder, [0])


def _limited_cpu(folder):
    return throttled.limited_cpu()


@pytest.mark.parametrize("limits", [_throttled_paths, _limited_cpu])
def test_interrupted_run_leaves_no_control_group_while_its_child_lives(tmp_path, limits):
    child = None
    try:
        with contextlib.suppress(KeyboardInterrupt), limits(tmp_path):
            child = subprocess.Popen(["sleep", "60"])
            raise KeyboardInterrupt
        roots = {control_groups.find_controller(name).root for name in ("io", "cpu")}
        assert not any((root / f"memascend-{os.getpid()}").exists() for root in roots)
        assert child.poll() is None
        assert f"memascend-{os.getpid()}" not in Path(f"/proc/{child.pid}/cgroup").read_text()
        assert not list(tmp_path.iterdir())
    except throttled.CannotThrottleError as reason:
        pytest.skip(str(reason))
    finally:
        if child is not None:
            child.kill()
            child.wait()


@pytest.mark.parametrize("share", ["0.05", "-1"])
def test_cpu_share_below_kernel_minimum_is_refused_in_one_line(share, capsys):
    words = [*CELL, "--testbed", "memascend-c1", "--batch", "8", f"--cpu-share={share}"]
    assert time_twin.main(words) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == [f"time_twin: error: a share of {share} of a CPU: the kernel gives 0.1 or more; 0 sets no limit"]
