"""Training steps on nodes without processors: every class of tensors is where the policy puts it, by move_pages."""

import dataclasses
import json
import os

import pytest
import torch

from memascend import _C
from memascend.memory.classes import (
    ACTIVATIONS,
    GRADIENTS,
    MASTERS,
    MOMENTUM,
    VARIANCE,
    WEIGHTS,
    class_of,
)
from memascend.memory.ledger import Ledger
from memascend.memory.placement import UNTOUCHED, nodes_of
from memascend.memory.process_policy import interleave_process
from memascend.memory.topology import Topology
from memascend.training.backends.in_memory import InMemoryBackend
from memascend.training.backends.streaming import StreamingBackend
from memascend.training.config import TrainConfig

pytestmark = pytest.mark.numa_vm

CONFIG = TrainConfig(
    model="m", data=["d"], system="in_memory", loss="plain", checkpointing="offloaded", context=16, batch=1
)
MODEL = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024, "tie_word_embeddings": True,
    "initializer_range": 0.02,
}  # fmt: skip
IDS = torch.arange(16).reshape(1, 16) * 7 % 1024
ALL = {MASTERS, MOMENTUM, VARIANCE, GRADIENTS, WEIGHTS, ACTIVATIONS}


def trained(placement, steps=2):
    """Train some steps; return the backend and its losses."""
    config = dataclasses.replace(CONFIG, placement=placement)
    backend = InMemoryBackend(config, {"update": "memascend", "group_elements": None}, Ledger())
    torch.manual_seed(3)
    backend.build(MODEL)
    return backend, [float(backend.step([IDS], 1e-3)[0]) for _ in range(steps)]


def streamed(folder, placement, steps=2):
    """Train some steps with the streaming engine; return its backend and its losses."""
    config = dataclasses.replace(CONFIG, system="lohan", placement=placement)
    backend = StreamingBackend(config, {"folder": str(folder), "arm": "optimized", "swap": None}, Ledger())
    torch.manual_seed(3)
    backend.build(MODEL)
    return backend, [float(backend.step([IDS], 1e-3)[0]) for _ in range(steps)]


@pytest.fixture(scope="module")
def nodes():
    return [number for number, node in Topology.read().nodes.items() if node.total_bytes]


@pytest.fixture(scope="module")
def unplaced_losses():
    return trained(None)[1]


def pages_by_class(backend):
    """Count pages by class and node over the ledger's live entries, each queried by its address."""
    found = {}
    for entry in backend.ledger.live():
        name = class_of(entry.owner)
        if name is not None:
            counted = _C.pages_by_node(entry.address, entry.reserved_bytes)
            assert set(counted) == set(entry.nodes), entry  # the ledger agrees with the kernel
            into = found.setdefault(name, {})
            for node, pages in counted.items():
                into[node] = into.get(node, 0) + pages
    return found


def tensors_by_class(backend):
    (group,) = backend._groups
    return {
        MASTERS: [group.master],
        MOMENTUM: [group.exp_avg],
        VARIANCE: [group.exp_avg_sq],
        GRADIENTS: [group.gradient],
        WEIGHTS: [parameter.data for parameter in backend.model.parameters()],
    }


def assert_tensors_lie_in_the_ledger(backend):
    """Check that the tensors that the model and the optimizer use are inside the ledger's entries."""
    ranges = [(e.address, e.address + e.reserved_bytes, class_of(e.owner)) for e in backend.ledger.live()]
    for name, tensors in tensors_by_class(backend).items():
        for tensor in tensors:
            owners = [of for begin, end, of in ranges if begin <= tensor.data_ptr() < end]
            assert owners == [name]


def test_each_class_lies_on_its_named_nodes(nodes, unplaced_losses):
    near, one, two = nodes
    placed = {
        MASTERS: one,
        MOMENTUM: two,
        VARIANCE: [one, two],
        GRADIENTS: near,
        WEIGHTS: [near, two],
        ACTIVATIONS: one,
    }
    backend, losses = trained(json.dumps(placed))
    pages = pages_by_class(backend)
    assert set(pages) == ALL
    for name, wanted in placed.items():
        wanted = wanted if isinstance(wanted, list) else [wanted]
        assert set(pages[name]) == set(wanted), name
        if len(wanted) == 2 and name == VARIANCE:
            assert abs(pages[name][one] - pages[name][two]) <= 1
    assert_tensors_lie_in_the_ledger(backend)
    assert losses == unplaced_losses


