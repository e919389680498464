"""ZeRO-Offload with every class of host buffers placed: the same losses, and DeepSpeed's own states in our memory."""

from __future__ import annotations

import pytest
from trainings import Job, train_all

pytestmark = pytest.mark.deepspeed

RUN = {"system": "cxl", "arm": "baseline", "dtype": "bf16", "steps": 4, "layers": 1}
STATES = ("master_weights", "momentum", "variance", "gradients", "weights", "arriving_gradients")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    named = dict.fromkeys((*STATES, "activations"), 0)
    jobs = [
        Job(name="stock", **{**RUN, "system": "zero_offload", "arm": "today"}),
        Job(name="unplaced", **RUN),
        Job(name="latency_first", parts={"placement": "latency_first"}, **RUN),
        Job(name="interleave", parts={"placement": "interleave"}, **RUN),
        Job(name="named", parts={"placement": named}, **RUN),
    ]
    return train_all(jobs, tmp_path_factory.mktemp("placed"))


@pytest.mark.parametrize("name", ["unplaced", "latency_first", "interleave", "named"])
def test_placed_states_train_as_stock_deepspeed_does(results, name):
    for field in ("losses", "weights_sha256"):
        assert results[name][field] == results["stock"][field]


@pytest.mark.parametrize("name", ["latency_first", "interleave", "named"])
def test_states_and_gradients_come_entirely_from_our_allocator(results, name):
    found, parameters = results[name]["bytes_by_class"], results[name]["parameters"]
    for state in ("master_weights", "momentum", "variance", "gradients"):
        assert sum(found[state].values()) >= 4 * parameters
    assert set(STATES) <= set(found)
    assert results[name]["misplaced"] == []


def test_without_a_placement_deepspeed_allocates_its_own_states(results):
    assert not {"master_weights", "momentum", "variance"} & set(results["unplaced"]["bytes_by_class"])
