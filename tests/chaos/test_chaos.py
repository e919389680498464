"""A few seeds of the chaos runs; more with --run-slow. `make chaos` runs all of them."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import power
from tests.chaos.draws import FAULTS, SHARES, draw
from tests.chaos.verdicts import FAILURES

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ["Plain", "TiedEmbedding"]


def outcomes(folder, *options):
    """Return the outcomes of `python -m tests.chaos` by seed. It runs in its
    own process, as OpenMP's threads do not survive a fork."""
    out = folder / "chaos.json"
    command = [sys.executable, "-m", "tests.chaos", "--out", str(out), "--targets", "engine", "activations", *options]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())["seeds"]


def seeds_of_each_fault(target, number):
    """Return the first `number` seeds of each fault of the target."""
    from tests.chaos.loops import SHAPES_DRAWN

    found: dict[str, list[int]] = {}
    for seed in range(2000):
        drawn = draw(seed, SHAPES_DRAWN)
        if drawn.target == target and not drawn.how.get("interrupted"):
            found.setdefault(drawn.fault, []).append(seed)
    return {fault: seeds[:number] for fault, seeds in found.items()}


@pytest.mark.timeout(300)
def test_training_survives_faults_with_equal_bits_or_named_error(tmp_path):
    engine = seeds_of_each_fault("engine", 1)
    seeds = [engine[fault][0] for fault in ("kill", "power cut", "EIO")]
    seeds.append(seeds_of_each_fault("activations", 1)["EIO"][0])
    found = outcomes(tmp_path, "--seeds", ",".join(map(str, seeds)))
    assert len(found) == len(seeds)
    assert {seed: row for seed, row in found.items() if row["verdict"] in FAILURES} == {}
    assert sum(row["struck"] for row in found.values()) >= 3
    again = outcomes(tmp_path, "--seeds", ",".join(map(str, seeds)))
    assert again == found  # a seed that is in the record is not run again


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", ["engine", "activations"])
def test_training_survives_several_seeds_of_each_fault(tmp_path, target):
    seeds = [seed for each in seeds_of_each_fault(target, 2).values() for seed in each]
    found = outcomes(tmp_path, "--seeds", ",".join(map(str, seeds)), "--minutes", "25")
    assert {seed: row for seed, row in found.items() if row["verdict"] in FAILURES} == {}


def test_draws_repeat_for_a_seed_and_cover_every_fault():
    drawn = [draw(seed, SHAPES) for seed in range(1000)]
    assert drawn == [draw(seed, SHAPES) for seed in range(1000)]
    assert {each.fault for each in drawn} == set(FAULTS)
    for target, faults in SHARES.items():
        assert {each.fault for each in drawn if each.target == target} == set(faults)


def logged(kind, token, offset=0, data=b"", size=None):
    return power._HEADER.pack(kind, 0, token, offset, len(data) if size is None else size) + data


def test_power_cut_keeps_flushed_data_and_tears_unflushed_writes():
    sector = power.SECTOR
    durable, lost = b"a" * sector, b"b" * (4 * sector)
    log = logged(power.WRITE, 1, 0, durable) + logged(power.WRITTEN, 1, size=sector) + logged(power.FLUSH, 2)
    # the write ends after the flush began, so the flush does not cover it
    in_flight = logged(power.WRITE, 1, sector, lost)
    log += in_flight + logged(power.WRITTEN, 1, size=len(lost))
    before = bytes(5 * sector)
    for place in (len(log), len(log) - 1):  # the flush has not returned
        assert power.after_a_cut(before, log[:place], 0.0, random.Random(0)) == before
    log += logged(power.FLUSHED, 2)
    assert power.after_a_cut(before, log, 0.0, random.Random(0)) == durable + bytes(4 * sector)
    states = {power.after_a_cut(before, log, 1.0, random.Random(seed)) for seed in range(40)}
    assert durable + lost in states
    assert len(states) > 8  # each sector of a write is kept or lost independently
    assert {each[:sector] for each in states} == {durable}


def test_truncated_last_record_of_the_log_is_ignored():
    log = logged(power.WRITE, 1, 0, b"a" * 512)
    assert power.replayed(log[:-1]) == []
    assert len(power.replayed(log)) == 1
