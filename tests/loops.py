"""The training loop that tests run over a model in memory and over a streamed one alike."""

from collections.abc import Callable, Iterable, Mapping

import torch


def train(
    loss_of: Callable[[int], torch.Tensor], optimizer: torch.optim.Optimizer, steps: Iterable[int]
) -> list[float]:
    """Return the loss of each step, which `loss_of` computes from its number."""
    losses = []
    for step in steps:
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Check that both have the same tensors by name, to the last bit."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
