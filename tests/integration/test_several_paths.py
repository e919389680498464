"""`"tiers": [...]`: ZeRO-3's optimizer over several drives (MLP-Offload) computes what plain offload computes, bitwise.

The cumulative arms of MLP-Offload's Figs. 14 and 15: each switch's effect is counted, and the results are compared.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import subprocess

import pytest
from trainings import Job, merged, train_all

from memascend.planner.derived_sizes import cached_sub_group_buffers
from tests.loop_devices import loop_device
from tests.reflinks import file_system_with_reflinks
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
KEYS = {name: value for name, value in HARD.items() if name != "config"}
SAME = ("losses", "skipped", "scales", "weights_sha256")


def tiers(folder, names="ab", **options):
    for name in names:
        (folder / name).mkdir(exist_ok=True)
    return {"tiers": [str(folder / name) for name in names], **options}


def caching(sub_groups):
    """Return a configuration that keeps so many sub-groups in host memory."""
    return {"zero_optimization": {"offload_optimizer": {"buffer_count": cached_sub_group_buffers(False, sub_groups)}}}


def test_two_paths_train_as_plain_offload_and_move_less(tmp_path):
    clipped = {"gradient_clipping": 0.1}
    jobs = [
        Job(name="plain", **SMALL),
        Job(name="tiers", parts=tiers(tmp_path), config=caching(3), **SMALL),
        Job(name="plain, fast", arm="memascend_fast", config=clipped, **SMALL),
        Job(name="fast", arm="memascend_fast", parts=tiers(tmp_path), config=merged(clipped, caching(3)), **SMALL),
    ]
    results = train_all(jobs, tmp_path / "out")
    plain, over_two = results["plain"], results["tiers"]
    for field in SAME:
        assert over_two[field] == plain[field]
        assert results["fast"][field] == results["plain, fast"][field]
    assert over_two["io_bytes"][-1] < 0.9 * plain["io_bytes"][-1] - 8 * plain["parameters"]
    # Gradients are converted as AdamW reads them: by DeepSpeed's a piece at a time, by ours without any memory.
    states = over_two["host"]["optimizer_buffers"]
    assert states == results["fast"]["host"]["optimizer_buffers"] == 9 * plain["host"]["optimizer_buffers"] // 5
    largest = states // 9
    converted = over_two["host"]["gradients"] - results["fast"]["host"].get("gradients", 0)
    assert largest - 1024 < converted <= largest < 2 << 20


ON_ONE = ("caching", "skip_gradients", "exclusive", "gradients_only", "exclusive_only")
ARMS = (*ON_ONE, "mlp_offload", "as_published", "multi_path_only", "weights_on_paths")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "hard"])
def test_cumulative_arms_train_identically_on_throttled_paths(tmp_path, case):
    """Figs. 14 and 15: each switch is added in turn, and alone, over two drives of 40 and 20 MB/s."""
    options = SMALL if case == "plain" else HARD
    with throttled_paths(tmp_path, [40_000_000, 20_000_000]) as paths:
        section = {"memascend": {"tiers": [str(path.folder / "swap") for path in paths]}}
        first = {"memascend": {"tiers": section["memascend"]["tiers"][:1]}}
        jobs = [Job(name="zero3", system="mlp_offload", arm="zero3", **options)]
        in_memory = merged(options.get("config", {}), {"data_types": {"grad_accum_dtype": "fp16"}})
        jobs.append(Job(name="zero_offload", system="zero_offload", arm="today", **{**options, "config": in_memory}))
        for arm in ARMS:
            config = merged(options.get("config", {}), first if arm in ON_ONE else section)
            jobs.append(Job(name=arm, system="mlp_offload", arm=arm, **{**options, "config": config}))
        results = train_all(jobs, tmp_path / "out", timeout_s=900)
        for arm in ("zero3", *ARMS):
            for field in SAME:
                assert results[arm][field] == results["zero_offload"][field], f"{arm} {field}"
        assert all(path.direct_bytes > 1 << 20 for path in paths)
    moved = {arm: sum(results[arm]["io_bytes"][2:]) for arm in ("zero3", *ARMS)}
    assert moved["zero3"] > moved["caching"] > moved["skip_gradients"] == moved["mlp_offload"]
    # with "exclusive" alone every sub-group is moved
    assert moved["exclusive_only"] > moved["gradients_only"] > moved["skip_gradients"]


@pytest.mark.slow
def test_larger_host_budget_moves_fewer_bytes(tmp_path):
    small = {name: value for name, value in SMALL.items() if name != "layers"} | {"layers": 3}
    leave_out = ("zero_optimization.offload_optimizer.buffer_count",)
    jobs = [
        Job(name=budget, parts=tiers(tmp_path, host_memory=budget), leave_out=leave_out, **small)
        for budget in ("16MiB", "64MiB")
    ]
    results = train_all(jobs, tmp_path / "out")
    assert results["16MiB"]["weights_sha256"] == results["64MiB"]["weights_sha256"]
    assert results["64MiB"]["io_bytes"][-1] < results["16MiB"]["io_bytes"][-1]


@pytest.mark.slow
def test_full_path_leaves_sub_groups_to_the_other_path(tmp_path):
    with small_file_system(tmp_path / "b", 4 << 20):
        jobs = [
            Job(name="plain", **SMALL),
            Job(name="tiers", parts=tiers(tmp_path, tier_placement=[1, 20]), config=caching(2), **SMALL),
        ]
        results = train_all(jobs, tmp_path / "out")
    for field in SAME:
        assert results["tiers"][field] == results["plain"][field]
    first, small = results["tiers"]["paths"]
    assert 0 < small["bytes"] <= 4 << 20
    assert first["groups"] > small["groups"] / 20


@pytest.mark.slow
def test_error_names_vanished_path_and_checkpoint_resumes_without_it(tmp_path):
    paths = tiers(tmp_path, aio="file", tier_placement=[1, 1])
    saved = {"checkpoint": str(tmp_path / "saved"), "config": caching(2)}
    jobs = [
        Job(name="plain", **SMALL),
        Job(name="lost", parts=paths, save_at=(2,), lose_path=(3, str(tmp_path / "b")), **saved, **SMALL),
        Job(name="resumed", parts=tiers(tmp_path, names="a"), resume=True, **saved, **SMALL),
    ]
    results = train_all(jobs, tmp_path / "out")
    assert "read of '" in results["lost"]["error"]
    assert ".tensor.swp' on " in results["lost"]["error"]
    assert str(tmp_path / "b") in results["lost"]["error"]
    assert results["resumed"]["weights_sha256"] == results["plain"]["weights_sha256"]
    assert results["resumed"]["losses"] == results["plain"]["losses"][2:]


@pytest.mark.slow
@pytest.mark.parametrize(("file_system", "aio"), [("xfs", "direct"), ("xfs", "file"), ("btrfs", "direct")])
def test_checkpoint_references_data_and_survives_removal_of_all_paths(tmp_path, file_system, aio):
    """Pre-staging (3.3): data on the path with reflinks, or in files, are shared; the other path's part is copied."""
    with file_system_with_reflinks(tmp_path, file_system) as shared:
        (tmp_path / "other").mkdir()
        (shared / "path").mkdir()
        paths = {"tiers": [str(shared / "path"), str(tmp_path / "other")], "tier_placement": [1, 1], "aio": aio}
        saved = {"checkpoint": str(shared / "saved"), "config": caching(2)}
        whole = Job(name="whole", parts=paths, save_at=(2, 3), **saved, **SMALL)
        whole_again = Job(name="plain", **SMALL)
        results = train_all([whole, whole_again], tmp_path / "out")
        manifest = json.loads(next((shared / "saved").glob("*3/offloaded_tensors/*/manifest.json")).read_text())
        how = [entry.get("referenced", "copied") for entry in manifest.values()]
        assert set(how) == {"reflink" if aio == "direct" else "link", "copied"}
        for folder in (shared / "path", tmp_path / "other"):
            shutil.rmtree(folder)
        gone_on = Job(name="gone on", parts=tiers(tmp_path), resume=True, **saved, **SMALL)
        resumed = train_all([gone_on], tmp_path / "out2")["gone on"]
    assert results["whole"]["weights_sha256"] == results["plain"]["weights_sha256"]
    assert resumed["weights_sha256"] == results["plain"]["weights_sha256"]
    assert resumed["losses"] == results["plain"]["losses"][3:]


