"""A derived sub_group_size changes the order of two sums, and nothing else."""

from __future__ import annotations

import pytest
import trainings
import unused_parameter_trainings
from unused_parameter_trainings import EXPERTS, HIDDEN, WIDTH

from memascend.planner.derived_sizes import sub_group_size

pytestmark = pytest.mark.deepspeed

SIZES = [WIDTH * HIDDEN, HIDDEN, *([HIDDEN * HIDDEN, HIDDEN] * (1 + EXPERTS)), HIDDEN * WIDTH, WIDTH]
CLIPPED = {"experts": (((0, 1),),) * 8, "config": {"gradient_clipping": 0.05}}


@pytest.fixture(scope="module")
def clipped(tmp_path_factory):
    jobs = [
        unused_parameter_trainings.Job(name="derived", parts={}, sub_group_size=None, **CLIPPED),
        unused_parameter_trainings.Job(name="same_in_memory", sub_group_size=sub_group_size([SIZES]), **CLIPPED),
        unused_parameter_trainings.Job(name="default_in_memory", sub_group_size=10**9, **CLIPPED),
    ]
    return unused_parameter_trainings.train_all(jobs, tmp_path_factory.mktemp("clipped"))


def test_equal_sub_group_sizes_give_bitwise_equal_results(clipped):
    derived, same = clipped["derived"], clipped["same_in_memory"]
    for what in ("losses", "norms", "tensors"):
        assert derived[what] == same[what], what


def test_another_sub_group_size_changes_norm_and_losses_only_slightly(clipped):
    """The first loss is before any update, and the first norm is of the same gradients."""
    derived, default = clipped["derived"], clipped["default_in_memory"]
    assert derived["losses"][0] == default["losses"][0]
    assert derived["norms"][0] == pytest.approx(default["norms"][0], rel=3e-7)
    assert derived["losses"] == pytest.approx(default["losses"], rel=1e-2)


def test_unclipped_training_on_whole_vectors_ignores_sub_group_size(tmp_path):
    """Every tensor of this model is a multiple of 16 elements: no vector of DeepSpeed's AdamW is cut."""
    shared = {"model": "llama-3.1-8b", "dtype": "bf16", "layers": 1, "steps": 4}
    unclipped = {"gradient_clipping": 0.0}
    jobs = [
        trainings.Job(
            name="default",
            system="zero_offload",
            arm="today",
            config=unclipped | {"zero_optimization": {"sub_group_size": 10**9}},
            **shared,
        ),
        trainings.Job(name="derived", config=unclipped, leave_out=("zero_optimization.sub_group_size",), **shared),
    ]
    results = trainings.train_all(jobs, tmp_path)
    for what in ("losses", "weights_sha256"):
        assert results["derived"][what] == results["default"][what]
