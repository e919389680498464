"""Plans against the paper: every printed component and total whose inputs the paper gives, within 1 %."""

import csv
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from memascend import systems
from memascend.memory.ledger import HOST
from memascend.memory.pinned import CountingAllocator
from memascend.planner import Workload, footprint, model_spec
from memascend.planner.derived_sizes import IoSettings
from memascend.planner.footprint import GIB, OWNER_METRICS, overflow_timeline
from memascend.planner.gpu_memory import gpu_memory
from memascend.planner.pool import partition_numel, streamed, sub_groups
from memascend.planner.workload import SwapSizes, papers
from memascend.storage.direct_engine import DirectEngine, swapping_config

PUBLISHED = Path(__file__).parents[2] / "results" / "published" / "memascend.csv"
MODELS = {
    "Llama3.1-8B": "llama3.1-8b",
    "Qwen2.5-7B": "qwen2.5-7b",
    "Qwen2.5-14B": "qwen2.5-14b",
    "Qwen2.5-32B": "qwen2.5-32b",
}
SYSTEMS = {"ZeRO-Infinity": "zero_infinity", "MemAscend": "memascend"}


def plan(spec, system="zero_infinity", arm=None, *, process_overhead=True, **workload):
    """Plan with the sizes that the papers' totals describe, and without activation checkpoints unless requested."""
    work = Workload(spec=spec, system=system, arm=arm, **({"context": 0} | workload))
    return footprint.plan(papers(work), process_overhead=process_overhead)


def published(exhibit: str, metric: str, series: str, model: str = "", x_value: str = "") -> float:
    with PUBLISHED.open(newline="") as file:
        rows = [
            row["value"]
            for row in csv.DictReader(file)
            if (row["exhibit_id"], row["metric"], row["series"], row["model"], row["x_value"])
            == (exhibit, metric, series, model, x_value)
            and (row["unit"] != "%" or "reduction" in metric)  # some metrics are printed in GiB and in percent
        ]
    assert len(set(rows)) == 1, f"{exhibit} {metric} {series} {model}: {rows}"
    return float(rows[0])


def gib(system: str, model: str, **workload) -> float:
    return plan(model_spec(model), system, **workload).host_bytes / GIB


def components(system: str) -> dict[str, float]:
    return {name: size / GIB for name, size in plan(model_spec("qwen2.5-7b"), system).components().items()}


def reduction(pairs) -> float:
    reductions = [100 * (1 - small / large) for large, small in pairs]
    return sum(reductions) / len(reductions)


@pytest.mark.parametrize(
    ("series", "metric"),
    [
        ("ZeRO-Infinity", "parameter buffer pool"),
        ("MemAscend", "parameter buffer pool"),
        ("ZeRO-Infinity", "overflow check overhead"),
        ("both", "gradient flat buffer"),
        ("both", "optimizer-state and swap-out buffers"),
    ],
)
def test_figure_8_components_match_the_paper(series, metric):
    expected = published("memascend-fig08", metric, series, "Qwen2.5-7B")
    for name in SYSTEMS if series == "both" else [series]:
        assert components(SYSTEMS[name])[metric] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("series", SYSTEMS)
def test_figure_8_combines_rounding_and_process_overhead(series):
    parts = components(SYSTEMS[series])
    expected = published("memascend-fig08", "pinned memory overhead", series, "Qwen2.5-7B")
    assert parts["pinned memory overhead"] + parts["process overhead"] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("series", SYSTEMS)
def test_figure_8_totals_match_the_paper(series):
    expected = published("memascend-fig08", "peak system memory", series, "Qwen2.5-7B")
    assert gib(SYSTEMS[series], "qwen2.5-7b") == pytest.approx(expected, rel=0.01)


def test_figure_8_margin_over_the_minimum_matches_the_paper():
    parts = components("memascend")
    minimum = parts["parameter buffer pool"] + parts["gradient flat buffer"]
    margin = published("memascend-fig08", "margin over theoretical minimum", "MemAscend", "Qwen2.5-7B")
    assert gib("memascend", "qwen2.5-7b") - minimum == pytest.approx(margin, rel=0.01)


