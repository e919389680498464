"""gradients: kept computes what swapped computes, bit by bit, and moves 8 bytes less per parameter and step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from trainings import Job, train_all

pytestmark = pytest.mark.deepspeed

HARD = {
    "steps": 8,
    "layers": 1,
    "micro_steps": 2,
    "overflow_at": 3,
    "freeze": ("layers.0.mlp",),
    "config": {"gradient_clipping": 0.1, "fp16": {"hysteresis": 1}},
}
PLAIN = {"steps": 4, "layers": 1}
KEPT = {"gradients": "host"}
BUFFERS = ("zero_optimization.offload_optimizer.buffer_count",)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    jobs = [
        Job(name="swapped", **PLAIN),
        Job(name="kept", parts=KEPT, **PLAIN),
        Job(name="hard_swapped", **HARD),
        Job(name="hard_kept", parts=KEPT, **HARD),
        Job(name="derived_swapped", leave_out=BUFFERS, **PLAIN),
        Job(name="derived_kept", leave_out=BUFFERS, parts=KEPT, **PLAIN),
        Job(name="bf16_swapped", arm="memascend_bf16", dtype="bf16", **PLAIN),
        Job(name="bf16_kept", arm="memascend_bf16", dtype="bf16", parts=KEPT, **PLAIN),
    ]
    return train_all(jobs, tmp_path_factory.mktemp("gradients"))


@pytest.mark.parametrize("name", ["", "hard_", "bf16_", "derived_"])
def test_kept_gradients_train_the_same(results, name):
    swapped, kept = results[f"{name}swapped"], results[f"{name}kept"]
    for field in ("losses", "skipped", "scales", "weights_sha256"):
        assert kept[field] == swapped[field]


@pytest.mark.parametrize(("name", "bytes_a_parameter"), [("", 8), ("bf16_", 4)])
def test_kept_gradients_are_neither_written_nor_read(results, name, bytes_a_parameter):
    swapped, kept = results[f"{name}swapped"], results[f"{name}kept"]
    saved = [before - after for before, after in zip(swapped["io_bytes"], kept["io_bytes"], strict=True)]
    assert saved == pytest.approx([bytes_a_parameter * kept["parameters"]] * len(saved), rel=0.05)


class Muonlike:
    """An optimizer other than DeepSpeed's AdamW."""


@pytest.mark.parametrize(
    ("adamw", "others", "said"),
    [
        (False, {}, "the optimizer is Muonlike"),
        (True, {"use_muon": True}, "Muon is in use"),
        (True, {"zenflow": True}, "ZenFlow is in use"),
        (True, {}, "no gradient of this step, or one that was set from outside"),
    ],
)
def test_one_line_says_why_gradient_conversion_is_not_deferred(caplog, adamw, others, said):
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from memascend.integrations.deepspeed.deferred_grad_conversion import DeferredGradConversion

    class OneSubGroup(DeferredGradConversion):
        grad_partitions_flat_buffer = torch.zeros(8)
        subgroup_to_device = ("cpu",)
        fp16_partitioned_groups_flat_numel, _flat_begin = (8,), (0,)
        _pieces: ClassVar = {0: SimpleNamespace(lie_in=lambda flat: False)}
        _announced = False

        def __init__(self):
            self.optimizer = object.__new__(DeepSpeedCPUAdam) if adamw else Muonlike()
            self.optimizer.opt_id, self.optimizer.ds_opt_adam = 0, SimpleNamespace(destroy_adam=lambda number: None)
            vars(self).update(others)

    training = OneSubGroup()
    assert [training._unconverted(0) for _ in range(2)] == [None, None]
    (line,) = caplog.messages
    assert said in line


@pytest.mark.slow
def test_two_ranks_keep_their_own_gradients_and_train_the_same(tmp_path):
    jobs = [
        Job(name="swapped", **HARD),
        Job(name="kept", parts=KEPT, **HARD),
        Job(name="bf16_swapped", arm="memascend_bf16", dtype="bf16", **PLAIN),
        Job(name="bf16_kept", arm="memascend_bf16", dtype="bf16", parts=KEPT, **PLAIN),
    ]
    results = train_all(jobs, tmp_path, ranks=2)
    assert results["swapped"]["skipped"][-1] == 1
    for name in ("", "bf16_"):
        swapped, kept = results[f"{name}swapped"], results[f"{name}kept"]
        for field in ("losses", "skipped", "scales", "weights_sha256"):
            assert kept[field] == swapped[field], f"{name}{field}"
        assert all(less < more for less, more in zip(kept["io_bytes"], swapped["io_bytes"], strict=True))
