"""`session.save(folder)` in a user's loop: the files, the errors, and training again from `session.load`."""

import copy
import errno
import os
import threading

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from memascend.engine.options import EngineOptions
from memascend.engine.snapshot import Snapshot
from memascend.engine.streaming import streaming
from memascend.storage.byte_views import flat_bytes
from memascend.storage.tensor_parts import TensorPartsWriter
from tests.unit.test_streaming_engine import batches, model
from tests.unit.test_streaming_loop import begin, loop

KINDS = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "bf16 states, one version": (torch.bfloat16, {"states": torch.bfloat16, "versions": 1}),
    "8 bits, clipped": (torch.bfloat16, {"states": torch.int8, "clip": 0.5}),
}


class Normed(nn.Module):
    """A model with running averages, which training changes in memory."""

    def __init__(self):
        super().__init__()
        self.norm, self.layers = nn.BatchNorm1d(16), nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(self.norm(x)))
        return x.square().mean()


class Turning(nn.Module):
    """A model with buffers of dtypes that no weights have."""

    def __init__(self, **buffers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        for name, values in buffers.items():
            self.register_buffer(name, values)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


ODD_BUFFERS = {
    "turns": torch.polar(torch.ones(4), torch.arange(4.0)),
    "back": torch.polar(torch.ones(4), torch.arange(4.0)).conj(),
    "codes": torch.randn(5).to(torch.float8_e4m3fn),
    "ranges": torch.randn(5).to(torch.float8_e5m2),
    "counts": torch.tensor([1, 1 << 31], dtype=torch.uint32),
}


def held_back(monkeypatch):
    """Return the event for which saves wait before they copy a tensor."""
    go_on, following = threading.Event(), Snapshot.next

    def patient(self, in_progress=None):
        go_on.wait(60)
        return following(self, in_progress)

    monkeypatch.setattr(Snapshot, "next", patient)
    return go_on


def full_in_a_save(monkeypatch):
    write = TensorPartsWriter._write_at

    def full(*arguments):
        if threading.current_thread().name == "memascend-save":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*arguments)

    monkeypatch.setattr(TensorPartsWriter, "_write_at", full)


@pytest.mark.parametrize(("dtype", "options"), KINDS.values(), ids=KINDS)
def test_training_resumed_from_save_repeats_losses_bit_for_bit(tmp_path, dtype, options):
    ours = model(dtype=dtype)
    session, optimizer = begin(ours, tmp_path / "run", options=EngineOptions(**options))
    loop(ours, optimizer, batches(2))
    session.note, optimizer.param_groups[0]["lr"] = {"epoch": 3}, 5e-3
    weights = {name: values.clone() for name, values in session.engine.read_weights()}
    save = session.save(tmp_path / "save")
    expected = loop(ours, optimizer, batches(3, seed=2))
    assert save.wait() == tmp_path / "save"
    found = load_file(tmp_path / "save" / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], values) for name, values in weights.items())
    names = ["model.safetensors", "states.json", "states.safetensors"]
    assert sorted(path.name for path in (tmp_path / "save").iterdir()) == names
    session.note, optimizer.param_groups[0]["lr"] = {}, 1.0
    session.load(tmp_path / "save")
    assert (session.steps, session.note, optimizer.param_groups[0]["lr"]) == (2, {"epoch": 3}, 5e-3)
    assert loop(ours, optimizer, batches(3, seed=2)) == expected
    session.close()
    other, another = begin(model(seed=5, dtype=dtype), tmp_path / "other", options=EngineOptions(**options))
    other.load(tmp_path / "save")
    assert loop(other._model, another, batches(3, seed=2)) == expected
    other.close()


def test_load_restores_fp16_weights_that_bf16_masters_cannot_hold(tmp_path):
    ours = model(dtype=torch.float16)
    session, optimizer = begin(ours, tmp_path / "run", options=EngineOptions(states=torch.bfloat16))
    initial = {name: values.clone() for name, values in session.engine.read_weights()}
    session.save(tmp_path / "save", background=False)
    loop(ours, optimizer, batches(1))
    session.load(tmp_path / "save")
    assert session.steps == 0
    assert all(torch.equal(values, initial[name]) for name, values in session.engine.read_weights())
    session.close()


def test_save_to_an_impossible_place_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with begin(model(), tmp_path / "run")[0] as session:
        for place, words in (
            (tmp_path / ("x" * 300), "File name too long; name another folder. Training itself is not harmed"),
            (tmp_path / "file" / "save", "Not a directory; name another folder"),
            (tmp_path / "run" / "save", "the folder of the states: name a folder outside of it"),
        ):
            with pytest.raises(ValueError, match=words):
                session.save(place)


