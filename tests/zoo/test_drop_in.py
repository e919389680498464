"""Every architecture of transformers trains through the drop-in on DeepSpeed as under CPU offload of the same version.

ZeRO-3 with parameters and optimizer on NVMe is compared with both in memory, in one process on the CPU: losses of three
clipped steps of two micro-batches, an evaluation after each, and the final master weights, bit by bit. One architecture
by default; with --run-slow also 20 of the others, by the date or MEMASCEND_ZOO_SEED=…; all with
MEMASCEND_ZOO_DROP_IN=all.
"""

import json
import os
import random
from pathlib import Path

import pytest

from tests.zoo.drop_in import Programs
from tests.zoo.page import RECORD
from tests.zoo.seeds import SEED

pytestmark = pytest.mark.deepspeed

ALWAYS = ("causal-llama",)
SAMPLE = 20


def chosen():
    rows = json.loads(RECORD.read_text())["architectures"]
    built = [name for name, row in rows.items() if all(entry["outcome"] != "not built" for entry in row.values())]
    others = sorted({*built} - {*ALWAYS})
    if os.environ.get("MEMASCEND_ZOO_DROP_IN") == "all":
        drawn = {name: name for name in others}
    else:
        drawn = {name: f"{name} MEMASCEND_ZOO_SEED={SEED}" for name in random.Random(SEED).sample(others, SAMPLE)}
    return [*ALWAYS, *(pytest.param(name, id=words, marks=pytest.mark.slow) for name, words in drawn.items())]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    with Programs(tmp_path_factory.mktemp("drop-in")) as programs:
        yield programs


def note(name, found):
    """Write an outcome for the page in docs when that is made (`make zoo-drop-in`)."""
    if folder := os.environ.get("MEMASCEND_ZOO_OUTCOMES"):
        line = {"architecture": name, "column": "drop-in"} | {key: found[key] for key in ("outcome", "why", "dtype")}
        Path(folder, f"{name}.drop-in.json").write_text(json.dumps(line))


@pytest.mark.parametrize("name", chosen())
def test_drop_in_trains_an_architecture_exactly_or_refuses_it(programs, name):
    found = programs.outcome(name)
    note(name, found)
    if found["outcome"] in ("not built", "stock fails"):
        pytest.skip(f"{found['outcome']}: {found['why']}")
    assert found["outcome"] in ("equal", "refused"), f"{found['why']}\n{found['trace']}"


def test_float32_weights_are_swapped_as_float32(programs):
    """DeepSpeed's Init took them for bfloat16 on a CPU without fp16."""
    found = programs.outcome("seq2seq-t5", ["fp32"])
    assert found["outcome"] == "equal", f"{found['why']}\n{found['trace']}"


def test_an_evaluation_may_use_other_parameters_than_training(programs):
    """RWKV scales weights of its blocks in an evaluation, and DeepSpeed's trace of the training did not have those."""
    found = programs.outcome("causal-rwkv")
    assert found["outcome"] == "equal", f"{found['why']}\n{found['trace']}"
