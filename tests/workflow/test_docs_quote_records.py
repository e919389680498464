"""The pages' numbers on speed, of the streaming engine and of a placement, are those of the committed records."""

import json
from pathlib import Path
from statistics import mean, median

import pytest

from memascend.bench.rounds import ratios, spread
from memascend.planner import Workload, model_spec, plan
from memascend.planner.workload import papers
from workflows.cases import step_seconds
from workflows.derive import claims
from workflows.records import predicted_steps

ROOT = Path(__file__).resolve().parents[2]
COST = (ROOT / "docs/explanation/cost-of-a-streamed-step.md").read_text()
REFERENCE = ROOT / "results/reference/epyc-genoa-2core"
RECORDS = sorted((ROOT / "results/reference").glob("*/bench-engine-*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_cost_page_has_a_row_for_every_ratio(path):
    record = json.loads(path.read_text())
    assert f"`{path.stem}`" in COST
    rows = [row for row in record["summary"] if row["method"] != "memory"]
    assert rows
    for row in rows:
        seconds, ratio = row["seconds"]["median"], row["of_memory"]
        cells = [
            f"`{path.stem}`",
            str(row["context"]),
            row["method"],
            f"{seconds:.2f}",
            f"{ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f})",
            f"{row['bound_share']:.0%}" if row["bound_share"] else "-",
        ]
        assert f"| {' | '.join(cells)} |" in COST
        assert row["losses_apart"] < 1e-3


def test_cost_page_quotes_how_much_a_serial_update_costs():
    record = json.loads((REFERENCE / "kernel-engine-arms-paper.json").read_text())
    took = {(point["context"], point["method"]): point["seconds"] for point in record["points"]}
    times = [median(a / b for a, b in zip(took[at, "none"], took[at, "optimized"], strict=True)) for at in (384, 768)]
    said = f"throttled to {record['options']['path_rate'] / 1e6:.0f} MB/s (`kernel-engine-arms-paper`) it took "
    said += f"{times[0]:.2f} times as long as `optimized` at 384 tokens, and {times[1]:.2f} times at 768."
    assert said in " ".join(COST.split())


GALLERY = " ".join((ROOT / "docs/gallery.md").read_text().split())


def modelled(paper):
    verdicts = claims.read_verdicts(ROOT / f"results/reference/modelled/{paper}-claims.csv")
    return {each.claim_id.removeprefix(f"{paper}-"): each for each in verdicts}


def test_gallery_says_how_the_difference_grows_with_context():
    def peak(system, context):
        ours = {"spec": model_spec("qwen2.5-7b"), "dtype": "fp16", "ranks": 2, "context": context}
        return plan(papers(Workload(system=system, **ours))).host_bytes / 2**30

    short, long = (peak("zero_infinity", at) - peak("memascend", at) for at in (4096, 131072))
    assert f"grows from {short:.1f} GiB at 4096 tokens to {long:.1f} at 131072 in the model" in GALLERY


def test_gallery_quotes_how_far_cxl_aware_throughput_is_too_high():
    found, ranges = modelled("cxl"), []
    for parts in ("ac", "bd"):
        names = [f"fig13-{part}-aware-{end}" for part in parts for end in ("low", "high")]
        apart = [float(found[name].value) - float(found[name].expected.split()[0]) for name in names]
        ranges.append(f"{min(apart):.0f} to {max(apart):.0f} points on {('one GPU', 'two')[parts == 'bd']}")
    assert f"too high by {ranges[0]} and by {ranges[1]}" in GALLERY


def test_gallery_quotes_ssdtrains_peaks_and_slower_step():
    found = {name.removeprefix("fig06-"): each.value for name, each in modelled("ssdtrain").items()}
    for ending in ("", "-slow"):
        least, most = (float(found[f"peak-{end}{ending}"]) for end in ("min", "max"))
        assert f"falls by {least:.0f} to {most:.0f} %" in GALLERY
    assert f"takes {float(found['overhead-slow']):.1f} % longer" in GALLERY


def test_engine_records_cover_both_context_lengths():
    lengths = {row["context"] for path in RECORDS for row in json.loads(path.read_text())["summary"]}
    assert {256, 1024} <= lengths


ACTIVATIONS = (ROOT / "docs/how-to/send-activations-to-the-ssd.md").read_text()
THROTTLED = sorted(REFERENCE.glob("bench-activations-throttled-*.json"))


@pytest.mark.parametrize("path", THROTTLED, ids=lambda path: path.stem)
def test_how_to_quotes_the_slowdown_on_throttled_drives(path):
    record = json.loads(path.read_text())
    row = next(row for row in record["summary"] if row["way"] == "ssd")
    cells = [
        f"`{path.stem}`",
        f"{path.stem.rpartition('-')[2]} MB/s",
        quoted(row["seconds_of_keeping"]),
        f"{row['predicted_seconds_of_keeping']:.2f}",
        f"{row['waited_share']['median']:.0%}",
    ]
    assert f"| {' | '.join(cells)} |" in ACTIVATIONS
    assert row["gradients_equal"]


NODES = (ROOT / "docs/how-to/a-machine-with-several-memory-nodes.md").read_text()


def quoted(found):
    return f"{found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def test_how_to_quotes_every_placement_and_all_train_identically():
    record = json.loads((REFERENCE / "bench-placement-llama3.2-1b.json").read_text())
    none, *others = record["summary"]
    assert [row["method"] for row in others] == ["again", "latency_first", "interleave", "node"]
    for row in others:
        cells = [row["method"], f"{row['seconds']['median']:.2f}"]
        cells += [quoted(row["seconds_of_none"]), quoted(row["optimizer_s_of_none"])]
        assert f"| {' | '.join(cells)} |" in NODES
        assert (row["equal"], row["losses_equal"], row["bytes"]) == (True, True, none["bytes"])
    assert f"{len(record['points'][0]['seconds'])} rounds" in NODES


def test_how_to_quotes_the_step_times_of_placement_arms():
    record = json.loads((REFERENCE / "times-placement-llama3.2-1b.json").read_text())
    seconds = {p["arm"]: step_seconds(p) for p in record["points"]}
    text = " ".join(NODES.split())
    aware, naive = (quoted(vars(ratios(seconds[arm], seconds["baseline"]))) for arm in ("cxl_aware", "naive"))
    assert f"arm `cxl_aware` took {aware} times as long as `baseline`, arm `naive` {naive}" in text


def test_reference_quotes_predicted_and_measured_gradient_offloading_steps():
    record = json.loads((REFERENCE / "kernel-engine-arms-paper.json").read_text())
    text = (REFERENCE / "README.md").read_text()
    predicted = {(row["context"], row["method"]): row["seconds"] for row in predicted_steps(record)}
    taken = {(row["context"], row["method"]): row["seconds"] for row in record["points"]}
    arms = ["optimized", "naive", "none"]
    for context in record["options"]["contexts"]:
        seconds = [f"{predicted[context, arm]:.2f}, {median(taken[context, arm]):.2f}" for arm in arms]
        shares = []
        for arm in arms[1:]:
            predicted_ratio = predicted[context, arm] / predicted[context, "optimized"]
            found = [mine / optimized for mine, optimized in zip(taken[context, arm], taken[context, "optimized"])]
            shares.append(f"{predicted_ratio:.2f}, {median(found):.2f} ({min(found):.2f} to {max(found):.2f})")
            assert abs(median(found) / predicted_ratio - 1) < 0.1
        assert f"| {context}, {context // 12} | {' | '.join(seconds + shares)} |" in text


@pytest.mark.parametrize(
    ("base", "arm"),
    [(("as_published_direct", "fp16"), ("memascend", "fp16")), (("memascend", "bf16"), ("memascend_bf16", "bf16"))],
)
def test_artifact_page_quotes_gains_of_tables_iv_and_vi(base, arm):
    record = json.loads((REFERENCE / "times-qwen2.5-7b-paper.json").read_text())
    seconds = {(p["batch"], p["arm"], p["dtype"]): step_seconds(p) for p in record["points"]}
    text = (ROOT / "docs/ARTIFACT.md").read_text().replace("−", "-").replace("+", "")
    for batch in (1, 4):
        gains = [100 * (a / b - 1) for a, b in zip(seconds[batch, *base], seconds[batch, *arm])]
        found = spread(gains)
        assert f"{found.median:.1f} % ({found.low:.1f} to {found.high:.1f})" in text


DRIVES = (ROOT / "docs/how-to/several-drives.md").read_text()


@pytest.mark.parametrize(("file_system", "referenced"), [("Btrfs", {"direct", "file"}), ("ext4", {"file"})])
def test_how_to_quotes_checkpoint_cost_and_referenced_data_stays_unwritten(file_system, referenced):
    record = json.loads((REFERENCE / f"checkpoints-{file_system.lower()}.json").read_text())
    found = {(point["arm"], point["way"]): point for point in record["checkpoints"]}
    states = 12 * record["twin"]["parameters"]
    for arm, aio in (("exclusive", "direct"), ("in_files", "file")):
        written = {way: median(found[arm, way]["bytes_written"]) for way in ("referenced", "copied")}
        seconds = {way: median(found[arm, way]["seconds"]) for way in written}
        cells = [f"{seconds[way]:.2f} s, {written[way] / 2**20:.1f} MiB" for way in written]
        assert f"| {' | '.join(cells)} |" in DRIVES
        assert written["copied"] > states
        assert (written["referenced"] < 0.01 * states) == (aio in referenced)


@pytest.mark.parametrize(("file_system", "shares"), [("XFS", True), ("Btrfs", True), ("ext4", False)])
def test_train_checkpoint_costs_are_quoted_and_shared_data_stays_unwritten(file_system, shares):
    record = json.loads((REFERENCE / f"bench-checkpoints-{file_system.lower()}.json").read_text())
    assert record["file_system"] == file_system.lower()
    cells = [file_system]
    for row in record["summary"]:
        written = f"{row['written_bytes'] / 2**20:.1f} MiB"
        cells.append(f"{quoted(row['seconds']).replace(' (', ' s (')}, {written}")
    shared, copied = record["summary"]
    cells.append(", ".join(f"{row['limit_s']:.2f} s" for row in (shared, copied)))
    assert all(f"| {' | '.join(cells)} |" in text for text in (DRIVES, (REFERENCE / "README.md").read_text()))
    whole = record["points"][0]["checkpoint_bytes"]
    assert copied["written_bytes"] >= whole
    assert shared["written_bytes"] == pytest.approx(whole - shared["shared_bytes"], rel=0.02)
    assert (shared["shared_bytes"] > 0.8 * whole) == shares


def test_how_to_quotes_the_speed_of_ranks_taking_turns():
    record = json.loads((REFERENCE / "times-mlpoffload-two-ranks.json").read_text())
    seconds = {point["arm"]: median(step_seconds(point)) for point in record["points"]}
    speeds = [seconds[free] / seconds[own] for free, own in (("skip_gradients", "exclusive"), ("free", "mlp_offload"))]
    assert record["ranks"] == 2
    assert f"({speeds[0]:.2f} of the speed over one drive and {speeds[1]:.2f} over two," in DRIVES
    assert all(0.97 < speed < 1.03 for speed in speeds)  # "neither gained nor lost"


def test_reference_quotes_passes_over_paths_against_the_formula():
    text, said = " ".join((REFERENCE / "README.md").read_text().split()), []
    for name, what in (("equal", "Two equal paths"), ("two-to-one", "2:1"), ("three", "three")):
        record = json.loads((REFERENCE / f"bench-tiers-{name}.json").read_text())
        (row,) = record["summary"]
        assert row["share_of_formula"]["simplex"] >= 0.9
        said.append(f"{what} {row['seconds']['median']:.2f} s, {row['share_of_formula']['simplex']:.2f}")
        if record["halved"]:
            shares = [f"{share:.2f}" for share in record["halved"][0]["share_of_formula"]]
            assert f"{', '.join(shares[:-1])} and {shares[-1]} of the new formula" in text
    assert "; ".join(said) in text


def test_reference_quotes_predicted_and_measured_steps_with_gradient_accumulation():
    measured, predicted = (
        {(p["arm"], p["accumulation"]): step_seconds(p) for p in json.loads((REFERENCE / name).read_text())["points"]}
        for name in ("times-mlpoffload-accumulation.json", "times-mlpoffload-accumulation-predicted.json")
    )
    for batches in (1, 4, 16):
        took, said = ([found[arm, batches] for arm in ("zero3", "mlp_offload")] for found in (measured, predicted))
        seconds = [f"{median(mine):.2f} | {each[0]:.2f}" for mine, each in zip(took, said)]
        ratio, expected = median(a / b for a, b in zip(*took)), said[0][0] / said[1][0]
        row = f"| {batches} | {' | '.join(seconds)} | {ratio:.2f} | {expected:.2f} |"
        text = (REFERENCE / "README.md").read_text()
        assert row in text
        apart = abs(ratio / expected - 1)
        assert apart < 0.07 or f"{ratio:.2f} where {expected:.2f} was predicted, {100 * apart:.0f} % more" in text


PATH_TWINS = ("duplex", "duplex-alone", "simplex", "simplex-caching", "simplex-alone", "simplex-turns-alone")


@pytest.mark.parametrize("name", [*PATH_TWINS, "two-ranks-alone"])
def test_reference_quotes_predicted_and_measured_times_of_multipath_arms(name):
    def points(name):
        record = json.loads((REFERENCE / f"times-mlpoffload-{name}.json").read_text())
        return {point["arm"]: step_seconds(point) for point in record["points"] if point["system"] == "mlp_offload"}

    predicted = points(f"{'simplex' if name.startswith('simplex') else name}-predicted")
    zero, text = points(name)["zero3"], (REFERENCE / "README.md").read_text()
    for arm, took in points(name).items():
        row = f"| {median(took):.2f} ({min(took):.2f} to {max(took):.2f}) | {predicted[arm][0]:.2f} |"
        if arm != "zero3":
            ratio, said = median(zero) / median(took), predicted["zero3"][0] / predicted[arm][0]
            apart = round(100 * (ratio / said - 1))
            row += f" {ratio:.2f} | {said:.2f} | {apart} % |"
            assert abs(apart) < 10 or (name, arm) == ("duplex", "mlp_offload")
        assert row in text, arm


@pytest.mark.parametrize(("dtype", "k", "printed"), [("fp16", 8, 55.7), ("bf16", 16, 25.19)])
def test_reference_and_readme_quote_peaks_and_their_mean_reduction(dtype, k, printed):
    text, less = " ".join((REFERENCE / "README.md").read_text().split()), []
    for model in ("Llama3.1-8B", "Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B"):
        paths = [REFERENCE / f"train-{model.lower()}-k{k}-{dtype}-{arm}.json" for arm in ("as_published", "memascend")]
        before, after = (json.loads(path.read_text())["memory"]["host_peak_net_bytes"] * k**2 / 2**30 for path in paths)
        less.append(100 * (1 - after / before))
        assert f"| {model} | {before:.1f} GiB | {after:.1f} GiB | {less[-1]:.1f} % |" in text
    assert f"{mean(less):.1f} % on average, where {printed} is printed" in text
    first_page = (ROOT / "README.md").read_text()
    said = f"{mean(less):.1f} % on average in fp16" if dtype == "fp16" else f"fp16 and {mean(less):.1f} % in bf16"
    assert said in first_page
    if dtype == "bf16":
        assert f"in bf16 from {min(less):.1f} % (Qwen2.5-32B) to {max(less):.1f} % (Qwen2.5-7B)" in first_page


PHASES = ("forward", "backward", "optimizer")
DEEPSPEED_ARMS = {
    ("zero_infinity", "as_published"): "ZeRO-Infinity, as published",
    ("zero_infinity", "today"): "the same today",
    ("zero_infinity", "today_pipelined"): "today, pipelined",
    ("memascend", "memascend"): "MemAscend",
    ("zero_offload", "today"): "ZeRO-Offload",
}
LOHAN_ARMS = {
    "none": "LoHan, arm `none`",
    "naive": "`naive`",
    "optimized": "`optimized`",
    "as_published": "`as_published`",
}


def test_reference_quotes_phase_times_in_which_lohan_is_never_slower():
    text = (REFERENCE / "README.md").read_text()
    rows = {arm: [f"| {name} "] for arm, name in DEEPSPEED_ARMS.items()}
    rows |= {("lohan", arm): [f"| {name} "] for arm, name in LOHAN_ARMS.items()}
    slower = set()
    for model in ("qwen2.5-7b", "llama3.2-1b", "qwen2.5-14b"):
        record = json.loads((REFERENCE / f"times-{model}-phases-paper.json").read_text())
        found = {(p["system"], p["arm"]): [median(p[f"{phase}_s"]) for phase in PHASES] for p in record["points"]}
        assert found.keys() == rows.keys()
        for arm, seconds in found.items():
            rows[arm].append(f"| {' + '.join(f'{each:.2f}' for each in seconds)} ")
        for theirs in DEEPSPEED_ARMS:
            for ours in ("optimized", "as_published"):
                pairs = zip(PHASES, found["lohan", ours], found[theirs])
                slower |= {(model, ours, phase) for phase, mine, its in pairs if mine > its}
    for row in rows.values():
        assert "".join(row) + "|" in text
    assert slower == set()
    assert "`optimized` and `as_published` are slower in no phase than any of DeepSpeed's arms." in text


def of_points(record):
    return {(point["context"], point["method"]): median(point["seconds"]) for point in record["points"]}


@pytest.mark.parametrize(("drives", "label"), [(1, "1"), (2, "2"), (3, "3"), (12, "6, 12")])
def test_reference_quotes_step_times_by_number_of_ssds(drives, label):
    record = json.loads((REFERENCE / f"kernel-engine-{drives}-drives-paper.json").read_text())
    took = of_points(record)
    said = {(row["context"], row["method"]): row["seconds"] for row in predicted_steps(record)}
    cells = [label, str(record["options"]["path_rate"] // 1_000_000)]
    for at in ((384, "optimized"), (768, "optimized")):
        cells += [f"{took[at]:.2f}", f"{said[at]:.2f}"]
    assert f"| {' | '.join(cells)} |" in (REFERENCE / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "batch"), [("0.67B", 8), ("0.90B", 8), ("1.4B", 2), ("10B", 0), ("20B", 0), ("40B", 0)]
)
def test_reference_quotes_images_per_second_of_diffusion_transformers(name, batch):
    took = of_points(json.loads((REFERENCE / f"kernel-engine-dit-{name.lower()}-paper.json").read_text()))
    theirs = f"{batch / took[batch, 'memory']:.1f} | {batch}" if batch else "out of memory | -"
    row = f"| {name} | {16 / took[16, 'optimized']:.1f} | {theirs} |"
    assert row in (REFERENCE / "README.md").read_text()


def test_readme_quotes_the_savings_in_the_records():
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| ")]
    names = [f"train-qwen2.5-7b-k8-fp16-{arm}" for arm in ("as_published", "today", "memascend")]
    records = [json.loads((REFERENCE / f"{name}.json").read_text()) for name in names]
    published, today, ours = (
        f"{record['twin']['k'] ** 2 * record['memory']['host_peak_net_bytes'] / 2**30:.1f} GiB" for record in records
    )
    stock = f"DeepSpeed {records[1]['versions']['deepspeed']}"
    said = f"| {published} (ZeRO-Infinity as published), {today} ({stock}) | **{ours}** |"
    assert sum(said in row for row in rows) == 1
    flagship = json.loads((REFERENCE / "flagship-llama3.1-8b.json").read_text())
    peak, step = flagship["summary"]["host_peak_bytes"] / 2**30, flagship["summary"]["step_s"]
    said = f"| **{peak:.2f} GiB** | [measured at full size](docs/how-to/train-8b-in-4-gib.md), {step:.0f} s per step"
    assert sum(said in row for row in rows) == 1
    record = json.loads((REFERENCE / "kernel-activations-h8192-paper.json").read_text())
    swapped = next(row for row in record["summary"] if (row["way"], row["batch"]) == ("ssd", 16))
    left, times = 100 * (1 - swapped["peak_reduction"]), swapped["seconds_of_keeping"]["median"]
    said = f"**{left:.0f} %**, the rest waits on the SSD; a step takes {times:.2f} times as long"
    assert sum(said in row for row in rows) == 1
    recomputed = next(row for row in record["summary"] if (row["way"], row["batch"]) == ("recompute", 16))
    left, times = 100 * (1 - recomputed["peak_reduction"]), recomputed["seconds_of_keeping"]["median"]
    assert sum(f"instead leaves {left:.0f} % and takes {times:.2f} times as long" in row for row in rows) == 1


def test_reference_quotes_how_long_checkpoints_stop_training():
    folder = ROOT / "results/reference/xeon-amx-2core"
    record = json.loads((folder / "bench-saves.json").read_text())
    _, foreground, background = record["summary"]
    page, readme = (path.read_text() for path in (ROOT / "docs/reference/streaming-engine.md", folder / "README.md"))
    said = " ".join(page.split())
    still, more = (
        ["{median:.2f} s ({low:.2f} to {high:.2f})".format(**row[name]) for row in (foreground, background)]
        for name in ("stood_still_s", "more_s")
    )
    assert f"stood still for {still[0]} per checkpoint in the foreground and for {still[1]} in the background;" in said
    assert f"the two steps after it took {more[0]} and {more[1]} longer than two steps alone" in said
    assert f"(medians of {record['conditions']['repeats']} rounds, with quartiles)" in said
    assert record["conditions"]["steps"] == 2
    for row, name, each, beyond in zip(
        (foreground, background), ("foreground", "background"), still, more, strict=True
    ):
        took = "{median:.2f} s ({low:.2f} to {high:.2f})".format(**row["save_s"])
        assert f"| {name} | {each} | {beyond} | {took} |" in readme


def test_readme_quotes_the_planners_modelled_peaks():
    text = " ".join((ROOT / "README.md").read_text().split())
    today = {"system": "zero_infinity", "arm": "today"}
    for more, said in (
        ({}, "fewer optimizer buffers, {:.1f} GiB, modelled"),
        (today, "would take {:.1f} GiB, modelled"),
    ):
        work = Workload(spec=model_spec("qwen2.5-7b"), dtype="fp16", context=0, **more)
        assert said.format(plan(work, process_overhead=False).host_bytes / 2**30) in text


def test_pages_quote_the_14b_models_record():
    folder = ROOT / "results/reference/xeon-amx-2core"
    record = json.loads((folder / "flagship-qwen2.5-14b.json").read_text())
    summary, disk = record["summary"], record["points"]["disk_bytes"]
    peak = f"{summary['host_peak_bytes'] / 2**30:.2f} GiB"
    how_to = " ".join((ROOT / "docs/how-to/train-8b-in-4-gib.md").read_text().split())
    assert f"host peak {peak}, {disk / 1e9:.1f} GB on the disk, {summary['step_s']:.0f} s per step" in how_to
    page = " ".join((folder / "README.md").read_text().split())
    assert f"Host peak {peak};" in page
    last = record["points"]["steps"][-1]
    assert f"reads {last['read_bytes'] / 1e9:.1f} GB and writes {last['written_bytes'] / 1e9:.1f} GB" in page
    assert f"It takes {summary['step_s']:.1f} s (median of steps 2 to 5;" in page
    assert f"alone take {summary['compute_bound_s']:.1f} s" in page
    assert f"mixed rate {summary['drive_bound_s']:.1f} s" in page
    assert f"{summary['of_the_bound']:.2f} times the larger of the two" in page


@pytest.mark.parametrize("host", ["xeon-amx-2core", "epyc-genoa-2core"])
def test_reference_table_of_mlp_offload_twins_matches_the_claims(host):
    folder = ROOT / "results/reference"
    found = {each.claim_id: each for each in claims.read_verdicts(folder / host / "claims.csv")}
    modelled = {each.claim_id: each for each in claims.read_verdicts(folder / "modelled/mlpoffload-claims.csv")}
    page = (folder / host / "README.md").read_text()
    lines = [line for line in page.splitlines() if "% (52B)" in line or "% (40B" in line]
    names = ("fig07-iteration", "fig07-update", "fig14-all", "fig15-further", "fig15-overall")
    order = [f"mlpoffload-{name}{alone}" for name in names for alone in ("", "-alone")]
    for name, line in zip(order, lines, strict=True):
        *_, measured, expected, printed, _ = (cell.strip() for cell in line.split("|"))
        assert measured == f"{float(found[name].value):.2f}"
        assert expected == f"{float(modelled[name].value):.2f}"
        assert f"{printed} x" == found[name].expected


def test_pages_quote_the_simulators_errors():
    record = json.loads((REFERENCE / "validation.json").read_text())
    readme, status = (path.read_text() for path in (REFERENCE / "README.md", ROOT / "docs/status.md"))
    for run in dict.fromkeys((row["system"], row["arm"]) for row in record["rows"]):
        cells = [f"{run[0]} ({run[1]})"]
        for phase in ("forward", "backward", "optimizer", "step"):
            mine = [r for r in record["rows"] if (r["system"], r["arm"], r["phase"]) == (*run, phase)]
            errors = [row["error_percent"] for row in mine]
            cells.append(f"{min(errors):+.0f} to {max(errors):+.0f} %" if errors else "")
        assert f"| {' | '.join(cells)} |" in readme
    for page in (readme, status):
        text = " ".join(page.split()).replace("Of ", "of ")
        for what in ("phases", "steps"):
            spread = record[what]
            said = f"of {spread['count']} {what} half are within {spread['half_within_percent']:.0f} % of the measured"
            assert f"{said} seconds and nine of ten within {spread['nine_of_ten_within_percent']:.0f} %" in text
            assert f"{spread['lowest_percent']:+.0f} to {spread['highest_percent']:+.0f} %" in readme