@pytest.mark.slow
def test_raw_device_can_be_a_path_like_a_folder(tmp_path):
    with loop_device(tmp_path, 256 << 20) as device:
        paths = tiers(tmp_path, names="a", tier_placement=[1, 1])
        paths["tiers"].append(device)
        saved = {"checkpoint": str(tmp_path / "saved"), "config": caching(2)}
        jobs = [
            Job(name="plain", **SMALL),
            Job(name="device", parts=paths, save_at=(2,), **saved, **SMALL),
            Job(name="resumed", parts=paths, resume=True, **saved, **SMALL),
        ]
        results = train_all(jobs, tmp_path / "out")
    plain = results["plain"]
    assert [path["groups"] > 0 for path in results["device"]["paths"]] == [True, True]
    assert results["device"]["paths"][1]["name"] == device
    assert results["device"]["losses"] == plain["losses"]
    assert results["resumed"]["losses"] == plain["losses"][2:]
    assert {results[name]["weights_sha256"] for name in ("device", "resumed")} == {plain["weights_sha256"]}


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 7))])
def test_run_killed_while_rehoming_resumes_to_same_bits(tmp_path, seed):
    """The kill comes at one of the 16 to 20 tensors that move in a step or two, or up to 20 ms later."""
    chance = random.Random(seed)
    paths = tiers(tmp_path, tier_placement=[1, 1])
    saved = {"checkpoint": str(tmp_path / "saved"), "config": caching(2)}
    instant = {
        "rehome_at": chance.choice([2, 3]),
        "die_at_move": chance.randint(1, 14),
        "die_after_s": chance.choice([0.0, chance.uniform(0, 0.02)]),
    }
    killed = Job(name="killed", parts=paths, save_at=(2,), **instant, **saved, **SMALL)
    assert train_all([killed], tmp_path / "out") == {}
    jobs = [
        Job(name="plain", **SMALL),
        Job(name="moved", parts=paths, rehome_at=1, config=caching(2), **SMALL),
        Job(name="resumed", parts=paths, resume=True, **saved, **SMALL),
    ]
    results = train_all(jobs, tmp_path / "out")
    assert results["moved"]["paths"][1]["groups"] == 0
    for name in ("moved", "resumed"):
        assert results[name]["weights_sha256"] == results["plain"]["weights_sha256"]
    left = [path.name for name in "ab" for path in (tmp_path / name).glob("memascend-scratch-*")]
    assert left == []  # nor of the killed process


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_path_faults_keep_the_bits_or_name_what_is_lost(tmp_path):
    """EIO, ENOSPC, a hang and a vanished path, at three instants each.

    The training ends with the same weights, or names what is lost, and a resume from the checkpoint without that path
    reaches the same weights.
    """
    paths, broken = tiers(tmp_path, tier_placement=[1, 1]), str(tmp_path / "b")
    jobs = [Job(name="plain", **SMALL)]
    faults = [(kind, after) for kind in ("eio", "full", "hang", "vanish") for after in (0, 7, 23)]
    for kind, after in faults:
        saved = {"checkpoint": str(tmp_path / f"{kind}-{after}"), "config": caching(2)}
        fault = (2, broken, kind, after)
        jobs.append(Job(name=f"{kind} {after}", parts=paths, save_at=(2,), path_fault=fault, **saved, **SMALL))
        rest = tiers(tmp_path, names="a")
        jobs.append(Job(name=f"{kind} {after}, gone on", parts=rest, resume=True, **saved, **SMALL))
    results = train_all(jobs, tmp_path / "out", timeout_s=800)
    plain, ends = results["plain"], {}
    for kind, after in faults:
        hit, gone_on = results[f"{kind} {after}"], results[f"{kind} {after}, gone on"]
        ends[kind, after] = hit.get("error")
        if "error" in hit:
            assert f".tensor.swp' on {broken}" in hit["error"], hit["error"]
        else:
            assert hit["weights_sha256"] == plain["weights_sha256"], (kind, after)
            assert hit["losses"] == plain["losses"], (kind, after)
        assert gone_on["weights_sha256"] == plain["weights_sha256"], (kind, after)
        assert gone_on["losses"] == plain["losses"][2:], (kind, after)
    # A write that a path refuses goes to another path; data that were on that path alone and cannot be read are named.
    assert all(ends[kind, after] is None for kind in ("eio", "full") for after in (0, 7, 23)), ends
    assert any(ends["vanish", after] for after in (0, 7, 23)), ends


