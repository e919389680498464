"""Memory on nodes without processors, as the kernel presents CXL cards: every policy, and the failures of each.

Each test about a mistake names one that libnuma, numactl or a plain mbind makes.
"""

import ctypes
import mmap
from pathlib import Path

import pytest
import torch

from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.memory.placement import UNTOUCHED, interleaved, move, nodes_of, on_node, prefer, weighted
from memascend.memory.topology import Topology

pytestmark = pytest.mark.numa_vm

MIB, PAGE = 2**20, 4096


@pytest.fixture(scope="module")
def nodes():
    """Return the numbers of nodes with memory: first the one with processors, then two without (or any others)."""
    topology = Topology.read()
    ordered = sorted((n for n in topology.nodes.values() if n.total_bytes), key=lambda n: (n.memory_only, n.number))
    return [node.number for node in ordered[:3]]


def allocate(nbytes, placement, ledger=None, **options):
    allocator = PageAlignedPinnedAllocator(ledger, **{"lock": False, **options})
    return allocator.allocate(nbytes, torch.uint8, name="x", owner="test", placement=placement)


@pytest.mark.parametrize("lock", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_every_page_lies_on_the_requested_node(nodes, lock, strict):
    for node in nodes:
        ledger = Ledger()
        tensor = allocate(3 * MIB + 1, on_node(node, strict=strict), ledger, lock=lock)
        assert nodes_of(tensor) == {node: 769}
        assert ledger.live()[0].nodes == (node,)
        assert ledger.live()[0].locked == lock


def test_small_allocation_lies_on_preferred_nodes(nodes):
    pages = nodes_of(allocate(2 * MIB, prefer(nodes[1:])))
    assert sum(pages.values()) == 512
    assert set(pages) <= set(nodes[1:])


def test_interleaving_is_exact_despite_huge_pages(nodes):
    first, second = nodes[:2]
    assert nodes_of(allocate(8 * MIB, interleaved([first, second]))) == {first: 1024, second: 1024}
    in_huge_pages = nodes_of(allocate(8 * MIB, interleaved([first, second]), pages="transparent"))
    assert sum(in_huge_pages.values()) == 2048
    assert all(abs(count - 1024) <= 1024 for count in in_huge_pages.values())


def test_pages_follow_the_kernels_node_weights(nodes):
    topology = Topology.read()
    weights = {node: topology.nodes[node].weight for node in nodes}
    if None in weights.values():
        pytest.skip("weighted interleaving needs Linux 6.9")
    pages = nodes_of(allocate(6 * MIB, weighted(nodes)))
    total = sum(weights.values())
    for node in nodes:
        assert abs(pages[node] - 1536 * weights[node] / total) <= 2 * weights[node]


@pytest.mark.parametrize("size", [6 * MIB, 6 * MIB + PAGE, 40 * PAGE, 2 * PAGE])
@pytest.mark.parametrize("shares", [(3, 1, 1), (5, 0, 2), (2**40, 2**41, 2**40)])
def test_pages_follow_a_tensors_own_weights_within_a_page(nodes, shares, size):
    tensor = allocate(size, weighted(dict(zip(nodes, shares))))
    counted, pages = nodes_of(tensor), size // PAGE
    assert sum(counted.values()) == pages
    for node, share in zip(nodes, shares):
        assert abs(counted.get(node, 0) - pages * share / sum(shares)) < 1


def mappings():
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_striped_memory_takes_few_mappings_and_leaves_thread_policy_alone(nodes):
    before = mappings()
    tensor = allocate(32 * MIB, weighted({nodes[0]: 7, nodes[1]: 3}))
    assert mappings() <= before + 2
    assert sum(nodes_of(tensor).values()) == 8192
    assert nodes_of(allocate(MIB, None)) == {nodes[0]: 256}


def test_strict_allocation_larger_than_its_node_raises_memory_error(nodes):
    card = nodes[-1]
    available = Topology.read().nodes[card].available_bytes
    with pytest.raises(MemoryError, match="the kernel would kill the process"):
        allocate(available + 16 * MIB, on_node(card, strict=True))


@pytest.mark.parametrize("make", [on_node, lambda node: prefer([node])], ids=["on_node", "prefer"])
def test_allocation_beyond_a_full_node_spills_to_others(nodes, make):
    card = nodes[-1]
    available = Topology.read().nodes[card].available_bytes
    if available > 512 * MIB:
        pytest.skip(f"node {card} has {available >> 20} MiB free, too much to fill here")
    ledger = Ledger()
    tensor = allocate(available + 16 * MIB, make(card), ledger)
    pages = nodes_of(tensor)
    elsewhere = sum(count for node, count in pages.items() if node != card)
    assert elsewhere >= 16 * MIB // PAGE
    assert pages[card] > 0
    assert set(ledger.live()[0].nodes) == set(pages)  # the ledger has the actual nodes, not the requested ones


def test_allocation_on_an_unknown_node_is_refused():
    with pytest.raises(ValueError, match="there is no node 77 here; name some of 0, 1"):
        allocate(MIB, on_node(77))


def test_policy_after_first_touch_moves_nothing_but_ours_precedes_it(nodes):
    first, card = nodes[:2]
    touched = torch.frombuffer(mmap.mmap(-1, MIB), dtype=torch.uint8).fill_(1)
    mask = ctypes.c_ulong(1 << card)
    mbind = ctypes.CDLL(None, use_errno=True).syscall
    arguments = (ctypes.c_long(237), ctypes.c_void_p(touched.data_ptr()), ctypes.c_ulong(MIB), 2, ctypes.byref(mask))
    assert mbind(*arguments, ctypes.c_ulong(65), 0) == 0
    assert nodes_of(touched) == {first: 256}
    assert nodes_of(allocate(MIB, on_node(card))) == {card: 256}
    assert nodes_of(torch.frombuffer(mmap.mmap(-1, MIB), dtype=torch.uint8))[UNTOUCHED] == 256


@pytest.mark.parametrize("kind", ["on_node", "weighted", "interleaved"])
def test_pages_move_with_their_contents(nodes, kind):
    make = {"on_node": on_node, "weighted": lambda n: weighted({n: 1}), "interleaved": lambda n: interleaved([n])}[kind]
    tensor = allocate(MIB, on_node(nodes[0]))
    tensor.copy_(torch.arange(MIB).to(torch.uint8))
    before = tensor.clone()
    assert move(tensor, make(nodes[1])) == {nodes[1]: 256}
    assert torch.equal(tensor, before)


def test_moved_pages_follow_the_given_weights(nodes):
    weights = weighted({nodes[0]: 1, nodes[1]: 3})
    assert move(allocate(MIB, on_node(nodes[0])), weights) == {nodes[0]: 64, nodes[1]: 192}
    small_pages = allocate(8 * MIB, interleaved(nodes[:1]))
    assert move(small_pages, weights) == {nodes[0]: 512, nodes[1]: 1536}
    heap = torch.zeros(8 * MIB, dtype=torch.uint8)  # in huge pages where they are enabled, which move as a whole
    moved = move(heap, weights)
    assert abs(moved[nodes[1]] - 1536) <= 512


def test_firmware_reports_cards_as_slower_and_farther(nodes):
    topology = Topology.read()
    cards = [topology.nodes[node] for node in nodes if topology.nodes[node].memory_only]
    if not cards or cards[0].bandwidth_bytes_per_s is None:
        pytest.skip("no HMAT here")
    near = topology.nodes[nodes[0]]
    for card in cards:
        assert card.bandwidth_bytes_per_s < near.bandwidth_bytes_per_s
        assert card.latency_ns > near.latency_ns
        assert card.distances[nodes[0]] > near.distances[nodes[0]]
        assert card.tier > near.tier
