"""Placement on NUMA nodes: what is refused on a described machine, and real placement on as many nodes as there are."""

import gc
import mmap
from pathlib import Path

import pytest
import torch

from memascend import _C
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import CountingAllocator, PageAlignedPinnedAllocator, PowerOfTwoPinnedAllocator
from memascend.memory.placement import UNTOUCHED, interleaved, move, nodes_of, on_node, prefer, weighted
from memascend.memory.topology import Node, Topology

GIB, MIB = 2**30, 2**20
PAGE = 4096
# Two sockets, a CXL card, and a node that has lost its memory.
MACHINE = Topology.of(
    Node(
        number=0, cpus="0-7", total_bytes=64 * GIB, available_bytes=32 * GIB, distances={0: 10, 1: 21, 2: 24}, weight=3
    ),
    Node(number=1, cpus="8-15", total_bytes=64 * GIB, available_bytes=1 * GIB, distances={0: 21, 1: 10}, weight=3),
    Node(number=2, total_bytes=128 * GIB, available_bytes=100 * GIB, distances={0: 24, 2: 10}, weight=1),
    Node(number=3, cpus="16-23", distances={3: 10}),
)
POLICIES = [on_node(0), on_node(0, strict=True), prefer([0]), interleaved([0]), weighted({0: 3})]


def allocate(allocator, nbytes, **options):
    return allocator.allocate(nbytes, torch.uint8, name="x", owner="test", **options)


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (on_node(7), "there is no node 7 here; name some of 0, 1, 2, 3"),
        (on_node(-1), "there is no node -1 here"),
        (on_node(3), "node 3 has no memory"),
        (interleaved([]), "no node is named"),
        (prefer([0, 9]), "there is no node 9"),
        (interleaved([0, 2, 0]), "named more than once"),
        (weighted({0: 0, 2: 0}), "a whole weight of 0 or more, and one above 0"),
        (weighted({0: -1, 2: 1}), "a whole weight"),
        (weighted({0: 1.5, 2: 1}), "a whole weight"),
    ],
)
def test_invalid_nodes_are_refused_in_one_line(placement, words):
    with pytest.raises(ValueError, match=r"^placement ") as refused:
        placement.check(MACHINE, PAGE)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_kernel_weights_need_kernel_support_but_own_weights_do_not():
    old = Topology.of(Node(number=0, cpus="0", total_bytes=GIB, available_bytes=GIB, distances={0: 10}))
    with pytest.raises(ValueError, match=r"needs Linux 6\.9; give weights of its own, as weighted\(\{0: 1\}\)"):
        weighted([0]).check(old, PAGE)
    weighted({0: 1}).check(old, PAGE)
    weighted([0, 1, 2]).check(MACHINE, GIB)
    weighted({0: 7, 2: 2}).check(MACHINE, GIB)


def test_policy_shares_follow_weights_and_add_up():
    assert weighted({0: 7, 2: 1}).shares(800, MACHINE) == {0: 700, 2: 100}
    assert weighted([0, 2]).shares(800, MACHINE) == {0: 600, 2: 200}
    assert interleaved([0, 1]).shares(800, MACHINE) == {0: 400, 1: 400}
    assert on_node(1).shares(2 * GIB, MACHINE) == {1: 2 * GIB}
    assert prefer([1, 2]).shares(3 * GIB, MACHINE) == {1: GIB, 2: 2 * GIB}


def test_strict_placement_beyond_free_memory_is_refused_before_allocation():
    for policy in (on_node(1), prefer([1]), interleaved([1])):
        policy.check(MACHINE, 2 * GIB)  # the rest goes to other nodes
    on_node(1, strict=True).check(MACHINE, GIB)
    gc.collect()  # objects of earlier tests are freed now, and not between the two counts
    before = len(_C.pinned_live())
    allocator = PageAlignedPinnedAllocator(Ledger(), lock=False, topology=MACHINE)
    with pytest.raises(MemoryError, match=r"2048 MiB exceed the 1024 MiB free there.*strict=False"):
        allocate(allocator, 2 * GIB, placement=on_node(1, strict=True))
    assert (len(_C.pinned_live()), allocator.ledger.entries()) == (before, [])


