"""A drive's write budget: counted across runs, with a warning at 80 %, and an end of the run if requested."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memascend.storage.write_budget import FILE, WriteBudget, WriteBudgetExceeded, WriteMeter, count_written, written

ROOT = Path(__file__).resolve().parents[2]


def test_budget_is_a_total_or_daily_amount():
    assert WriteBudget.parse("300TB") == WriteBudget(limit_bytes=300 * 10**12, a_day=False)
    assert WriteBudget.parse("0.5 TB/day") == WriteBudget(limit_bytes=5 * 10**11, a_day=True)
    assert WriteBudget.parse("100GiB/day").limit_bytes == 100 << 30
    for wrong in ("much", "3TB/week", "TB", 5):
        with pytest.raises(ValueError, match="use 300TB"):
            WriteBudget.parse(wrong)


def test_meter_warns_once_at_80_percent_and_once_above_budget(tmp_path):
    meter = WriteMeter(WriteBudget(limit_bytes=1000, a_day=False))
    path = str(tmp_path)
    assert meter.count([(path, 700)]) == []
    assert len(meter.count([(path, 850)])) == 1
    assert meter.count([(path, 860)]) == []
    assert "in all, 110% of its write budget" in meter.count([(path, 1100)])[0]
    assert meter.count([(path, 1200)]) == []


def test_new_run_continues_the_count_and_stops_if_requested(tmp_path):
    path = str(tmp_path)
    WriteMeter(WriteBudget(limit_bytes=1000, a_day=False)).count([(path, 700)])
    meter = WriteMeter(WriteBudget(limit_bytes=1000, a_day=False, stops=True))
    assert meter.count([(path, 100)])  # 800 bytes: a warning
    meter.require_within()
    assert meter.count([(path, 300)])
    with pytest.raises(WriteBudgetExceeded, match="training stops; raise write_budget"):
        meter.require_within()
    assert written(path)["total"] == 1000


def test_a_daily_budget_begins_anew_each_day(tmp_path):
    path, budget = str(tmp_path), WriteBudget(limit_bytes=1000, a_day=True)
    count_written(path, 900, "2026-01-01")
    count_written(path, 100, "2026-01-02")
    assert budget.used(path, "2026-01-01") == 900
    assert budget.used(path, "2026-01-02") == 100
    for day in range(3, 20):
        count_written(path, 1, f"2026-01-{day:02}")
    assert len(written(path)["days"]) == 8
    assert written(path)["total"] == 1017


def test_device_writes_are_counted_for_the_run(tmp_path):
    meter = WriteMeter(WriteBudget(limit_bytes=1000, a_day=True))
    device = str(tmp_path / "device")
    assert meter.count([(device, 700)]) == []
    assert "today, 90%" in meter.count([(device, 900)])[0]


def test_processes_add_to_one_count(tmp_path):
    program = "from memascend.storage.write_budget import count_written\n" + "count_written('.', 3)\n" * 50
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    children = [subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=environment) for _ in range(3)]
    assert [child.wait() for child in children] == [0, 0, 0]
    assert written(str(tmp_path))["total"] == 450


def test_unreadable_count_is_refused_and_not_reset(tmp_path):
    count_written(str(tmp_path), 10**15)
    (tmp_path / FILE).write_text('{"total": 10000')
    for use in (lambda: written(str(tmp_path)), lambda: count_written(str(tmp_path), 5)):
        with pytest.raises(ValueError, match=r"cannot be read .*put the file back from a copy, or remove it"):
            use()
    assert (tmp_path / FILE).read_text() == '{"total": 10000'


def test_count_file_does_not_follow_symbolic_links(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "ssd"
    victim.write_text("keep me")
    folder.mkdir()
    (folder / FILE).symlink_to(victim)
    with pytest.raises(ValueError, match="cannot be read"):
        count_written(str(folder), 5)
    (folder / FILE).unlink()
    (folder / f".{FILE}.partial").symlink_to(victim)
    count_written(str(folder), 5)
    assert victim.read_text() == "keep me"
    assert written(str(folder))["total"] == 5


def test_unreadable_count_is_refused_when_the_meter_is_created(tmp_path):
    (tmp_path / FILE).write_text("torn")
    with pytest.raises(ValueError, match=r"cannot be read .*: put the file back from a copy, or remove it"):
        WriteMeter(WriteBudget.parse("1TB"), [str(tmp_path)])
    WriteMeter(WriteBudget.parse("1TB"), [str(tmp_path / "missing")])
