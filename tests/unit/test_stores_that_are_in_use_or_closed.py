"""A session that is closed, dropped, already open, or of another model, and a loss scaler: one line tells the fix."""

import errno
import gc
import os
import shutil
import threading
import time

import pytest
import torch

from memascend import offload_activations
from memascend.engine.errors import NotStreamable, NotThisModel
from memascend.engine.options import EngineOptions
from memascend.engine.state_files import StoreSpace
from memascend.engine.state_store import StateStore
from memascend.engine.streaming import streaming
from memascend.ops.adamw import AdamW
from tests.unit.test_streaming_engine import SETTINGS, batches, model
from tests.unit.test_streaming_loop import assert_equal, begin, loop


@pytest.fixture(scope="module", autouse=True)
def others_objects_are_not_looked_at_again():
    """Exclude earlier objects from garbage collections.

    Each takes half a second in a process that has run thousands of tests, and these tests run hundreds.
    """
    gc.collect()
    gc.freeze()


def test_any_use_of_a_closed_session_gives_one_line_error(tmp_path):
    ours = model()
    session, optimizer = begin(ours, tmp_path / "run")
    loop(ours, optimizer, batches(1))
    session.close()
    for use in (
        optimizer.step,
        optimizer.zero_grad,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({"state": {}, "param_groups": []}),
        lambda: session.engine.read_states("head.weight"),
        lambda: next(iter(session.engine.read_weights())),
    ):
        with pytest.raises(
            RuntimeError, match=r"^this session \(.*run\) is closed: open it again .*resume=True"
        ) as error:
            use()
        assert "\n" not in str(error.value)
    session.close()
    assert session.steps == 1
    with pytest.raises(AttributeError):
        session.engine.nothing_of_this_name  # noqa: B018


def test_folder_open_in_this_process_is_refused_immediately(tmp_path):
    ours, theirs, data = model(), model(), batches(2)
    session, optimizer = begin(ours, tmp_path / "run")
    began = time.monotonic()
    with pytest.raises(ValueError, match="is in use by this process: close the other session first"):
        begin(model(), tmp_path / "run", resume=True)
    assert time.monotonic() - began < 10
    with pytest.raises(ValueError, match="is in use by this process: close the other session first"):
        StateStore.create(tmp_path / "run", "ours", StoreSpace([1 << 20]))
    assert loop(ours, optimizer, data) == loop(theirs, AdamW(theirs.parameters(), **SETTINGS), data)
    session.close()
    begin(model(), tmp_path / "run", resume=True)[0].remove()


def open_resources():
    """Return how many descriptors and threads of sessions this process has."""
    gc.collect()
    names = (os.readlink(entry) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry))
    threads = sum(t.name == "memascend-updates" for t in threading.enumerate())
    return sum("memascend" in name or "io_uring" in name for name in names) + threads


def with_a_backward_that_fails(layer, inputs, result):
    def fail(gradient):
        raise ZeroDivisionError

    result.register_hook(fail)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip": 1.0},
        {"accumulate": 2},
        {"options": EngineOptions(swap="all", states=torch.int8, versions=1)},
        {"options": EngineOptions(wait=True, arm="naive")},
    ],
    ids=["as it is", "clipping", "accumulating", "int8 with swapped activations", "naive and waiting"],
)
@pytest.mark.parametrize("at", ["after a step", "after forward", "in a backward that failed", "after backward"])
def test_dropped_session_releases_its_resources_and_can_be_resumed(tmp_path, options, at):
    """A notebook cell that is run again does this, and so does a function that sweeps over settings."""
    data = batches(4)

    def cell(*, resume):
        ours = model(dtype=torch.bfloat16)
        session, optimizer = begin(ours, tmp_path / "run", resume=resume, **options)
        if "accumulate" in options:
            session.accumulate(lambda ids: ours(ids).backward(), data[:2])
            optimizer.step()
        else:
            loop(ours, optimizer, data[:1])
        if at == "after backward":
            ours(data[2]).backward()
        elif at == "after forward":
            ours(data[2])
        elif at == "in a backward that failed":
            inside = next(each for each in ours.layers[1].modules() if isinstance(each, torch.nn.Linear))
            inside.register_forward_hook(with_a_backward_that_fails)
            with pytest.raises(ZeroDivisionError):
                ours(data[2]).backward()
        return session.steps

    before = open_resources()
    assert cell(resume=False) == 1
    if at == "in a backward that failed":  # autograd itself keeps what it has not reached, until its next pass
        torch.ones((), requires_grad=True).backward()
    deadline = time.monotonic() + 20
    while open_resources() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # nothing is freed while an update is running, and threads end a moment later
    assert open_resources() <= before
    gc.disable()
    try:
        assert cell(resume=True) == 2
        assert cell(resume=True) == 3  # the previous one is not collected yet
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"depth": 5}, r"this model has the part 'layers\.\d+.*' of the weights, which it has not"),
        ({"depth": 1}, r"it has the part 'layers\.\d+.*' of the weights, which this model has not"),
        ({"dtype": torch.bfloat16}, "its weights are float32, and this model's bfloat16"),
        ({"hidden": 64}, r"the part '.*' of the weights takes \d+ bytes there, and \d+ of this model"),
    ],
    ids=["deeper", "less deep", "another dtype", "wider"],
)
def test_mismatched_model_is_refused_naming_the_first_difference(tmp_path, other, message):
    begin(model(), tmp_path / "run")[0].close()
    with pytest.raises(NotThisModel, match=rf"{message}\. Create the model as it was") as error:
        begin(model(**other), tmp_path / "run", resume=True)
    assert "\n" not in str(error.value)
    begin(model(), tmp_path / "run", resume=True)[0].remove()


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("wait", [False, True])
def test_grad_scaler_gives_one_line_error_naming_the_fix(tmp_path, unscales, wait):
    ours = model()
    session, optimizer = begin(ours, tmp_path / "run", wait=wait)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(ours(batches(1)[0])).backward()
    said = "delay updates" if unscales and not wait else r"GradScaler cannot .*session\.engine\.scale = "
    with pytest.raises((NotStreamable, RuntimeError), match=said) as error:
        scaler.unscale_(optimizer) if unscales else scaler.step(optimizer)
    assert "\n" not in str(error.value)
    optimizer.zero_grad()
    session.remove()