@pytest.mark.slow
def test_path_measured_slow_at_start_gets_its_share_later(tmp_path):
    steps = {**SMALL, "steps": 12}
    disturbed = (3, str(tmp_path / "b"), "disturbed", 0)
    jobs = [
        Job(name="plain", **steps),
        Job(name="disturbed", parts=tiers(tmp_path), config=caching(2), path_fault=disturbed, **steps),
    ]
    results = train_all(jobs, tmp_path / "out")
    on_b = [of_paths[1] for of_paths in results["disturbed"]["groups"]]
    assert on_b[:3] == [0] * 3
    assert max(on_b[3:]) > 0
    for field in SAME:
        assert results["disturbed"][field] == results["plain"][field]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eio", "full", "hang"])
def test_path_that_fails_and_recovers_gets_its_share_again(tmp_path, kind):
    steps = {**SMALL, "steps": 14}
    fault = {"path_fault": (3, str(tmp_path / "b"), kind, 5), "heal_at": 6}
    jobs = [
        Job(name="plain", **steps),
        Job(name="back", parts=tiers(tmp_path, tier_placement=[1, 1]), config=caching(2), **fault, **steps),
    ]
    results = train_all(jobs, tmp_path / "out")
    back = results["back"]
    if kind == "hang" and "error" in back:  # a read hung, and data that were on that path alone are lost
        assert f".tensor.swp' on {tmp_path / 'b'}" in back["error"]
        return
    on_b = [of_paths[1] for of_paths in back["groups"]]
    assert on_b[2] > min(on_b[3:6])
    assert max(on_b[7:]) >= on_b[2]
    assert back["paths"][1]["failure"] is None
    for field in SAME:
        assert back[field] == results["plain"][field]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_processes_train_identically_after_a_path_recovers(tmp_path):
    """The fault comes in each process separately, at three instants; they take
    turns on the paths, also when they retry one."""
    steps = {**SMALL, "steps": 10}
    jobs = [Job(name="plain", **steps)]
    for kind in ("eio", "full"):
        for after in (0, 7, 23):
            fault = {"path_fault": (2, str(tmp_path / "b"), kind, after), "heal_at": 5}
            parts = tiers(tmp_path, tier_placement=[1, 1])
            jobs.append(Job(name=f"{kind} {after}", parts=parts, config=caching(2), **fault, **steps))
    results = train_all(jobs, tmp_path / "out", ranks=4, timeout_s=800)
    for job in jobs[1:]:
        hit = results[job.name]
        for field in SAME:
            assert hit[field] == results["plain"][field], f"{job.name} {field}"
        second = hit["paths"][1]
        assert second["failure"] is None, job.name
        assert second["groups"] > 0, job.name
        assert second["turns"] > 0, job.name


