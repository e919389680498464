"""Bad input gets one clear line and no stack trace."""

from __future__ import annotations

import os

import pytest

pytestmark = pytest.mark.deepspeed


def one_line(done) -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_unknown_system_lists_the_known_ones(runs):
    assert "memascend" in one_line(runs.command("memascent", "memascend"))


def test_unknown_arm_lists_the_arms(runs):
    assert "as_published" in one_line(runs.command("zero_infinity", "asPublished"))


def test_unknown_model_lists_models(runs):
    assert "qwen2.5-7b" in one_line(runs.command("memascend", "memascend", "--model", "qwen-2.5-8b"))


def test_a_divisor_that_does_not_divide_is_refused(runs):
    assert "128" in one_line(runs.command("memascend", "memascend", "--k", "128"))


@pytest.mark.skipif(not os.path.exists("/proc/version"), reason="needs procfs as an unwritable folder")
def test_unwritable_results_file_is_refused_naming_its_option(runs):
    assert "--out" in one_line(runs.command("memascend", "memascend", "--out", "/proc/memascend/x.json"))


@pytest.mark.skipif(not os.path.exists("/proc/version"), reason="needs procfs as an unwritable folder")
def test_unwritable_swap_folder_is_named(runs):
    assert "/proc/memascend" in one_line(runs.command("memascend", "memascend", "--nvme", "/proc/memascend"))
