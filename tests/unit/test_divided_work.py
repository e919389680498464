"""A run's report says how AdamW's work was divided over nodes with processors, if there are several."""

import json
from types import SimpleNamespace

import pytest

from memascend.memory.ledger import Ledger
from memascend.memory.topology import Node, Topology
from memascend.ops.adamw import divided_work
from memascend.training import worker as worker_module
from memascend.training.config import complete
from memascend.training.folder import RunFolder
from memascend.training.worker import FINISHED, Worker
from workflows.run import training

DISTANCES = {0: 10, 1: 20, 2: 24}
CARD = Node(number=2, total_bytes=1, distances=DISTANCES)
TWO = Topology.of(*(Node(number=n, cpus=str(n), total_bytes=1, distances=DISTANCES) for n in (0, 1)), CARD)
ONE = Topology.of(Node(number=0, cpus="0-3", total_bytes=1, distances=DISTANCES), CARD)
STEP = {"kind": "step", "step": 1, "tokens": 8, "skipped": 0, "loss": 1.0, "seconds": 1.0}


@pytest.fixture
def reported(tmp_path, monkeypatch):
    """Return the report of a finished run on a machine, given AdamW's counts, as data and as text."""

    def write(topology, counts):
        monkeypatch.setattr(worker_module, "chunk_counts", lambda: counts)
        monkeypatch.setattr(worker_module.Topology, "read", lambda: topology)
        made = object.__new__(Worker)
        made.ranks, made.rank, made.first, made.step, made.steps, made.placement = 1, 0, 0, 1, 1, None
        made.memory = SimpleNamespace(measured=lambda: [1 << 20] * 7)
        made.backend = SimpleNamespace(ledger=Ledger(), facts=dict)
        made.progress = SimpleNamespace(say=lambda text: None)
        prepared = {"parameters": 1, "planned_host_bytes": None}
        made.job = {"config": {"model": "m", "system": "in_memory", "data": ["d"]}, "prepared": prepared}
        made.config = complete(made.job["config"])
        made.folder = RunFolder(tmp_path)
        made.folder.metrics.parent.mkdir(parents=True, exist_ok=True)
        made.folder.metrics.write_text(json.dumps(STEP | {"read_bytes": 0, "written_bytes": 0}) + "\n")
        made._report(FINISHED)
        path = made.folder.report
        return json.loads(path.with_suffix(".json").read_text()), path.with_suffix(".md").read_text()

    return write


def test_report_on_two_nodes_counts_chunks_updated_near_their_data(reported):
    found, text = reported(TWO, (970, 30))
    assert found["adamw_by_node"] == {"nodes": [0, 1], "near": 970, "elsewhere": 30}
    assert "AdamW over nodes 0, 1: 970 of 1,000 chunks (97.0%) were updated near their data.\n" in text


def test_report_says_when_nothing_was_divided(reported):
    found, text = reported(TWO, (0, 0))
    assert found["adamw_by_node"] == {"nodes": [0, 1], "near": 0, "elsewhere": 0}
    assert "AdamW over nodes 0, 1: nothing was divided" in text


def test_report_on_one_node_does_not_mention_divided_work(reported):
    found, text = reported(ONE, (0, 0))
    assert "adamw_by_node" not in found
    assert "AdamW" not in text
    assert divided_work(0, 0, ONE) is None


def test_record_sums_counts_of_all_ranks_if_work_was_divided():
    rank = dict.fromkeys(training.COUNTED, 0) | {"losses": [], "phases": [], "overflow_checks": [], "io_steps": []}
    asked = SimpleNamespace(mode="time", points=[], stacks=[])

    def recorded(*counts):
        return training._results(asked, {"results": [rank | more for more in counts]})

    assert recorded({"adamw_chunks": [97, 3]}, {"adamw_chunks": [90, 10]})["adamw_chunks"] == [187, 13]
    assert "adamw_chunks" not in recorded({}, {})
