"""Latency first: placement by level, free space and bandwidth. Sizes here are small numbers of bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memascend.memory.classes import (
    ACTIVATIONS,
    ARRIVING,
    CLASSES,
    GRADIENTS,
    LEVELS,
    MASTERS,
    MOMENTUM,
    VARIANCE,
    WEIGHTS,
    ByClass,
    class_of,
)
from memascend.memory.latency_first import FAR, NEAR, SPLIT, Item, NodeCapacity, capacities_of, latency_first
from memascend.memory.policies import interleaved, on_node, weighted
from memascend.memory.topology import Node, Topology

DRAM, CARD = NodeCapacity(0, 100, near=True, bandwidth=100), NodeCapacity(1, 1000, bandwidth=25)


def placed(items, capacities):
    made = latency_first([Item(name, size) for name, size in items.items()], capacities)
    return {name: (allocation.kind, dict(allocation.bytes_by_node)) for name, allocation in made.items()}


def test_near_memory_is_filled_from_the_lowest_tolerance_up():
    items = {ACTIVATIONS: 30, WEIGHTS: 10, VARIANCE: 20, MASTERS: 20, GRADIENTS: 20, MOMENTUM: 20}
    assert placed(items, [DRAM, CARD]) == {
        MASTERS: (NEAR, {0: 20}),
        MOMENTUM: (NEAR, {0: 20}),
        VARIANCE: (NEAR, {0: 20}),
        GRADIENTS: (NEAR, {0: 20}),
        WEIGHTS: (NEAR, {0: 10}),
        ACTIVATIONS: (SPLIT, {0: 10, 1: 20}),  # a split by bandwidth would put 24 into near memory
    }


def test_split_uses_only_bandwidth_share_of_near_memory():
    made = placed({MASTERS: 120, WEIGHTS: 4}, [DRAM, CARD])
    assert made == {MASTERS: (SPLIT, {0: 96, 1: 24}), WEIGHTS: (NEAR, {0: 4})}


def test_far_memory_is_divided_by_bandwidth_and_free_space():
    capacities = [NodeCapacity(0, 0, near=True), NodeCapacity(1, 1000, bandwidth=30), NodeCapacity(2, 10, bandwidth=10)]
    capacities = [
        NodeCapacity(capacity.node, capacity.nbytes, capacity.near, capacity.bandwidth or 100)
        for capacity in capacities
    ]
    assert placed({ACTIVATIONS: 40}, capacities) == {ACTIVATIONS: (FAR, {1: 30, 2: 10})}
    assert placed({ACTIVATIONS: 80}, capacities) == {ACTIVATIONS: (FAR, {1: 70, 2: 10})}


def test_nodes_share_equally_if_a_bandwidth_is_unknown():
    capacities = [
        NodeCapacity(0, 0, near=True),
        NodeCapacity(1, 100, bandwidth=None),
        NodeCapacity(2, 100, bandwidth=5),
    ]
    assert placed({WEIGHTS: 60}, capacities) == {WEIGHTS: (FAR, {1: 30, 2: 30})}


def test_tensors_that_do_not_fit_are_refused_with_both_sums():
    with pytest.raises(MemoryError, match=r"3\.00 GiB of tensors, and nodes 0, 1 have 2\.00 GiB for them"):
        latency_first([Item(MASTERS, 3 << 30)], [NodeCapacity(0, 1 << 30, near=True), NodeCapacity(1, 1 << 30)])


@given(
    st.dictionaries(st.sampled_from(CLASSES), st.integers(0, 1 << 45), min_size=1),
    st.lists(st.tuples(st.integers(0, 1 << 45), st.booleans(), st.sampled_from([None, 1.0, 27.0, 204.8])), max_size=5),
)
def test_no_node_is_overfilled_and_no_byte_is_lost(sizes, described):
    capacities = [
        NodeCapacity(node, nbytes, near, bandwidth) for node, (nbytes, near, bandwidth) in enumerate(described)
    ]
    items = [Item(name, size) for name, size in sizes.items()]
    if sum(sizes.values()) > sum(capacity.nbytes for capacity in capacities):
        with pytest.raises(MemoryError):
            latency_first(items, capacities)
        return
    made = latency_first(items, capacities)
    for name, size in sizes.items():
        assert sum(made[name].bytes_by_node.values()) == size
    for capacity in capacities:
        assert sum(allocation.bytes_by_node.get(capacity.node, 0) for allocation in made.values()) <= capacity.nbytes
    # No class with a higher tolerance is near while one with a lower tolerance is entirely far.
    near = {capacity.node for capacity in capacities if capacity.near}
    for name, allocation in made.items():
        if allocation.kind == FAR:
            later = [other for other in made.values() if LEVELS[other.item.name] > LEVELS[name]]
            assert not any(near & set(other.bytes_by_node) for other in later)


def test_allocation_becomes_a_placement_policy():
    made = latency_first([Item(MASTERS, 100), Item(ARRIVING, 80)], [DRAM, CARD, NodeCapacity(2, 1000, bandwidth=75)])
    assert made[MASTERS].placement() == on_node(0)
    assert made[ARRIVING].placement() == weighted({1: 20, 2: 60})


def test_space_per_node_is_available_memory_up_to_limits():
    topology = Topology.of(
        Node(number=0, cpus="0-3", total_bytes=100, available_bytes=80, distances={0: 10}, bandwidth_bytes_per_s=4.0),
        Node(number=1, total_bytes=50, available_bytes=50, distances={1: 10}),
        Node(number=2, cpus="4", distances={2: 10}),
    )
    assert capacities_of(topology, {0: 60}) == [NodeCapacity(0, 60, True, 4.0), NodeCapacity(1, 50)]
    assert capacities_of(topology, {0: 600})[0].nbytes == 80
    with pytest.raises(ValueError, match="no node 7 to limit; there are 0, 1, 2"):
        capacities_of(topology, {7: 1})


def test_buffer_class_and_its_policy_are_found_by_owner():
    owners = {"momentum": MOMENTUM, "gradient_flat_buffer": ARRIVING, "activation_checkpoints": ACTIVATIONS}
    assert {owner: class_of(owner) for owner in owners} == owners
    assert class_of("process") is None
    assert class_of("gradient_flat_buffer", host_gradients=True) == GRADIENTS  # AdamW reads it in place
    kept = ByClass({GRADIENTS: on_node(0), ARRIVING: on_node(1)}, host_gradients=True)
    assert kept.of("gradient_flat_buffer") == on_node(0)
    policy = ByClass({MASTERS: on_node(1), ACTIVATIONS: interleaved([0, 1])})
    assert policy.of("master_weights") == on_node(1)
    assert policy.of("activation_checkpoints") == interleaved([0, 1])
    assert policy.of("momentum") is None
    assert policy.of("process") is None
    with pytest.raises(ValueError, match="unknown class 'moments': use master_weights, momentum"):
        ByClass({"moments": on_node(0)})
