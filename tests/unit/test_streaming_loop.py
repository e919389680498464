"""A user's loop over a streamed model: torch's optimizer interface, and the mistakes that are possible in it."""

import copy
import errno
import logging

import pytest
import torch

from memascend.engine.errors import NotStreamable
from memascend.engine.streaming import streaming
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.ops.adamw import AdamW
from memascend.storage.errors import StorageError
from tests.unit.test_streaming_engine import SETTINGS, batches, model


def begin(of, folder, *, resume=False, note=None, **options):
    session = streaming(folder, resume=resume, allocator=PageAlignedPinnedAllocator(Ledger(), lock=False))
    session.hook(of)
    return session, session.optimizer(torch.optim.AdamW, **{**SETTINGS, **options})


def loop(of, optimizer, data, scheduler=None, max_norm=None):
    losses = []
    for ids in data:
        optimizer.zero_grad()
        loss = of(ids)
        loss.backward()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(of.parameters(), max_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def assert_equal(session, other):
    found = {name: values.clone() for name, values in session.engine.read_weights()}
    for name, values in other.named_parameters():
        assert torch.equal(found[name], values.cpu()), name


def test_three_added_lines_stream_a_plain_loop(tmp_path):
    torch.manual_seed(0)
    ours, theirs = model(), model()
    with streaming(tmp_path / "run") as session:
        session.hook(ours)
        optimizer = session.optimizer(torch.optim.AdamW, **SETTINGS)
        losses = loop(ours, optimizer, batches(3))
        assert losses == loop(theirs, AdamW(theirs.parameters(), **SETTINGS), batches(3))
        assert_equal(session, theirs)
        assert session.steps == 3
        session.remove()
    assert list(tmp_path.iterdir()) == []
    assert torch.isnan(next(ours.parameters())).all()


def test_implicit_step_is_completed_by_the_next_forward_pass(tmp_path):
    """LoHan's Fig. 4b omits optimizer.step()."""
    ours, theirs = model(), model()
    session, optimizer = begin(ours, tmp_path / "run", implicit_step=True)
    for ids in batches(3):
        ours(ids).backward()
    optimizer.step()
    loop(theirs, AdamW(theirs.parameters(), **SETTINGS), batches(3))
    assert session.steps == 3
    assert_equal(session, theirs)
    session.close()


def test_schedulers_and_groups_work_as_in_torch(tmp_path):
    ours, theirs = model(), model()

    def groups(of):
        decayed, others = ([p for p in of.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False))
        return [{"params": decayed, "weight_decay": 0.3}, {"params": others, "lr": 0.1}]

    session, optimizer = begin(ours, tmp_path / "run", params=groups(ours))
    other = AdamW(groups(theirs), **SETTINGS)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in (optimizer, other)]
    assert loop(ours, optimizer, batches(3), schedulers[0]) == loop(theirs, other, batches(3), schedulers[1])
    assert_equal(session, theirs)
    session.close()


SCHEDULERS = {
    "each rate from the last": lambda of: torch.optim.lr_scheduler.CosineAnnealingLR(of, T_max=5),
    "keys that are numbers": lambda of: torch.optim.lr_scheduler.MultiStepLR(of, milestones=[1, 3]),
}


@pytest.mark.parametrize("scheduled", SCHEDULERS.values(), ids=SCHEDULERS)
def test_scheduler_continues_after_resume_as_the_how_to_says(tmp_path, scheduled):
    """Learning rates are kept as the last completed step had them."""

    def step(of, optimizer, scheduler, ids, session=None):
        of(ids).backward()
        if session is not None:
            session.note = {"schedule": scheduler.state_dict()}
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    theirs = model()
    other = AdamW(theirs.parameters(), **SETTINGS)
    schedule = scheduled(other)
    for ids in batches(4):
        step(theirs, other, schedule, ids)
    for resume in (False, True):
        ours = model()
        session, optimizer = begin(ours, tmp_path / "run", resume=resume)
        scheduler = scheduled(optimizer)
        if resume:
            scheduler.load_state_dict(session.note["schedule"])
            scheduler.step()
        for ids in batches(4)[2 * resume : 2 + 2 * resume]:
            step(ours, optimizer, scheduler, ids, session)
        if not resume:
            session.close()
    assert_equal(session, theirs)
    session.close()


