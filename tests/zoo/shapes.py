"""Shapes of modules that people write, and that transformers' models do not have.

Each is a class whose instance maps a batch to a scalar loss. `RAGGED` ones leave parameters without a gradient in some
steps; `REFUSED` gives the words with which the streaming engine refuses a shape.
"""

from __future__ import annotations

import contextlib
from collections import UserDict
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, WORDS, DEPTH, LENGTH = 16, 40, 4, 8
SHAPES: dict[str, type[nn.Module]] = {}
WAYS = ("as they come", "inputs in memory", "accumulated", "measured", "swapped")  # of the streaming engine


def shape(kind: type[nn.Module]) -> type[nn.Module]:
    SHAPES[kind.__name__] = kind
    return kind


def batch(number: int) -> torch.Tensor:
    """Return token numbers of shape (2, LENGTH)."""
    return torch.randint(0, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(number))


class Mlp(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Embedding, `DEPTH` blocks, head."""

    block: type[nn.Module] = Mlp

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(self.block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WORDS)

    def blocks(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def loss(self, x, ids):
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    def forward(self, ids):
        return self.loss(self.blocks(self.embed(ids)), ids)


@shape
class Plain(Stack):
    pass


# -- parameters --------------------------------------------------------------------------------------------------------


@shape
class RootParameter(Stack):
    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, ids):
        return self.loss(self.blocks(self.embed(ids) + self.position), ids)


class Body(Stack):
    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, ids):
        return self.blocks(self.embed(ids) + self.position)


@shape
class WrapperWithAChildCalledModel(Stack):
    def __init__(self):
        nn.Module.__init__(self)
        self.scale, self.model, self.head = nn.Parameter(torch.full((WIDTH,), 5.0)), Body(), nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        return self.loss(self.model(ids) * self.scale, ids)


class ZeroDimensional(Mlp):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return x + self.gate * super().forward(x)


@shape
class ZeroDimensionalParameters(Stack):
    block = ZeroDimensional

    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, ids):
        return self.loss(self.blocks(self.embed(ids)) * self.logit_scale.exp(), ids)


class WithEmpty(Mlp):
    def __init__(self):
        super().__init__()
        self.extra = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x):
        return super().forward(x) + self.extra.sum()


@shape
class EmptyParameters(Stack):
    block = WithEmpty


@shape
class TiedEmbedding(Stack):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


@shape
class HeadFromTheRootsForward(Stack):
    def __init__(self):
        super().__init__()
        del self.head

    def loss(self, x, ids):
        return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), ids.flatten())


@shape
class TiedAcrossBlocks(Stack):
    def __init__(self):
        super().__init__()
        self.layers[2].up.weight = self.layers[0].up.weight


@shape
class FrozenEmbedding(Stack):
    def __init__(self):
        super().__init__()
        self.embed.requires_grad_(False)


@shape
class FrozenBlocks(Stack):
    def __init__(self):
        super().__init__()
        self.layers[:2].requires_grad_(False)


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.a, self.b = Mlp(), nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.base.requires_grad_(False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


@shape
class LowRankAdapters(Stack):
    block = Adapted

    def __init__(self):
        super().__init__()
        self.embed.requires_grad_(False)
        self.head.requires_grad_(False)


class Normed(Mlp):
    def __init__(self):
        super().__init__()
        self.up = nn.utils.parametrizations.weight_norm(self.up)
        self.down = nn.utils.parametrizations.spectral_norm(self.down)


@shape
class Parametrizations(Stack):
    block = Normed


class Registered(Mlp):
    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(3))
        self.rates = nn.ParameterDict({"in": torch.ones(WIDTH)})

    def forward(self, x):
        for scale in self.scales:
            x = x * scale
        return super().forward(x * self.rates["in"])


@shape
class ListsAndDictsOfParameters(Stack):
    block = Registered


# -- buffers and random numbers ----------------------------------------------------------------------------------------


class BatchNormed(Mlp):
    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return super().forward(self.batch_norm(x.transpose(1, 2)).transpose(1, 2))


@shape
class BatchNormInBlocks(Stack):
    block = BatchNormed


class Quantised(Mlp):
    """A code book that follows the values that are looked up in it; the result uses it before it is changed."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(6, WIDTH))
        self.register_buffer("used", torch.zeros(6))

    def forward(self, x):
        x = super().forward(x)
        nearest = torch.cdist(x, self.codes[None]).argmin(-1)
        found = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                self.used.index_add_(0, nearest.flatten(), torch.ones(nearest.numel()))
                self.codes = self.codes.index_add(0, nearest.flatten(), 0.1 * (x - found).detach().flatten(0, 1))
        return x + (found - x).detach() * 0.5 + (x - found).square().mean()


@shape
class CodeBookInBlocks(Stack):
    block = Quantised


class Unsaved(Mlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril(), persistent=False)

    def forward(self, x):
        return super().forward(x @ self.mask)


@shape
class UnsavedBuffers(Stack):
    block = Unsaved


class Dropping(Mlp):
    def forward(self, x):
        return x + F.dropout(super().forward(x), 0.3, self.training) * torch.rand(())


@shape
class RandomNumbers(Stack):
    block = Dropping


class Counting(Mlp):
    """Changes an attribute of the module in forward, on which forward depends."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


@shape
class CountersInBlocks(Stack):
    block = Counting


# -- inputs and outputs ------------------------------------------------------------------------------------------------


@dataclass
class State:
    hidden: torch.Tensor
    trail: list = field(default_factory=list)


class OnAState(Mlp):
    def forward(self, state):
        state.hidden = super().forward(state.hidden)
        state.trail = [*state.trail, state.hidden.square().mean()]
        return state


@shape
class ADataclassInAndOut(Stack):
    block = OnAState

    def forward(self, ids):
        state = self.blocks(State(self.embed(ids)))
        return self.loss(state.hidden, ids) + 0.1 * sum(state.trail)


class OnADict(Mlp):
    def forward(self, x):
        x["hidden"] = super().forward(x["hidden"])
        return {**x, "norm": x["hidden"].norm(), "nothing": None, "name": "block"}


@shape
class DictsInAndOut(Stack):
    block = OnADict

    def forward(self, ids):
        out = self.blocks({"hidden": self.embed(ids), "mask": None})
        return self.loss(out["hidden"], ids) + 0.01 * out["norm"]


class WithAuxiliary(Mlp):
    def forward(self, x):
        x = super().forward(x)
        self.auxiliary = x.square().mean() * self.up.weight.abs().mean()
        return x


@shape
class AuxiliaryLossOfAnAttribute(Stack):
    block = WithAuxiliary

    def forward(self, ids):
        return super().forward(ids) + 0.1 * sum(layer.auxiliary for layer in self.layers)


class Router(nn.Module):
    def __init__(self, idle=False):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Mlp() for _ in range(3))
        self.idle = idle

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        chosen = range(2) if self.idle else range(3)
        return x + sum(weights[..., n, None] * self.experts[n](x) for n in chosen)


@shape
class AuxiliaryLossByHooks(Stack):
    """Collects auxiliary losses as transformers collects router logits."""

    block = Router

    def forward(self, ids):
        logits = []
        with contextlib.ExitStack() as stack:
            for layer in self.layers:
                handle = layer.gate.register_forward_hook(lambda _, __, out: logits.append(out))
                stack.callback(handle.remove)
            loss = super().forward(ids)
        return loss + 0.1 * torch.cat(logits).softmax(-1).square().mean()


@shape
class IdleExperts(Stack):
    @staticmethod
    def block():
        return Router(idle=True)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter, self.mlp = nn.Parameter(torch.randn(LENGTH // 2 + 1, WIDTH, 2)), Mlp()

    def forward(self, x):
        spectrum = torch.fft.rfft(x, dim=1).conj() * torch.view_as_complex(self.filter)
        return self.mlp(torch.fft.irfft(spectrum.conj(), n=x.shape[1], dim=1))


@shape
class SpectralMixing(Stack):
    block = Complex


class ChangesItsInput(Mlp):
    def forward(self, x):
        x.mul_(0.5)
        y = self.norm(x).mul_(2.0)
        return x + self.down(F.relu_(self.up(y)))


@shape
class InPlaceChanges(Stack):
    block = ChangesItsInput


class HandsOn(Mlp):
    def forward(self, x, norm):
        return super().forward(norm(x))


@shape
class ANormHandedIn(Stack):
    block = HandsOn

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def blocks(self, x):
        for layer in self.layers:
            x = layer(x, self.norm)
        return x


class HandsOnLast(Mlp):
    """Backward needs nothing that comes after the norm: when it is recomputed, the block ends inside the norm."""

    def forward(self, x, norm):
        return norm(super().forward(x))


@shape
class ANormHandedInThatComesLast(ANormHandedIn):
    block = HandsOnLast


@shape
class ResidualOfTheFirstBlock(Stack):
    """All other blocks use a value of the first block."""

    class Valued(Mlp):
        def forward(self, x, first=None):
            value = self.up(x).tanh()
            return super().forward(x + (0 if first is None else self.down(first))), value

    block = Valued

    def blocks(self, x):
        x, first = self.layers[0](x)
        for layer in self.layers[1:]:
            x, _ = layer(x, first)
        return x


# -- order -------------------------------------------------------------------------------------------------------------


@shape
class BlocksCalledTwice(Stack):
    def blocks(self, x):
        return super().blocks(super().blocks(x))


@shape
class AnotherOrderEachStep(Stack):
    steps = 0

    def blocks(self, x):
        order = [self.layers[(n * 3 + self.steps) % DEPTH] for n in range(DEPTH)]
        self.steps += self.training
        for layer in order:
            x = layer(x)
        return x


@shape
class StochasticDepth(Stack):
    steps = 0

    def blocks(self, x):
        left_out = self.steps % DEPTH
        self.steps += self.training
        for number, layer in enumerate(self.layers):
            x = x if number == left_out else layer(x)
        return x


@shape
class ParallelBranches(Stack):
    def blocks(self, x):
        return sum(layer(x) for layer in self.layers)


@shape
class SkipConnections(Stack):
    """Has the structure of a UNet: the way up meets the way down."""

    def blocks(self, x):
        down = [x]
        for layer in self.layers[: DEPTH // 2]:
            down.append(layer(down[-1]))
        x = down.pop()
        for layer in self.layers[DEPTH // 2 :]:
            x = layer(x) + down.pop()
        return x


# -- recurrence, images ------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x):
        state, out = x.new_zeros(len(x), WIDTH), []
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            out.append(state)
        return x + torch.stack(out, dim=1)


@shape
class RecurrenceOverSlices(Stack):
    block = Recurrent


class LongShort(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return x + self.lstm(x)[0]


@shape
class LstmInBlocks(Stack):
    block = LongShort


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp = nn.MultiheadAttention(WIDTH, 2, batch_first=True), Mlp()

    def forward(self, x, condition=None):
        found, _ = self.attention(x, x, x, need_weights=False)
        x = self.mlp(x + found)
        return x if condition is None else x * (1 + condition[:, None])


@shape
class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 2, 2)
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 17, WIDTH))
        self.layers = nn.ModuleList(Attention() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 5)

    def image(self, ids):
        return ids.float().repeat(1, 24).view(2, 3, 8, 8).sin()

    def features(self, ids, condition=None):
        x = self.patches(self.image(ids)).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(2, -1, -1), x], 1) + self.pos_embed
        for layer in self.layers:
            x = layer(x, condition)
        return x

    def forward(self, ids):
        return F.cross_entropy(self.head(self.features(ids)[:, 0]), ids[:, 0] % 5)


@shape
class DiffusionTransformer(VisionTransformer):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)
        del self.head

    def forward(self, ids):
        condition = self.time(ids[:, :1].float() / WORDS)
        x = self.features(ids, condition)
        return (self.out(x) - torch.randn_like(x)).square().mean()


# -- checkpoints, autocast, wrappers -----------------------------------------------------------------------------------


class Nested(nn.Module):
    reentrant = False

    def __init__(self):
        super().__init__()
        self.first, self.second = Mlp(), Mlp()

    def forward(self, x):
        if not torch.is_grad_enabled():
            return self.second(self.first(self.first(x)))
        x = checkpoint(self.first, x, use_reentrant=self.reentrant)
        return checkpoint(lambda y: self.second(self.first(y)), x, use_reentrant=self.reentrant)


class NestedReentrant(Nested):
    reentrant = True


@shape
class CheckpointsInBlocks(Stack):
    block = Nested


@shape
class ReentrantCheckpointsInBlocks(Stack):
    block = NestedReentrant


@shape
class CheckpointsAroundGroups(Stack):
    reentrant = False

    def blocks(self, x):
        if not torch.is_grad_enabled():
            return super().blocks(x)
        for begin in range(0, DEPTH, 2):
            group = self.layers[begin : begin + 2]
            x = checkpoint(lambda y, group=group: group[1](group[0](y)), x, use_reentrant=self.reentrant)
        return x


@shape
class ReentrantCheckpointsAroundGroups(CheckpointsAroundGroups):
    reentrant = True


@shape
class ReentrantCheckpointsAroundBlocksCalledTwice(ReentrantCheckpointsAroundGroups):
    """Only backward knows how often a block comes, and its gradient is computed in parts there."""

    def blocks(self, x):
        return super().blocks(super().blocks(x))


@shape
class Autocast(Stack):
    def forward(self, ids):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids).float()


@shape
class AutocastOverBlocksCalledTwice(BlocksCalledTwice):
    def forward(self, ids):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids).float()


@shape
class Wrapped(nn.Module):
    """Wrapped like nn.DataParallel without devices."""

    def __init__(self):
        super().__init__()
        self.module = nn.DataParallel(Plain(), device_ids=[])

    def forward(self, ids):
        return self.module(ids)


@shape
class ChunkedLoss(Stack):
    def loss(self, x, ids):
        chunks = zip(x.split(3, dim=1), ids.split(3, dim=1), strict=True)
        return sum(F.cross_entropy(self.head(c).flatten(0, 1), i.flatten(), reduction="sum") for c, i in chunks)


@shape
class MicroBatches(Stack):
    def blocks(self, x):
        return torch.cat([super(MicroBatches, self).blocks(x[n : n + 1]) for n in range(len(x))])


class StoresOnTheContext(torch.autograd.Function):
    """Saves tensors on the context and reads them twice."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors[0], ctx.saved_tensors[1]
        return grad * weight, (grad * x).sum((0, 1))


class CustomFunction(Mlp):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return super().forward(StoresOnTheContext.apply(x, self.scale))


@shape
class CustomFunctionsInBlocks(Stack):
    block = CustomFunction


class Energy(Mlp):
    """Computes a gradient inside forward, as for a force field."""

    def forward(self, x):
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(super().forward(y).square().sum(), y)
        return super().forward(x) + 0.01 * force


@shape
class AGradientInForward(Stack):
    block = Energy


@shape
class GradientPenalty(Stack):
    def forward(self, ids):
        x = self.embed(ids)
        loss = self.loss(self.blocks(x), ids)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()


# -- objects, attributes, memory that is shared ------------------------------------------------------------------------


class Shared(nn.Module):
    """Is used with and without a gradient of its weights."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x, frozen):
        return F.linear(x, self.weight.detach() if frozen else self.weight)


class FrozenAtTimes(nn.Module):
    """Autograd saves the parameter itself, and no view of it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x, frozen):
        self.scale.requires_grad_(not frozen)
        x = x * self.scale
        self.scale.requires_grad_(True)
        return x


