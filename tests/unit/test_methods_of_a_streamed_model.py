"""torch's own methods on a model whose parameters are empty give the right result, or one line; never NaN silently."""

import copy
import io
import os

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn

from memascend.engine.errors import NotStreamable
from memascend.engine.mmap_tensors import TensorFile
from memascend.engine.streaming import streaming
from memascend.ops.adamw import AdamW
from tests.unit.test_streaming_engine import SETTINGS, batches, model
from tests.unit.test_streaming_loop import assert_equal, begin, loop


def trained(folder, **shape):
    """Return a streamed model after a step, and the same model trained in memory."""
    ours, theirs = model(**shape), model(**shape)
    session, optimizer = begin(ours, folder)
    loop(ours, optimizer, batches(1))
    loop(theirs, AdamW(theirs.parameters(), **SETTINGS), batches(1))
    return session, optimizer, ours, theirs


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


PARTS = {
    "a block": lambda of: of.layers[1],
    "inside of a block": lambda of: of.layers[1].up,
    "the list": lambda of: of.layers,
    "the head": lambda of: of.head,
    "the model": lambda of: of,
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_the_state_dict_of_any_part_has_its_values(tmp_path, part):
    session, _, ours, theirs = trained(tmp_path / "run")
    assert_same(part(ours).state_dict(), part(theirs).state_dict())
    assert_same(part(ours).state_dict(prefix="x."), part(theirs).state_dict(prefix="x."))
    assert_same(nn.Module.state_dict(part(ours)), part(theirs).state_dict())
    session.close()


def test_parts_in_another_container_are_saved_with_their_values(tmp_path):
    session, _, ours, theirs = trained(tmp_path / "run", tied=True)
    for of in (lambda m: nn.ModuleList([m.layers[0], m.layers[2]]), lambda m: nn.Sequential(m)):
        assert_same(of(ours).state_dict(), of(theirs).state_dict())
    tied = ours.state_dict()
    assert tied["head.weight"].data_ptr() == tied["embedding.weight"].data_ptr()
    session.close()


class Wrapped(nn.Module):
    """A module whose class overrides state_dict, as some libraries' models do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, ids):
        return self.inner(ids)

    def state_dict(self, *args, **options):
        return {name: values.double() for name, values in super().state_dict(*args, **options).items()}


def test_state_dict_overridden_by_a_class_has_the_values(tmp_path):
    ours, theirs = Wrapped(model()), Wrapped(model())
    session, _ = begin(ours, tmp_path / "run")
    assert_same(ours.state_dict(), theirs.state_dict())
    assert_same(ours.inner.layers.state_dict(), theirs.inner.layers.state_dict())
    session.close()


def test_error_in_a_state_dict_does_not_affect_the_next(tmp_path):
    session, _, ours, theirs = trained(tmp_path / "run")

    def fails(*_):
        raise OSError("no")

    hook = ours.layers[2].register_state_dict_pre_hook(fails)
    with pytest.raises(OSError, match="no"):
        ours.state_dict()
    hook.remove()
    assert_same(ours.layers[2].state_dict(), theirs.layers[2].state_dict())
    assert_same(ours.state_dict(), theirs.state_dict())
    session.close()


UNCHANGED = {
    "to its device": lambda of: of.to("cpu"),
    "to its type": lambda of: of.to(torch.float32),
    "float": lambda of: of.float(),
    "a part": lambda of: of.layers[0].cpu(),
}
REFUSED = {
    "half": lambda of: of.half(),
    "bfloat16": lambda of: of.to(torch.bfloat16),
    "a part's type": lambda of: of.layers[0].up.double(),
    "another device": lambda of: of.to("meta"),
    "load": lambda of: of.load_state_dict(model(seed=3).state_dict()),
    "load, assign": lambda of: of.load_state_dict(model(seed=3).state_dict(), assign=True),
    "load a part": lambda of: of.layers[0].load_state_dict(model(seed=3).layers[0].state_dict()),
    "deepcopy": copy.deepcopy,
    "deepcopy of a part": lambda of: copy.deepcopy(of.layers[0].up),
    "deepcopy of a parameter": lambda of: copy.deepcopy(of.head.weight),
    "torch.save": lambda of: torch.save(of, io.BytesIO()),
    "torch.save of a part": lambda of: torch.save(of.head, io.BytesIO()),
}


@pytest.mark.parametrize("change", [*UNCHANGED.values(), *REFUSED.values()], ids=[*UNCHANGED, *REFUSED])
def test_conversions_loads_and_copies_change_nothing_or_are_refused(tmp_path, change):
    session, optimizer, ours, theirs = trained(tmp_path / "run")
    if change in REFUSED.values():
        with pytest.raises(NotStreamable) as refusal:
            change(ours)
        assert "\n" not in str(refusal.value)
    else:
        change(ours)
    other = AdamW(theirs.parameters(), **SETTINGS)
    other.load_state_dict(optimizer.state_dict())
    assert loop(ours, optimizer, batches(2)) == loop(theirs, other, batches(2))
    assert_equal(session, theirs)
    session.close()


@pytest.mark.parametrize("options", [{}, {"wait": True}], ids=["as they come", "waiting"])
def test_zero_grad_of_the_model_discards_the_step(tmp_path, options):
    data, ours, theirs = batches(3), model(), model()
    session, optimizer = begin(ours, tmp_path / "run", **options)
    ours(data[0]).backward()
    optimizer.step()
    ours.zero_grad()
    assert all(p.grad is None for p in ours.parameters())
    ours(data[1]).backward()
    with pytest.raises(RuntimeError, match=r"cannot be discarded without that of"):
        ours.layers[0].zero_grad()
    ours.zero_grad()
    loop(ours, optimizer, data[2:])
    loop(theirs, AdamW(theirs.parameters(), **SETTINGS), [data[0], data[2]])
    assert_equal(session, theirs)
    session.close()


def test_empty_model_cannot_be_used_after_the_session_ends(tmp_path):
    session, _, ours, theirs = trained(tmp_path / "run")
    session.close()
    for use in (
        ours.state_dict,
        ours.layers[0].state_dict,
        lambda: ours(batches(1)[0]),
        lambda: ours.layers[0].up(torch.ones(1, 32)),
        ours.half,
        ours.layers[0].up.double,
        lambda: ours.to(torch.bfloat16),
        lambda: copy.deepcopy(ours),
        lambda: torch.save(ours, io.BytesIO()),
        lambda: torch.save(ours.head, io.BytesIO()),
    ):
        with pytest.raises(RuntimeError, match=r"resume=True"):
            use()
    again = streaming(tmp_path / "run", resume=True)
    again.hook(ours)
    again.optimizer(torch.optim.AdamW, **SETTINGS)
    assert_same(ours.state_dict(), theirs.state_dict())
    again.remove()
    ours.load_state_dict(theirs.state_dict(), assign=True)
    assert_same(ours.state_dict(), theirs.state_dict())
    assert ours(batches(1)[0]) == theirs(batches(1)[0])
    guards = {"state_dict", "_apply", "zero_grad", "__deepcopy__", "__reduce_ex__"}
    assert all(not set(vars(m)) & guards for m in ours.modules())
    assert_same(copy.deepcopy(ours).half().state_dict(), theirs.half().state_dict())


def test_parameterless_module_shared_by_two_models_keeps_working(tmp_path):
    """Some of transformers' models take their activation functions from one shared table of modules."""
    activation, losses = nn.GELU(), []

    def made():
        torch.manual_seed(0)
        blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), activation) for _ in range(3)])
        return nn.Sequential(*blocks)

    for folder in "ab":
        ours = made()
        with streaming(tmp_path / folder) as session:
            session.hook(ours)
            optimizer = session.optimizer(torch.optim.AdamW, lr=0.1)
            loss = ours(torch.ones(2, 8)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[0] == losses[1]
    assert activation(torch.zeros(1)).item() == 0.0
    with pytest.raises(RuntimeError, match="was closed"):
        ours(torch.ones(2, 8))


def test_copy_of_a_model_reloaded_after_the_end_is_complete(tmp_path):
    session, _, ours, theirs = trained(tmp_path / "run")
    session.close()
    ours.load_state_dict(theirs.state_dict(), assign=True)
    assert_same(copy.deepcopy(ours).state_dict(), theirs.state_dict())


def test_states_stay_in_place_when_the_loop_changes_directory(tmp_path, monkeypatch):
    (tmp_path / "elsewhere" / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    session, optimizer, ours, theirs = trained("run")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert_same(ours.state_dict(), theirs.state_dict())
    assert optimizer.state_dict()["state"]
    session.remove()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["elsewhere"]
    assert (tmp_path / "elsewhere" / "run").is_dir()


def test_remove_after_the_end_deletes_the_states(tmp_path):
    session, _, _, _ = trained(tmp_path / "run")
    with session:
        pass
    assert (tmp_path / "run").exists()
    session.remove()
    assert list(tmp_path.iterdir()) == []


def test_tensor_file_never_has_a_name_on_disk(tmp_path, monkeypatch):
    allocate, seen = os.posix_fallocate, []

    def looked(*args):
        seen.append(list(tmp_path.iterdir()))
        allocate(*args)

    monkeypatch.setattr(os, "posix_fallocate", looked)
    copied = TensorFile(tmp_path, [16]).put(torch.arange(4.0))
    assert torch.equal(copied, torch.arange(4.0))
    assert seen == [[]]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("end", ["resume", "remove"])
def test_tensor_file_left_by_an_earlier_version_is_removed(tmp_path, end):
    session, _, ours, theirs = trained(tmp_path / "run")
    session.close()
    left = tmp_path / "run" / "state-dict-abc"
    left.write_bytes(bytes(100))
    if end == "resume":
        session, _ = begin(ours, tmp_path / "run", resume=True)
        assert not left.exists()
        assert_same(ours.state_dict(), theirs.state_dict())
    session.remove()
    assert list(tmp_path.iterdir()) == []


WRITES = {
    "init": lambda p: nn.init.zeros_(p),
    "fill": lambda p: p.detach().fill_(1.0),
    "data": lambda p: setattr(p, "data", torch.ones(p.shape)),
    "in the data": lambda p: p.data.zero_(),
    "NumPy": lambda p: p.detach().numpy().fill(0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_write_to_a_parameter_between_steps_is_refused_without_effect(tmp_path, write):
    session, optimizer, ours, theirs = trained(tmp_path / "run")
    with pytest.raises(NotStreamable, match=r"layers\.1\.up\.weight"):
        write(ours.layers[1].up.weight)
    other = AdamW(theirs.parameters(), **SETTINGS)
    other.load_state_dict(optimizer.state_dict())
    assert loop(ours, optimizer, batches(2)) == loop(theirs, other, batches(2))
    assert_equal(session, theirs)
    session.close()


def test_state_dict_parts_save_alone_and_safetensors_saves_the_model(tmp_path):
    session, optimizer, ours, theirs = trained(tmp_path / "run")
    whole = ours.state_dict()
    torch.save({"bias": whole["layers.0.up.bias"]}, tmp_path / "part")
    assert (tmp_path / "part").stat().st_size < 4096
    assert torch.equal(torch.load(tmp_path / "part")["bias"], theirs.state_dict()["layers.0.up.bias"])
    torch.save(optimizer.state_dict()["state"][1]["exp_avg"], tmp_path / "moment")
    assert (tmp_path / "moment").stat().st_size < 4096
    save_model(ours, tmp_path / "model.safetensors")
    session.close()
    again = model(seed=3)
    load_model(again, tmp_path / "model.safetensors")
    assert_same(again.state_dict(), theirs.state_dict())
    assert_same(whole, theirs.state_dict())  # also after the session has ended


@pytest.mark.parametrize("wrong", ["a file", "a link to nowhere"])
def test_path_that_cannot_become_a_folder_is_refused(tmp_path, wrong):
    place = tmp_path / "run"
    place.touch() if wrong == "a file" else place.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=f"run is {wrong}"):
        streaming(place)
