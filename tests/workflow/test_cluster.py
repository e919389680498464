"""Runs as jobs of a cluster: what they request, and a Slurm of two nodes on this machine that runs them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests import slurm_cluster
from workflows import console, registry
from workflows.artifact import bundle
from workflows.configuration import Configuration
from workflows.console import SERVERS
from workflows.derive import claims
from workflows.run import provenance

ROOT = Path(__file__).resolve().parents[2]
NODE = {"cores": 32, "memory_gib": 60, "scratch": "/local"}
TIMED, SHARED = "kernel-overflow-smoke", "train-qwen2.5-7b-k64-fp16-as_published"


def known(monkeypatch: pytest.MonkeyPatch, **config: Any) -> Configuration:
    monkeypatch.chdir(ROOT)
    usual = yaml.safe_load(Path("workflows/config/config.yaml").read_text())
    return Configuration({**usual, "profile": "smoke", **config}, [])


def asked(configuration: Configuration, name: str, run_id: str, **more: int) -> Any:
    return configuration.resources[name](SimpleNamespace(run_id=run_id), **more)


def test_timed_runs_take_whole_nodes_and_memory_runs_share_them(monkeypatch) -> None:
    here = known(monkeypatch, node=NODE)
    assert asked(here, "slurm_extra", TIMED) == "--exclusive"
    assert asked(here, "slurm_extra", SHARED) == ""
    assert here.threads(TIMED, 32) == 32
    assert here.threads(SHARED, 32) < 16
    assert asked(here, "mem_mb", TIMED, attempt=1) == 60 * 1024
    once = asked(here, "mem_mb", SHARED, attempt=1)
    assert 2500 < once < 10_000
    assert asked(here, "mem_mb", SHARED, attempt=2) == 2 * once
    assert asked(here, "mem_mb", SHARED, attempt=99) == 60 * 1024


def test_node_with_too_little_memory_for_a_run_is_refused(monkeypatch) -> None:
    here = known(monkeypatch, node=NODE | {"memory_gib": 2})
    with pytest.raises(SystemExit, match=rf"node/memory_gib: {SHARED} needs about .* a job can ask for 2;"):
        asked(here, "mem_mb", SHARED, attempt=1)


def test_interleaved_arms_need_the_memory_of_all_of_them(monkeypatch) -> None:
    here = known(monkeypatch, node=NODE)
    arms, single = "times-qwen2.5-7b-smoke", "train-qwen2.5-7b-k64-fp16-memascend"
    assert here.run(arms)["needs_gib"] == 4 * here.run(single)["needs_gib"]


def test_runs_time_out_before_their_jobs(monkeypatch) -> None:
    here = known(monkeypatch, node=NODE)
    limits = {run_id: run["allowed_s"] for run_id, run in here.runs.items()}
    assert limits[TIMED] == 120
    assert all(60 * asked(here, "runtime", run_id) >= limit + 300 for run_id, limit in limits.items())


def test_lock_temporary_files_and_measured_drive_are_on_the_node(monkeypatch) -> None:
    here = known(monkeypatch, node=NODE)
    own = "TMPDIR=/local MEMASCEND_NVME=/local flock"  # swap files of trainings go to MEMASCEND_NVME
    assert here.command(TIMED).startswith(f"{own} /local/")
    assert here.command(SHARED).startswith(f"{own} --shared /local/")
    assert "--folder /local " in here.command("kernel-nvme-smoke")


def test_snakemake_samples_the_jobs_that_no_server_forks(monkeypatch) -> None:
    """tests/workflow/test_children.py tests which runs a server forks."""
    not_sampled = re.compile(known(monkeypatch).not_sampled)
    assert not_sampled.fullmatch(SHARED)
    assert not not_sampled.fullmatch(TIMED)
    assert not re.search(known(monkeypatch, node=NODE).not_sampled, SHARED)


def test_single_machine_requests_no_cluster_resources(monkeypatch) -> None:
    here = known(monkeypatch)
    assert here.resources.keys() == {"mem_mb", "runtime"}
    limit = "setpriv --pdeathsig TERM timeout 120"
    assert here.command(TIMED).startswith(f"flock results/raw/.machine.lock {limit} ")
    assert "--folder results " in here.command("kernel-nvme-smoke")
    assert here.threads(TIMED, 3) == 3


def test_named_host_has_separate_folders_and_its_name_in_records(tmp_path, monkeypatch) -> None:
    """Two hosts that share a file system thus never write one record, nor take each other's records for their own."""
    monkeypatch.setenv("MEMASCEND_HOST", "of-the-caller")
    here = known(monkeypatch, node=NODE, host="genoa")
    other = known(monkeypatch, node=NODE, host="milan")
    assert (here.raw, here.derived, here.figures) == ("results/raw/genoa", "results/derived/genoa", "figures/genoa")
    assert f"--out results/raw/genoa/{TIMED}.json" in here.command(TIMED)
    assert here.artifact.startswith("artifact/genoa/memascend-")
    assert set(here.all_records(here.built)).isdisjoint(other.all_records(other.built))
    # A bundle reads the same configuration again.
    assert Configuration(json.loads(json.dumps(here.config)), []).raw == here.raw
    console.leave_servers(here)
    assert provenance.host.__wrapped__()["name"] == "genoa"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a/b", "'a/b' is no name of a host: use lower-case letters and digits"),
        ("A", "'A' is no name of a host"),
        ("a.", "'a.' is no name of a host"),
        ("..", "'..' is no name of a host"),
        ("", "nothing is no name of a host"),
        (None, "nothing is no name of a host"),
        (123, "123 is no name of a host"),
        ("123", "'123' is no name of a host"),
        (True, "True is no name of a host"),
        ("null", "'null' is no name of a host"),
        ("x.json", "x.json is a name of results that have no host: choose another"),
        ("runs", "runs is a name of results that have no host: choose another, such as host-runs"),
    ],
)
def test_host_name_that_cannot_be_a_folder_gives_one_line(monkeypatch, name, said) -> None:
    with pytest.raises(SystemExit) as ended:
        known(monkeypatch, host=name)
    assert str(ended.value).startswith(f"config: host: {said}")
    assert "\n" not in str(ended.value)


