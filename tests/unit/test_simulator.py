"""The simulator against closed forms: rooflines, pipelines, shares, pools and locks."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memascend.simulator import (
    Drive,
    Event,
    Fifo,
    ResourceModel,
    Shared,
    Task,
    read_trace,
    roofline_s,
    simulate,
    write_trace,
)
from memascend.simulator.calibration import Calibration, CircularClaim, require_held_out
from memascend.simulator.trace import busy_s


def machine(pools=None, locks=(), **resources):
    return ResourceModel(name="test", resources=resources, pools=pools or {}, locks=tuple(locks))


def times(simulated):
    return {event.name: (event.begin_s, event.end_s) for event in simulated.events}


def test_fifo_resource_serves_tasks_in_order_one_at_a_time():
    tasks = [Task(name=f"t{i}", phase="p", needs={"gpu": 10.0}) for i in range(3)]
    assert times(simulate(tasks, machine(gpu=Fifo(rate=5.0)))) == {"t0": (0, 2), "t1": (2, 4), "t2": (4, 6)}


def test_task_speeds_up_when_another_leaves_the_shared_link():
    tasks = [Task(name="small", phase="p", needs={"dram": 10.0}), Task(name="large", phase="p", needs={"dram": 30.0})]
    simulated = simulate(tasks, machine(dram=Shared(rate=10.0)))
    assert times(simulated)["small"][1] == pytest.approx(2.0)  # both at 5 per second
    assert simulated.seconds == pytest.approx(4.0)  # the link is used completely


def test_max_min_sharing_gives_unused_capacity_to_other_tasks():
    """The optimizer needs 2 of DRAM's 10 per second; the copy gets the other 8."""
    tasks = [
        Task(name="adam", phase="p", needs={"cpu": 10.0, "dram": 20.0}),
        Task(name="copy", phase="p", needs={"dram": 80.0}),
    ]
    simulated = simulate(tasks, machine(cpu=Fifo(rate=1.0), dram=Shared(rate=10.0)))
    assert times(simulated)["adam"][1] == pytest.approx(10.0)
    assert times(simulated)["copy"][1] == pytest.approx(10.0)


def test_a_task_ends_when_its_slowest_resource_has_served_it():
    tasks = [Task(name="t", phase="p", needs={"cpu": 1.0, "dram": 50.0})]
    assert simulate(tasks, machine(cpu=Fifo(rate=1.0), dram=Shared(rate=10.0))).seconds == pytest.approx(5.0)


@pytest.mark.parametrize(("duplex", "seconds"), [(True, 4.0), (False, 6.0)])
def test_duplex_drive_overlaps_reads_and_writes_but_simplex_does_not(duplex, seconds):
    tasks = [
        Task(name="read", phase="p", needs={"ssd.read": 20.0}),
        Task(name="write", phase="p", needs={"ssd.write": 20.0}),
    ]
    assert simulate(tasks, machine(ssd=Drive(read=10.0, write=5.0, duplex=duplex))).seconds == pytest.approx(seconds)


@pytest.mark.parametrize(("buffers", "seconds"), [(1, 12.0), (2, 8.0), (math.inf, 8.0)])
def test_the_number_of_buffers_decides_what_overlaps(buffers, seconds):
    """Read a block (2 s), compute it (1 s), four times: one buffer makes it serial, two hide the computation."""
    tasks = []
    for i in range(4):
        tasks.append(Task(name=f"read {i}", phase="p", needs={"ssd.read": 2.0}, takes={"buffers": 1}))
        tasks.append(Task(name=f"block {i}", phase="p", needs={"gpu": 1.0}, after=(f"read {i}",), gives={"buffers": 1}))
    simulated = simulate(tasks, machine({"buffers": buffers}, gpu=Fifo(), ssd=Drive(read=1.0, write=1.0)))
    assert simulated.seconds == pytest.approx(seconds if buffers == 1 else seconds + 1.0)
    assert simulated.peak("buffers") == (1 if buffers == 1 else 2)