@shape
class AWeightUsedWithoutAGradientFirst(Stack):
    """Backward has the weight's gradient before it computes with the weight for the last time."""

    shared: type[nn.Module] = Shared

    def __init__(self):
        super().__init__()
        self.common = self.shared()

    def blocks(self, x):
        return self.common(super().blocks(self.common(x, True)), False)


@shape
class AParameterFrozenForAWhile(AWeightUsedWithoutAGradientFirst):
    shared = FrozenAtTimes


@shape
class AWeightUsedWithoutAGradientInACheckpoint(AWeightUsedWithoutAGradientFirst):
    def blocks(self, x):
        x = checkpoint(self.common, x, True, use_reentrant=False)
        return self.common(Stack.blocks(self, x), False)


class UsesItsWeightTwice(Mlp):
    def forward(self, x):
        return super().forward(x + F.linear(x, self.up.weight[:WIDTH].detach()))


@shape
class AWeightUsedWithoutAGradientInBlocks(Stack):
    block = UsesItsWeightTwice


class HandsOnFrozen(Mlp):
    def forward(self, x, common):
        return super().forward(common(x, True))


@shape
class AWeightThatBlocksUseWithoutAGradient(AWeightUsedWithoutAGradientFirst):
    block = HandsOnFrozen

    def blocks(self, x):
        for layer in self.layers:
            x = layer(x, self.common)
        return self.common(x, False)


