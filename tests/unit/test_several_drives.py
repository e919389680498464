"""Several drives in a user's input: the section's keys, `train`, `doctor`."""

from __future__ import annotations

from pathlib import Path

import pytest

from memascend.doctor import tiers as doctor
from memascend.doctor.checks import Needs
from memascend.doctor.speed import DeviceSpeed
from memascend.integrations.deepspeed.config import enable_options
from memascend.planner import model_spec
from memascend.training.config import complete, resumed
from memascend.training.prepare import workload_of_run
from memascend.training.systems import check, setup
from tests.loop_devices import loop_device

NVME = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}}


def section(**keys):
    return enable_options(NVME | {"memascend": keys}, {})


def test_tiers_key_alone_keeps_gradients_in_host_memory():
    options = section(tiers=["/mnt/a", "/mnt/b"])
    assert options.paths.tiers == ("/mnt/a", "/mnt/b")
    assert options.parts.gradients == "host"
    assert section(tiers=["/mnt/a"], gradients="nvme").parts.gradients == "nvme"
    assert section().parts.gradients == "nvme"
    assert not section(tiers=[]).paths


@pytest.mark.parametrize(("former", "now"), [("kept", "host"), ("swapped", "nvme")])
def test_former_values_of_gradients_work_with_a_warning(former, now):
    with pytest.warns(FutureWarning, match=f"'{former}' is now '{now}'"):
        assert section(gradients=former).parts.gradients == now


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"tiers": "/mnt/a"}, "must be a list of paths"),
        ({"tiers": ["/mnt/a", "/mnt/a/"]}, "names a path more than once"),
        ({"tiers": ["/mnt/a"], "tier_placement": "fast"}, "choose balanced or as_published"),
        ({"tiers": ["/mnt/a", "/mnt/b"], "tier_placement": [1]}, "a number for each of 2 paths"),
        ({"tiers": ["/mnt/a", "/mnt/b"], "tier_placement": [1, float("nan")]}, "a number for each of 2 paths"),
        ({"tiers": ["/mnt/a"], "sub_group_order": "random"}, "choose alternating or ascending"),
        ({"tiers": ["/mnt/a"], "tier_exclusive": "yes"}, "must be true or false"),
        ({"tiers": ["/mnt/a"], "write_budget": "plenty"}, "use 300TB"),
        ({"tiers": ["/mnt/a"], "write_budget_stops": True}, 'write_budget_stops" needs a write_budget'),
        ({"tiers": ["/mnt/a"], "devices": ["/dev/null"], "aio": "direct"}, "list the devices in tiers"),
        ({"tiers": ["/mnt/a"], "pinned": "stock", "pool": "stock", "aio": "stock"}, "DeepNVMe writes to nvme_path"),
        ({"sub_group_order": "ascending"}, "name them in tiers"),
        ({"tier": ["/mnt/a"]}, "did you mean tiers"),
    ],
)
def test_invalid_section_gives_one_line_error_naming_the_fix(keys, words):
    with pytest.raises(ValueError, match=words) as caught:
        section(**keys)
    assert "\n" not in str(caught.value)


def config_of(**keys):
    return complete({"model": "qwen2.5-7b", "data": ["x"], "twin": 64, **keys})


def prepared():
    return {"context": 32, "largest_tensor": 1000, "parameters": 10_000, "pool_buffers": 9, "sub_group_size": 500}


@pytest.mark.parametrize(
    ("system", "arm", "paths", "buffers"),
    [
        ("memascend", None, ["/a", "/b"], 15),
        ("mlp_offload", None, ["/a", "/b"], 15),
        ("mlp_offload", "caching", ["/a"], 13),
    ],
)
def test_train_gives_each_arm_the_paths_it_uses(system, arm, paths, buffers):
    config = config_of(system=system, arm=arm, tiers=["/a", "/b"], write_budget="1TB/day")
    made = setup(config, prepared(), "run", "/swap").settings["deepspeed_config"]
    assert made["memascend"] == {"tiers": paths, "write_budget": "1TB/day", "write_budget_stops": True}
    assert made["zero_optimization"]["offload_optimizer"]["buffer_count"] == buffers


