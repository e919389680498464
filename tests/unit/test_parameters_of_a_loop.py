"""Valid values of `params=`, `EngineOptions` and a step's note: what torch
accepts; others are one line before anything moves."""

import itertools
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

import memascend
from memascend.engine.options import EngineOptions
from memascend.engine.streaming import streaming
from memascend.ops.adamw import AdamW
from tests.unit.test_streaming_engine import SETTINGS, batches, model
from tests.unit.test_streaming_loop import assert_equal, begin, loop

FORMS = {
    "parameters": lambda of: of.parameters(),
    "a list": lambda of: list(of.parameters()),
    "names": lambda of: of.named_parameters(),
    "groups": lambda of: [
        {"params": of.layers.parameters(), "lr": 0.1},
        {"params": [*of.embedding.parameters(), *of.norm.parameters(), *of.head.parameters()]},
    ],
    "groups with names": lambda of: [
        {"params": of.layers.named_parameters(), "weight_decay": 0.0},
        {"params": [(name, p) for name, p in of.named_parameters() if not name.startswith("layers.")]},
    ],
}


def frozen_in_part(**shape):
    of = model(**shape)
    of.layers[1].requires_grad_(False)
    of.norm.bias.requires_grad_(False)
    return of


@pytest.mark.parametrize("of", [model, frozen_in_part])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_all_parameter_forms_train_save_and_load_as_in_torch(tmp_path, form, of):
    data, ours, theirs = batches(4), of(), of()
    session, optimizer = begin(ours, tmp_path / "run", params=form(ours))
    other = torch.optim.AdamW(form(theirs), **SETTINGS)
    loop(ours, optimizer, data[:2])
    loop(theirs, other, data[:2])
    saved, expected = optimizer.state_dict(), other.state_dict()
    assert saved["state"].keys() == expected["state"].keys()
    for mine, torchs in zip(saved["param_groups"], expected["param_groups"], strict=True):
        assert mine["params"] == torchs["params"]
        assert mine.get("param_names") == torchs.get("param_names")
    weights = ours.state_dict()
    session.remove()
    again = of()
    again.load_state_dict(weights)
    session, optimizer = begin(again, tmp_path / "again", params=form(again))
    optimizer.load_state_dict(saved)
    loop(again, optimizer, data[2:])
    loop(theirs, other, data[2:])
    found = again.state_dict()
    for name, values in theirs.state_dict().items():
        assert torch.allclose(found[name], values, rtol=1e-4, atol=1e-5), name
    session.close()


def test_loading_skips_states_of_frozen_parameters_and_logs_it(tmp_path, caplog):
    theirs, ours = model(), frozen_in_part()
    other = AdamW(theirs.parameters(), **SETTINGS)
    loop(theirs, other, batches(1))
    session, optimizer = begin(ours, tmp_path / "run", params=ours.parameters())
    optimizer.load_state_dict(other.state_dict())
    assert "layers.1.norm.weight is frozen: its states are not loaded" in caplog.text
    assert session.engine.steps["head.weight"] == 1
    session.close()


def test_parameter_of_another_model_is_refused(tmp_path):
    ours = model()
    with pytest.raises(
        ValueError, match=r"a parameter of shape \(2, 2\) in group 1 of params= does not belong to the model"
    ):
        begin(ours, tmp_path / "run", params=[{"params": ours.parameters()}, {"params": nn.Linear(2, 2).weight}])
    assert list(tmp_path.iterdir()) == []


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize(
    ("weights", "states"),
    list(itertools.product(DTYPES, (*DTYPES, torch.int8))),
    ids=lambda d: str(d).removeprefix("torch."),
)
def test_type_pairs_train_or_are_refused_before_anything_moves(tmp_path, weights, states):
    ours, allowed = model(dtype=weights), weights != torch.float64 and states in (torch.float32, torch.bfloat16)
    refused = (torch.float32, torch.bfloat16)
    if states == torch.int8:
        allowed = weights == torch.bfloat16
    session = streaming(tmp_path / "run")
    session.hook(ours)

    def make():
        return session.optimizer(torch.optim.AdamW, options=EngineOptions(states=states), **SETTINGS)

    if allowed and (weights, states) != refused:
        loop(ours, make(), batches(2))
        assert session.steps == 2
    else:
        with pytest.raises(
            ValueError,
            match=r"EngineOptions\.states|cannot be streamed: convert|need float32 states|need bfloat16 weights",
        ):
            make()
        assert list(tmp_path.iterdir()) == []
        assert not torch.isnan(ours.head.weight).any()
    session.close()


def test_invalid_dtype_of_waiting_gradients_is_refused():
    with pytest.raises(ValueError, match=r"EngineOptions\.gradients: torch\.float32 or .*got torch\.float64"):
        EngineOptions(gradients=torch.float64)


