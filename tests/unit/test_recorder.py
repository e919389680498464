"""Events of a real step: phases that interrupt one another, waits taken out, blocks; and two steps compared."""

import json
import threading
import zipfile

import pytest

from memascend import cli
from memascend.simulator import Event, Recorder, write_trace
from memascend.simulator.side_by_side import rows, step_of_trace


class Clock:
    """Seconds that pass when the test says so."""

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


def test_a_phase_within_another_interrupts_it(clock):
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


def test_waits_are_taken_out_of_what_the_same_thread_computes(clock):
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


def test_transfers_of_other_threads_keep_the_phase_that_they_began_in(clock):
    recorder = Recorder(rank=1)
    with recorder.phase("backward"):
        begin, phase = recorder.now(), recorder.current_phase
    clock.s = 9.0
    thread = threading.Thread(target=recorder.add, args=("gradient", "ssd.write", begin, 64.0, phase))
    thread.start()
    thread.join()
    recorder.add("nobody asked", "ssd.read", 0.0)  # outside of every phase
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


def test_a_transfer_that_the_end_of_the_step_finds_under_way_belongs_to_it():
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


def test_a_measured_phase_is_the_time_of_its_thread_and_a_simulated_one_its_span(tmp_path):
    """A transfer that goes on after the phase belongs to it, and does not make it longer."""
    simulated = step_of_trace(*trace(tmp_path / "a.json", "modelled", main=False))
    measured = step_of_trace(*trace(tmp_path / "b.json", "measured", scale=2.0))
    assert simulated.phase_s == {"forward": 9.0, "optimizer": 1.0}
    assert measured.phase_s == {"forward": 6.0, "optimizer": 2.0}
    ratios = {(row["phase"], row["resource"]): row["ratio"] for row in rows(simulated, measured)}
    assert ratios["optimizer", ""] == ratios["optimizer", "cpu"] == 2.0
    assert ("forward", "main") not in ratios


def test_compare_says_where_two_steps_are_not_the_same_work(tmp_path, capsys):
    trace(tmp_path / "a.json", "modelled", main=False)
    trace(tmp_path / "b.json", "measured", batch=4)
    assert cli.main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    said = capsys.readouterr().out
    assert "A: toy (wooden) on here, modelled" in said
    assert "not the same work: batch None against 4" in said
    assert "5.000" in next(line for line in said.splitlines() if "ssd.read" in line)


def test_two_steps_are_drawn_and_a_picture_is_not_replaced_unasked(tmp_path, capsys):
    trace(tmp_path / "a.json", "modelled", main=False)
    trace(tmp_path / "b.json", "measured", scale=2.0)
    command = ["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--picture", str(tmp_path / "both.svg")]
    assert cli.main(command) == 0
    drawn = (tmp_path / "both.svg").read_text()
    for phase_colour in ("#0072b2", "#009e73"):
        assert phase_colour in drawn
    assert cli.main(command) == 2
    assert "--force replaces it" in capsys.readouterr().err


def record(folder, seconds, name="r"):
    folder.mkdir(exist_ok=True)
    points = [{"arm": "one", "batch": 4, "forward_s": seconds, "bytes": [1, 2]}]
    (folder / f"{name}.json").write_text(json.dumps({"run_id": name, "points": points}))


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        ([2.0, 2.1, 2.2, 2.3, 2.4], "B is slower"),
        ([0.9, 1.0, 1.1, 1.2, 3.0], "within the spread"),
        ([9.0], "a single value"),
    ],
)
def test_two_sets_of_results_are_told_apart_by_their_quartiles(tmp_path, capsys, other, verdict):
    record(tmp_path / "a", [1.0, 1.1, 1.2, 1.3, 1.4])
    record(tmp_path / "b", other)
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["name"], found["verdict"]) == ("r: one 4 forward_s", verdict)


def streams(folder, name, engine, **settings):
    """A record of `bench nvme`, whose repeats each run for 0.7 s."""
    point = {"question": "stream", "method": "engine io_uring", "op": "write", "engine": engine, "fio": [2e9, 2e9]}
    folder.mkdir(exist_ok=True)
    record = {"benchmark": "nvme", **settings, "points": [point | {"seconds": [0.7] * len(engine)}]}
    (folder / f"{name}.json").write_text(json.dumps(record))


def test_benches_of_a_fixed_time_are_compared_by_their_rates(tmp_path, capsys):
    streams(tmp_path / "a", "one", [3.8e9, 3.9e9], target="file", depth=16)
    streams(tmp_path / "b", "one", [2.0e9, 2.1e9], target="loop", depth=16)
    command = ["compare", str(tmp_path / "a"), str(tmp_path / "b")]
    assert cli.main(command) == 0
    said = capsys.readouterr()
    assert (
        "nvme: stream engine io_uring write: A 3.85 [3.8, 3.9] GB/s, B 2.05 [2, 2.1] GB/s, B / A 0.532: B is slower"
        in said.out
    )
    assert "stream engine io_uring write fio: A 2 [2, 2] GB/s, B 2 [2, 2] GB/s, B / A 1.000: within the" in said.out
    assert "0.7" not in said.out
    assert said.err == "note: nvme: target is file in A and loop in B\n"
    assert cli.main([command[0], command[2], command[1]]) == 0
    assert "B is faster" in capsys.readouterr().out
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)[0]
    assert (found["a_bytes_per_s"], found["b_bytes_per_s"]) == ([3.8e9, 3.85e9, 3.9e9], [2.0e9, 2.05e9, 2.1e9])
    assert "a_s" not in found


