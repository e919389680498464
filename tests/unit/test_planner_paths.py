"""A plan over several paths: what each stores and is written, its life, and the time of a step."""

import json

import pytest

from hardware.registry import load_testbed
from memascend.cli import main
from memascend.planner import Workload, model_spec
from memascend.planner.from_config import workload_of
from memascend.planner.limits import Limits
from memascend.planner.machine import machine_from_testbed
from memascend.planner.plan_result import full_plan
from memascend.planner.step_time import step_time

SPEC = model_spec("qwen2.5-7b")
MACHINE = machine_from_testbed(load_testbed("mlpoffload-testbed1"))
TIERS = ["/mnt/fast", "/mnt/slow"]
RATES = {"/mnt/fast": 1 / (1 / 6.9 + 1 / 5.3), "/mnt/slow": 3.6 / 2}


def config(param="none", **section):
    zero = {"stage": 3, "offload_param": {"device": param}, "offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}
    return {"bf16": {"enabled": True}, "zero_optimization": zero, "memascend": {"tiers": TIERS} | section}


def planned(*, endurance=None, **section):
    work = workload_of(config(**section), SPEC, ranks=4, context=2048)
    return full_plan(work, Limits(), MACHINE, endurance)


def test_tiers_key_plans_several_paths():
    made = planned()
    assert made.host.label == "MemAscend over 2 paths"
    assert [path.name for path in made.paths] == TIERS
    assert not made.work.arrangement.swaps_gradients  # they stay in host memory, as the drop-in keeps them
    assert planned(gradients="nvme").work.arrangement.swaps_gradients
    kept, swapped = made.work.optimizer_buffers, planned(gradients="nvme").work.optimizer_buffers
    assert (kept, swapped) == (15, 21)  # for five sub-groups: kept gradients have no buffer
    assert workload_of(config(param="nvme"), SPEC).arm_name == "weights_on_paths"
    assert full_plan(Workload(spec=SPEC), Limits(), MACHINE).paths == ()


def test_paths_hold_their_share_and_sums_match_the_plan():
    made = planned()
    whole = sum(RATES.values())
    for path in made.paths:
        assert path.share == pytest.approx(RATES[path.name] / whole, abs=0.02)  # whole sub-groups
    assert sum(path.stored_bytes for path in made.paths) == pytest.approx(made.volume.stored_bytes, abs=2)
    assert sum(path.write_bytes_per_step for path in made.paths) == pytest.approx(made.wear.bytes_per_step, rel=1e-6)


def test_step_without_a_path_takes_the_time_of_the_others():
    made = planned()
    fast, slow = made.paths
    assert made.time.seconds < slow.seconds_without < fast.seconds_without
    alone = workload_of(config(tiers=TIERS[:1]), SPEC, ranks=4, context=2048)
    one = machine_from_testbed({**load_testbed("mlpoffload-testbed1"), "paths": MACHINE.described["paths"][:1]})
    assert slow.seconds_without == pytest.approx(step_time(alone, one).seconds)
    assert full_plan(alone, Limits(), one).paths[0].seconds_without is None


def test_drive_lifetime_ends_when_its_rated_bytes_are_written():
    made = planned(endurance=600)
    for path in made.paths:
        steps = 600e12 / path.write_bytes_per_step
        assert path.days_of_life == pytest.approx(steps * made.time.seconds / 86_400)
    assert planned().paths[0].days_of_life is None


def test_manual_ratio_is_followed_until_one_path_is_lost():
    fast, slow = planned(tier_placement=[3, 1]).paths
    assert (fast.share, slow.share) == (pytest.approx(0.75, abs=0.02), pytest.approx(0.25, abs=0.02))
    assert slow.seconds_without == pytest.approx(planned().paths[1].seconds_without)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (
            {"tiers": ["/a", "/b", "/c"]},
            "names 3 tiers, the testbed mlpoffload-testbed1 2 paths: describe the tiers' rates",
        ),
        ({"tiers": "/a"}, "must be a list of paths"),
        ({"tier_placement": [1, 2, 3]}, "must name a number for each of 2 paths"),
        ({"param": "cpu"}, "offload_param on 'nvme' or 'none', got 'nvme' and 'cpu'"),
    ],
)
def test_unplannable_paths_are_refused_in_one_line(section, words):
    with pytest.raises(ValueError, match=words) as caught:
        planned(**section)
    assert "\n" not in str(caught.value)


def test_command_prints_paths_and_writes_them_as_json(capsys, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config()))
    words = ["plan", "--model", "qwen2.5-7b", "--gpus", "4", "--context", "2048", "--ds-config", str(file)]
    words += ["--testbed", "mlpoffload-testbed1", "--ssd-endurance", "600"]
    main(words)
    out = capsys.readouterr().out
    assert "paths of mlpoffload-testbed1, side by side without RAID" in out
    assert all(f"  {path} " in out for path in TIERS)
    assert "lifetime of each drive: rated for 600 TB written" in out
    main([*words, "--json"])
    found = json.loads(capsys.readouterr().out)["paths"]
    assert [path["name"] for path in found] == TIERS
    assert all(path["seconds_without"] > 0 and path["days_of_life"] > 0 for path in found)
