"""Models and configurations of every kind train as the reference that swaps nothing, to the last bit.

One process for a set of ranks runs all of them; every training has a reference with parameters and optimizer in memory.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from trainings import Job, train_all

pytestmark = pytest.mark.deepspeed

STEPS = 6
ZERO = "zero_optimization"
MOE = {
    "model_type": "qwen2_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# Keys that a user without further knowledge leaves out; the bucket stays, because on the CPU it is host memory.
LEFT_OUT = (
    "aio",
    "data_types",
    *(f"{ZERO}.{key}" for key in ("overlap_comm", "contiguous_gradients")),
    *(f"{ZERO}.stage3_{key}" for key in ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")),
    f"{ZERO}.stage3_param_persistence_threshold",
    *(f"{ZERO}.offload_param.{key}" for key in ("buffer_size", "buffer_count", "max_in_cpu", "pin_memory")),
    *(f"{ZERO}.offload_optimizer.{key}" for key in ("buffer_count", "pin_memory", "fast_init")),
    *(f"{ZERO}.offload_optimizer.{key}" for key in ("pipeline_read", "pipeline_write")),
)
KINDS = {
    "untied": Job(name="untied"),
    "tied": Job(name="tied", tied=True),
    "mixture-of-experts": Job(name="mixture-of-experts", model_config=MOE),
    "frozen": Job(name="frozen", freeze=("layers.0.", "embed_tokens")),
    "nothing-but-folders": Job(name="nothing-but-folders", leave_out=LEFT_OUT),
    # DeepSpeed then gathers ahead in an order that is not the training's, and all buffers are in use.
    "evaluated-first": Job(name="evaluated-first", leave_out=LEFT_OUT, layers=4, evaluate_first=True),
    # The pool is made when DeepSpeed has partitioned the model that it was given whole.
    "built-outside": Job(name="built-outside", built="outside"),
    # Initialisation gathers a module's weight and bias together, before there is a pool.
    "built-by-transformers": Job(name="built-by-transformers", built="transformers"),
}

# The size of sub-groups determines which elements AdamW's vector loop
# leaves to its scalar loop, which rounds differently.
NOT_EVEN_SUB_GROUPS = Job(name="not-even-sub-groups", leave_out=(*LEFT_OUT, f"{ZERO}.sub_group_size"))


def jobs_of(kinds: dict[str, Job]) -> list[Job]:
    jobs = []
    for job in kinds.values():
        # dtype of accumulated gradients: leaving it out changes results
        dtype = tuple({"data_types"} & set(job.leave_out))
        reference = replace(job, name=f"{job.name}-reference", system="zero_offload", arm="today", leave_out=dtype)
        jobs += [replace(reference, steps=STEPS), replace(job, steps=STEPS)]
    return jobs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    derived = replace(NOT_EVEN_SUB_GROUPS, steps=STEPS)
    return train_all([*jobs_of(KINDS), derived], tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("kind", KINDS)
def test_model_of_each_kind_trains_as_without_swapping(trained, kind):
    reference, ours = trained[f"{kind}-reference"], trained[kind]
    assert ours["losses"] == reference["losses"]
    assert ours["weights_sha256"] == reference["weights_sha256"]
    assert len({str(losses) for losses in ours["losses"]}) == STEPS
    assert min(ours["io_bytes"]) > 0


def test_derived_sub_groups_change_later_losses_only_slightly(trained):
    reference, ours = trained["nothing-but-folders-reference"], trained["not-even-sub-groups"]
    assert ours["losses"][:3] == reference["losses"][:3]
    assert [loss for [loss] in ours["losses"]] == pytest.approx([loss for [loss] in reference["losses"]], abs=2e-3)


def test_frozen_parameters_move_no_optimizer_states(trained):
    assert trained["frozen"]["io_bytes"][-1] < 0.7 * trained["untied"]["io_bytes"][-1]


# Without these settings parameters stay gathered for long, and used to be released while they were being read.
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["nothing-but-folders", "built-outside"], marks=pytest.mark.slow),
        pytest.param(["untied", "frozen", "built-by-transformers"], marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_as_without_swapping(tmp_path, names):
    kinds = {name: replace(KINDS[name], layers=4) for name in names}
    results = train_all(jobs_of(kinds), tmp_path, ranks=2)
    for kind in kinds:
        assert results[kind]["losses"] == results[f"{kind}-reference"]["losses"]
        assert results[kind]["weights_sha256"] == results[f"{kind}-reference"]["weights_sha256"]
