"""CXL-aware allocation: Algorithm 1 as printed and the default, on the paper's scenarios, and plans by node."""

import json

import pytest

from memascend import cli
from memascend.baselines.cxl.published_algorithm import (
    LOCAL_CXL,
    PURE_CXL,
    PURE_LOCAL,
    Published,
    algorithm_1,
    carried_out,
)
from memascend.baselines.cxl.scenarios import (
    AS_PUBLISHED,
    AS_TEXT,
    GIB,
    NEMO_12B,
    OURS,
    SCENARIOS,
    allocation,
    overfull,
)
from memascend.memory.classes import MASTERS, WEIGHTS
from memascend.memory.ledger import Ledger
from memascend.memory.topology import Node, Topology
from memascend.planner.node_memory import OTHER, place, topology_of
from memascend.training import systems
from memascend.training.config import TrainConfig

ONE, TWO, TIGHT = SCENARIOS
NODES = {
    "memory_nodes": [
        {"name": "dram", "kind": "dram", "memory_gib": 4, "gb_per_s": 200},
        {"name": "cxl0", "kind": "cxl", "memory_gib": {"value": 8, "source": "s"}, "gb_per_s": 50},
    ]
}


def gib(shares):
    return {node: round(nbytes / GIB, 1) for node, nbytes in shares.items()}


def test_algorithm_1_matches_the_paper():
    assert algorithm_1(10, 100, 2, {1: [4, 4], 2: [4], 3: [1], 4: [1]}) == {
        "level_1_item_0": Published(PURE_LOCAL, (1, 0, 0)),
        "level_1_item_1": Published(PURE_LOCAL, (1, 0, 0)),
        "level_2_item_0": Published(LOCAL_CXL, (1, 1, 1)),
        "level_3_item_0": Published(PURE_CXL, (0, 1, 1)),
        "level_4_item_0": Published(PURE_CXL, (0, 1, 1)),
    }


def test_published_algorithm_keeps_items_local_while_they_fit():
    """X4: the text of scenarios 1 and 2 has bf16 P on the card; the algorithm leaves the 7B model's in DRAM."""
    printed, text = allocation(ONE, AS_PUBLISHED), allocation(ONE, AS_TEXT)
    assert gib(printed["bf16 P"]) == {0: 14.2}
    assert gib(text["bf16 P"]) == {1: 14.2}
    assert gib(text["bf16 A"]) == {1: 24.5}
    assert {name for name, shares in text.items() if set(shares) == {0}} == {"fp32 P", "fp32 G", "fp32 O"}


def test_published_even_split_exceeds_the_dram_that_is_left():
    """X5: 12B, one card: 36.7 GiB are left, the even split takes 45.6, so that 136.9 of 128 GiB are allocated."""
    p = NEMO_12B
    placed, beyond = carried_out([128 * GIB, 512 * GIB], {1: [4 * p, 4 * p, 8 * p]})
    assert gib(placed["level_1_item_2"]) == {0: 45.6, 1: 45.6}
    assert [(each.node, round(each.given / GIB, 1)) for each in beyond] == [(0, 136.9)]


def test_published_split_leaves_dram_unused_and_card_capacity_is_ignored():
    placed, beyond = carried_out([128 * GIB, 256 * GIB, 256 * GIB], {1: [4 * NEMO_12B, 4 * NEMO_12B, 8 * NEMO_12B]})
    assert gib(placed["level_1_item_2"]) == {0: 30.4, 1: 30.4, 2: 30.4}  # of the 36.7 GiB that were left
    assert beyond == []
    _, beyond = carried_out([GIB, GIB], {4: [2 * GIB, 5 * GIB]})
    assert [(each.node, each.given / GIB) for each in beyond] == [(1, 6.0)]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.exhibit)
def test_default_keeps_every_byte_within_every_capacity(scenario):
    for algorithm in (OURS, AS_TEXT):
        placed = allocation(scenario, algorithm)
        assert {name: sum(shares.values()) for name, shares in placed.items()} == scenario.published_items()
        assert overfull(scenario, placed) == {}