def test_torch_clip_grad_norm_works_with_delayed_updates(tmp_path):
    stock, ours, theirs = torch.nn.utils.clip_grad_norm_, model(), model()
    session, optimizer = begin(ours, tmp_path / "run", wait=True)
    expected = loop(theirs, AdamW(theirs.parameters(), **SETTINGS), batches(3), max_norm=0.1)
    assert loop(ours, optimizer, batches(3), max_norm=0.1) == pytest.approx(expected, rel=1e-5)
    session.close()
    assert torch.nn.utils.clip_grad_norm_ is stock


def test_torch_clip_grad_norm_is_refused_without_delayed_updates(tmp_path):
    """torch would find no gradient, and silently clip nothing."""
    ours = model()
    session, optimizer = begin(ours, tmp_path / "run")
    ours(batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match=r"consumed as they arrive\. To clip them"):
        torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
    other = torch.nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    assert torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0) > 0  # other models still use torch's function
    optimizer.step()
    session.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_state_dict_goes_on_in_another_folder_and_in_torch(tmp_path, dtype):
    data, ours, theirs = batches(4), model(dtype=dtype), model(dtype=dtype)
    session, optimizer = begin(ours, tmp_path / "run")
    loop(ours, optimizer, data[:2])
    other = AdamW(theirs.parameters(), **SETTINGS)
    loop(theirs, other, data[:2])
    saved, weights = optimizer.state_dict(), ours.state_dict()
    session.remove()
    expected = other.state_dict()
    assert {k for s in saved["state"].values() for k in s} == {k for s in expected["state"].values() for k in s}
    for number, state in expected["state"].items():
        for key, value in state.items():
            assert torch.equal(saved["state"][number][key], value), key
    plain = model(seed=9, dtype=dtype)
    plain.load_state_dict(weights)
    again = copy.deepcopy(plain)
    session, optimizer = begin(again, tmp_path / "again")
    optimizer.load_state_dict(saved)
    in_torch = AdamW(plain.parameters(), **SETTINGS)
    in_torch.load_state_dict(saved)
    assert loop(again, optimizer, data[2:]) == loop(theirs, other, data[2:]) == loop(plain, in_torch, data[2:])
    assert_equal(session, theirs)
    session.close()


def test_loop_resumes_after_its_last_step_with_the_users_note(tmp_path):
    data, ours, theirs = batches(4), model(), model()
    session, optimizer = begin(ours, tmp_path / "run")
    session.note["epoch"] = 7
    losses = loop(ours, optimizer, data[:2])
    ours(data[2]).backward()
    session.close()
    with pytest.raises(ValueError, match="holds the states of an earlier training"):
        streaming(tmp_path / "run")
    again = model(seed=3)
    session, optimizer = begin(again, tmp_path / "run", resume=True)
    assert (session.note, session.steps) == ({"epoch": 7}, 2)
    losses += loop(again, optimizer, data[2:])
    assert losses == loop(theirs, AdamW(theirs.parameters(), **SETTINGS), data)
    session.close()
    with pytest.raises(ValueError, match="holds no states to continue from"):
        streaming(tmp_path / "nothing", resume=True)


def test_zero_grad_after_backward_undoes_its_updates(tmp_path):
    data, ours, theirs = batches(3), model(), model()
    session, optimizer = begin(ours, tmp_path / "run")
    losses = loop(ours, optimizer, data[:1])
    ours(data[1]).backward()
    optimizer.zero_grad()
    losses += loop(ours, optimizer, data[2:])
    assert losses == loop(theirs, AdamW(theirs.parameters(), **SETTINGS), [data[0], data[2]])
    assert_equal(session, theirs)
    session.close()


