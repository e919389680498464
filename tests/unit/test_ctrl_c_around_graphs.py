"""Ctrl-C where Python gives no second chance: in torch's context managers, and while a graph is freed."""

import _thread
import contextlib
import itertools
import operator

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from memascend import offload_activations
from memascend.activation.checkpointing import OffloadedCheckpoint
from memascend.activation.store import CheckpointStore
from memascend.engine.options import EngineOptions
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.ops.adamw import AdamW
from tests.unit.test_streaming_engine import SETTINGS, batches, model
from tests.unit.test_streaming_loop import assert_equal, begin, loop


def interrupt(monkeypatch, manager, method, number):
    """Raise KeyboardInterrupt at the end of the `number`th `__enter__`, or at the beginning of that `__exit__`."""
    stock, calls = getattr(manager, method), itertools.count()

    def interrupted(self, *error):
        comes = next(calls) == number
        if comes and method == "__exit__":
            raise KeyboardInterrupt
        result = stock(self, *error)
        if comes:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(manager, method, interrupted)


def plain_gradient():
    torch.manual_seed(3)
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    torch.tanh(layer(x)).sum().backward()
    return layer.weight.grad


# Two blocks: hooks 0 and 1 are those of forward passes, 2 and 3 those of recomputations.
@pytest.mark.parametrize("method", ["__enter__", "__exit__"])
@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("manager", "swap"), [(saved_tensors_hooks, None), (saved_tensors_hooks, "all"), (TorchDispatchMode, "all")]
)
def test_ctrl_c_leaves_training_and_other_models_intact(tmp_path, monkeypatch, manager, swap, number, method):
    ours, theirs, data = model(depth=2), model(depth=2), batches(4)
    plain = AdamW(theirs.parameters(), **SETTINGS)
    session, optimizer = begin(ours, tmp_path / "run", options=EngineOptions(swap=swap))
    assert loop(ours, optimizer, data[:2]) == loop(theirs, plain, data[:2])
    with monkeypatch.context() as patched:
        interrupt(patched, manager, method, number)
        with pytest.raises(KeyboardInterrupt):
            ours(data[2]).backward()
    optimizer.zero_grad()
    assert _get_current_dispatch_mode_stack() == []
    assert session.steps == 2
    alone = plain_gradient()
    assert loop(ours, optimizer, data[2:]) == loop(theirs, plain, data[2:])
    assert torch.equal(plain_gradient(), alone)
    assert_equal(session, theirs)
    session.remove()
    assert torch.equal(plain_gradient(), alone)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert _get_current_dispatch_mode_stack() == []


@pytest.mark.parametrize("method", ["__enter__", "__exit__"])
def test_ctrl_c_leaves_no_offloading_hooks_behind(tmp_path, monkeypatch, method):
    """The cache is closed by then, and would refuse them."""
    alone = plain_gradient()
    interrupt(monkeypatch, saved_tensors_hooks, method, 0)
    with pytest.raises(KeyboardInterrupt), offload_activations(tmp_path, amount="all", minimum_bytes=1):
        plain_gradient()
    assert torch.equal(plain_gradient(), alone)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def offloaded_in_the_cache(tmp_path):
    context = offload_activations(tmp_path, amount="all", minimum_bytes=1)
    return context, lambda layer, x: torch.tanh(layer(x)).sum()


def offloaded_checkpoints(tmp_path):
    checkpointed = OffloadedCheckpoint(CheckpointStore(PageAlignedPinnedAllocator(), blocks=1))
    return contextlib.nullcontext(), lambda layer, x: checkpointed(layer, x).sum()


@pytest.mark.parametrize("kind", [offloaded_in_the_cache, offloaded_checkpoints])
def test_ctrl_c_arrives_while_a_graph_is_freed(tmp_path, kind):
    """C++ frees a graph between the nodes of a backward pass. A `__del__` of ours would be the first Python code to see
    the interrupt, and Python ignores what a `__del__` raises."""
    context, loss_of = kind(tmp_path)
    layer, x = torch.nn.Linear(64, 64), torch.randn(32, 64, requires_grad=True)
    with context:
        kept = [loss_of(layer, x)]
        with pytest.raises(KeyboardInterrupt):
            list(map(operator.call, [_thread.interrupt_main, kept.clear]))  # one call from Python's point of view
        loss_of(layer, x).backward()
    assert x.grad is not None