def test_default_fills_dram_with_states_and_splits_by_bandwidth():
    placed = allocation(TIGHT, OURS)
    assert gib(placed["fp32 P"]) == {0: 45.6}
    # Momentum is whole in DRAM, and 120 / (120 + 27 + 27) of the variance (bandwidths in GB/s); gradients get the rest.
    assert gib(placed["fp32 O"]) == {0: 77.1, 1: 7.1, 2: 7.1}
    assert gib(placed["fp32 G"])[0] == 5.3
    assert placed["fp32 G"][1] == pytest.approx(placed["fp32 G"][2], abs=1)
    printed = allocation(TIGHT, AS_PUBLISHED)
    used = [sum(shares.get(0, 0) for shares in made.values()) / GIB for made in (placed, printed)]
    assert used == [pytest.approx(128, abs=0.01), pytest.approx(121.7, abs=0.1)]


def test_two_equal_cards_share_equally():
    for name in ("bf16 A", "bf16 G"):
        shares = allocation(TWO, AS_TEXT)[name]
        assert abs(shares[1] - shares[2]) <= 1


def booked(**sizes):
    ledger = Ledger()
    for owner, gibs in sizes.items():
        ledger.record(owner, owner, int(gibs * GIB))
    return ledger.entries()


def test_plan_never_exceeds_the_capacity_of_a_node():
    entries = booked(master_weights=3, parameter_flat_buffer=2, process=1.5)
    made = place(entries, topology_of(NODES), "latency_first")
    assert made.fits
    assert gib(made.placed[OTHER]) == {0: 1.5}
    assert gib(made.placed[MASTERS]) == {0: 2.4, 1: 0.6}  # of the 2.5 GiB that are free, by the bandwidths 200 and 50
    assert gib(made.placed[WEIGHTS]) == {0: 0.1, 1: 1.9}
    assert made.used(0) <= 4 * GIB


def test_kept_gradients_go_to_dram_and_arriving_ones_to_cxl():
    entries = booked(gradient_flat_buffer=3, parameter_flat_buffer=4)
    kept = place(entries, topology_of(NODES), "latency_first", host_gradients=True)
    assert (set(kept.placed), gib(kept.placed["gradients"])) == ({"gradients", WEIGHTS}, {0: 3.0})
    arriving = place(entries, topology_of(NODES), "latency_first")
    assert gib(arriving.placed["arriving_gradients"]) == {1: 3.0}


def test_local_plan_uses_this_machines_memory_nodes(capsys, monkeypatch):
    nodes = [
        Node(number=0, cpus="0-1", total_bytes=200 * GIB, available_bytes=GIB, distances={0: 10}),
        Node(number=2, total_bytes=300 * GIB, available_bytes=GIB, distances={2: 10}, bandwidth_bytes_per_s=3e10),
        Node(number=3, cpus="2", distances={3: 10}),
    ]
    monkeypatch.setattr(Topology, "read", lambda: Topology.of(*nodes))
    arguments = ["plan", "--model", "qwen2.5-7b", "--system", "cxl", "--testbed", "local", "--json"]
    cli.main(arguments)  # whether it fits depends on this machine's memory
    made = json.loads(capsys.readouterr().out)["memory_nodes"]
    assert [(node["name"], node["capacity_bytes"] / GIB) for node in made["nodes"]] == [("node0", 200), ("node2", 300)]
    monkeypatch.setattr(Topology, "read", lambda: Topology.of(nodes[0]))
    cli.main(arguments)
    assert json.loads(capsys.readouterr().out)["memory_nodes"] is None