def test_figure_11_average_reduction_matches_the_paper():
    pools = [
        [plan(model_spec(name), system).requested_bytes("parameter_pool") for system in SYSTEMS.values()]
        for name in MODELS.values()
    ]
    expected = published("memascend-fig11", "average pool reduction", "MemAscend")
    assert reduction(pools) == pytest.approx(expected, rel=0.01)
    assert pools[2][0] == pools[3][0]  # 14B and 32B share their embedding
    assert pools[2][1] < pools[3][1]


def test_pools_of_qwen_32b_match_section_iii_a():
    baseline, ours = (plan(model_spec("qwen2.5-32b"), system) for system in SYSTEMS.values())
    assert baseline.requested_bytes("parameter_pool") / GIB == pytest.approx(13.05, rel=0.001)
    assert ours.requested_bytes("parameter_pool") / GIB == pytest.approx(3.81, rel=0.001)


@pytest.mark.parametrize(("model", "series"), list(itertools.product(MODELS, SYSTEMS)))
def test_figure_15_totals_match_the_paper(model, series):
    expected = published("memascend-fig15", "peak system memory", series, model)
    assert gib(SYSTEMS[series], MODELS[model]) == pytest.approx(expected, rel=0.01)


def test_figure_15_average_reduction_matches_the_paper():
    expected = published("memascend-fig15", "average reduction", "MemAscend", "4 dense models")
    pairs = [[gib(system, name) for system in SYSTEMS.values()] for name in MODELS.values()]
    assert reduction(pairs) == pytest.approx(expected, rel=0.01)


def test_figure_21_bf16_average_reduction_matches_the_paper():
    expected = published("memascend-fig21", "average memory reduction, bf16", "MemAscend")
    pairs = [[gib(system, name, dtype="bf16") for system in SYSTEMS.values()] for name in MODELS.values()]
    assert reduction(pairs) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("model", "context", "series"),
    list(itertools.product(["Llama3.1-8B", "Qwen2.5-32B"], ["4096", "131072"], SYSTEMS)),
)
def test_figure_16_endpoints_on_two_gpus_match_the_paper(model, context, series):
    with PUBLISHED.open(newline="") as file:
        (expected,) = (
            float(row["value"])
            for row in csv.DictReader(file)
            if (row["exhibit_id"], row["series"], row["model"], row["x_value"])
            == ("memascend-fig16", series, model, context)
        )
    ours = gib(SYSTEMS[series], MODELS[model], ranks=2, context=int(context))
    assert ours == pytest.approx(expected, rel=0.01)


def test_table_ii_8b_matches_and_two_cells_deviate_as_known():
    def residual(model, series, cell):
        return gib("zero_infinity", model) / published("memascend-tab02", "peak system memory", series, cell, cell) - 1

    assert abs(residual("llama3.1-8b", "ZeRO-Infinity", "8B")) < 0.01
    # Known deviations, kept as they are: erratum M29. A change that moves them affects the agreement with the paper.
    assert residual("llama3.2-1b", "ZeRO-Infinity", "1B") == pytest.approx(-0.35, abs=0.01)
    assert residual("llama3.2-3b", "ZeRO-Infinity", "3B") == pytest.approx(-0.165, abs=0.01)


@pytest.mark.parametrize(("model", "cell"), [("llama3.2-1b", "1B"), ("llama3.2-3b", "3B")])
def test_table_ii_zero_offload_is_predicted_within_seven_percent(model, cell):
    expected = published("memascend-tab02", "peak system memory", "ZeRO-Offload", cell, cell)
    assert gib("zero_offload", model) == pytest.approx(expected, rel=0.07)


def test_models_fit_where_table_ii_says():
    assert gib("zero_offload", "llama3.2-3b") < 128 < gib("zero_offload", "llama3.1-8b")
    device = {name: plan(model_spec(name), "all_in_gpu").device_bytes / GIB for name in ("llama3.2-1b", "llama3.2-3b")}
    assert device["llama3.2-1b"] < 24 < device["llama3.2-3b"]