def test_engine_removes_its_loss_scale_from_gradients(tmp_path):
    ours, theirs, data = model(), model(), batches(2)
    session, optimizer = begin(ours, tmp_path / "run")
    session.engine.scale = 1024.0
    for ids in data:
        (1024.0 * ours(ids)).backward()
        optimizer.step()
        optimizer.zero_grad()
    (1e38 * 1e3 * ours(data[0])).backward()
    optimizer.step()
    assert optimizer.norm is None
    loop(theirs, AdamW(theirs.parameters(), **SETTINGS), data)
    assert_equal(session, theirs)
    session.remove()


def test_existing_states_are_refused_before_a_model_is_given(tmp_path):
    begin(model(), tmp_path / "run")[0].close()
    with pytest.raises(ValueError, match="holds the states of an earlier training"):
        streaming(tmp_path / "run")


def test_removed_folder_is_reported_once_and_weights_can_be_saved(tmp_path, caplog):
    ours, theirs, data = model(), model(), batches(3)
    session, optimizer = begin(ours, tmp_path / "run")
    loop(ours, optimizer, data[:1])
    shutil.rmtree(tmp_path / "run")
    loop(ours, optimizer, data[1:])
    (said,) = (text for text in caplog.messages if "was removed or moved" in text)
    assert said.startswith(f"memascend: {tmp_path / 'run'}, the folder of the states, was")
    loop(theirs, AdamW(theirs.parameters(), **SETTINGS), data)
    for name, values in ours.state_dict().items():
        assert torch.equal(values, theirs.state_dict()[name]), name
    session.close()
    with pytest.raises(RuntimeError, match=r"weights were in .*run, which was removed: load others"):
        ours(data[0])


def test_state_dict_without_room_names_needed_bytes_and_folder(tmp_path, monkeypatch):
    session, _ = begin(ours := model(), tmp_path / "run")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"values of a state dict need \d+ bytes in .*run for as long .*: No space left"):
        ours.state_dict()
    session.remove()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda path: streaming(path, allocator=3), r"^streaming\(allocator=\.\.\.\): an allocator of .*, got 3$"),
        (lambda path: streaming(path / ("x" * 300)), r"^streaming\(folder\): .*: File name too long$"),
        (
            lambda path: begin(model(), "/proc/states"),
            r"^/proc/states cannot be created \(.*\): name a folder",
        ),
        (lambda path: streaming(path / "a").hook([model()]), r"^hook\(model\): .* got \[Model\( .{,90} \.\.\.$"),
        (
            lambda path: streaming(path / "a").hook(model(), blocks=[3]),
            r"^hook\(model, blocks=\.\.\.\): .* got 3$",
        ),
        (lambda path: offload_activations(""), r"^offload_activations\(where\): .*, got ''$"),
        (lambda path: offload_activations(None), r"^offload_activations\(where\): .*, got None$"),
    ],
)
def test_wrong_argument_gives_one_line_error_before_creating_anything(tmp_path, wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong(tmp_path)
    assert list(tmp_path.iterdir()) == []