class Bag:
    """An object that pytree does not know, and that is not a dataclass."""

    def __init__(self, hidden):
        self.hidden, self.trail, self.calls = hidden, [], 0


class OnABag(Mlp):
    def forward(self, bag):
        bag.calls += 1
        bag.hidden = super().forward(bag.hidden) * (1 + 0.1 * bag.calls)
        bag.trail.append(bag.hidden.square().mean())
        return bag


@shape
class APlainObjectInAndOut(Stack):
    block = OnABag

    def forward(self, ids):
        bag = self.blocks(Bag(self.embed(ids)))
        return self.loss(bag.hidden, ids) + 0.1 * sum(bag.trail)


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, hidden):
        self.hidden = hidden


class OnSlots(Mlp):
    def forward(self, state):
        state.hidden = super().forward(state.hidden)


@shape
class AnObjectWithSlotsIsChanged(Stack):
    block = OnSlots

    def blocks(self, x):
        state = Slotted(x)
        for layer in self.layers:
            layer(state)
        return state.hidden


@shape
class FrozenBlocksOnAnObject(AnObjectWithSlotsIsChanged):
    def __init__(self):
        super().__init__()
        self.layers[1:3].requires_grad_(False)


class Remembering(Mlp):
    """Has tensors in plain attributes, which are changed in place, and in a list."""

    def __init__(self):
        super().__init__()
        self.seen, self.history, self.by_name = torch.zeros(WIDTH), [], {"count": 0}

    def forward(self, x):
        x = super().forward(x) + 0.01 * self.seen + 0.001 * len(self.history) + 0.001 * self.by_name["count"]
        if self.training:
            self.seen.add_(x.detach().mean((0, 1)))
            self.history.append(x.detach().mean().item())
            self.by_name["count"] += 1
        return x


