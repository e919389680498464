"""What cannot begin is refused in one line, with nothing changed: no folder removed, no value moved."""

import re

import pytest
import torch

import memascend
from memascend.engine.options import EngineOptions
from memascend.engine.streaming import streaming
from memascend.ops.adamw import AdamW
from tests.unit.test_streaming_engine import SETTINGS, batches, model
from tests.unit.test_streaming_loop import assert_equal, begin, loop


def one_line(error):
    assert "\n" not in str(error.value)


def test_second_session_for_a_model_is_refused_and_first_continues(tmp_path):
    ours, theirs, data = model(), model(), batches(4)
    optimizer_of_theirs = AdamW(theirs.parameters(), **SETTINGS)
    second = tmp_path / "second"
    second.mkdir()
    late = streaming(second)
    late.hook(ours)  # before it is moved
    session, optimizer = begin(ours, tmp_path / "run")
    assert loop(ours, optimizer, data[:2]) == loop(theirs, optimizer_of_theirs, data[:2])
    for again in (
        lambda: streaming(second).hook(ours),
        lambda: streaming(second).hook(torch.nn.Sequential(ours)),
        lambda: late.optimizer(torch.optim.AdamW),
    ):
        with pytest.raises(
            RuntimeError, match=r"are already in .*run: close that session first .* or create a new"
        ) as error:
            again()
        one_line(error)
    assert list(second.iterdir()) == []
    assert loop(ours, optimizer, data[2:]) == loop(theirs, optimizer_of_theirs, data[2:])
    assert_equal(session, theirs)
    session.close()


def test_model_emptied_by_a_closed_session_cannot_begin_another(tmp_path):
    ours = model()
    begin(ours, tmp_path / "run")[0].close()
    with pytest.raises(RuntimeError, match=r"weights are in .*run, which was closed: open it again") as error:
        begin(ours, tmp_path / "another")
    one_line(error)
    assert not (tmp_path / "another").exists()
    session, _ = begin(ours, tmp_path / "run", resume=True)
    session.remove()


@pytest.mark.parametrize("there", [True, False], ids=["there", "not there"])
def test_failed_start_leaves_folders_as_they_were(tmp_path, there):
    folder = tmp_path / "run"
    if there:
        folder.mkdir()
    ours = model()
    first = next(iter(ours.parameters()))
    with pytest.raises(ValueError, match="is in no param group"):
        begin(ours, folder, params=[first])
    assert folder.exists() == there
    assert list(tmp_path.rglob("*")) == ([folder] if there else [])


def test_missing_parent_of_the_folder_is_refused_and_not_created(tmp_path):
    with pytest.raises(ValueError, match=r"^streaming\(folder\): \S+/nvmee/run cannot be created, since .*/nvmee "):
        streaming(tmp_path / "nvmee" / "run")
    assert list(tmp_path.iterdir()) == []


BAD_OPTIONS = {
    "arm": ["fast", 1],
    "accumulate": [0, -1, 1.5, "2", True, None],
    "clip": [-1, float("inf"), float("nan"), "1", True, None],
    "wait": [1, "no", None],
    "checkpoints": ["host", 1],
    "states": [torch.float16, "float32"],
    "gradients": [torch.float64, "float32"],
    "zero_missing": [0],
    "measure": ["yes"],
    "swap": ["most", "-1", -1, 1.5, True, "101%", "-5%", "%", ""],
    "swap_room": [-1, 1.5, True, None, "much", "-1GiB"],
    "blocks_in_flight": [0, -1, 2.0, "3", True],
    "piece_elements": [0, -5, 1.5, "1MiB", True],
    "versions": [0, 3, True, "2", 2.0],
    "redo": [0, None],
    "device": ["meta", "foo", 3, torch.device("meta"), ""],
    "implicit_step": [1],
    "unfreezes": ["all"],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD_OPTIONS.items() for v in values], ids=repr)
def test_invalid_option_is_named_with_its_value(name, value):
    with pytest.raises(ValueError, match=rf"^EngineOptions\.{name}: .*{re.escape(repr(value))}") as error:
        EngineOptions(**{name: value})
    one_line(error)


def test_each_option_has_a_bad_value():
    assert set(BAD_OPTIONS) == set(EngineOptions.__dataclass_fields__)