def test_only_table_iis_1b_cell_depends_on_batch_and_context():
    depends = set()
    for system, models in (
        ("all_in_gpu", ("llama3.2-1b", "llama3.2-3b", "llama3.1-8b")),
        ("zero_offload", ("llama3.2-3b", "llama3.1-8b")),
        ("zero_infinity", ("llama3.1-8b",)),
    ):
        for model in models:
            made = [plan(model_spec(model), system, batch=b, context=c) for b in (1, 8) for c in (2048, 4096)]
            fits = {gpu_memory(p.work).device_bytes <= 24 * GIB and p.host_bytes <= 128 * GIB for p in made}
            if len(fits) > 1:
                depends.add((model, system))
    assert depends == {("llama3.2-1b", "all_in_gpu")}


ARMS = [(name, arm) for name in systems.names() for arm in systems.load(name).arms]


@pytest.mark.parametrize(("system", "arm"), ARMS)
@pytest.mark.parametrize(("model", "workload"), [("llama3.2-1b", {}), ("qwen2.5-7b", {"ranks": 2, "context": 512})])
def test_components_add_up_to_the_total(system, arm, model, workload):
    made = plan(model_spec(model), system, arm, dtype="bf16", **workload)
    assert sum(made.components().values()) == made.host_bytes
    assert {entry.owner for entry in made.entries if entry.role == HOST} <= set(OWNER_METRICS)


@pytest.mark.parametrize(
    ("model", "tolerance"),
    # Routers shrink by k, not k^2, which shifts the sub-groups of a mixture slightly.
    [("qwen2.5-7b", 0.002), ("llama3.1-8b", 0.002), ("qwen3-30b-a3b", 0.01)],
)
def test_twin_memory_scales_with_one_over_k_squared(model, tolerance):
    spec, k = model_spec(model), 8
    for system in SYSTEMS.values():
        full = plan(spec, system, process_overhead=False)
        twin = plan(spec.twin(k), system, process_overhead=False)
        assert twin.host_bytes * k * k == pytest.approx(full.host_bytes, rel=tolerance)


def test_qwen_twin_matches_the_memory_measured_on_deepspeed():
    """MiB measured manually on DeepSpeed 0.19.8 for Qwen2.5-7B at k = 8: locked memory plus peak."""
    twin = model_spec("qwen2.5-7b").twin(8)
    assert plan(twin, "zero_infinity").host_net_bytes / 2**20 == pytest.approx(1720.5, rel=0.002)
    assert plan(twin, "memascend").host_net_bytes / 2**20 == pytest.approx(673.3, rel=0.002)


def test_single_tensor_pool_is_rounded_as_a_whole():
    made = plan(model_spec("llama3.1-8b"), "zero_infinity", "as_published_one_tensor")
    (pool,) = (entry for entry in made.entries if entry.owner == "parameter_pool")
    assert pool.reserved_bytes == 16 * GIB
    separate = plan(model_spec("llama3.1-8b"), "zero_infinity", "as_published")
    assert sum(entry.owner == "parameter_pool" for entry in separate.entries) == 9


def test_bounded_rounding_leaves_only_pool_and_chain_to_save():
    """Qwen2.5-7B, calculated manually. Elements: embedding 152064 x 3584,
    all 7,615,616,512; every buffer is above 1 MiB."""
    spec, embedding, parameters = model_spec("qwen2.5-7b"), 152064 * 3584, 7_615_616_512
    made = plan(spec, "zero_infinity", "as_published_round_threshold", process_overhead=False)
    small = made.requested_bytes("small_parameters")
    buffers = 9 * 2 * embedding + 5 * 4 * embedding + 2 * embedding + 4 * parameters
    assert made.host_bytes - small == pytest.approx(buffers + 5 * parameters, abs=200 * 4096)
    published, ours = (plan(spec, system, process_overhead=False) for system in ("zero_infinity", "memascend"))
    gone = published.host_bytes - made.host_bytes
    expected = 10 * (2**31 - 2 * embedding) + 5 * (2**32 - 4 * embedding) + (2**35 - 4 * parameters)
    assert gone == pytest.approx(expected, abs=200 * 4096)
    pool = made.requested_bytes("parameter_pool") - ours.requested_bytes("parameter_pool")
    assert made.host_bytes - ours.host_bytes == pytest.approx(pool + 5 * parameters, abs=200 * 4096)


