"""numerics: exact is DeepSpeed's arithmetic; fast is ours, close to it but not the same bits."""

from __future__ import annotations

import pytest
import torch
from trainings import Job, train_all

pytestmark = pytest.mark.deepspeed

CLIPPED = {"gradient_clipping": 0.1, "fp16": {"hysteresis": 1}}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    shared = {"steps": 12, "layers": 1, "overflow_at": 3, "config": CLIPPED}
    jobs = [
        Job(name="exact", **shared),
        Job(name="fast", arm="memascend_fast", **shared),
        Job(name="fast_in_memory", arm="memascend_fast", minimum_swap_bytes=40_000, **shared),
    ]
    return train_all(jobs, tmp_path_factory.mktemp("numerics"))


@pytest.mark.parametrize("name", ["fast", "fast_in_memory"])
def test_fast_follows_exact_through_clipping_and_an_overflow(results, name):
    exact, fast = results["exact"], results[name]
    assert fast["skipped"] == exact["skipped"]
    assert fast["scales"] == exact["scales"]
    for one, other in zip(fast["losses"], exact["losses"]):
        assert one == pytest.approx(other, rel=2e-3)


def test_fast_numerics_differ_bitwise_from_exact(results):
    """If this fails, ours has become bitwise equal and may replace DeepSpeed's everywhere."""
    assert results["fast"]["weights_sha256"] != results["exact"]["weights_sha256"]


def test_our_adamw_differs_from_deepspeeds_by_rounding_alone():
    from memascend.integrations.deepspeed.stock_ops import cpu_adam_step
    from memascend.ops.adamw import adamw_

    torch.manual_seed(0)
    start, grad = torch.randn(10_000) * 0.02, torch.randn(10_000) * 1e-3
    theirs, ours = start.clone(), start.clone()
    options = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    cpu_adam_step(theirs, grad.clone(), torch.zeros(10_000), torch.zeros(10_000), **options)()
    adamw_(ours, grad, torch.zeros(10_000), torch.zeros(10_000), step=1, **options)
    assert (ours != theirs).any()
    assert (ours - theirs).abs().max() < 1e-8


def test_fast_numerics_refuse_an_optimizer_other_than_adamw():
    from memascend.integrations.deepspeed.numerics import _require_cpu_adamw

    with pytest.raises(ValueError, match="AdamW") as caught:
        _require_cpu_adamw(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    assert "\n" not in str(caught.value)
