"""A step that a tier has kept, in a run that was killed before the checkpoint that was due after it."""

import io
from types import SimpleNamespace

import pytest

from memascend.training.config import TrainConfig
from memascend.training.worker import FINISHED, Worker


@pytest.mark.parametrize(
    ("kept", "saved", "every", "expected"),
    [
        (4, 2, 0, [4]),  # the last step: without it the run would end without weights
        (4, 4, 0, []),
        (2, 0, 2, [2, 4]),
        (2, 2, 2, [4]),
        (3, 2, 2, [4]),
    ],
)
def test_due_checkpoint_is_saved_before_training_continues(kept, saved, every, expected):
    run = Worker.__new__(Worker)
    run.config = TrainConfig(model="m", data=["d"], save_every=every, eval_every=0)
    run.step, run.steps, run.saved, run.evaluated, written = kept, 4, saved, 0, []
    run._write_checkpoint = lambda: written.append(run.step)
    run._evaluate = lambda: False
    run.ranks, run.eval_data = 1, []

    class Backend:
        def keep(self, facts):
            assert facts["step"] == run.step

    def step():
        run.step += 1
        return False

    run.backend, run._one_step = Backend(), step
    assert run._train() == FINISHED
    assert written == expected


@pytest.mark.parametrize("checkpoints", ["full", "weights", "none"])
def test_states_past_the_last_step_are_left_alone(checkpoints):
    run = Worker.__new__(Worker)
    run.config = TrainConfig(model="m", data=["d"], checkpoints=checkpoints)
    run.job, run.rank, run.out, run.steps = {"checkpoint": None}, 0, io.StringIO(), 55
    run.backend = SimpleNamespace(kept_step=lambda: 60)  # nothing else is called
    assert not run._begin()
    assert (
        run.out.getvalue()
        == "nothing to do: the states are at step 60, past step 55; raise --steps above 60 to train further\n"
    )
