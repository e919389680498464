"""Events of a real step: nested phases, waits subtracted, blocks; and the comparison of two steps."""

import contextlib
import threading

import pytest
import torch

from memascend import cli
from memascend.integrations.block_spans import record_blocks
from memascend.simulator import Event, Recorder, write_trace
from memascend.simulator.side_by_side import rows, step_of_trace
from memascend.storage import interrupts


class Clock:
    """A clock that advances when the test says so."""

    def __init__(self):
        self.s = 0.0

    def __call__(self):
        return self.s


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(Recorder, "now", staticmethod(made))
    return made


def spans(events, resource):
    return [(event.name, event.phase, event.begin_s, event.end_s) for event in events if event.resource == resource]


def test_waits_do_not_shorten_computation_of_another_thread(clock):
    recorder = Recorder()
    with recorder.phase("backward"), recorder.wait():
        clock.s = 1.0
        other = threading.Thread(target=recorder.add, args=("AdamW", "cpu", 0.25))
        other.start()
        other.join()
        clock.s = 3.0
    assert spans(recorder.take(), "cpu") == [("AdamW", "backward", 0.25, 1.0)]


def test_main_thread_waits_are_recorded_automatically(clock):
    recorder = Recorder()
    model = torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(2, 2))]))
    record_blocks(model, recorder)

    def ready(_):
        clock.s = 2.0
        return True

    try:
        with recorder.phase("forward"):
            assert interrupts.wait(ready)
            clock.s = 3.0
    finally:
        interrupts.record_waits(contextlib.nullcontext)
    assert spans(recorder.take(), "wait") == [("wait", "forward", 0.0, 2.0)]


def test_nested_phase_interrupts_the_outer_one(clock):
    recorder = Recorder()
    with recorder.phase("optimizer"):
        clock.s = 1.0
        with recorder.phase("overflow check"):
            clock.s = 3.0
        clock.s = 4.0
    assert spans(recorder.take(), "main") == [
        ("optimizer", "optimizer", 0.0, 1.0),
        ("overflow check", "overflow check", 1.0, 3.0),
        ("optimizer", "optimizer", 3.0, 4.0),
    ]


def test_waits_are_subtracted_from_computation_of_the_same_thread(clock):
    recorder = Recorder()
    with recorder.phase("forward"):
        recorder.begin_block("block 0")
        clock.s = 2.0
        with recorder.wait():
            clock.s = 5.0
        clock.s = 6.0
        recorder.begin_block("block 1")
        clock.s = 7.0
    events = recorder.take()
    assert spans(events, "gpu0") == [
        ("block 0", "forward", 0.0, 2.0),
        ("block 0", "forward", 5.0, 6.0),
        ("block 1", "forward", 6.0, 7.0),
    ]
    assert spans(events, "wait") == [("wait", "forward", 2.0, 5.0)]
    assert recorder.take() == []


def test_transfers_of_other_threads_keep_their_initial_phase(clock):
    recorder = Recorder(rank=1)
    with recorder.phase("backward"):
        begin, phase = recorder.now(), recorder.current_phase
    clock.s = 9.0
    thread = threading.Thread(target=recorder.add, args=("gradient", "ssd.write", begin, 64.0, phase))
    thread.start()
    thread.join()
    recorder.add("nobody asked", "ssd.read", 0.0)  # outside every phase
    written = [event for event in recorder.take() if event.resource.startswith("ssd")]
    assert written == [
        Event(name="gradient", phase="backward", resource="ssd.write", begin_s=0, end_s=9.0, rank=1, amount=64.0)
    ]


def trace(path, lane, scale=1.0, main=True, **facts):
    events = [
        Event(name="b", phase="forward", resource="gpu0", begin_s=0.0, end_s=2.0 * scale),
        Event(name="r", phase="forward", resource="ssd.read", begin_s=0.0, end_s=9.0 * scale, amount=5e9),
        Event(name="a", phase="optimizer", resource="cpu", begin_s=3.0 * scale, end_s=4.0 * scale),
    ]
    if main:
        events.append(Event(name="f", phase="forward", resource="main", begin_s=0.0, end_s=3.0 * scale))
        events.append(Event(name="o", phase="optimizer", resource="main", begin_s=3.0 * scale, end_s=4.0 * scale))
    write_trace(path, events, lane=lane, source="here", **{"system": "toy", "arm": "wooden", "model": "m"} | facts)
    return events, {"source": "here", "lane": lane, "model": "m"} | facts


def test_transfer_unfinished_at_the_end_of_a_step_is_recorded():
    recorder = Recorder()
    with recorder.phase("optimizer"):
        ended = recorder.transfer("weights", "ssd.write", recorder.now(), 512, recorder.current_phase)
    timer = threading.Timer(0.2, ended, (None,))
    timer.start()
    taken = recorder.take()
    timer.join()
    assert [(event.name, event.amount, event.phase) for event in taken if event.resource == "ssd.write"] == [
        ("weights", 512, "optimizer")
    ]


def test_measured_phase_uses_thread_time_and_simulated_phase_its_span(tmp_path):
    """A transfer that continues after the phase belongs to it, but does not make it longer."""
    simulated = step_of_trace(*trace(tmp_path / "a.json", "modelled", main=False))
    measured = step_of_trace(*trace(tmp_path / "b.json", "measured", scale=2.0))
    assert simulated.phase_s == {"forward": 9.0, "optimizer": 1.0}
    assert measured.phase_s == {"forward": 6.0, "optimizer": 2.0}
    ratios = {(row["phase"], row["resource"]): row["ratio"] for row in rows(simulated, measured)}
    assert ratios["optimizer", ""] == ratios["optimizer", "cpu"] == 2.0
    assert ("forward", "main") not in ratios


def test_compare_reports_where_two_steps_do_different_work(tmp_path, capsys):
    trace(tmp_path / "a.json", "modelled", main=False)
    trace(tmp_path / "b.json", "measured", batch=4)
    assert cli.main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    said = capsys.readouterr().out
    assert "A: toy (wooden) on here, modelled" in said
    assert "not the same work: batch None against 4" in said
    assert "5.000" in next(line for line in said.splitlines() if "ssd.read" in line)


def test_two_steps_are_drawn_and_pictures_are_not_overwritten(tmp_path, capsys):
    trace(tmp_path / "a.json", "modelled", main=False)
    trace(tmp_path / "b.json", "measured", scale=2.0)
    command = ["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--picture", str(tmp_path / "both.svg")]
    assert cli.main(command) == 0
    drawn = (tmp_path / "both.svg").read_text()
    for phase_colour in ("#0072b2", "#009e73"):
        assert phase_colour in drawn
    assert cli.main(command) == 2
    assert "--force replaces it" in capsys.readouterr().err