def test_byte_options_accept_numbers_or_text():
    assert EngineOptions(swap=1 << 20, swap_room="1GiB") == EngineOptions(swap=str(1 << 20), swap_room=1 << 30)
    assert EngineOptions(swap="100%", clip=1, device=torch.device("cpu")).clip == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minimum_bytes": "much"}, "minimum_bytes: 'much' is not an amount"),
        ({"minimum_bytes": 0}, "minimum_bytes must be bytes, at least 1, .* got 0"),
        ({"prefetch_bytes": True}, "prefetch_bytes must be bytes, .* got True"),
        ({"reserve_bytes": 1.5}, "reserve_bytes must be bytes, .* got 1.5"),
        ({"write_budget_bytes": -1}, "write_budget_bytes must be bytes, .* got -1"),
        ({"amount": True}, "amount must be 'auto', 'all' or bytes, got True"),
        ({"device": 3}, "device must be a text .* got 3"),
    ],
)
def test_invalid_activation_options_are_refused(tmp_path, options, message):
    with (
        pytest.raises(ValueError, match=f"^activations: {message}") as error,
        memascend.offload_activations(tmp_path, **options),
    ):
        pass
    one_line(error)
    assert list(tmp_path.iterdir()) == []


def test_activation_byte_options_accept_text(tmp_path):
    with memascend.offload_activations(tmp_path, minimum_bytes="1MiB", reserve_bytes=0) as cache:
        assert cache.options.minimum_bytes == 1 << 20


def made_in_inference_mode():
    with torch.inference_mode():
        return model()


def with_sparse_gradients():
    made = model()
    made.sparse = torch.nn.Embedding(8, 4, sparse=True)
    return made


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (lambda session: session.hook(None), r"hook\(model\): a torch.nn.Module, got None"),
        (lambda session: session.hook("x"), r"hook\(model\): a torch.nn.Module, got 'x'"),
        (lambda session: session.hook(model(), blocks=5), "modules of the model in a list, got 5"),
        (lambda session: session.hook(model(), blocks="layers"), "modules of the model in a list, got 'l'"),
        (lambda session: session.hook(model(), device="foo"), "EngineOptions.device: .* got 'foo'"),
        (
            lambda session: session.optimizer(torch.optim.AdamW(session.model.parameters())),
            "got an instance of AdamW: write",
        ),
        (lambda session: session.optimizer("AdamW"), "torch.optim.AdamW or Adam, got 'AdamW'"),
        (lambda session: session.optimizer(options={"clip": 1.0}), r"write options=EngineOptions\(...\)"),
        (lambda session: session.optimizer(accumulate=True), "EngineOptions.accumulate: .* got True"),
        (lambda session: session.optimizer(lr=float("inf")), "lr: a finite number, got inf"),
        (lambda session: session.optimizer(lr=float("nan")), "nan"),
        (
            lambda session: session.optimizer(params=[{"params": session.model.parameters(), "eps": float("inf")}]),
            "eps: a finite",
        ),
        (
            lambda session: (session.hook(made_in_inference_mode()), session.optimizer()),
            "was created in inference mode: create the",
        ),
        (
            lambda session: (session.hook(with_sparse_gradients()), session.optimizer()),
            r"sparse.weight is sparse: .*sparse=False",
        ),
    ],
)
def test_invalid_start_is_refused_in_one_line_and_moves_nothing(tmp_path, start, message):
    session = streaming(tmp_path / "run")
    session.model = session.hook(model())
    before = {name: values.clone() for name, values in session.model.state_dict().items()}
    with pytest.raises(ValueError, match=message) as error:
        start(session)
    one_line(error)
    assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(values, before[name]) for name, values in session.model.state_dict().items())


@pytest.mark.parametrize("folder", ["", None, 3, "a\0b"], ids=repr)
def test_invalid_folder_is_refused(folder):
    with pytest.raises(ValueError, match=r"streaming\(folder\): the path of a folder, got"):
        streaming(folder)


def test_non_dict_note_is_refused_and_step_can_be_completed(tmp_path):
    ours = model()
    session, optimizer = begin(ours, tmp_path / "run")
    ours(batches(1)[0]).backward()
    session.note = ["epoch", 1]
    with pytest.raises(ValueError, match=r"session\.note: a dict, got \['epoch', 1\]"):
        optimizer.step()
    session.note = {"epoch": 1}
    optimizer.step()
    assert session.steps == 1
    session.remove()


def test_one_block_in_flight_is_enough(tmp_path):
    ours, theirs = model(), model()
    session, optimizer = begin(ours, tmp_path / "run", options=EngineOptions(blocks_in_flight=1))
    data = batches(2)
    assert loop(ours, optimizer, data) == loop(theirs, AdamW(theirs.parameters(), **SETTINGS), data)
    session.remove()
