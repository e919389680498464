"""The statements of `memascend plan` about a run, compared with the run that its own DeepSpeed JSON configures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memascend.cli import main
from memascend.planner import model_spec
from tests import one_rank

pytestmark = pytest.mark.deepspeed
ROOT = Path(__file__).resolve().parents[2]
MODEL, K, CONTEXT, BATCH = "qwen2.5-7b", 32, 24, 2


def run_script(name, folder, *arguments):
    """Run a training script of this folder in a separate process, with one rank on the CPU."""
    script = Path(__file__).parent / "scripts" / name
    one_rank.run([script, *arguments], cwd=folder, timeout=600, OMP_NUM_THREADS="2", PYTHONPATH=str(ROOT))


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow) for name in ("fp32", "bf16", "bf16-gradients")],
)
def pair(request, tmp_path_factory):
    """Return (the plan as JSON, what the run did) for a twin of Qwen2.5-7B, by the dtype of states and of gradients."""
    folder = tmp_path_factory.mktemp(f"planned-{request.param}")
    (folder / "nvme").mkdir()
    config, result = folder / "ds.json", folder / "result.json"
    states, _, gradients = request.param.partition("-")
    arguments = ["plan", "--model", MODEL, "--twin", str(K), "--dtype", "bf16", "--states", states]
    arguments += ["--gradients", "bf16"] if gradients else []
    arguments += ["--batch", str(BATCH), "--context", str(CONTEXT), "--checkpointing", "plain", "--loss", "plain"]
    arguments += ["--nvme", str(folder / "nvme"), "--write-config", str(config), "--json"]
    with (folder / "plan.json").open("w") as out:
        command = [sys.executable, "-m", "memascend.cli", *arguments]
        assert subprocess.run(command, cwd=ROOT, stdout=out, check=False).returncode in (0, 1)
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "model.json").write_text(json.dumps(model_spec(MODEL).twin(K).hf_config_dict()))
    run_script("planned_script.py", folder, folder / "model.json", config, K, CONTEXT, result)
    return plan, json.loads(result.read_text())


def test_bytes_of_each_phase_match_the_plan(pair):
    """Backward finds the output matrix and the last block still in memory, but the plan counts them. From the second
    step on the prefetcher reads (part of) the block before it while forward ends. The last gradients wait in an
    optimizer buffer, small ones in memory, and are written when the optimizer begins."""
    plan, run = pair
    spec = model_spec(MODEL).twin(K)
    last = [t.numel for t in spec.tensors() if t.block == spec.layers - 1 or t.name == "lm_head.weight"]
    block = 2 * sum(t.numel for t in spec.tensors() if t.block == spec.layers - 2)
    before, measured, waiting, early = (0, 0), 0, 0, 0
    buffer = max(e["reserved_bytes"] for e in plan["ledger"] if e["owner"] == "optimizer_buffers")
    for phase, after in zip(("forward", "backward", "optimizer"), run["moved"][-1], strict=True):
        read, written = after[0] - before[0], after[1] - before[1]
        before, measured = after, sum(after)
        if phase == "forward":
            early = max(0, read - plan["io_bytes"]["read"][phase])
            assert early <= block
            read -= early
        kept = 2 * sum(last) + early if phase == "backward" else 0
        assert read + kept == pytest.approx(plan["io_bytes"]["read"][phase], rel=0.02), phase
        planned = plan["io_bytes"]["write"][phase] + waiting
        waiting = max(0, planned - written) if phase == "backward" else 0
        assert 0 <= waiting < 2 * buffer
        assert written + waiting == pytest.approx(planned, rel=0.02), phase
    planned = sum(sum(phases.values()) for phases in plan["io_bytes"].values())
    assert measured == pytest.approx(planned, rel=0.02)


def test_large_planned_buffers_match_the_run_within_two_percent(pair):
    plan, run = pair
    planned: dict[str, int] = {}
    for entry in plan["ledger"]:
        if entry["role"] == "host" and entry["allocator"] == "page_aligned":
            planned[entry["owner"]] = planned.get(entry["owner"], 0) + entry["reserved_bytes"]
    reserved_bytes: dict[str, int] = {}
    for owner, reserved in run["ledger"]:
        reserved_bytes[owner] = reserved_bytes.get(owner, 0) + reserved
    large = {owner: size for owner, size in planned.items() if size > 100 << 10}
    assert set(large) >= {"parameter_pool", "optimizer_buffers", "gradient_flat_buffer"}
    for owner, size in large.items():
        assert reserved_bytes.get(owner, 0) == pytest.approx(size, rel=0.02), (owner, reserved_bytes)


def test_swap_files_match_the_planned_size(pair):
    plan, run = pair
    assert run["stored"] == pytest.approx(plan["ssd_bytes"], rel=0.05)


# Small twins of few layers, each a separate model to the planner: (twin divisor, keys of its configuration).
DROP_IN = {
    "qwen2.5-7b": (8, {"num_hidden_layers": 2}),
    "llama3.1-8b": (8, {"num_hidden_layers": 3}),
    "qwen2.5-0.5b": (2, {"num_hidden_layers": 2, "vocab_size": 16_000}),
}


@pytest.fixture(scope="module")
def drop_in(tmp_path_factory):
    """Return (a DeepSpeed JSON with `"memascend": {}`, the folder of each model, the buffers of its training)."""
    folder = tmp_path_factory.mktemp("drop-in")
    (folder / "nvme").mkdir()
    offload = {"device": "nvme", "nvme_path": str(folder / "nvme"), "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 1_000_000,
            "stage3_max_reuse_distance": 0,
            "offload_param": offload,
            "offload_optimizer": offload,
        },
        "zero_force_ds_cpu_optimizer": True,
        "memascend": {},
    }
    path = folder / "ds.json"
    path.write_text(json.dumps(config))
    models = {}
    for name, (k, small) in DROP_IN.items():
        models[name] = folder / name / "config.json"
        models[name].parent.mkdir()
        keys = model_spec(name).twin(k).hf_config_dict() | small
        models[name].write_text(json.dumps(keys))
    run_script("drop_in_script.py", folder, path, CONTEXT, folder / "result.json", *models.values())
    made = json.loads((folder / "result.json").read_text())
    return path, models, {name: made[str(model)] for name, model in models.items()}


@pytest.mark.parametrize("model", DROP_IN)
def test_plan_of_a_users_configuration_matches_the_run_by_entry(drop_in, capsys, model):
    """Every buffer that the run's allocators returned is in the plan and vice versa, each within 2 %."""
    config, models, runs = drop_in
    arguments = ["plan", "--model", str(models[model].parent), "--ds-config", str(config), "--context", str(CONTEXT)]
    assert main([*arguments, "--json"]) in (0, 1)
    planned: dict[str, list[int]] = {}
    for entry in json.loads(capsys.readouterr().out)["ledger"]:
        if entry["allocator"] in ("page_aligned", "direct engine"):  # torch's own, pageable, are in no ledger of a run
            planned.setdefault(entry["owner"], []).append(entry["reserved_bytes"])
    measured: dict[str, list[int]] = {}
    for owner, _, reserved in runs[model]:
        measured.setdefault(owner, []).append(reserved)
    assert set(planned) == set(measured)
    assert len(planned["optimizer_buffers"]) == 4
    for owner, sizes in planned.items():
        assert sorted(measured[owner]) == pytest.approx(sorted(sizes), rel=0.02), owner
    total = {name: sum(map(sum, owners.values())) for name, owners in (("plan", planned), ("run", measured))}
    assert total["plan"] == pytest.approx(total["run"], rel=0.02)


def test_baseline_configuration_is_accepted_too(tmp_path):
    """DeepSpeed's own parser accepts it, and so does enable(): a stock configuration needs no section of ours."""
    import memascend

    (tmp_path / "nvme").mkdir()
    for system in ("zero_infinity", "zero_offload"):
        config = tmp_path / f"{system}.json"
        arguments = ["plan", "--model", "qwen2.5-0.5b", "--system", system, "--dtype", "bf16"]
        main([*arguments, "--nvme", str(tmp_path / "nvme"), "--write-config", str(config)])
        memascend.enable(json.loads(config.read_text()))
        memascend.disable()