def test_host_cannot_take_a_name_used_by_results(monkeypatch) -> None:
    here = known(monkeypatch)
    manifest = {"exhibits": dict.fromkeys(here.built)}
    drawn = {Path(name).parts[0] for name in bundle.pages(Path(here.figures), manifest)}
    folders = {"exhibits", "records", "traces", "modelled", "runs", "logs", "benchmarks", "gpu"}
    for name in {*drawn, *folders, "claims.csv"}:
        with pytest.raises(SystemExit):
            known(monkeypatch, host=name)
    for name in ("genoa", "epyc-genoa-2core", "node_1", "node1.example.org", "2core"):
        assert known(monkeypatch, host=name).raw == f"results/raw/{name}"


def test_unnamed_host_uses_default_folders_and_the_callers_name(monkeypatch) -> None:
    monkeypatch.setenv("MEMASCEND_HOST", "of-the-caller")
    here = known(monkeypatch, node=NODE)
    assert (here.raw, here.artifact.rpartition("/")[0]) == ("results/raw", "artifact")
    console.leave_servers(here)
    assert provenance.host.__wrapped__()["name"] == "of-the-caller"


@pytest.mark.parametrize("words", [["--workflow-profile", "profiles/slrm"], ["--workflow-profile=profiles/slrm"]])
def test_missing_workflow_profile_is_refused_with_a_suggestion(monkeypatch, words) -> None:
    here = known(monkeypatch)
    here.words = ["figures", *words]
    with pytest.raises(
        SystemExit, match=r"there is no profiles/slrm \(did you mean profiles/slurm\?\); here are profiles/"
    ):
        here.refuse_missing_profile()
    for good in (["--workflow-profile", "profiles/slurm"], ["--workflow-profile=none"], []):
        here.words = [*good, "figures"]
        here.refuse_missing_profile()