@pytest.mark.parametrize(
    ("system", "arm", "buffers"), [("memascend", None, 15), ("mlp_offload", None, 15), ("mlp_offload", "caching", 13)]
)
def test_train_plans_as_many_buffers_as_its_run_makes(system, arm, buffers):
    config = config_of(system=system, arm=arm, tiers=["/a", "/b"])
    assert workload_of_run(config, model_spec("qwen2.5-7b").twin(64), 32).optimizer_buffers == buffers


def test_train_refuses_paths_where_nothing_uses_them():
    with pytest.raises(ValueError, match="set --system mlp_offload or memascend"):
        check(config_of(system="zero_infinity", arm="today", tiers=["/a"]))
    with pytest.raises(ValueError, match="states on one drive: leave --tiers out, and name --nvme"):
        check(config_of(system="lohan", tiers=["/a"]))
    with pytest.raises(ValueError, match="swaps nothing: leave --tiers out"):
        check(config_of(system="in_memory", tiers=["/a"]))
    with pytest.raises(ValueError, match="name the folders with --tiers"):
        config_of(write_budget="1TB")
    with pytest.raises(ValueError, match="mutually exclusive"):
        config_of(tiers=["/a"], devices=["/dev/b"])


def test_run_resumes_on_different_paths():
    saved = {"model": "qwen2.5-7b", "data": ["x"], "tiers": ["/a", "/b"]}
    assert resumed(saved, {"tiers": ["/a"]}).tiers == ["/a"]


@pytest.fixture
def drives(tmp_path, monkeypatch):
    """Make two folders that count as separate drives, of 6 and 3 GB/s."""
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    rates = {folders[0]: 6e9, folders[1]: 3e9}
    monkeypatch.setattr(doctor, "name_of_place", str)
    monkeypatch.setattr(doctor, "file_system", lambda _: "ext4")
    monkeypatch.setattr(
        doctor,
        "check_speed",
        lambda path, _, option: (
            doctor.Check(name="drive speed", status="ok", found="quick"),
            DeviceSpeed(write_bytes_per_s=rates[path], read_bytes_per_s=rates[path], tried_bytes=1),
        ),
    )
    return folders


def needs(ssd_bytes: int) -> Needs:
    moved = {"read_bytes": 18 * 10**9, "write_bytes": 18 * 10**9}
    return Needs(label="m", host_bytes=0, locked_bytes=0, device_bytes=0, ssd_bytes=ssd_bytes, **moved)


def test_doctor_reports_step_time_of_drives_together_and_alone(drives):
    *each, together = doctor.check_tiers(drives, needs(10**6))
    assert [check.status for check in (*each, together)] == ["ok", "ok", "ok"]
    assert f"{drives[0]} 67%" in together.found
    assert "4 s on them together" in together.found
    assert f"{drives[1]} alone 12 s" in together.found


def test_doctor_detects_lack_of_space_and_folders_sharing_a_drive(drives, monkeypatch):
    assert list(doctor.check_tiers(drives, needs(10**18)))[-1].status == "fail"
    monkeypatch.setattr(doctor, "name_of_place", lambda _: "8-0")
    checks = list(doctor.check_tiers(drives, None))
    assert [check.status for check in checks] == ["ok", "warn"]
    assert "same file system" in checks[1].found


def test_doctor_without_timing_still_checks_space_of_the_plan(drives):
    for paths in (drives, drives[:1]):
        *_, space = doctor.check_tiers(paths, needs(10**18), try_speed=False)
        assert (space.name, space.status) == ("free space", "fail")
        assert all(str(path) in space.found for path in paths)
    *_, space = doctor.check_tiers(drives[:1], needs(1))
    assert (space.name, space.status) == ("free space", "ok")


def test_doctor_names_the_option_that_named_the_folder(drives, monkeypatch):
    monkeypatch.setattr(doctor, "file_system", lambda _: "tmpfs")
    assert [check.fix for check in doctor.check_tiers(drives, None)] == ["--tiers with a folder on the SSD: df -h"] * 2


def test_doctor_tries_raw_device_and_reports_a_missing_store(drives, tmp_path):
    with loop_device(tmp_path) as device:
        check, _, together = doctor.check_tiers([Path(device), drives[0]], needs(10**6))
        assert (check.status, together.status) == ("ok", "ok")
        assert "free on a raw device, written at" in check.found
        assert device in together.found
        _overwritten(tmp_path / "store")
        (refused,) = doctor.check_tiers([Path(device)], None)
        assert refused.status == "fail"
        assert "holds no store: create one with memascend storage format" in refused.found


def _overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
