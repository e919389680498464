"""A piece of the states passes through its step in one order, whichever code moves it."""

import itertools
import threading

import pytest
import torch

from memascend.engine.job_thread import JobThread
from memascend.engine.layout import Kind, UnitParameters, make_layout
from memascend.engine.pieces import PieceState, StepPieces

WAITING, ARRIVED, SPILLED, SUMMED, UPDATED, WRITTEN = PieceState
ALLOWED = {
    (WAITING, ARRIVED), (WAITING, UPDATED), (ARRIVED, SPILLED), (ARRIVED, SUMMED), (ARRIVED, UPDATED),
    (SPILLED, ARRIVED), (SPILLED, SUMMED), (SPILLED, UPDATED), (SUMMED, UPDATED), (UPDATED, WRITTEN),
}  # fmt: skip
WAYS = {
    WAITING: [], ARRIVED: [ARRIVED], SPILLED: [ARRIVED, SPILLED], SUMMED: [ARRIVED, SUMMED], UPDATED: [UPDATED],
    WRITTEN: [UPDATED, WRITTEN],
}  # fmt: skip


def layout():
    """Return two blocks, each of two pieces of one and a half parameters."""
    units = [
        UnitParameters(
            key=f"layers.{n}",
            kind=Kind.BLOCK,
            parameters=[(f"layers.{n}.a", (96,), True), (f"layers.{n}.b", (32,), True)],
        )
        for n in range(2)
    ]
    order = [(name, numel) for n in range(2) for name, numel in ((f"layers.{n}.a", 96), (f"layers.{n}.b", 32))]
    return make_layout(units, order, weights=torch.float32, states=torch.float32, piece_elements=64)


def in_state(state):
    pieces, (piece, *_) = StepPieces(made := layout()), made.pieces
    for each in WAYS[state]:
        pieces.move(piece, each)
    return pieces, piece


@pytest.mark.parametrize(
    ("before", "after"), list(itertools.product(PieceState, repeat=2)), ids=lambda each: each.value
)
def test_only_transitions_of_the_state_diagram_are_allowed(before, after):
    pieces, piece = in_state(before)
    if (before, after) in ALLOWED:
        pieces.move(piece, after)
        assert pieces.state(piece) is after
    else:
        with pytest.raises(AssertionError, match=f"{piece.key} was {before.value} and cannot be {after.value} next"):
            pieces.move(piece, after)
        assert pieces.state(piece) is before


@pytest.mark.parametrize("state", list(PieceState), ids=lambda each: each.value)
def test_begun_and_on_tier_flags_follow_from_the_state(state):
    pieces, piece = in_state(state)
    assert pieces.has_begun(piece) == pieces.any_begun == (state in (UPDATED, WRITTEN))
    assert pieces.is_on_tier(piece) == (state in (SPILLED, SUMMED))


def test_piece_is_complete_when_each_part_has_arrived_once():
    made = layout()
    pieces, piece = StepPieces(made), next(each for each in made.pieces if len(each.runs) == 2)
    first, second = (run.part.key for run in piece.runs)
    assert not pieces.add(piece, first, torch.zeros(96))
    with pytest.raises(AssertionError, match="two gradients in one pass"):
        pieces.add(piece, first, torch.zeros(96))
    assert pieces.add(piece, second, torch.zeros(32))
    assert set(pieces.take(piece)) == {first, second}
    pieces.move(piece, SPILLED)
    assert not pieces.add(piece, first, torch.zeros(96))  # of the next pass
    assert pieces.state(piece) is ARRIVED
    assert pieces.is_on_tier(piece)


def test_a_gradient_after_the_update_has_begun_is_refused():
    pieces, piece = in_state(UPDATED)
    with pytest.raises(AssertionError, match="was updated and cannot be arrived next"):
        pieces.add(piece, piece.runs[0].part.key, torch.zeros(96))
    assert pieces.take(piece) == {}


def test_a_unit_is_written_when_all_of_its_pieces_are():
    made = layout()
    pieces, unit = StepPieces(made), made.units[0]
    for piece in unit.pieces:
        assert not pieces.is_written(unit)
        pieces.move(piece, UPDATED)
        pieces.move(piece, WRITTEN)
    assert pieces.is_written(unit)
    assert not pieces.is_written(made.units[1])


def test_only_one_of_many_threads_opens_or_closes_a_unit():
    pieces, gate = StepPieces(layout()), threading.Barrier(8)
    opened, closed = [], []

    def work():
        gate.wait()
        opened.append(pieces.open("layers.0"))
        gate.wait()
        closed.append(pieces.close("layers.0"))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(opened) == sorted(closed) == [False] * 7 + [True]
    assert pieces.open_units == []


def test_failed_job_raises_in_training_thread_and_stops_later_jobs():
    ran, cleaned = [], []
    jobs = JobThread("jobs", lambda: None, lambda: cleaned.append(threading.current_thread().name), 100)

    def fails():
        raise OSError("the drive is gone")

    jobs.submit(lambda: ran.append(1))
    jobs.submit(fails)
    jobs.submit(lambda: ran.append(2))
    with pytest.raises(OSError, match="the drive is gone"):
        jobs.drain()
    assert jobs.failure_was_raised
    assert (ran, cleaned) == ([1], ["jobs"])
    with pytest.raises(OSError, match="the drive is gone"):
        jobs.run(lambda: ran.append(3))
    jobs.abandon()
    jobs.run(lambda: ran.append(4))
    assert ran == [1, 4]
    jobs.close()
    jobs.close()


def test_training_thread_is_held_back_until_jobs_release_memory():
    jobs, gate = JobThread("jobs", lambda: None, lambda: None, 100), threading.Event()
    jobs.hold_back(150)
    jobs.submit(gate.wait)
    jobs.submit(lambda: jobs.let_go(150))
    reached = []
    waiting = threading.Thread(target=lambda: (jobs.hold_back(10), reached.append(1)))
    waiting.start()
    waiting.join(0.1)
    assert reached == []
    gate.set()
    waiting.join(10)
    assert reached == [1]
    jobs.close()