def test_write_that_frees_a_buffer_overtakes_a_waiting_read():
    tasks = [
        Task(name="old", phase="p", takes={"buffers": 1}),
        Task(
            name="read", phase="p", needs={"ssd.read": 1.0}, takes={"buffers": 1}, after=("old",), gives={"buffers": 1}
        ),
        Task(name="write", phase="p", needs={"ssd.write": 1.0}, after=("old",), gives={"buffers": 1}),
    ]
    assert times(simulate(tasks, machine({"buffers": 1}, ssd=Drive(read=1.0, write=1.0)))) == {
        "write": (0, 1),
        "read": (1, 2),
    }


def test_large_pool_request_is_not_starved_by_later_small_ones():
    tasks = [Task(name="first", phase="p", needs={"a": 2.0}, takes={"m": 1}, gives={"m": 1})]
    tasks.append(Task(name="large", phase="p", needs={"b": 1.0}, takes={"m": 2}, gives={"m": 2}))
    tasks += [Task(name=f"s{i}", phase="p", needs={f"c{i}": 5.0}, takes={"m": 1}, gives={"m": 1}) for i in range(2)]
    simulated = simulate(tasks, machine({"m": 2}, a=Fifo(), b=Fifo(), c0=Fifo(), c1=Fifo()))
    assert times(simulated)["large"] == (2, 3)


def test_a_lock_is_held_by_one_rank_at_a_time():
    tasks = [
        Task(name=f"rank {i}", phase="p", rank=i, needs={f"stream {i}": 3.0}, holds=("node-0-nvme",)) for i in range(3)
    ]
    simulated = simulate(tasks, machine(locks=["node-0-nvme"], **{f"stream {i}": Fifo() for i in range(3)}))
    assert simulated.seconds == pytest.approx(9.0)