def test_threshold_rounds_only_small_pinned_buffers_to_powers_of_two():
    counted = CountingAllocator("round_threshold")
    mib = 1 << 20
    assert [counted.reserved_bytes(n) for n in (1, 5000, mib - 1, mib)] == [4096, 8192, mib, mib]
    assert [counted.reserved_bytes(n) for n in (mib + 1, 5 * mib, 5 * mib + 1)] == [mib + 4096, 5 * mib, 5 * mib + 4096]


def test_one_tensor_arm_needs_a_swap_out_buffer_per_rank():
    spec = model_spec("qwen2.5-7b")
    one, two = (
        plan(spec, "zero_infinity", arm, ranks=2).requested_bytes("swap_out_buffer")
        for arm in ("as_published", "as_published_one_tensor")
    )
    assert two == 2 * one


def test_activation_checkpoints_follow_equation_1_and_round_per_rank():
    spec = model_spec("qwen3-30b-a3b")
    workload = {"ranks": 2, "batch": 1, "context": 4096}
    requested = 2 * 1 * 4096 * spec.layers * spec.hidden * 2
    for system, reserved in (("memascend", requested), ("zero_infinity", 2 * GIB)):
        made = plan(spec, system, **workload)
        assert made.requested_bytes("activation_checkpoints") == requested
        entries = [entry for entry in made.entries if entry.owner == "activation_checkpoints"]
        assert sum(entry.reserved_bytes for entry in entries) == reserved


def test_bf16_has_no_overflow_check():
    spec = model_spec("qwen2.5-7b")
    fp16, bf16 = (plan(spec, "zero_infinity", dtype=dtype) for dtype in ("fp16", "bf16"))
    assert fp16.host_bytes - bf16.host_bytes == 5 * spec.parameters
    assert bf16.requested_bytes("overflow_check") == 0


def test_aminmax_and_the_fused_check_leave_no_temporaries():
    spec = model_spec("qwen2.5-7b")
    assert plan(spec, "zero_infinity", "aminmax").requested_bytes("overflow_check") == 0
    assert plan(spec, "memascend").requested_bytes("overflow_check") == 0


def test_overflow_timeline_peaks_as_in_figure_3():
    numel = model_spec("llama3.1-8b").parameters
    live = dict(overflow_timeline(numel, chain=True))
    factor = published("memascend-fig03", "peak relative to tensor", "ZeRO-Infinity", x_value="isinf")
    assert live["isinf"] / live["gradients"] == factor
    assert live["isnan"] / live["gradients"] == 1.25
    assert live["isinf"] / GIB == pytest.approx(67.30, rel=0.001)
    assert live["done"] == live["gradients"]
    assert set(dict(overflow_timeline(numel, chain=False)).values()) == {4 * numel}


def test_the_timeline_and_the_plan_agree_on_the_spike():
    spec = model_spec("qwen2.5-7b")
    spike = max(size for _, size in overflow_timeline(spec.parameters, chain=True)) - 4 * spec.parameters
    assert plan(spec, "zero_infinity").requested_bytes("overflow_check") == spike


def test_partitions_of_all_ranks_cover_the_model():
    spec = model_spec("qwen2.5-7b")
    for ranks in (1, 2, 3, 8):
        assert sum(partition_numel(tensor.numel, ranks) for tensor in spec.tensors()) * ranks >= spec.parameters


def test_streamed_tensors_are_those_over_the_threshold():
    spec = model_spec("qwen2.5-7b")
    parts = streamed(spec.tensors(), element_bytes=2)
    assert len(parts.outside) == 2
    assert {len(block) for block in parts.blocks} == {7}
    assert parts.monolithic_count() == 9
    assert parts.monolithic_count(blocks_in_flight=2) == 16
    assert all(not tensor.is_matrix for tensor in parts.resident)


