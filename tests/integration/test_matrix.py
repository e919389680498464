"""Every part, alone, in pairs and all together, trains as stock DeepSpeed does, to the last bit.

The reference is ZeRO-3 with CPU offload, which uses no swap buffer; stock NVMe is compared with it too. Losses of 30
applied steps and the final master weights (SHA-256) are compared. Two architectures of two blocks: Qwen2.5-7B (biases,
untied) and Llama-3.1-8B (no biases), k = 64, and Llama with tied embeddings.
"""

from __future__ import annotations

import itertools

import pytest
from trainings import Job, train_all

# All of it is slow: test_training_is_unchanged.py compares the whole drop-in with the same reference in every run.
pytestmark = [pytest.mark.deepspeed, pytest.mark.slow]

STEPS = 30
# Everything of ours that no other part needs: the base to which parts are added alone and in pairs.
GROUND = {"pinned": "power_of_two", "pool": "stock", "overflow": "stock", "aio": "file"}
PARTS = {"pinned": "exact", "pool": "adaptive", "overflow": "fused", "aio": "direct"}
ALL = GROUND | PARTS
COMBINATIONS = {
    "ground": GROUND,
    **{f"{name}_alone": GROUND | {name: value} for name, value in PARTS.items()},
    **{"+".join(pair): GROUND | {name: PARTS[name] for name in pair} for pair in itertools.combinations(PARTS, 2)},
    "all": ALL,
}
STOCK = {
    "stock": {"system": "zero_infinity", "arm": "today"},
    "monolithic_separate": {"parts": GROUND | {"pool": "monolithic_separate"}},
    "monolithic": {"parts": GROUND | {"pool": "monolithic"}},
    "aminmax": {"parts": GROUND | {"overflow": "aminmax"}},
    "chain": {"parts": GROUND | {"overflow": "chain"}},
    "overflow_without_pinned": {"parts": {"pinned": "stock", "pool": "stock", "overflow": "fused", "aio": "stock"}},
}
MODELS = {
    "qwen": {"model": "qwen2.5-7b"},
    "llama": {"model": "llama-3.1-8b"},
    "tied": {"model": "llama-3.1-8b", "tied": True},
}
CONDITIONS = {
    "plain": {},
    "accumulated_and_clipped": {"micro_steps": 2, "config": {"gradient_clipping": 0.5}},
    "overflow": {"overflow_at": 7, "config": {"fp16": {"hysteresis": 1}}},
    "frozen": {"freeze": ("embed_tokens", "layers.0.")},
    "everything": {
        "micro_steps": 2,
        "overflow_at": 7,
        "freeze": ("embed_tokens", "layers.0.mlp"),
        "config": {"gradient_clipping": 0.5, "fp16": {"hysteresis": 1}},
    },
}


def training(name: str, condition: str, model: str, **fields) -> Job:
    """Return the job of a training; it has an extra step for a skipped one, so that 30 are applied."""
    shared = {"steps": STEPS + ("overflow_at" in CONDITIONS[condition]), **MODELS[model], **CONDITIONS[condition]}
    return Job(name=name, **shared, **fields)


def reference(condition: str, model: str) -> Job:
    return training("reference", condition, model, system="zero_offload", arm="today")


def assert_same(result, expected) -> None:
    for what in ("losses", "weights_sha256", "skipped", "scales"):
        assert result[what] == expected[what], f"{result['name']}: {what}"


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Train the quick subset in one process; the names have the model and the condition."""
    folder = tmp_path_factory.mktemp("matrix")
    jobs = [
        reference("plain", "qwen"),
        training("stock", "plain", "qwen", **STOCK["stock"]),
        training("all", "plain", "qwen", parts=ALL),
        training("reference-everything", "everything", "tied", system="zero_offload", arm="today"),
        training("all-everything", "everything", "tied", parts=ALL),
    ]
    return train_all(jobs, folder)


@pytest.mark.parametrize("name", ["stock", "all"])
def test_stock_on_nvme_and_all_parts_equal_the_reference(quick, name):
    assert_same(quick[name], quick["reference"])


def test_all_parts_equal_the_reference_under_all_conditions_together(quick):
    """One training has gradient accumulation, clipping, an overflow, frozen parameters and tied embeddings."""
    assert_same(quick["all-everything"], quick["reference-everything"])


def test_thirty_steps_apply_and_overflow_halves_the_scale(quick):
    plain, eventful = quick["reference"], quick["reference-everything"]
    assert len(plain["losses"]) - plain["skipped"][-1] == STEPS
    assert len(eventful["losses"]) - eventful["skipped"][-1] == STEPS
    at = CONDITIONS["everything"]["overflow_at"]
    assert eventful["skipped"][at - 1 : at + 1] == [0, 1]
    assert eventful["scales"][at] == eventful["scales"][at - 1] / 2


def test_the_training_learns(quick):
    losses = [sum(micro) / len(micro) for micro in quick["reference"]["losses"]]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_parts_alone_in_pairs_and_together_equal_the_reference(tmp_path, condition, model):
    others = {name: {"parts": parts} for name, parts in COMBINATIONS.items()} | STOCK
    jobs = [training(name, condition, model, **fields) for name, fields in others.items()]
    results = train_all([reference(condition, model), *jobs], tmp_path, timeout_s=3600)
    for name in others:
        assert_same(results[name], results["reference"])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("condition", ["plain", "everything"])
def test_two_ranks_equal_their_own_reference(tmp_path, condition):
    chosen = {name: {"parts": parts} for name, parts in COMBINATIONS.items() if "+" not in name}
    chosen |= {"stock": STOCK["stock"]}
    jobs = [training(name, condition, "qwen", **fields) for name, fields in chosen.items()]
    results = train_all([reference(condition, "qwen"), *jobs], tmp_path, ranks=2, timeout_s=1800)
    for name in chosen:
        assert_same(results[name], results["reference"])
