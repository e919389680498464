"""Ctrl-C between a context manager of torch and the body of its `with`: what stays on torch's stacks does no harm."""

import itertools

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from memascend import offload_activations
from memascend.engine.options import EngineOptions
from memascend.ops.adamw import AdamW
from tests.unit.test_streaming_engine import SETTINGS, batches, model
from tests.unit.test_streaming_loop import assert_equal, begin, loop


def interrupt(monkeypatch, manager, method, number):
    """KeyboardInterrupt at the end of the `number`th `__enter__`, or at the beginning of that `__exit__`."""
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
def test_a_training_goes_on_and_so_does_any_other_model(tmp_path, monkeypatch, manager, swap, number, method):
    ours, theirs, data = model(depth=2), model(depth=2), batches(4)
    plain = AdamW(theirs.parameters(), **SETTINGS)
    home, optimizer = begin(ours, tmp_path / "run", options=EngineOptions(swap=swap))
    assert loop(ours, optimizer, data[:2]) == loop(theirs, plain, data[:2])
    with monkeypatch.context() as patched:
        interrupt(patched, manager, method, number)
        with pytest.raises(KeyboardInterrupt):
            ours(data[2]).backward()
    optimizer.zero_grad()
    assert home.steps == 2
    alone = plain_gradient()
    assert loop(ours, optimizer, data[2:]) == loop(theirs, plain, data[2:])
    assert torch.equal(plain_gradient(), alone)
    assert_equal(home, theirs)
    home.remove()
    assert torch.equal(plain_gradient(), alone)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("method", ["__enter__", "__exit__"])
def test_activations_of_a_model_outside_stay_in_memory(tmp_path, monkeypatch, method):
    """The cache is closed by then, and would refuse them."""
    alone = plain_gradient()
    interrupt(monkeypatch, saved_tensors_hooks, method, 0)
    with pytest.raises(KeyboardInterrupt), offload_activations(tmp_path, amount="all", minimum_bytes=1):
        plain_gradient()
    assert torch.equal(plain_gradient(), alone)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
