"""`"checkpointing": "ssd"` in the key "memascend": DeepSpeed trains to
the same bits, and weights are not written again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from trainings import Job, train_all

from tests import one_rank

pytestmark = pytest.mark.deepspeed
ROOT = Path(__file__).parents[2]
KEY = {"memascend": {"checkpointing": "ssd", "activations": {"amount": "all", "minimum_bytes": 1024}}}
COMMON = {"dtype": "bf16", "steps": 3, "micro_steps": 2}


def test_zero_3_trains_identically_with_activations_on_the_ssd(tmp_path):
    """Every loss and the final weights are equal, with accumulation, and also if the model checkpoints its blocks."""
    kept = Job(name="kept", built="transformers", **COMMON)
    sent = Job(name="sent", built="transformers", config=KEY, **COMMON)
    checkpointed = Job(name="checkpointed", **COMMON)
    mixed = Job(name="mixed", config=KEY, **COMMON)
    done = train_all([kept, sent, checkpointed, mixed], tmp_path)
    for without, with_ssd in (("kept", "sent"), ("checkpointed", "mixed")):
        assert done[with_ssd]["losses"] == done[without]["losses"]
        assert done[with_ssd]["weights_sha256"] == done[without]["weights_sha256"]
        assert done[without]["activations"] is None
    assert len({json.dumps(losses) for losses in done["sent"]["losses"]}) == 3
    activations = done["sent"]["activations"]
    assert activations["read"] > 0
    assert activations["live_tensors"] == 0
    assert activations["written"] > 2 * done["mixed"]["activations"]["written"] > 0
    weights = {2 * rows * columns for rows, columns in ((56, 56), (56, 296), (56, 2376))}
    assert weights.isdisjoint(nbytes for _, nbytes, _ in activations["saved"])


@pytest.mark.slow
def test_stages_0_to_2_train_identically_inside_the_context(tmp_path):
    script = Path(__file__).parent / "scripts" / "activation_stages.py"
    done = one_rank.run([script, tmp_path], PYTHONPATH=str(ROOT))
    stages = json.loads(done.stdout.splitlines()[-1])
    assert [stage["stage"] for stage in stages] == [0, 1, 2]
    for stage in stages:
        assert stage["offloaded"] == stage["kept"]
        assert stage["read"] > 0
    assert os.listdir(tmp_path) == []