def test_plan_reports_when_a_policy_does_not_fit():
    too_much = place(booked(master_weights=14), topology_of(NODES), None)
    assert not too_much.fits
    assert "14.00 GiB of tensors, and nodes 0, 1 have 12.00 GiB" in too_much.refused
    named = place(booked(master_weights=6), topology_of(NODES), "{master_weights: 0}")
    assert named.overfull == {0: 2 * GIB}
    assert not named.fits
    spread = place(booked(master_weights=9, process=1), topology_of(NODES), "process_interleave")
    assert gib(spread.placed[MASTERS]) == {0: 4.0, 1: 5.0}  # the share of the full node goes to the other
    assert spread.fits


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([{"kind": "hbm", "memory_gib": 1}], "memory_nodes.0: kind must be one of dram, cxl"),
        ([{"kind": "dram"}], "memory_nodes.0: memory_gib is needed"),
        ([{"kind": "dram", "memory_gib": -1}], "memory_nodes.0.memory_gib must be a positive number"),
    ],
)
def test_invalid_node_description_is_refused(nodes, words):
    with pytest.raises(ValueError, match=r"^testbed: ") as refused:
        topology_of({"memory_nodes": nodes})
    assert words in str(refused.value)


PREPARED = {"context": 64, "largest_tensor": 1000, "parameters": 10_000, "pool_buffers": 9}


@pytest.mark.parametrize(
    ("arm", "given", "section", "process"),
    [
        ("cxl_aware", None, "latency_first", "latency_first"),
        ("naive", None, None, "process_interleave"),
        ("baseline", None, None, None),
        ("baseline", "interleave", "interleave", "interleave"),
        ("baseline", "process_interleave", None, "process_interleave"),
    ],
)
def test_every_arm_configures_its_placement(arm, given, section, process):
    config = TrainConfig(model="m", data=["d"], system="cxl", arm=arm, placement=given)
    systems.check(config)
    settings = systems.setup(config, PREPARED, "r", "/somewhere").settings
    assert settings["deepspeed_config"].get("memascend", {}).get("placement") == section
    assert settings["placement"] == process


@pytest.mark.parametrize(
    ("system", "arm", "words"),
    [
        ("cxl", "cxl_aware", "the arm cxl_aware has its own"),
        ("zero_offload", None, "needs our allocator"),
        ("memascend", None, "plans states in host memory, and these are on the SSD"),
        ("lohan", None, "plans states in host memory, and these are on the SSD"),
    ],
)
def test_unsupported_placement_is_refused(system, arm, words):
    config = TrainConfig(model="m", data=["d"], system=system, arm=arm, placement="latency_first")
    with pytest.raises(ValueError, match=words):
        systems.check(config)


def test_plan_lists_the_contents_of_every_node(capsys):
    arguments = ["plan", "--model", "qwen2.5-7b", "--system", "cxl", "--gradients", "bf16", "--testbed", "cxl-a"]
    assert cli.main([*arguments, "--context", "32768", "--batch", "4"]) == 0
    text = capsys.readouterr().out
    assert "memory nodes of cxl-a, latency first (GiB)" in text
    assert cli.main([*arguments, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)["memory_nodes"]
    dram, card = made["nodes"]
    assert made["placement"] == "latency_first"
    assert dram["name"] == "dram"
    assert dram["used_bytes"] <= dram["capacity_bytes"] == 128 * GIB
    level_1 = ("master_weights", "momentum", "variance", "gradients")
    assert round(sum(dram["bytes"][name] for name in level_1) / GIB) == 113
    assert card["bytes"]


def test_plan_refuses_a_placement_that_overfills_dram(capsys):
    arguments = ["plan", "--model", "qwen2.5-32b", "--system", "cxl", "--testbed", "cxl-a"]
    placement = "{master_weights: 0, momentum: 0, variance: 0}"
    assert cli.main([*arguments, "--placement", placement]) == 1
    assert "dram is given" in capsys.readouterr().out
    assert cli.main([*arguments, "--placement", "nearest"]) == 2
    assert "--placement: unknown policy 'nearest'" in capsys.readouterr().err
