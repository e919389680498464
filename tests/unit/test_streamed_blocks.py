"""A plain module whose blocks pass through two slots, forward and backward, trains as the same module in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from memascend.engine import WeightStream
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.memory.pools import AdaptiveBufferPool, PoolClass
from memascend.storage.engine_tiers import DirectTier, FileTier

HIDDEN, BLOCKS, STEPS, RATE = 32, 6, 4, 0.1


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


class StreamedBlock(torch.autograd.Function):
    """One block, by a key: forward without a graph; backward fetches again, recomputes, updates and writes."""

    @staticmethod
    def forward(ctx, x, key, trainer):
        ctx.key, ctx.trainer = key, trainer
        ctx.save_for_backward(x)
        (weights,) = trainer.stream.fetch([key])
        out = functional_call(trainer.shape, trainer.named(weights), x)
        trainer.stream.copied(key)  # here the computation takes the place of the copy, and it has ended
        return out

    @staticmethod
    def backward(ctx, grad_out):
        trainer, (x,) = ctx.trainer, ctx.saved_tensors
        (weights,) = trainer.stream.fetch([ctx.key])
        with torch.enable_grad():
            x, leaf = x.detach().requires_grad_(), weights.detach().requires_grad_()
            out = functional_call(trainer.shape, trainer.named(leaf), x)
            grad_x, grad_weights = torch.autograd.grad(out, (x, leaf), grad_out)
        weights.sub_(grad_weights, alpha=RATE)
        trainer.stream.write(ctx.key)
        trainer.stream.release(ctx.key)  # its slot is reused when the write has ended
        return grad_x, None, None


class StreamedTrainer:
    def __init__(self, blocks: list[nn.Module], storage, ledger: Ledger) -> None:
        self.shape, self.keys = block().requires_grad_(False), [f"block.{i}" for i in range(len(blocks))]
        numel = flat(blocks[0]).numel()
        pool = AdaptiveBufferPool(
            [PoolClass("block", numel, 2)], torch.float32, PageAlignedPinnedAllocator(ledger, lock=False)
        )
        self.stream = WeightStream(storage, pool=pool)
        for key, module in zip(self.keys, blocks, strict=True):
            self.stream.register(key, numel)
            self.stream.put(key).copy_(flat(module))
            self.stream.write(key)
            self.stream.release(key)

    def named(self, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = weights.split([parameter.numel() for parameter in self.shape.parameters()])
        names = self.shape.named_parameters()
        return {name: part.view_as(parameter) for (name, parameter), part in zip(names, parts, strict=True)}

    def step(self, x: torch.Tensor, target: torch.Tensor) -> float:
        self.stream.read_ahead([*self.keys, *reversed(self.keys)])
        x = x.clone().requires_grad_()
        for key in self.keys:
            x = StreamedBlock.apply(x, key, self)
        loss = (x - target).square().mean()
        loss.backward()
        return loss.item()

    def weights(self) -> list[torch.Tensor]:
        found = []
        for key in self.keys:
            found.append(self.stream.fetch([key])[0].clone())
            self.stream.release(key)
        return found


def in_memory(blocks: list[nn.Module], batches) -> list[float]:
    optimizer = torch.optim.SGD([p for module in blocks for p in module.parameters()], lr=RATE)
    losses = []
    for x, target in batches:
        for module in blocks:
            x = module(x)
        loss = (x - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(params=[DirectTier.in_file, FileTier], ids=["direct", "file"])
def tier(request, tmp_path):
    made = request.param(tmp_path, "blocks")
    yield made
    made.close()


def test_streamed_blocks_train_bit_identically_to_module_in_memory(tier):
    torch.manual_seed(0)
    blocks = [block() for _ in range(BLOCKS)]
    batches = [(torch.randn(8, HIDDEN), torch.randn(8, HIDDEN)) for _ in range(STEPS)]
    ledger = Ledger()
    streamed = StreamedTrainer(blocks, tier, ledger)
    losses = [streamed.step(x, target) for x, target in batches]
    assert losses == in_memory(blocks, batches)
    for found, module in zip(streamed.weights(), blocks, strict=True):
        assert torch.equal(found, flat(module))
    (entry,) = ledger.entries()  # two blocks, whatever the depth
    assert entry.requested_bytes <= 2 * (flat(blocks[0]).nbytes + 512)
    statistics = streamed.stream.statistics()
    # The last block stays for its backward pass; every other visit reads, mostly ahead of time.
    assert statistics.hits > statistics.misses
    streamed.stream.close()
    assert streamed.stream.free_count() == 2


def test_stream_continues_after_an_error_in_the_users_loop(tier):
    torch.manual_seed(0)
    blocks = [block() for _ in range(BLOCKS)]
    batch = torch.randn(8, HIDDEN), torch.randn(8, HIDDEN)
    streamed = StreamedTrainer(blocks, tier, Ledger())
    with pytest.raises(RuntimeError):
        streamed.step(batch[0], torch.randn(3, 3))  # forward has run, backward has not
    streamed.stream.release_idle()
    assert streamed.step(*batch) == in_memory(blocks, [batch])[0]
    streamed.stream.close()