def test_waiting_gradients_are_logged_once(tmp_path, caplog):
    ours = model()
    with caplog.at_level(logging.INFO, "memascend"):
        session, optimizer = begin(ours, tmp_path / "run", clip=1.0)
        loop(ours, optimizer, batches(3))
    assert [r.message for r in caplog.records].count(
        "memascend: gradients wait on the SSD for their norm: one more write and read of them per step"
    ) == 1
    session.close()


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (torch.optim.SGD, {}, "SGD cannot be streamed: use torch.optim.AdamW or Adam"),
        (torch.optim.AdamW, {"amsgrad": True}, "AdamW with amsgrad cannot be streamed"),
        (torch.optim.Adam, {"weight_decay": 0.1}, "weight decay in the gradient cannot be streamed"),
        (torch.optim.AdamW, {"momentum": 0.9}, "AdamW has no setting 'momentum'"),
    ],
    ids=["SGD", "amsgrad", "Adam with decay", "momentum"],
)
def test_unsupported_optimizer_is_refused_and_leaves_model_unchanged(tmp_path, kind, settings, message):
    ours = model()
    before = copy.deepcopy(ours)
    session = streaming(tmp_path / "run")
    session.hook(ours)
    with pytest.raises(ValueError, match=message):
        session.optimizer(kind, **settings)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), before.parameters(), strict=True))
    assert list(tmp_path.iterdir()) == []


def test_groups_that_omit_a_trained_parameter_are_refused(tmp_path):
    ours = model()
    session = streaming(tmp_path / "run")
    session.hook(ours)
    with pytest.raises(ValueError, match="is in no param group of the optimizer"):
        session.optimizer(torch.optim.AdamW, list(ours.layers.parameters()))
    assert list(tmp_path.iterdir()) == []
    assert not torch.isnan(ours.head.weight).any()


def test_unsupported_setting_enabled_later_is_refused_and_loop_continues(tmp_path):
    data, ours, theirs = batches(2), model(), model()
    session, optimizer = begin(ours, tmp_path / "run")
    optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(ValueError, match="a parameter group sets maximize"):
        loop(ours, optimizer, data[:1])
    optimizer.param_groups[0]["maximize"] = False
    assert loop(ours, optimizer, data) == loop(theirs, AdamW(theirs.parameters(), **SETTINGS), data)
    assert_equal(session, theirs)
    session.close()


def test_load_state_dict_resets_states_but_assignment_is_refused(tmp_path):
    data, ours, theirs = batches(3), model(), model()
    session, optimizer = begin(ours, tmp_path / "run")
    other = AdamW(theirs.parameters(), **SETTINGS)
    loop(ours, optimizer, data[:2])
    loop(theirs, other, data[:2])
    with pytest.raises(NotStreamable, match="`state` is empty: load_state_dict"):
        optimizer.state = {}
    optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
    other.load_state_dict({"state": {}, "param_groups": other.state_dict()["param_groups"]})
    assert loop(ours, optimizer, data[2:]) == loop(theirs, other, data[2:])
    assert_equal(session, theirs)
    session.close()


def test_a_closed_session_says_how_to_open_it(tmp_path):
    session, _ = begin(model(), tmp_path / "run")
    session.close()
    for use in (session.__enter__, lambda: session.hook(model()), lambda: session.optimizer(lr=1.0)):
        with pytest.raises(RuntimeError, match="is closed: open it again"):
            use()


def test_a_module_of_torchscript_is_refused_by_name(tmp_path):
    ours = model()
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit"):
        ours.head = torch.jit.script(ours.head)
    with pytest.raises(NotStreamable, match="head is a module of TorchScript"):
        begin(ours, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_full_disk_gives_one_error_before_anything_moves(tmp_path, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    ours = model()
    session = streaming(tmp_path / "run")
    session.hook(ours)
    with pytest.raises(StorageError, match="two versions of all states do not fit") as full:
        session.optimizer(torch.optim.AdamW)
    assert full.value.errno == errno.ENOSPC
    assert str(full.value).count("free space") == 1
    assert list(tmp_path.iterdir()) == []
    assert not torch.isnan(ours.head.weight).any()


def test_not_streamable_is_a_value_error():
    assert issubclass(NotStreamable, ValueError)