@shape
class TensorsAndListsInAttributes(Stack):
    block = Remembering


class ReturnsItsWeight(Mlp):
    def forward(self, x):
        return super().forward(x), self.up.weight[:WIDTH]


@shape
class ABlockThatReturnsItsParameter(Stack):
    block = ReturnsItsWeight

    def blocks(self, x):
        penalty = 0.0
        for layer in self.layers:
            x, weight = layer(x)
            penalty = penalty + weight.square().mean()
        return x + penalty


class KeepsAView(torch.autograd.Function):
    """Keeps what it needs as an attribute of its context, where no hook sees it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.x, ctx.weight = x, weight.t()
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.weight.t(), grad.flatten(0, 1).t() @ ctx.x.flatten(0, 1)


class WithOwnProduct(Mlp):
    def forward(self, x):
        return x + self.down(F.gelu(KeepsAView.apply(self.norm(x), self.up.weight)))


@shape
class AFunctionThatKeepsAViewOfItsWeight(Stack):
    block = WithOwnProduct


class Position(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * LENGTH, WIDTH))

    def forward(self, length):
        return self.table[:length]


@shape
class AModuleThatReturnsItsParameter(Stack):
    def __init__(self):
        super().__init__()
        self.position, self.other = Position(), Position()

    def forward(self, ids):
        position = self.position(ids.shape[1])
        other = self.other(ids.shape[1])
        return self.loss(self.blocks(self.embed(ids) + position) + other + position, ids)


class OnTwoViews(Mlp):
    def forward(self, x, part):
        x.mul_(0.5)
        return super().forward(x) + part.square().mean()


@shape
class TwoViewsOfOneTensorOfWhichOneIsChanged(Stack):
    block = OnTwoViews

    def blocks(self, x):
        for layer in self.layers:
            x = x * 1.0
            x = layer(x, x[:, :3])
        return x


class ChangesAtTimes(Mlp):
    def forward(self, x, other=None):
        if other is not None:
            other.mul_(0.5)
            x = x + other
        return super().forward(x)


@shape
class AnotherArgumentIsChangedLater(Stack):
    block = ChangesAtTimes
    steps = 0

    def blocks(self, x):
        self.steps += self.training
        for layer in self.layers:
            x = layer(x) if self.steps % 2 else layer(x, x * 0.5)
        return x


@shape
class ConvolutionsOfSeveralSizes(nn.Module):
    """A Sequential of children of one type and different shapes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 4)
        self.stages = nn.Sequential(*[nn.Conv1d(4 + 2 * n, 6 + 2 * n, 3, padding=1) for n in range(4)])
        self.head = nn.Linear(12, WORDS)

    def forward(self, ids):
        x = self.stages(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@shape
class OthersWeightsInTheRootsForward(Stack):
    """Uses a row of an embedding for missing values, and all rows of one that is not called at all."""

    def __init__(self):
        super().__init__()
        self.streams, self.scale = nn.Embedding(3, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids):
        x = torch.where((ids % 3 == 0)[..., None], self.embed.weight[1], self.embed(ids))
        x = self.blocks(x + self.streams.weight[2]) + self.streams.weight.mean(0)
        if not self.training:
            x = x * self.scale.bias
        return self.loss(self.scale(x), ids)


@shape
class AWeightThatTheRootsForwardChanges(Stack):
    def forward(self, ids):
        with torch.no_grad():
            self.embed.weight[3:5].mul_(0.5)
        return super().forward(ids)


@shape
class AWeightOfABlockThatTheRootsForwardChanges(Stack):
    """Changes a weight as rwkv does between training and evaluation."""

    def forward(self, ids):
        if not self.training:
            with torch.no_grad():
                self.layers[1].up.weight.mul_(0.5)
        return super().forward(ids)


@shape
class InputsThatGrow(Stack):
    """The last blocks get more positions than the first ones."""

    def blocks(self, x):
        for layer in self.layers[:2]:
            x = layer(x)
        x = torch.cat([x, 0.5 * x, x - 1.0, x, x], 1)
        for layer in self.layers[2:]:
            x = layer(x)
        return x[:, :LENGTH] + x[:, LENGTH : 2 * LENGTH]


class Handed(UserDict):
    """A mapping that is passed from block to block."""


class TakesWhatTheFirstBlocksHand(Mlp):
    def forward(self, x, handed):
        if len(handed) < 2:
            handed[len(handed)] = self.up(x).mean(1, keepdim=True)[..., :WIDTH]
        return super().forward(x) + handed[len(handed) - 1]


@shape
class BlocksFillAMapping(Stack):
    """The mapping is empty when the first block gets it."""

    block = TakesWhatTheFirstBlocksHand

    def blocks(self, x):
        handed = Handed()
        for layer in self.layers:
            x = layer(x, handed=handed)
        return x


class Cache:
    """A cache of keys by slot, which can be asked for its length as those of transformers can."""

    def __init__(self):
        self.keys = {}

    def get_seq_length(self):
        return max((each.shape[1] for each in self.keys.values()), default=0)

    def update(self, slot, keys):
        self.keys[slot] = torch.cat([*([self.keys[slot]] if slot in self.keys else []), keys], 1)
        return self.keys[slot]


class WithCache(Mlp):
    def forward(self, x, cache, slot):
        return super().forward(x) + cache.update(slot, self.up(x)).mean(1, keepdim=True)[..., :WIDTH]


@shape
class CyclesWithoutAGraphFillACache(Stack):
    """Each layer is called repeatedly with another slot of the cache for each call; the first calls have no graph."""

    block = WithCache

    def blocks(self, x):
        cache = Cache()
        for cycle in range(4):
            with torch.set_grad_enabled(torch.is_grad_enabled() and cycle % 2 == 1):
                for number, layer in enumerate(self.layers):
                    x = layer(x, cache, (cycle, number))
        return x


@shape
class APrefixInTheCache(Stack):
    block = WithCache

    def blocks(self, x):
        cache = Cache()
        for graph in (False, True):
            with torch.set_grad_enabled(torch.is_grad_enabled() and graph):
                for number, layer in enumerate(self.layers):
                    x = layer(x, cache, number)
        return x


# Allowed relative difference of the losses from training in memory, where sums are in another order or dtype.
CLOSE = {
    # Partial gradients, which torch adds one by one to `.grad`.
    ("ReentrantCheckpointsInBlocks", "accumulated"): 1e-5,
    # Gradients of a weight's uses: each is float32 here; torch casts the weight once, and accumulates them in bfloat16.
    **{("AutocastOverBlocksCalledTwice", way): 1e-3 for way in WAYS},
}
# The words with which the engine refuses a shape, in the first forward or backward pass at the latest.
REFUSED = {
    "TiedAcrossBlocks": "shared by the blocks",
    "AWeightThatTheRootsForwardChanges": "embed.weight is changed in place outside of the forward pass",
    "AWeightOfABlockThatTheRootsForwardChanges": "layers.1.up.weight is changed in place outside of the forward pass",
    "GradientPenalty": "create_graph=True",
    "APrefixInTheCache": "layers.0 appends to a cache of keys and values that is already filled",
    "ABlockThatReturnsItsParameter": "layers.0 returns or keeps a view of its own weights",
    "AFunctionThatKeepsAViewOfItsWeight": "layers.0 returns or keeps a view of its own weights",
    "TwoViewsOfOneTensorOfWhichOneIsChanged": "shares its memory with another one",
    "ReentrantCheckpointsAroundBlocksCalledTwice": "computed again within one backward pass, after the update",
    "AWeightUsedWithoutAGradientInACheckpoint": "common would have to be computed again within one backward pass",
    "AWeightThatBlocksUseWithoutAGradient": "common would have to be computed again within one backward pass",
}
