"""python -O removes asserts: some of DeepSpeed's contain its NVMe transfers, ours contain no work."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from memascend.training.processes import free_port
from tests.one_rank import environment

pytestmark = pytest.mark.deepspeed

ENABLE = """
import memascend, sys
for offload in ({"device": "cpu"}, {"device": "nvme", "nvme_path": sys.argv[1]}):
    memascend.enable({"zero_optimization": {"stage": 3, "offload_optimizer": offload}})
    print("asserts:", __debug__)
    memascend.disable()
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> subprocess.CompletedProcess[str]:
    """Run a script that enables memascend in memory, and then on NVMe."""
    command = [sys.executable, "-O", "-c", ENABLE, str(tmp_path_factory.mktemp("nvme"))]
    return subprocess.run(command, env=environment(0, 1, free_port()), capture_output=True, text=True, check=False)


def test_offloading_to_nvme_without_asserts_is_refused_in_one_line(done):
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: python -O")
    assert last.endswith("start python without -O and without PYTHONOPTIMIZE")


def test_other_configurations_can_be_enabled_without_asserts(done):
    assert [line for line in done.stdout.splitlines() if line.startswith("asserts")] == ["asserts: False"]


def test_asserts_of_the_library_have_no_side_effects():
    """They call no function except for a few without side effects."""
    looks = {"all", "any", "isinstance", "len", "str"}
    found = []
    for path in sorted((Path(__file__).parents[2] / "memascend").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assert):
                calls = [ast.unparse(call.func) for call in ast.walk(node.test) if isinstance(call, ast.Call)]
                found += [f"{path.name}:{node.lineno}: {call}" for call in calls if call not in looks]
    assert found == []