@pytest.mark.parametrize("options", [{}, {"options": EngineOptions(versions=1)}, {"clip": 1.0}], ids=str)
@pytest.mark.parametrize(
    ("note", "message"),
    [("x" * (1 << 20), r"takes \d+ bytes of JSON, and 1048576"), (torch.ones(1), "must be JSON: .*Tensor")],
    ids=["too large", "no JSON"],
)
def test_unstorable_note_is_refused_before_update_and_step_can_continue(tmp_path, options, note, message):
    ours, theirs, data = model(), model(), batches(2)
    session, optimizer = begin(ours, tmp_path / "run", **options)
    reference, other = begin(theirs, tmp_path / "other", **options)
    for ids in data:
        ours(ids).backward()
        session.note["x"] = note
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        session.note["x"] = 1
        optimizer.step()
        theirs(ids).backward()
        other.step()
    expected = theirs.state_dict()
    assert all(torch.equal(values, expected[name]) for name, values in ours.state_dict().items())
    assert session.steps == 2
    session.close(), reference.close()


def test_note_is_equal_after_resume(tmp_path):
    note = {"at": {1: [2, (3, {"x": None})], 2.5: True}, "empty": {}, "text": "a", (1, 2): "a tuple"}
    of = model()
    session, optimizer = begin(of, tmp_path / "run")
    of(batches(1)[0]).backward()
    session.note = note
    optimizer.step()
    session.close()
    session, _ = begin(model(), tmp_path / "run", resume=True)
    assert session.note == note
    session.close()


def test_public_names_have_one_source_and_import_is_light():
    assert memascend.streaming is streaming
    assert memascend.EngineOptions is EngineOptions
    assert {"EngineOptions", "NotStreamable", "StorageError", "InterruptedUpdate", "streaming"} <= set(dir(memascend))
    assert all(getattr(memascend, name) for name in memascend.__all__)
    with pytest.raises(AttributeError, match="no attribute 'stream'"):
        getattr(memascend, "stream")  # noqa: B009
    light = "import sys, memascend; assert 'torch' not in sys.modules; from memascend import streaming, EngineOptions"
    subprocess.run([sys.executable, "-c", light], check=True)


def test_public_docstrings_list_arguments_exceptions_and_an_example():
    for each in (memascend.enable, memascend.offload_activations, streaming.optimizer, streaming.hook, EngineOptions):
        for part in ("Args:", "Raises:", "Example:"):
            assert part in each.__doc__, (each, part)
    assert all(f"        {name}: " in EngineOptions.__doc__ for name in EngineOptions.__dataclass_fields__)


def test_named_parameters_train_to_the_same_bits_as_in_memory(tmp_path):
    ours, theirs = model(), model()
    session, optimizer = begin(ours, tmp_path / "run", params=ours.named_parameters())
    loop(ours, optimizer, batches(2))
    loop(theirs, AdamW(theirs.named_parameters(), **SETTINGS), batches(2))
    assert_equal(session, theirs)
    session.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": -1.0},
        {"lr": "x"},
        {"lr": math.nan},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9,)},
        {"eps": -1},
        {"weight_decay": -1},
    ],
    ids=str,
)
@pytest.mark.parametrize("of_group", [False, True], ids=["of all", "of a group"])
def test_settings_that_torch_refuses_are_refused_before_anything_moves(tmp_path, settings, of_group):
    ours = model()
    before = {name: values.clone() for name, values in ours.state_dict().items()}
    params = [{"params": list(ours.parameters()), **settings}] if of_group else None
    with streaming(tmp_path / "run") as session:
        session.hook(ours)
        with pytest.raises(ValueError) as refusal:
            session.optimizer(torch.optim.AdamW, params, **({} if of_group else settings))
        assert "\n" not in str(refusal.value)
    assert all(torch.equal(values, before[name]) for name, values in ours.state_dict().items())
    assert list(tmp_path.iterdir()) == []


def matrices_and_others(of):
    return [
        {"params": [p for p in of.parameters() if p.dim() > 1], "weight_decay": 0.5},
        {"params": [p for p in of.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize(
    "groups", [lambda of: matrices_and_others(of)[::-1], lambda of: list(of.parameters())], ids=["order", "number"]
)
def test_resume_refuses_other_groups_and_keeps_settings_of_same_groups(tmp_path, caplog, groups):
    ours = model()
    session, optimizer = begin(ours, tmp_path / "run", params=matrices_and_others(ours), lr=0.01)
    loop(ours, optimizer, batches(1))
    session.close()
    with pytest.raises(ValueError, match="params="):
        begin(other := model(), tmp_path / "run", resume=True, params=groups(other))
    again = model()
    with caplog.at_level("INFO", "memascend"):
        session, optimizer = begin(again, tmp_path / "run", resume=True, params=matrices_and_others(again), lr=0.07)
    assert [(group["weight_decay"], group["lr"]) for group in optimizer.param_groups] == [(0.5, 0.01), (0.0, 0.01)]
    assert "group 1 continues with lr=0.01 of the last step (0.07 was requested" in caplog.text
    session.close()