def test_node_outside_the_cpuset_is_refused():
    confined = Topology(nodes=MACHINE.nodes, allowed=frozenset({0}))
    with pytest.raises(ValueError, match=r"may not use node 2 \(cpuset\), only 0"):
        interleaved([0, 2]).check(confined, PAGE)


def test_planned_allocations_record_policy_nodes_and_respect_machine_limits():
    ledger = Ledger()
    allocator = CountingAllocator("page_aligned", ledger, placement=on_node(2), topology=MACHINE)
    allocate(allocator, GIB)
    allocate(allocator, GIB, placement=interleaved([0, 2]))
    with pytest.raises(MemoryError, match="free there"):
        allocate(allocator, 200 * GIB, placement=on_node(2, strict=True))
    assert [entry.nodes for entry in ledger.entries()] == [(2,), (0, 2)]
    assert ledger.to_json()[1]["nodes"] == (0, 2)


def sysfs(root: Path) -> Path:
    node = "sys/devices/system/node/node"
    for name, text in {
        "proc/self/status": "Name:\tx\nMems_allowed:\t5\nMems_allowed_list:\t0,2\n",
        f"{node}0/cpulist": "0-3\n",
        f"{node}0/distance": "10 20\n",
        f"{node}0/meminfo": "Node 0 MemTotal: 1000 kB\nNode 0 MemFree: 100 kB\nNode 0 Active(file): 30 kB\n"
        "Node 0 Active(anon): 7 kB\nNode 0 Inactive(file): 20 kB\nNode 0 SReclaimable: 5 kB\n",
        f"{node}2/cpulist": "\n",
        f"{node}2/distance": "20 10\n",
        f"{node}2/meminfo": "Node 2 MemTotal: 5000 kB\nNode 2 MemFree: 4000 kB\n",
        "sys/kernel/mm/mempolicy/weighted_interleave/node0": "4\n",
        "sys/kernel/mm/mempolicy/weighted_interleave/node2": "1\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_topology_is_read_from_sysfs_with_gaps_between_node_numbers(tmp_path):
    topology = Topology.read(sysfs(tmp_path))
    near, card = topology.nodes[0], topology.nodes[2]
    assert (near.cpus, near.total_bytes, near.available_bytes, near.weight) == ("0-3", 1000 << 10, 155 << 10, 4)
    assert (card.memory_only, card.distances, card.weight) == (True, {0: 20, 2: 10}, 1)
    assert (topology.with_cpus, topology.memory_only) == ((near,), (card,))
    assert topology.allowed == {0, 2}


def test_kernel_without_numa_has_one_node(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 600 kB\n")
    (node,) = Topology.read(tmp_path).nodes.values()
    assert (node.number, node.total_bytes, node.available_bytes, node.distances) == (0, 1000 << 10, 600 << 10, {0: 10})
    on_node(0).check(Topology.read(tmp_path), PAGE)


def test_this_machine_has_a_node_with_cpus_and_memory():
    topology = Topology.read()
    node = topology.with_cpus[0]
    assert node.total_bytes >= node.available_bytes > 0
    assert node.distances[node.number] == 10


@pytest.mark.parametrize("make", [PageAlignedPinnedAllocator, PowerOfTwoPinnedAllocator])
@pytest.mark.parametrize("placement", POLICIES, ids=str)
@pytest.mark.parametrize("lock", [True, False])
def test_all_pages_of_an_allocation_follow_the_placement_policy(make, placement, lock):
    ledger = Ledger()
    allocator = make(ledger, lock=lock, placement=placement)
    tensor = allocate(allocator, 3 * MIB + 1)
    assert nodes_of(tensor) == {0: 769}
    assert ledger.live()[0].nodes == (0,)
    assert allocate(make(ledger, lock=lock), PAGE).numel() == PAGE
    assert ledger.entries()[1].nodes is None
    tensor.fill_(3)
    view = tensor[5:]
    del tensor
    assert int(view[0]) == 3
    del view
    gc.collect()
    assert ledger.live() == []


@pytest.mark.parametrize("pages", ["small", "transparent"])
def test_small_and_transparent_huge_pages_can_be_placed(pages):
    tensor = allocate(PageAlignedPinnedAllocator(lock=False, pages=pages), 4 * MIB, placement=interleaved([0]))
    assert nodes_of(tensor) == {0: 1024}


def no_huge_pages(address: int) -> bool:
    """Return whether the mapping at `address` has huge pages disabled (VmFlags nh)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(part, 16) for part in head.split("-"))
            inside = begin <= address < end
        elif inside and head == "VmFlags:":
            return "nh" in line.split()
    raise AssertionError("not mapped")


def test_interleaving_uses_small_pages_unless_huge_ones_are_requested():
    allocator = PageAlignedPinnedAllocator(lock=False, placement=interleaved([0]))
    huge = PageAlignedPinnedAllocator(lock=False, placement=interleaved([0]), pages="transparent")
    assert no_huge_pages(allocate(allocator, 2 * MIB).data_ptr())
    assert not no_huge_pages(allocate(huge, 2 * MIB).data_ptr())
    assert not no_huge_pages(allocate(allocator, 2 * MIB, placement=on_node(0)).data_ptr())


def test_untouched_pages_are_counted_separately():
    mapped = torch.frombuffer(mmap.mmap(-1, 8 * PAGE), dtype=torch.uint8)
    mapped[0] = 1
    assert nodes_of(mapped)[UNTOUCHED] == 7


def test_nodes_of_counts_the_pages_of_a_view():
    tensor = allocate(PageAlignedPinnedAllocator(lock=False), 10 * PAGE)
    assert nodes_of(tensor[PAGE - 1 : PAGE + 1]) == {0: 2}
    assert nodes_of(tensor.view(10, PAGE).t()) == {0: 10}
    for bad in (tensor[:0], torch.empty(4, device="meta"), torch.zeros(3).to_sparse()):
        with pytest.raises(ValueError, match="strided CPU tensor with elements"):
            nodes_of(bad)


@pytest.mark.parametrize("placement", POLICIES, ids=str)
def test_moving_keeps_address_and_contents(placement):
    tensor = allocate(PageAlignedPinnedAllocator(), MIB + 5)
    tensor.copy_(torch.arange(MIB + 5).to(torch.uint8))
    before, address = tensor.clone(), tensor.data_ptr()
    assert move(tensor, placement) == {0: 257}
    assert tensor.data_ptr() == address
    assert torch.equal(tensor, before)
    heap = torch.ones(MIB)
    assert sum(move(heap, placement).values()) >= 1024
    assert bool((heap == 1).all())


def test_moving_to_a_missing_node_is_refused():
    with pytest.raises(ValueError, match="there is no node 999 here"):
        move(torch.ones(MIB), on_node(999))


def test_extension_itself_refuses_invalid_placements():
    with pytest.raises(ValueError, match="unknown placement 'everywhere'"):
        _C.pinned_empty(10, torch.uint8, PAGE, False, False, "small", ("everywhere", [0], []))
    with pytest.raises(ValueError, match="at least one node"):
        _C.pinned_empty(10, torch.uint8, PAGE, False, False, "small", ("bind", [], []))
    with pytest.raises(ValueError, match="the kernel does not place memory on node 1000"):
        _C.pinned_empty(10, torch.uint8, PAGE, False, False, "small", ("bind", [1000], []))
    assert not [block for block in _C.pinned_live() if block["requested_bytes"] == 10]