def test_circular_waits_and_pool_deadlocks_are_reported():
    both = [Task(name="a", phase="p", after=("b",)), Task(name="b", phase="p", after=("a",))]
    with pytest.raises(ValueError, match=r"circular wait between tasks: a, b"):
        simulate(both, machine())
    kept = [Task(name=f"t{i}", phase="p", takes={"m": 1}) for i in range(2)]
    with pytest.raises(
        ValueError, match=r"simulation deadlock .*'t1' waits for 1 of pool 'm', of which 1 of 1 are in use"
    ):
        simulate(kept, machine({"m": 1}))


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Task(name="t", phase="p", needs={"tpu": 1.0}), "test has no 'tpu'; it has gpu, ssd.read, ssd.write"),
        (Task(name="t", phase="p", needs={"gpu": 1.0, "ssd.read": 1.0}), "at most one FIFO resource"),
        (Task(name="t", phase="p", takes={"m": 3}), "takes 3 of pool 'm', which holds 2"),
        (Task(name="t", phase="p", gives={"m": 1}), "more is released than was acquired"),
        (Task(name="t", phase="p", gives={"n": 1}), "has no pool 'n'; it has m"),
        (Task(name="t", phase="p", holds=("l",)), "has no lock 'l'; it has none"),
        (Task(name="t", phase="p", after=("u",)), "waits for 'u', which is not a task"),
        (Task(name="t", phase="p", needs={"gpu": -1.0}), "amounts are finite and >= 0"),
    ],
)
def test_invalid_task_is_refused_with_the_reason(task, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        simulate([task], machine({"m": 2}, gpu=Fifo(), ssd=Drive(read=1.0, write=1.0)))


@settings(max_examples=80, deadline=None)
@given(
    stages=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    blocks=st.integers(1, 30),
    shared=st.integers(0, 20),
)
def test_pipeline_takes_between_roofline_and_roofline_plus_fill_and_drain(stages, blocks, shared):
    """Return equal blocks that pass through a chain of FIFO stages, each of which also loads DRAM."""
    tasks = []
    for block in range(blocks):
        for stage, work in enumerate(stages):
            tasks.append(
                Task(
                    name=f"{block}/{stage}",
                    phase="p",
                    needs={f"s{stage}": float(work), "dram": float(shared)},
                    after=(f"{block}/{stage - 1}",) if stage else (),
                    takes={"m": 1} if stage == 0 else {},
                    gives={"m": 1} if stage == len(stages) - 1 else {},
                )
            )
    resources = {f"s{stage}": Fifo() for stage in range(len(stages))} | {"dram": Shared(rate=10.0)}
    testbed = ResourceModel(name="test", resources=resources, pools={"m": math.inf})
    simulated = simulate(tasks, testbed)
    lower = roofline_s(tasks, testbed)
    alone = [max(work, shared / 10.0) for work in stages]
    assert lower * (1 - 1e-6) <= simulated.seconds
    if shared == 0 or len(stages) == 1:
        assert simulated.seconds <= (blocks - 1) * max(alone) + sum(alone) + 1e-6
        assert simulated.seconds <= lower + sum(alone) + 1e-6
    else:  # shares of DRAM lengthen stages, together by at most DRAM's own work
        assert simulated.seconds <= lower + blocks * len(stages) * shared / 10.0 + sum(alone) + 1e-6


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_random_graphs_take_between_roofline_and_serial_time(seed):
    rng = random.Random(seed)
    kinds = ["gpu", "ssd.read", "ssd.write", "dram"]
    tasks = []
    for number in range(rng.randint(1, 40)):
        needs = {rng.choice(kinds[:3]): rng.uniform(0, 5)} | ({"dram": rng.uniform(0, 5)} if rng.random() < 0.5 else {})
        after = tuple({f"t{rng.randrange(number)}" for _ in range(rng.randint(0, 2))}) if number else ()
        pool = {"m": rng.choice([0.5, 1.0])} if rng.random() < 0.5 else {}
        tasks.append(Task(name=f"t{number}", phase="p", needs=needs, after=after, takes=pool, gives=pool))
    testbed = machine({"m": 1.5}, gpu=Fifo(rate=2.0), ssd=Drive(read=1.0, write=0.5), dram=Shared(rate=3.0))
    simulated = simulate(tasks, testbed)
    serial = sum(max(amount / testbed.serve(work)[1] for work, amount in task.needs.items()) for task in tasks)
    assert roofline_s(tasks, testbed) * (1 - 1e-6) <= simulated.seconds <= serial * (1 + 1e-6) + 1e-6
    assert {event.name for event in simulated.events} == {task.name for task in tasks}
    assert simulated.levels["m"][-1][1] == pytest.approx(0.0)
    for phase, by_server in simulated.served_s.items():
        assert all(seconds <= simulated.seconds * (1 + 1e-6) for seconds in by_server.values()), phase
    assert simulate(tasks, testbed) == simulated


def test_trace_round_trips_and_has_rows_for_perfetto(tmp_path):
    tasks = [
        Task(name="read", phase="forward", needs={"ssd.read": 20.0}),
        Task(name="block", phase="forward", rank=1, needs={"gpu": 3.0}, after=("read",)),
    ]
    simulated = simulate(tasks, machine(gpu=Fifo(), ssd=Drive(read=10.0, write=5.0)))
    write_trace(tmp_path / "t.json", simulated.events, lane="modelled", source="test", system="toy")
    events, facts = read_trace(tmp_path / "t.json")
    assert events == list(simulated.events)
    assert facts == {"lane": "modelled", "source": "test", "system": "toy"}
    raw = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {(e["pid"], e["args"]["name"]) for e in raw if e["name"] == "thread_name"} == {(0, "ssd.read"), (1, "gpu")}
    assert simulated.busy("forward") == {"ssd.read": 2.0, "gpu": 3.0}
    assert simulated.bottleneck() == "gpu"


def test_overlapping_events_count_once_as_busy_time():
    events = [Event(name=str(b), phase="p", resource="r", begin_s=b, end_s=e) for b, e in ((0, 2), (1, 3), (5, 6))]
    assert busy_s(events) == {"p": {"r": 4.0}}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"otherData": {"format": "memascend step trace", "version": 99}}'])
def test_invalid_trace_file_is_named_in_the_error(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json"):
        read_trace(tmp_path / "x.json")


def test_claim_is_refused_if_its_expectation_calibrated_a_constant():
    fitted = Calibration(
        name="gpu_efficiency",
        value=0.449,
        unit="1",
        reason="Fig. 17",
        reach="H100",
        solved_from=("fig17:s:32B:1:tok/s",),
    )
    require_held_out("other", ["fig17:s:32B:48:tok/s"], [fitted])
    with pytest.raises(
        CircularClaim, match=r"claim level: its expectation fig17:s:32B:1:tok/s was used to calibrate gpu_eff"
    ):
        require_held_out("level", ["fig17:s:32B:1:tok/s"], [fitted])
