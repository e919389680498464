"""What cannot begin is refused in one line, with nothing touched: no folder removed, no value moved."""

import pytest
import torch

from memascend.engine.streaming import streaming
from memascend.ops.adamw import AdamW
from tests.unit.test_streaming_engine import SETTINGS, batches, model
from tests.unit.test_streaming_loop import assert_equal, begin, loop


def one_line(error):
    assert "\n" not in str(error.value)


def test_a_model_in_a_second_home_is_refused_and_the_first_goes_on(tmp_path):
    ours, theirs, data = model(), model(), batches(4)
    optimizer_of_theirs = AdamW(theirs.parameters(), **SETTINGS)
    second = tmp_path / "second"
    second.mkdir()
    late = streaming(second)
    late.hook(ours)  # before it is moved
    home, optimizer = begin(ours, tmp_path / "run")
    assert loop(ours, optimizer, data[:2]) == loop(theirs, optimizer_of_theirs, data[:2])
    for again in (
        lambda: streaming(second).hook(ours),
        lambda: streaming(second).hook(torch.nn.Sequential(ours)),
        lambda: late.optimizer(torch.optim.AdamW),
    ):
        with pytest.raises(RuntimeError, match="are in .*run already: close that home first .* or make a new") as error:
            again()
        one_line(error)
    assert list(second.iterdir()) == []
    assert loop(ours, optimizer, data[2:]) == loop(theirs, optimizer_of_theirs, data[2:])
    assert_equal(home, theirs)
    home.close()


def test_a_model_that_a_closed_home_left_empty_does_not_begin_another(tmp_path):
    ours = model()
    begin(ours, tmp_path / "run")[0].close()
    with pytest.raises(RuntimeError, match="weights are in .*run, which was closed: open it again") as error:
        begin(ours, tmp_path / "another")
    one_line(error)
    assert not (tmp_path / "another").exists()
    home, _ = begin(ours, tmp_path / "run", resume=True)
    home.remove()


@pytest.mark.parametrize("there", [True, False], ids=["there", "not there"])
def test_a_start_that_fails_leaves_folders_as_they_were(tmp_path, there):
    folder = tmp_path / "deep" / "run"
    if there:
        folder.mkdir(parents=True)
    ours = model()
    first = next(iter(ours.parameters()))
    with pytest.raises(ValueError, match="is trained and in no group"):
        begin(ours, folder, params=[first])
    assert folder.exists() == there
    assert [each.name for each in tmp_path.iterdir()] == (["deep"] if there else [])
    assert there == (list(tmp_path.rglob("*")) == [tmp_path / "deep", folder])
