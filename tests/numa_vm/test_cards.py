"""Emulated CXL type-3 cards that the guest's kernel turns into memory: placement on CXL down to the registers.

Each access to a card's memory goes through QEMU's decoders, some 2 MiB per second, so all sizes are small.
"""

import os

import pytest
import torch

from memascend import _C
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.memory.placement import interleaved, move, nodes_of, on_node, weighted
from memascend.memory.topology import Topology
from memascend.ops.adamw import adamw_
from tests.numa_vm import cards
from tests.numa_vm.in_guest import REPORTS

pytestmark = [pytest.mark.numa_vm, pytest.mark.slow]

KIB, PAGE = 1024, 4096
ELEMENTS = 16 * KIB


@pytest.fixture(scope="module")
def nodes():
    """Return the processor's node, and those of two cards that this fixture brings up."""
    if REPORTS not in os.environ:
        pytest.skip("cards are brought up in a guest alone, never on a machine that somebody uses")
    return 0, *cards.bring_up()


def allocate(numel, placement, dtype=torch.uint8, ledger=None):
    allocator = PageAlignedPinnedAllocator(ledger)
    return allocator.allocate(numel, dtype, name="x", owner="momentum", placement=placement)


def test_each_card_is_a_processorless_node_with_its_own_region(nodes):
    topology = Topology.read()
    assert [node.number for node in topology.memory_only] == list(nodes[1:])
    regions = sorted(cards.DEVICES.glob("region*"))
    assert len(regions) == len(nodes) - 1 == 2
    assert all((region / "commit").read_text().strip() == "1" for region in regions)
    for node in nodes[1:]:
        assert 0 < topology.nodes[node].total_bytes <= 256 << 20
        assert topology.nodes[node].distances[node] == 10


def test_every_page_lies_on_the_requested_card(nodes):
    for node in nodes:
        ledger = Ledger()
        tensor = allocate(256 * KIB + 1, on_node(node, strict=True), ledger=ledger)
        assert nodes_of(tensor) == {node: 65}
        (entry,) = ledger.live()
        assert entry.nodes == (node,)
        assert entry.locked


def test_pages_are_interleaved_over_ordinary_memory_and_cards(nodes):
    assert nodes_of(allocate(48 * PAGE, interleaved(nodes))) == dict.fromkeys(nodes, 16)
    near, one, two = nodes
    assert nodes_of(allocate(40 * PAGE, weighted({near: 3, one: 1, two: 1}))) == {near: 24, one: 8, two: 8}


def test_pages_move_from_card_to_card_with_their_contents(nodes):
    near, one, two = nodes
    tensor = allocate(16 * PAGE, on_node(near))
    tensor.copy_(torch.arange(tensor.numel()).to(torch.uint8))
    before = tensor.clone()
    for node in (one, two, near):
        assert move(tensor, on_node(node)) == {node: 16}
        assert torch.equal(tensor, before)


def test_adamw_on_card_states_gives_same_bits_as_in_memory(nodes):
    near, one, two = nodes
    generator = torch.Generator().manual_seed(1)
    made = [torch.rand(ELEMENTS, generator=generator) for _ in range(4)]
    placements = (on_node(near), on_node(one), on_node(two), interleaved([one, two]))
    placed = [allocate(ELEMENTS, at, torch.float32).copy_(tensor) for at, tensor in zip(placements, made, strict=True)]
    for tensors in (made, placed):
        for step in (1, 2):
            adamw_(*tensors, step=step, lr=1e-3)
    for mine, other in zip(placed, made, strict=True):
        assert torch.equal(mine, other)
    assert _C.pages_by_node(placed[1].data_ptr(), 4 * ELEMENTS) == {one: 16}
    assert set(nodes_of(placed[3])) == {one, two}
