"""`"tiers": [...]`: ZeRO-3's optimizer over several drives (MLP-Offload) computes what plain offload computes, bitwise.

The cumulative arms of MLP-Offload's Figs. 14 and 15: what each switch does is counted, what it computes is compared.
"""

from __future__ import annotations

import pytest
from trainings import Job, merged, train_all

from tests.throttled import throttled_paths

pytestmark = pytest.mark.deepspeed

SMALL = {"steps": 4, "layers": 1}
HARD = {
    "steps": 8,
    "layers": 1,
    "micro_steps": 2,
    "overflow_at": 3,
    "config": {"gradient_clipping": 0.1, "fp16": {"hysteresis": 1}},
}
SAME = ("losses", "skipped", "scales", "weights_sha256")


def tiers(folder, names="ab", **options):
    for name in names:
        (folder / name).mkdir(exist_ok=True)
    return {"tiers": [str(folder / name) for name in names], **options}


def held(sub_groups, **gradients):
    """The buffers of so many sub-groups in host memory."""
    each = 4 if gradients.get("gradients") == "swapped" else 3
    return {"zero_optimization": {"offload_optimizer": {"buffer_count": each * sub_groups + 1}}}


def test_two_paths_train_as_plain_offload_and_move_less(tmp_path):
    jobs = [
        Job(name="plain", **SMALL),
        Job(name="tiers", parts=tiers(tmp_path), config=held(3), **SMALL),
    ]
    results = train_all(jobs, tmp_path / "out")
    plain, over_two = results["plain"], results["tiers"]
    for field in SAME:
        assert over_two[field] == plain[field]
    assert over_two["io_bytes"][-1] < 0.9 * plain["io_bytes"][-1] - 8 * plain["parameters"]


ARMS = ("caching", "skip_gradients", "exclusive", "mlp_offload", "as_published", "multi_path_only", "weights_on_paths")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "hard"])
def test_the_cumulative_arms_train_to_the_same_bits_on_throttled_paths(tmp_path, case):
    """Figs. 14 and 15: each switch added in turn, and alone, over two drives of 40 and 20 MB/s."""
    options = SMALL if case == "plain" else HARD
    with throttled_paths(tmp_path, [40_000_000, 20_000_000]) as paths:
        section = {"memascend": {"tiers": [str(path.folder / "swap") for path in paths]}}
        first = {"memascend": {"tiers": section["memascend"]["tiers"][:1]}}
        alone = ("caching", "skip_gradients", "exclusive")
        jobs = [Job(name="zero3", system="mlp_offload", arm="zero3", **options)]
        in_memory = merged(options.get("config", {}), {"data_types": {"grad_accum_dtype": "fp16"}})
        jobs.append(Job(name="zero_offload", system="zero_offload", arm="today", **{**options, "config": in_memory}))
        for arm in ARMS:
            config = merged(options.get("config", {}), first if arm in alone else section)
            jobs.append(Job(name=arm, system="mlp_offload", arm=arm, **{**options, "config": config}))
        results = train_all(jobs, tmp_path / "out", timeout_s=900)
        for arm in ("zero3", *ARMS):
            for field in SAME:
                assert results[arm][field] == results["zero_offload"][field], f"{arm} {field}"
        assert all(path.direct_bytes > 1 << 20 for path in paths)
    moved = {arm: sum(results[arm]["io_bytes"][2:]) for arm in ("zero3", *ARMS)}
    assert moved["zero3"] > moved["caching"] > moved["skip_gradients"] == moved["mlp_offload"]