@pytest.mark.slow
def test_write_budget_stops_training_and_the_checkpoint_resumes(tmp_path):
    paths = tiers(tmp_path, tier_placement=[1, 1])
    saved = {"checkpoint": str(tmp_path / "saved"), "config": caching(2)}
    budget = {"write_budget": "1MiB", "write_budget_stops": True}
    jobs = [
        Job(name="plain", **SMALL),
        Job(name="stopped", parts=paths | budget, save_at=(1,), **saved, **SMALL),
        Job(name="gone on", parts=tiers(tmp_path, names="ab"), resume=True, **saved, **SMALL),
    ]
    results = train_all(jobs, tmp_path / "out")
    assert "training stops; raise write_budget, or name another path in tiers" in results["stopped"]["error"]
    assert 1 <= len(results["stopped"]["losses"]) < 4
    assert results["gone on"]["weights_sha256"] == results["plain"]["weights_sha256"]


@pytest.mark.slow
def test_two_ranks_share_the_paths_and_train_the_same(tmp_path):
    jobs = [
        Job(name="plain", **HARD),
        Job(
            name="exclusive",
            parts=tiers(tmp_path, tier_exclusive=True),
            config=merged(HARD["config"], caching(2)),
            **KEYS,
        ),
        Job(
            name="free", parts=tiers(tmp_path, tier_exclusive=False), config=merged(HARD["config"], caching(2)), **KEYS
        ),
    ]
    results = train_all(jobs, tmp_path / "out", ranks=2)
    for name in ("exclusive", "free"):
        for field in SAME:
            assert results[name][field] == results["plain"][field], f"{name} {field}"
    assert all(path["turns"] > 0 for path in results["exclusive"]["paths"])
    assert all(path["turns"] == 0 for path in results["free"]["paths"])


@contextlib.contextmanager
def small_file_system(folder, size_bytes):
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", folder], check=False)
    if made.returncode != 0:
        pytest.skip("a small file system needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=False)