def test_every_class_is_interleaved(nodes, unplaced_losses):
    backend, losses = trained("interleave")
    pages = pages_by_class(backend)
    assert set(pages) == ALL
    for name in (MASTERS, MOMENTUM, VARIANCE, GRADIENTS):
        assert set(pages[name]) == set(nodes)
        assert max(pages[name].values()) - min(pages[name].values()) <= 1, name
    for name in (WEIGHTS, ACTIVATIONS):  # several buffers, interleaved separately
        assert set(pages[name]) == set(nodes)
    assert_tensors_lie_in_the_ledger(backend)
    assert losses == unplaced_losses


def test_latency_first_fills_near_node_and_splits_rest_by_bandwidth(nodes, unplaced_losses):
    near, one, two = nodes
    parameters = sum(p.numel() for p in trained(None, steps=0)[0].model.parameters())
    limit = 4 * parameters * 5 // 2  # masters, momentum, and half of the variance
    backend, losses = trained(json.dumps({"policy": "latency_first", "limits": {str(near): limit}}))
    pages = pages_by_class(backend)
    assert set(pages) == ALL
    state = -(-4 * parameters // 4096)
    assert pages[MASTERS] == {near: state}
    assert pages[MOMENTUM] == {near: state}
    left = limit / 4096 - 2 * state  # less than its share by bandwidth, so all of it is used
    assert abs(pages[VARIANCE][near] - left) <= 1
    assert abs(pages[VARIANCE][one] - (state - left) / 2) <= 1
    assert abs(pages[VARIANCE][two] - (state - left) / 2) <= 1
    assert set(pages[GRADIENTS]) == {one, two}
    assert abs(pages[GRADIENTS][one] - state / 2) <= 1
    for name in (WEIGHTS, ACTIVATIONS):
        assert set(pages[name]) <= {one, two}
    assert sum(counted.get(near, 0) for counted in pages.values()) * 4096 <= limit
    assert_tensors_lie_in_the_ledger(backend)
    assert losses == unplaced_losses


def test_latency_first_with_space_leaves_everything_on_the_near_node(nodes):
    backend, _ = trained("latency_first", steps=1)
    for name, counted in pages_by_class(backend).items():
        assert set(counted) == {nodes[0]}, name


@pytest.mark.parametrize("policy", ["named", "interleave"])
def test_streaming_engine_buffers_follow_the_placement_policy(nodes, unplaced_losses, tmp_path, policy):
    near, one, two = nodes
    placed = {MASTERS: one, GRADIENTS: near, WEIGHTS: two, ACTIVATIONS: one} if policy == "named" else policy
    backend, losses = streamed(tmp_path / "states", json.dumps(placed) if policy == "named" else placed)
    try:
        pages = pages_by_class(backend)
    finally:
        backend.close()
    found = {MASTERS, GRADIENTS, WEIGHTS, ACTIVATIONS}  # momentum and variance share the buffers of the masters
    assert set(pages) == found
    for name in found:
        assert set(pages[name]) == ({placed[name]} if policy == "named" else set(nodes)), name
    assert losses == unplaced_losses


def interleaved_process():
    """Interleave a separate process before it allocates tensors; return pages by class and node, and the losses."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        import ctypes

        status = 1
        try:
            ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # without huge pages, which would be placed in units of 2 MiB
            interleave_process()
            backend, losses = trained("process_interleave")
            pages = {
                name: [nodes_of(tensor) for tensor in tensors if tensor.numel() * tensor.element_size() >= 1 << 16]
                for name, tensors in tensors_by_class(backend).items()
            }
            checkpoints = next(e for e in backend.ledger.live() if class_of(e.owner) == ACTIVATIONS)
            pages[ACTIVATIONS] = [_C.pages_by_node(checkpoints.address, checkpoints.reserved_bytes)]
            os.write(writer, json.dumps([pages, losses]).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    assert os.waitpid(child, 0)[1] == 0
    return json.loads(text)


def test_process_interleaved_like_numactl_spreads_every_class_evenly(nodes, unplaced_losses):
    pages, losses = interleaved_process()
    assert set(pages) == ALL
    for name, tensors in pages.items():
        total = {node: sum(counted.get(str(node), 0) for counted in tensors) for node in nodes}
        assert all(str(UNTOUCHED) not in counted for counted in tensors)
        share = sum(total.values()) / len(nodes)
        for count in total.values():
            assert abs(count - share) <= 0.1 * share + 2 * len(tensors), (name, total)
    assert losses == unplaced_losses
