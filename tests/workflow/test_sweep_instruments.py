"""The instruments behind sweeps and step times, without training anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from memascend.integrations.deepspeed import measured
from memascend.memory import account
from workflows.run import interleaved, training


def job(**more: object) -> dict:
    return {"points": [], "stacks": [], "sequence": 32, "batch": 1, "steps": 1} | more


def steps(points: list[dict]) -> list[tuple[int, int]]:
    return [(p["first_step"], p["last_step"]) for p in points]


def test_a_plain_run_is_one_point() -> None:
    assert steps(measured.schedule(job(steps=11))) == [(1, 11)]


def test_only_the_first_point_of_a_sweep_includes_warm_up() -> None:
    points = measured.schedule(job(points=[[128, 2], [256, 2], [128, 4]]))
    assert steps(points) == [(1, 3), (4, 4), (5, 5)]


def test_every_stack_visits_every_point() -> None:
    stacks = [{"checkpointing": name} for name in ("none", "plain")]
    points = measured.schedule(job(points=[[8, 4], [512, 1]], stacks=stacks))
    assert [(p["stack"]["checkpointing"], p["sequence"]) for p in points] == [
        ("none", 8),
        ("none", 512),
        ("plain", 8),
        ("plain", 512),
    ]
    assert steps(points) == [(1, 3), (4, 4), (5, 5), (6, 6)]


@pytest.mark.parametrize("word", ["128", "x2", "128xtwo", "128x-1"])
def test_malformed_point_is_refused_with_the_expected_form(word: str) -> None:
    with pytest.raises(ValueError, match="write tokens x sequences, such as 128x2"):
        training.point(word)


def test_malformed_stack_is_refused_with_the_expected_form() -> None:
    with pytest.raises(ValueError, match="write checkpointing:attention:loss"):
        training.stack("offloaded")


@pytest.mark.parametrize("word", ["memascend:fp16", "memascend:memascend:fp16:a:b", "memascend::fp16"])
def test_malformed_arm_is_refused_with_the_expected_form(word: str) -> None:
    with pytest.raises(ValueError, match="expected system:arm:dtype"):
        interleaved.Arm(word, None, None)


def test_missing_environment_is_refused_with_the_command_to_make_it(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="make it with: make deepspeed_016"):
        interleaved.Arm("zero_infinity:today_016:fp16:deepspeed_016", None, None)


def result() -> dict:
    """Return two points after a warm-up of two steps: stores of 4096 and 16384 bytes, device blocks of 100 and 900."""
    phases = [{"name": "init", "role": "host", "begin_s": 0.0, "end_s": 1.0}]
    for step in range(1, 5):
        for i, (name, role) in enumerate((("forward", "device"), ("backward", "device"), ("optimizer", "host"))):
            begin = 10.0 * step + i
            phases.append({"name": f"step{step}-{name}", "role": role, "begin_s": begin, "end_s": begin + 0.9})
    phases = [p | {"seconds": 0.9, "hwm_bytes": 0} for p in phases]
    same = {"name": "store", "owner": "activation_checkpoints", "role": "host", "locked": True, "allocator": "pinned"}
    stores = [
        {**same, "requested_bytes": 3000, "reserved_bytes": 4096, "address": 1, "born_s": 10.5, "died_s": 40.0},
        {**same, "requested_bytes": 12_000, "reserved_bytes": 16_384, "address": 2, "born_s": 40.5, "died_s": None},
    ]
    events = []
    for number, (nbytes, at) in enumerate(((100, 31), (900, 41))):
        events.append(["alloc", number, 1000 + number, nbytes, "device", int(at * 1e9)])
        events.append(["free", number, 1000 + number, nbytes, "device", int((at + 0.5) * 1e9)])
    status = {"RssAnon": 1_000_000, "RssFile": 0}
    idle = {"at_s": 23.5, "status": status, "trimmed": status, "named": {}}
    points = [
        {"sequence": 8, "batch": 1, "first_step": 1, "last_step": 3},
        {"sequence": 16, "batch": 1, "first_step": 4, "last_step": 4},
    ]
    more = {"idle": [idle, idle], "overflow_checks": [], "floor": status, "warm_up_steps": 2}
    return {"points": points, "phases": phases, "ledger": stores, "tracked_events": events, **more}


def test_each_point_has_the_peaks_of_its_own_steps() -> None:
    samples = [(31.2, 0, 1_004_096, 0, 100, 0), (41.2, 0, 1_016_384, 0, 900, 0)]
    small, large = account.points([result()], samples)
    assert (small["checkpoint_store_requested_bytes"], small["checkpoint_store_reserved_bytes"]) == (3000, 4096)
    assert (large["checkpoint_store_requested_bytes"], large["checkpoint_store_reserved_bytes"]) == (12_000, 16_384)
    assert large["memory"]["host_peak_net_bytes"] - small["memory"]["host_peak_net_bytes"] == 16_384 - 4096
    assert [p["memory"]["device_peak_bytes"] for p in (small, large)] == [100, 900]


class Recorded:
    """An arm that records when it was asked to step."""

    def __init__(self, name: str, order: list[str]) -> None:
        self.name, self.order, self.labels = name, order, {"arm": name}

    def step(self, point: tuple[int, ...], deadline: float) -> dict[str, float]:
        self.order.append(self.name)
        return {"forward_s": float(len(self.order))}


def test_arms_alternate_in_order_and_warm_up_is_left_out() -> None:
    order: list[str] = []
    found = interleaved.rounds([Recorded("a", order), Recorded("b", order)], [(32, 1), (128, 1)], 2, 1e12)
    assert order[:8] == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert len(order) == 2 * (2 + 2) + 2 * (1 + 2)
    assert [len(series["forward_s"]) for series in found] == [2, 2, 2, 2]
    assert [(s["arm"], s["sequence"]) for s in found] == [("a", 32), ("b", 32), ("a", 128), ("b", 128)]


def test_missing_gpu_is_refused(tmp_path, capsys) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is one")
    words = ["--run-id", "x", "--system", "memascend", "--arm", "memascend", "--model", "qwen2.5-7b", "--k", "64"]
    assert training.main([*words, "--device", "cuda", "--out", str(tmp_path / "x.json")]) == 2
    line = capsys.readouterr().err
    assert line.startswith("training: error: --device cuda: no NVIDIA device on this machine; leave --device out")
