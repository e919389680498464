"""Made-up records of sweeps, stacks, loss curves and step times, shaped as the run programs write them."""

from __future__ import annotations

from typing import Any

from workflow_fixtures import ARMS, MODELS, header, power_of_two, training

from memascend.planner import model_spec

MOE = "Qwen3-30B-A3B"
POINTS = [(4096, 1), (16_384, 1), (20_480, 1), (131_072, 1), (4096, 4), (4096, 32)]
STACKS = {  # checkpointing, attention, loss -> device bytes per sequence and token of the twin
    ("none", "eager", "plain"): 9000,
    ("plain", "eager", "plain"): 900,
    ("plain", "sdpa", "chunked"): 300,
    ("offloaded", "sdpa", "chunked"): 90,
}
STEP_SECONDS = {
    "as_published_direct:fp16": 1.1,
    "memascend:fp16": 1.0,
    "memascend:bf16": 1.2,
    "memascend_bf16:bf16": 0.9,
}
SYSTEMS = {"as_published_direct": "zero_infinity"}  # the others are MemAscend's
BYTES = {"memascend_bf16:bf16": 22, "memascend:bf16": 38}


def stack_of(words: tuple[str, str, str]) -> dict[str, str]:
    return dict(zip(("checkpointing", "attention", "loss"), words, strict=True))


def sweep(model: str, arm: str, number: int, k: int = 32, ranks: int = 1) -> dict[str, Any]:
    """Make a sweep over POINTS with the sequences of two GPUs: the run's peak, and a checkpoint store at each point."""
    record = training("Qwen2.5-7B" if model == MOE else model, arm, "fp16", number, k=k)
    if model == MOE:
        record |= {"model": "qwen3-30b-a3b", "run_id": f"train-qwen3-30b-a3b-{arm}"}
    twin = model_spec(record["model"]).twin(k)
    base, points = record["memory"]["host_peak_net_bytes"], []
    for context, batch in POINTS:
        sequences = 2 * batch // ranks
        requested = sequences * context // k * twin.layers * twin.hidden * 2
        reserved = power_of_two(requested) if arm == "as_published" else requested
        memory = record["memory"] | {"host_peak_net_bytes": base + ranks * reserved}
        sizes = {"checkpoint_store_requested_bytes": requested, "checkpoint_store_reserved_bytes": reserved}
        points.append({"sequence": context // k, "batch": sequences, "memory": memory, **sizes})
    record["run_id"] += f"-r{ranks}-sweep"
    record["twin"]["config"] = twin.hf_config_dict()
    stack = stack_of(("offloaded", "sdpa", "plain"))
    requested = [[p["sequence"], p["batch"]] for p in points]
    more = {"gpus": 2, "ranks": ranks, "stacks": [stack], "points_requested": requested}
    return {**record, **more, "points": [{**p, "stack": stack} for p in points]}


def stacks(number: int, k: int = 64) -> dict[str, Any]:
    """Make a record for Fig. 2: four stacks at two contexts."""
    record = training("Llama3.1-8B", "as_published", "fp16", number, k=k)
    points = []
    for words, bytes_a_token in STACKS.items():
        for context, batch in ((512, 4), (32_768, 1)):
            device = batch * context // k * bytes_a_token
            memory = record["memory"] | {"device_peak_bytes": device}
            sizes = {"checkpoint_store_requested_bytes": 0, "checkpoint_store_reserved_bytes": 0}
            point = {"sequence": context // k, "batch": batch, "stack": stack_of(words), "memory": memory}
            points.append({**point, **sizes})
    record["run_id"] += "-stacks"
    requested = [[p["sequence"], p["batch"]] for p in points[:2]]
    more = {"gpus": 1, "stacks": [stack_of(words) for words in STACKS], "points_requested": requested}
    return {**record, **more, "points": points}


def curve(arm: str, number: int, nudge: float = 0.0) -> dict[str, Any]:
    """Make a record for Fig. 19: a falling loss; ``nudge`` moves the last training loss."""
    losses = [10.0 - 0.1 * step for step in range(8)]
    losses[-1] += nudge
    system, name = ARMS[arm]
    record = header(f"train-qwen2.5-0.5b-k16-fp16-{arm}-curve", "training", number)
    return record | {
        "system": system,
        "arm": name,
        "parts": {},
        "model": "qwen2.5-0.5b",
        "twin": {"k": 16, "parameters": 1_930_000},
        "dtype": "fp16",
        "ranks": 1,
        "sequence": 64,
        "batch": 4,
        "steps": 8,
        "seed": 0,
        "mode": "time",
        "evaluate_every": 4,
        "losses": losses,
        "evaluation": [{"step": 4, "loss": 9.8}, {"step": 8, "loss": 9.5}],
        "phases": [],
    }


def step_times(model: str, number: int, k: int = 32) -> dict[str, Any]:
    """Make a record for Tables IV and VI and Fig. 20: arms that took
    turns; MemAscend wins more at the smaller batch."""
    twin = model_spec(model).twin(k)
    points = []
    for batch in (1, 4):
        for name, once in STEP_SECONDS.items():
            arm, dtype = name.split(":")
            moved = BYTES.get(name, 38) * twin.parameters
            series = {"forward_s": [batch * 1.0] * 3, "backward_s": [batch * 2.0] * 3}
            series |= {"optimizer_s": [once, once, 1.3 * once]}
            series |= {"bytes_read": [moved - 100] * 3, "bytes_written": [100] * 3}
            own = {"sequence": 4096 // k, "batch": batch, "dtype": dtype}
            own |= {"system": SYSTEMS.get(arm, "memascend"), "arm": arm}
            points.append({**own, **series})
    record = header(f"times-{model}-test", "step-times", number)
    own = {"model": model, "twin": {"k": k, "parameters": twin.parameters}, "arms": [{}] * 4, "rounds": 3}
    return record | own | {"points": points}


def full_sweeps() -> list[dict[str, Any]]:
    """Return the records that a long profile leaves."""
    out = [sweep(m, a, 200 + i) for i, (m, a) in enumerate(model_pairs())]
    out += [stacks(300), curve("as_published", 301), curve("memascend", 302)]
    for i, arm in enumerate(("as_published", "memascend")):
        pair = training("Qwen2.5-7B", arm, "fp16", 400 + i) | {"ranks": 2}
        out.append({**pair, "run_id": pair["run_id"] + "-r2"})
    models = ("llama3.1-8b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b")
    return out + [step_times(model, 310 + i) for i, model in enumerate(models)]


def smoke_sweeps() -> list[dict[str, Any]]:
    """Return the records that the smoke profile leaves: one model."""
    out = [sweep("Qwen2.5-7B", arm, 200 + i, k=64) for i, arm in enumerate(("as_published", "memascend"))]
    return [*out, stacks(300), curve("as_published", 301), curve("memascend", 302), step_times("qwen2.5-7b", 310)]


def model_pairs() -> list[tuple[str, str]]:
    return [(model, arm) for model in (*MODELS, MOE) for arm in ("as_published", "memascend")]