def test_save_without_states_loads_as_plain_safetensors_file(tmp_path):
    ours = model(tied=True)
    session, optimizer = begin(ours, tmp_path / "run")
    loop(ours, optimizer, batches(2))
    expected = {name: values.clone() for name, values in session.engine.read_weights()}
    save = session.save(tmp_path / "save", states=False, background=False)
    assert save.done()
    assert [path.name for path in (tmp_path / "save").iterdir()] == ["model.safetensors"]
    with pytest.raises(ValueError, match=r"save holds no saved states: name a folder that session.save\(...\) wrote"):
        session.load(tmp_path / "save")
    session.close()
    loaded = model(seed=7, tied=True)
    load_model(loaded, tmp_path / "save" / "model.safetensors")
    assert all(torch.equal(values, expected[name]) for name, values in loaded.named_parameters())


def test_save_and_load_use_buffers_of_the_saved_step(tmp_path):
    torch.manual_seed(0)
    ours, data = Normed(), torch.randn(6, 8, 16)
    session, optimizer = begin(ours, tmp_path / "run")
    loop(ours, optimizer, data[:2])
    then = copy.deepcopy(dict(ours.named_buffers()))
    save = session.save(tmp_path / "save")
    expected = loop(ours, optimizer, data[2:])
    found = load_file(save.wait() / "model.safetensors")
    assert all(torch.equal(found[name], values) for name, values in then.items())
    assert not torch.equal(ours.norm.running_mean, then["norm.running_mean"])
    session.load(tmp_path / "save")
    assert all(torch.equal(buffer, then[name]) for name, buffer in ours.named_buffers())
    assert loop(ours, optimizer, data[2:]) == expected
    session.close()


def test_buffers_of_all_dtypes_of_the_format_are_saved_and_loaded(tmp_path):
    session, _ = begin(Turning(**ODD_BUFFERS), tmp_path / "run")
    session.save(tmp_path / "save").wait()
    found = load_file(tmp_path / "save" / "model.safetensors")
    session.close()
    zeros = {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in ODD_BUFFERS.items()}
    other, _ = begin(again := Turning(**zeros), tmp_path / "other")
    other.load(tmp_path / "save")
    for name, values in ODD_BUFFERS.items():
        for each in (found[name], getattr(again, name)):
            assert each.dtype == values.dtype
            assert torch.equal(flat_bytes(each), flat_bytes(values.resolve_conj())), name
    other.close()


def test_buffer_that_no_file_can_hold_is_named_before_training(tmp_path, caplog):
    ours = Turning(turns=torch.zeros(3, dtype=torch.complex128), codes=torch.zeros(3))
    session, optimizer = begin(ours, tmp_path / "run")
    assert [line for line in caplog.messages if "turns is torch.complex128" in line and "persistent=False" in line]
    ours(torch.ones(2, 16)).backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"^turns is torch\.complex128, for which the safetensors format has no code"):
        session.save(tmp_path / "save")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    session.close()


def test_load_of_mismatched_save_is_refused_and_changes_nothing(tmp_path):
    ours = model(dtype=torch.bfloat16)
    session, optimizer = begin(ours, tmp_path / "run")
    loop(ours, optimizer, batches(1))
    session.save(tmp_path / "save", background=False)
    session.close()
    for other, options, said in (
        (model(dtype=torch.bfloat16), {"states": torch.int8}, "but this training has torch.bfloat16 and torch.int8"),
        (model(dtype=torch.bfloat16, depth=3), {}, "holds the states of another model: layers.3"),
        (model(dtype=torch.bfloat16, hidden=16), {}, r"embedding.weight.master is F32 of \[6400\], expected"),
    ):
        session, optimizer = begin(
            other, tmp_path / f"{said[:12].strip()} {len(said)}", options=EngineOptions(**options)
        )
        before = {name: values.clone() for name, values in session.engine.read_weights()}
        with pytest.raises(ValueError, match=said):
            session.load(tmp_path / "save")
        assert all(torch.equal(values, before[name]) for name, values in session.engine.read_weights())
        session.close()


