"""`placement:` of a run: valid values, their effect on a described machine, and refusals in one line."""

import pytest

from memascend.memory.classes import ACTIVATIONS, CLASSES, MASTERS, MOMENTUM, WEIGHTS
from memascend.memory.placement_policy import PlacementPolicy
from memascend.memory.policies import interleaved, on_node, weighted
from memascend.memory.topology import Node, Topology
from memascend.training.config import checked, from_text

GIB = 2**30
MACHINE = Topology.of(
    Node(number=0, cpus="0-7", total_bytes=8 * GIB, available_bytes=4 * GIB, distances={0: 10}),
    Node(number=1, total_bytes=16 * GIB, available_bytes=16 * GIB, distances={1: 10}),
    Node(number=2, total_bytes=16 * GIB, available_bytes=16 * GIB, distances={2: 10}),
)


@pytest.mark.parametrize(
    "value",
    [
        "latency_first",
        "interleave",
        "process_interleave",
        {"momentum": 1, "weights": [1, 2]},
        {"momentum": {0: 3, 1: 1}},
        {"policy": "latency_first", "limits": {0: "1GiB"}},
    ],
)
def test_policy_survives_a_round_trip_through_text(value):
    policy = PlacementPolicy.parse(value)
    assert PlacementPolicy.parse(policy.as_text()) == policy


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("nearest", "unknown policy 'nearest': use latency_first, interleave, process_interleave, or a mapping"),
        ("{momentum: 1", "is not a mapping"),
        ({}, "use one of latency_first"),
        (3, "use one of latency_first"),
        ({"moments": 1}, "unknown class 'moments': use master_weights"),
        ({"momentum": "near"}, "'near' is not a node: nodes have numbers from 0"),
        ({"momentum": []}, "no node for momentum"),
        ({"momentum": True}, "is not a node"),
        ({"momentum": {1: -2}}, "weights of momentum"),
        ({"momentum": {1: 0}}, "weights of momentum"),
        ({"policy": "latency_first", "limit": {}}, "unknown key 'limit' next to policy and limits"),
        ({"policy": "interleave", "limits": {0: "1GiB"}}, "limits only apply to latency_first, not to interleave"),
        ({"limits": {0: "1G"}}, "'1G' is not an amount of memory"),
        ({"limits": [1]}, "limits are a mapping"),
    ],
)
def test_invalid_policy_is_refused_in_one_line_naming_the_key(value, words):
    with pytest.raises(ValueError) as refused:
        PlacementPolicy.parse(value, "run.yaml: 'placement'")
    assert str(refused.value).startswith("run.yaml: 'placement': ")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_latency_first_respects_sizes_and_limits():
    sizes = {MASTERS: 2 * GIB, MOMENTUM: 2 * GIB, ACTIVATIONS: 4 * GIB}
    free = PlacementPolicy.parse("latency_first").resolve(sizes, MACHINE)
    divided = weighted({1: 2 * GIB, 2: 2 * GIB})
    assert free.placements == {MASTERS: on_node(0), MOMENTUM: on_node(0), ACTIVATIONS: divided}
    tight = PlacementPolicy.parse({"limits": {0: "2GiB"}}).resolve(sizes, MACHINE)
    assert tight.placements[MASTERS] == on_node(0)
    assert tight.placements[MOMENTUM] == weighted({1: GIB, 2: GIB})


def test_interleave_spreads_every_class_over_all_nodes_with_memory():
    assert PlacementPolicy.parse("interleave").resolve({}, MACHINE).placements == dict.fromkeys(
        CLASSES, interleaved([0, 1, 2])
    )


def test_named_nodes_are_checked_and_given_weights_are_used():
    policy = PlacementPolicy.parse("{momentum: 1, weights: [0, 2], activations: {1: 3, 2: 1}}")
    assert policy.resolve({}, MACHINE).placements == {
        MOMENTUM: on_node(1),
        WEIGHTS: interleaved([0, 2]),
        ACTIVATIONS: weighted({1: 3, 2: 1}),
    }
    with pytest.raises(ValueError, match="there is no node 5 here"):
        PlacementPolicy.parse({"momentum": 5}).resolve({}, MACHINE)


def test_placement_key_accepts_names_and_mappings_in_file_and_flag():
    assert checked("placement", {"momentum": 1}, "run.yaml") == from_text("placement", "{momentum: 1}")
    assert checked("placement", "latency_first", "run.yaml") == "latency_first"
    assert checked("placement", None, "run.yaml") is None
    with pytest.raises(ValueError, match="--placement: 'placement': unknown policy 'cxl'"):
        from_text("placement", "cxl")