def test_benches_with_registered_buffers_are_not_compared_with_those_without(tmp_path, capsys):
    for folder, rates in (("a", (3.8e9, 2.8e9)), ("b", (3.7e9, 2.7e9))):
        for registered, rate in zip((True, False), rates, strict=True):
            streams(tmp_path / folder, str(registered), [rate], registered=registered)
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    said = capsys.readouterr()
    assert "nvme, registered: stream engine io_uring write: A 3.8 [3.8, 3.8] GB/s, B 3.7" in said.out
    assert "nvme: stream engine io_uring write: A 2.8 [2.8, 2.8] GB/s, B 2.7" in said.out
    assert said.err == ""


def test_claims_that_change_their_verdict_are_named(tmp_path, capsys):
    header = "claim_id,lane,verdict,value\n"
    (tmp_path / "a.csv").write_text(header + "x,modelled,deviates,23.6\ny,modelled,reproduced,1\n")
    (tmp_path / "b.csv").write_text(header + "x,modelled,reproduced,23.5\ny,modelled,reproduced,2\n")
    assert cli.main(["compare", str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]) == 0
    said = capsys.readouterr().out
    assert "x (modelled): A deviates (23.6), B reproduced (23.5)" in said
    assert "2 in common: 1 other verdict, 1 other value" in said or "2 in common: 1 other value, 1 other" in said
    assert "y (modelled)" not in said
    assert cli.main(["compare", str(tmp_path / "a.csv"), str(tmp_path / "b.csv"), "--all"]) == 0
    assert "y (modelled): A reproduced (1), B reproduced (2)" in capsys.readouterr().out


def test_a_claim_in_two_tables_of_one_folder_is_told(tmp_path, capsys):
    header = "claim_id,lane,verdict,value\n"
    for name, verdict in (
        ("a/claims.csv", "reproduced"),
        ("a/more-claims.csv", "deviates"),
        ("b/claims.csv", "deviates"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{header}x,modelled,{verdict},1\n")
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    said = capsys.readouterr()
    assert (
        f"note: {tmp_path / 'a'}: 1 measurements or claims (such as 'x (modelled)') in more than one file" in said.err
    )
    assert "1 equal" in said.out


def test_two_artifacts_are_compared_by_their_records_and_claims(tmp_path, capsys):
    for name, verdict, seconds in (("a", "deviates", 1.0), ("b", "reproduced", 0.0)):
        record(tmp_path / name, [seconds] * 5)
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as file:
            file.writestr("root/tables/claims.csv", f"claim_id,lane,verdict,value\nx,modelled,{verdict},1\n")
            file.write(tmp_path / name / "r.json", "root/records/r.json")
            file.writestr("root/source/results/reference/claims.csv", "not,read\n")
    command = ["compare", str(tmp_path / "a.zip"), str(tmp_path / "b.zip")]
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert "x (modelled): A deviates (1), B reproduced (1)" in said
    assert "r: one 4 forward_s: A 1 [1, 1] s, B 0 [0, 0] s, B / A 0.000: B is faster" in said
    assert cli.main([command[0], command[2], command[1]]) == 0  # nothing is divided by a median of zero
    assert "B 1 [1, 1] s: B is slower" in capsys.readouterr().out
    (tmp_path / "a.zip").write_bytes(b"PK")
    assert cli.main(command) == 2
    assert "as an artifact" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ("none.json", "r/r.json", "there is no"),
        ("t.json", "r/r.json", "is a step and"),
        ("empty", "r/r.json", "holds no records"),
        ("other", "r/r.json", "have no measurement in common"),
    ],
)
def test_what_cannot_be_compared_is_one_line(tmp_path, capsys, a, b, said):
    trace(tmp_path / "t.json", "measured")
    record(tmp_path / "r", [1.0])
    record(tmp_path / "other", [1.0], "else")
    (tmp_path / "empty").mkdir()
    assert cli.main(["compare", str(tmp_path / a), str(tmp_path / b)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_measurement_in_two_records_of_a_folder_is_said(tmp_path, capsys):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for name, seconds in (("first", [1.0]), ("second", [2.0])):
            record = {"run_id": "same", "points": [{"arm": "x", "seconds": seconds}]}
            (tmp_path / folder / f"{name}.json").write_text(json.dumps(record))
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    said = capsys.readouterr()
    assert f"note: {tmp_path / 'a'}: 1 measurements or claims (such as 'same: x') in more than one file" in said.err
    assert "A 2 [2, 2] s" in said.out