def test_save_refuses_nonempty_folder_but_replaces_remains_of_killed_save(tmp_path):
    ours = model()
    session, _ = begin(ours, tmp_path / "run")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(ValueError, match="taken exists and is not an empty folder: name a new one"):
        session.save(tmp_path / "taken")
    (tmp_path / ".save.partial").mkdir()
    with pytest.raises(ValueError, match=r"\.save\.partial exists but was not left by a save"):
        session.save(tmp_path / "save")
    (tmp_path / ".save.partial" / ".memascend-save").touch()
    (tmp_path / ".save.partial" / "half").touch()
    session.save(tmp_path / "save", background=False)
    assert not (tmp_path / ".save.partial").exists()
    session.close()


@pytest.mark.parametrize("versions", [1, 2])
@pytest.mark.parametrize("name", ["states.safetensors", "model.safetensors"])
def test_load_of_damaged_save_is_refused_and_changes_nothing(tmp_path, name, versions):
    ours, data = Normed(), torch.randn(2, 4, 16)
    session, optimizer = begin(ours, tmp_path / "run", options=EngineOptions(versions=versions))
    loop(ours, optimizer, data[:1])
    session.save(tmp_path / "save", background=False)
    loop(ours, optimizer, data[1:])
    before = {key: values.clone() for key, values in ours.state_dict().items()}
    optimizer.param_groups[0]["lr"] = 0.5
    os.truncate(tmp_path / "save" / name, (tmp_path / "save" / name).stat().st_size - 1)
    with pytest.raises(ValueError, match="ends inside"):
        session.load(tmp_path / "save")
    (tmp_path / "save" / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing"):
        session.load(tmp_path / "save")
    assert session.steps == 2
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert all(torch.equal(values, before[key]) for key, values in ours.state_dict().items())
    session.close()


def test_second_save_into_a_folder_leaves_the_running_one_whole(tmp_path, monkeypatch):
    go_on = held_back(monkeypatch)
    session, _ = begin(model(), tmp_path / "run")
    with session:
        save = session.save(tmp_path / "save")
        threading.Timer(0.1, go_on.set).start()
        with pytest.raises(ValueError, match="save exists and is not an empty folder: name a new one"):
            session.save(tmp_path / "save")
        assert save.wait() == tmp_path / "save"
        session.load(tmp_path / "save")


def test_full_disk_fails_the_save_but_not_the_training(tmp_path, monkeypatch):
    ours, theirs = model(), model()
    (session, optimizer), (other, another) = begin(ours, tmp_path / "ours"), begin(theirs, tmp_path / "theirs")
    full_in_a_save(monkeypatch)
    save = session.save(tmp_path / "save")
    assert loop(ours, optimizer, batches(3)) == loop(theirs, another, batches(3))
    with pytest.raises(ValueError, match=r"cannot save .*/save: No space left on device; free space, or name a folder"):
        save.wait()
    assert not (tmp_path / "save").exists()
    assert not (tmp_path / ".save.partial").exists()
    session.close()
    other.close()


def test_close_raises_unread_save_error_unless_another_error_is_raised(tmp_path, monkeypatch):
    full_in_a_save(monkeypatch)
    session, _ = begin(model(), tmp_path / "run")
    with pytest.raises(ValueError, match="cannot save"), session:
        session.save(tmp_path / "save")
    session, _ = begin(model(), tmp_path / "run", resume=True)
    saves = []

    def fails():
        saves.append(session.save(tmp_path / "save"))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), session:
        fails()
    assert isinstance(saves[0].error(), ValueError)


def test_save_between_backward_and_step_is_refused_and_leaves_nothing(tmp_path):
    ours = model()
    session, optimizer = begin(ours, tmp_path / "run")
    (ids,) = batches(1)
    ours(ids).backward()
    with pytest.raises(RuntimeError, match=r"call optimizer.step\(\) first"):
        session.save(tmp_path / "save")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    optimizer.step()
    session.save(tmp_path / "save", background=False)
    session.close()


def test_leaving_the_context_waits_for_a_running_save(tmp_path, monkeypatch):
    go_on = held_back(monkeypatch)
    session, _ = begin(model(), tmp_path / "run")
    with session:
        save = session.save(tmp_path / "save")
        assert not save.done()
        threading.Timer(0.1, go_on.set).start()
    assert save.done()
    assert (tmp_path / "save" / "states.json").is_file()


def test_saving_or_loading_without_an_optimizer_is_refused(tmp_path):
    session = streaming(tmp_path / "run")
    with pytest.raises(RuntimeError, match="create the optimizer first"):
        session.save(tmp_path / "save")
    with pytest.raises(RuntimeError, match="create the optimizer first"):
        session.load(tmp_path / "save")