def test_model_without_streamable_tensors_is_refused():
    spec = model_spec("llama3.2-1b")
    with pytest.raises(ValueError, match="no tensor reaches the swap threshold"):
        streamed(spec.tensors(), element_bytes=2, threshold_bytes=1 << 40)


def test_sub_groups_close_once_they_reach_the_size():
    tensors = model_spec("qwen2.5-7b").tensors()
    each = sub_groups(tensors, 1)
    assert each == [[tensor.numel] for tensor in tensors]
    grouped = sub_groups(tensors, 10**9)
    whole = [tensor.numel for tensor in tensors]
    assert [numel for group in grouped for numel in group] == whole
    assert all(sum(group) >= 10**9 for group in grouped[:-1])
    assert sub_groups(tensors, 10**12) == [whole]


def test_a_larger_sub_group_needs_larger_optimizer_buffers():
    spec = model_spec("qwen2.5-7b")
    small, large = (
        footprint.plan(Workload(spec=spec, sizes=SwapSizes(sub_group_size=size))).requested_bytes("optimizer_buffers")
        for size in (1, 10**9)
    )
    assert small == 4 * 4 * spec.largest().numel
    assert large > small


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"system": "zero_finity"}, "unknown system"),
        ({"arm": "tomorrow"}, "has no arm 'tomorrow'"),
        ({"dtype": "fp8"}, "unknown dtype 'fp8'"),
        ({"ranks": 0}, "number of GPUs"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"context": -1}, "context must be at least 0"),
        ({"blocks_in_flight": 0}, "blocks in flight"),
    ],
)
def test_impossible_arguments_are_refused_in_one_line(arguments, words):
    with pytest.raises(ValueError, match=words) as caught:
        plan(model_spec("llama3.2-1b"), **arguments)
    assert "\n" not in str(caught.value)


def test_every_system_has_a_default_arm():
    found = {name: systems.default_arm(name) for name in systems.names()}
    assert None not in found.values()
    ours = {
        "zero_infinity": "as_published",
        "memascend": "memascend",
        "mlp_offload": "mlp_offload",
        "ssdtrain": "ssdtrain",
        "zero_offload": "today",
        "cxl": "cxl_aware",
        "lohan": "optimized",
        "all_in_gpu": "today",
        "in_memory": "torch_adamw",
        "colossal_ai": "as_published",
        "flashneuron": "as_published",
    }
    assert {name: found[name] for name in ours} == ours


def test_drop_in_plan_includes_the_buffers_it_derives():
    """It has four buffers of the largest sub-group for the derived size, and the engine's bounce buffers."""
    spec = model_spec("qwen2.5-7b")
    work = Workload(spec=spec, ranks=2, sizes=SwapSizes(io=IoSettings(block_bytes=1 << 20, queue_depth=32, workers=4)))
    made = footprint.plan(work)
    embedding = 152064 * 3584 // 2
    buffers = [e.requested_bytes for e in made.entries if e.owner == "optimizer_buffers"]
    assert buffers == [pytest.approx(4 * embedding, rel=1e-4)] * 8
    assert made.requested_bytes("nvme_engine_buffers") == 2 * 2 * (32 * 4096 + 4 * 65536)
    assert "nvme_engine_buffers" not in {e.owner for e in footprint.plan(papers(work)).entries}
    assert "nvme_engine_buffers" not in {e.owner for e in footprint.plan(replace(work, arm="pool_only")).entries}
    assert {e.name for e in made.entries if e.owner == "activation_checkpoints"} == {
        "activation checkpoints, rank 0",
        "activation checkpoints, rank 1",
    }


def test_bounce_buffers_of_the_engine_have_the_configured_size(tmp_path):
    config = replace(swapping_config(4, 1 << 20, 16), control_folder=str(tmp_path / "control"))
    (tmp_path / "control").mkdir()
    engine = DirectEngine.create_file_store(tmp_path, 1 << 20, "test", config)
    try:
        assert [size for _, size in engine.bounce_buffers] == [config.bounce_bytes] * config.workers
    finally:
        engine.close()