def test_slurm_executor_is_refused_without_sbatch(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    console.require_executor("local")
    with pytest.raises(SystemExit, match="this machine has no sbatch: call it on a login node"):
        console.require_executor("slurm")


def test_scratch_folder_of_a_node_must_be_absolute(monkeypatch) -> None:
    assert known(monkeypatch, node=NODE | {"scratch": "$SLURM_TMPDIR/x"})
    with pytest.raises(SystemExit, match="config: node/scratch: 'relative/x' does not match"):
        known(monkeypatch, node=NODE | {"scratch": "relative/x"})


def test_only_runs_on_a_gpu_request_one(monkeypatch) -> None:
    on_gpus = known(monkeypatch, node=NODE, profile="gpu")
    asks = {run_id: asked(on_gpus, "gpu", run_id) for run_id in on_gpus.runs}
    assert asks == {run_id: int("--device cuda" in on_gpus.command(run_id)) for run_id in on_gpus.runs}
    assert sum(asks.values()) > 5
    assert "gpu" not in known(monkeypatch, node=NODE).resources


def test_node_jobs_do_not_use_servers_of_the_submitting_machine(monkeypatch) -> None:
    for name in SERVERS:
        monkeypatch.setenv(name, "/tmp/of-another-host/socket")
    monkeypatch.setenv("MEMASCEND_EXHIBITS", "{}")
    here = known(monkeypatch, node=NODE)
    console.leave_servers(here)
    assert not os.environ.keys() & SERVERS.keys()
    assert json.loads(os.environ["MEMASCEND_EXHIBITS"])[TIMED]


@pytest.mark.parametrize(("node", "modules"), [(NODE, ["workflows.derive.server"]), (None, [*SERVERS.values()])])
def test_only_the_drawing_server_starts_when_runs_are_cluster_jobs(tmp_path, monkeypatch, node, modules) -> None:
    started = []
    monkeypatch.setattr(console.subprocess, "Popen", lambda command, **how: started.append(command[2]))
    monkeypatch.setattr(console.atexit, "register", lambda end: None)
    for name in (*SERVERS, "MEMASCEND_EXHIBITS"):
        monkeypatch.setenv(name, "")
    console.start_servers(SimpleNamespace(raw=str(tmp_path / "raw"), exhibits_of_runs="{}", node=node, host=None))
    assert started == modules


def folders(fresh: Path) -> list[str]:
    return [*(f"{name}_dir={fresh / name}" for name in ("raw", "derived", "figures")), "profile=smoke"]


def plugin_missing(name: str) -> str | None:
    wanted = {"slurm": ["executor_plugin_slurm"], "kubernetes": ["executor_plugin_kubernetes", "storage_plugin_fs"]}
    lacking = [each for each in wanted[name] if importlib.util.find_spec(f"snakemake_{each}") is None]
    return f"no snakemake_{lacking[0]}: docs/how-to/run-on-a-cluster.md" if lacking else None


@pytest.mark.parametrize("name", ["slurm", "kubernetes"])
def test_dry_run_with_a_cluster_profile_shows_the_requested_resources(tmp_path: Path, name: str) -> None:
    if reason := plugin_missing(name):
        pytest.skip(reason)
    words = ["--workflow-profile", f"profiles/{name}", "-n", "memascend-fig12", "memascend-tab02"]
    command = [sys.executable, "-m", "snakemake", *words, "--config", *folders(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    node = yaml.safe_load((ROOT / f"profiles/{name}/node.yaml").read_text())["node"]
    blocks = re.split(r"\n\s*\n", done.stdout + done.stderr)
    (timed,) = [b for b in blocks if f"wildcards: run_id={TIMED}" in b]
    assert f"mem_mb={1024 * node['memory_gib']}," in timed
    assert "slurm_extra=--exclusive" in timed
    shared = [b for b in blocks if "wildcards: run_id=train-" in b]
    assert len(shared) == 2
    assert not any("exclusive" in b for b in shared)


# Two timed runs, and an exhibit of two memory runs with claims that they decide.
TARGETS = ["memascend-fig12", "cxl-fig05", "memascend-tab02"]
TIMED_ONES = ("kernel-overflow-smoke", "kernel-adamw-smoke")


def verdicts(fresh: Path) -> dict[str, str]:
    """Return the measured verdicts on Table II."""
    mine = [claim for claim in registry.claims() if claim["exhibit_id"] == "memascend-tab02"]
    found = claims.decide_all(mine, fresh / "derived" / "exhibits")
    return {verdict.claim_id: verdict.verdict for verdict in found if verdict.lane == "measured"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_timed_runs_have_nodes_alone_and_lost_runs_are_repeated(tmp_path, monkeypatch) -> None:
    if reason := plugin_missing("slurm") or slurm_cluster.missing():
        pytest.skip(reason)
    monkeypatch.chdir(ROOT)
    # Half of a node's cores and memory: without --exclusive two timed runs would fit on one node.
    (tmp_path / "node.yaml").write_text("node: {cores: 2, memory_gib: 4}\n")
    words = ["--workflow-profile", "profiles/slurm", "--configfile", str(tmp_path / "node.yaml")]
    words += ["--slurm-init-seconds-before-status-checks", "5", "--slurm-status-command", "squeue"]
    words += ["--slurm-logdir", str(tmp_path / "slurm"), "--latency-wait", "10", *TARGETS]
    command = [sys.executable, "-m", "snakemake", *words, "--config", *folders(tmp_path)]
    with slurm_cluster.slurm(cores=4, memory_mib=9000) as cluster, (tmp_path / "said").open("w") as said:
        calling = subprocess.Popen(command, env=cluster.environment, stdout=said, stderr=subprocess.STDOUT)
        try:
            lost = None
            while calling.poll() is None and lost is None:
                running = [job for job in cluster.jobs() if job.state == "RUNNING" and is_timed(job)]
                lost = next((job for job in running if log_of(tmp_path, job).exists()), None)
                time.sleep(0.2)
            assert lost is not None, (tmp_path / "said").read_text()
            cluster.lose(lost.node)
            assert calling.wait() == 0, (tmp_path / "said").read_text()
        finally:
            calling.terminate()
            calling.wait()
        jobs = [job for job in cluster.jobs() if job.comment.startswith("rule_record")]

    ended = {job.job: job for job in jobs}
    assert ended[lost.job].state == "NODE_FAIL"
    (again,) = [job for job in jobs if job.comment == lost.comment and job.job != lost.job]
    assert (again.state, again.node != lost.node) == ("COMPLETED", True)
    assert {job.state for job in jobs if job.node != lost.node} == {"COMPLETED"}
    assert sum(map(is_timed, jobs)) == len(TIMED_ONES) + 1
    for timed in filter(is_timed, jobs):
        neighbours = [job for job in jobs if job is not timed and job.node == timed.node]
        assert all(job.ended <= timed.began or timed.ended <= job.began for job in neighbours), jobs

    tables = (tmp_path / "raw/benchmarks").iterdir()
    sampled = {path.stem: path.read_text().split("\n")[1].split("\t") for path in tables}
    assert sampled.keys() == {path.stem for path in (tmp_path / "raw").glob("*.json")}
    assert all(float(line[2]) > 100 for run_id, line in sampled.items() if run_id.startswith("train-")), sampled  # MiB
    for run_id in TIMED_ONES:  # on a busy machine a run may reach its own limit first: that is a record, not a lost job
        assert json.loads((tmp_path / "raw" / f"{run_id}.json").read_text())["status"] in ("ok", "timeout")
    local = tmp_path / "local"
    command = [sys.executable, "-m", "snakemake", "--cores", "2", "memascend-tab02", "--config", *folders(local)]
    subprocess.run(command, check=True, capture_output=True)
    assert verdicts(tmp_path) == verdicts(local)
    assert set(verdicts(local).values()) & set(registry.DECIDED)
    for path in (local / "raw").glob("train-*.json"):
        both = [json.loads((folder / path.name).read_text()) for folder in (local / "raw", tmp_path / "raw")]
        assert both[0]["master_weights_sha256"] == both[1]["master_weights_sha256"] != ""


def is_timed(job: slurm_cluster.Job) -> bool:
    return job.comment.endswith(TIMED_ONES)


def log_of(fresh: Path, job: slurm_cluster.Job) -> Path:
    """Return the log of a run's program, which exists once its command has begun."""
    return fresh / "raw" / "logs" / f"{job.comment.removeprefix('rule_record_wildcards_')}.log"
