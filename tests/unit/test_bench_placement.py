"""`memascend bench placement`: what it refuses, and that every method has the same bits on the nodes that it names."""

import json

import pytest

from memascend.cli import main
from memascend.memory.topology import Topology

TINY = ["--model", "llama3.2-1b", "--twin", "32", "--context", "16", "--repeats", "2"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--placements", "nearest"], "--placements: unknown policy 'nearest'"),
        (["--placements", "process_interleave"], "applies to the whole process"),
        (["--placements", "{momentum: 77}"], "there is no node 77 here"),
        (["--model", "nothing"], "unknown model 'nothing'"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, said, capsys):
    assert main(["bench", "placement", *TINY, *options]) == 2
    out = capsys.readouterr().err.strip()
    assert said in out
    assert "\n" not in out


def test_every_placement_keeps_the_same_bits_on_its_nodes(capsys):
    assert main(["bench", "placement", *TINY, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {row["method"]: row for row in result["summary"]}
    assert list(rows) == ["none", "again", "latency_first", "interleave", "node"]
    points = {point["method"]: point for point in result["points"]}
    near = str(Topology.read().with_cpus[0].number)
    for name, row in rows.items():
        assert row["equal"]
        assert row["losses_equal"]
        assert row["bytes"] == rows["none"]["bytes"]
        assert set(row["resident"]) == {"weights", "master_weights", "momentum", "variance", "gradients"}
        assert {
            phase: len(points[name][f"{phase}_s"]) for phase in ("forward", "backward", "optimizer")
        } == dict.fromkeys(("forward", "backward", "optimizer"), 2)
        for kind, nodes in row["resident"].items():
            assert sum(nodes.values()) >= row["bytes"][kind]
    assert all(set(nodes) == {near} for nodes in rows["node"]["resident"].values())
    assert all(set(nodes) == set(map(str, result["nodes"])) for nodes in rows["interleave"]["resident"].values())
