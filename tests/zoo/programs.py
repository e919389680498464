"""Models and training loops composed of the zoo's shapes: a `Program` describes the modules and the loop.

The first value of every field is the plain one, to which hypothesis reduces a program that fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.zoo import shapes
from tests.zoo.shapes import LENGTH, WIDTH, WORDS, batch

STEPS = 3
MAX_NORM = 0.5
BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": shapes.Mlp,
    "gated": shapes.ZeroDimensional,
    "with an empty parameter": shapes.WithEmpty,
    "adapted": shapes.Adapted,
    "parametrized": shapes.Normed,
    "lists of parameters": shapes.Registered,
    "batch norm": shapes.BatchNormed,
    "code book": shapes.Quantised,
    "unsaved buffer": shapes.Unsaved,
    "random": shapes.Dropping,
    "counting": shapes.Counting,
    "remembering": shapes.Remembering,
    "auxiliary": shapes.WithAuxiliary,
    "experts": shapes.Router,
    "idle experts": lambda: shapes.Router(idle=True),
    "complex": shapes.Complex,
    "in place": shapes.ChangesItsInput,
    "gru": shapes.Recurrent,
    "lstm": shapes.LongShort,
    "attention": shapes.Attention,
    "checkpoints": shapes.Nested,
    "reentrant checkpoints": shapes.NestedReentrant,
    "own function": shapes.CustomFunction,
    "gradient in forward": shapes.Energy,
}
# Attributes that are not buffers, which another process would have from its user's own checkpoint.
PLAIN_STATE = ("calls", "passes", "seen", "history", "by_name")
ORDERS = ("listed", "reversed", "twice", "another each pass", "one left out", "one never", "branches", "skips")
_CARRIERS = ("tensor", "dict", "dataclass", "object")
_PARTS = ("embed", "position", "head", "first block", "last block")


@dataclass(frozen=True)
class Program:
    """A model, and three steps of a loop over it."""

    # -- the model
    blocks: tuple[str, ...] = ("mlp", "mlp")
    lists: int = 1  # over which the blocks are distributed
    carrier: str = "tensor"  # what is passed from block to block
    order: str = "listed"
    position: bool = False  # a parameter of the body itself
    scale: bool = False  # a parameter of the outermost module, whose child is called "model"
    tied: bool = False  # of head and embedding
    frozen: frozenset[str] = frozenset()
    without_grad: int = 0  # the first blocks run under no_grad
    groups: str = "none"  # the loop's own checkpoints around two blocks
    chunks: bool = False  # the loss is computed over pieces of the hidden states
    autocast: bool = False
    # -- the loop
    accumulate: int = 1
    forwards: int = 1  # for one loss
    clip: bool = False
    apart: bool = False  # the loop calls the model's parts, and computes the loss
    evaluate: str = "never"
    spoilt: bool = False  # one backward pass is discarded
    schedule: bool = False
    resume: str = "never"
    # -- options of the engine
    measure: bool = False
    swap: bool = False
    checkpoints: str = "tier"
    versions: int | None = None
    arm: str = "optimized"

    @property
    def rtol(self) -> float:
        """Return the tolerance of losses whose sums are in another order or
        dtype than in memory; 0 means equal bit by bit."""
        adds_up = max(self.accumulate, self.forwards) > 1 or self.order == "twice"
        if self.autocast and (adds_up or self.tied):
            return 5e-2  # gradients of a weight's uses are float32 here, but accumulated in bfloat16 in memory
        reentrant = self.groups == "reentrant" or "reentrant checkpoints" in self.blocks
        return 1e-3 if reentrant and adds_up else 0.0  # partial gradients, which torch adds to `.grad` one by one


# When torch's checkpoints recompute them, they change or read what the first pass has changed; the engine leaves
# modules as they are after one pass.
_STATEFUL = {"parametrized", "batch norm", "code book", "counting", "remembering"}


def programs() -> st.SearchStrategy[Program]:
    several = st.lists(st.sampled_from([*BLOCKS]), min_size=2, max_size=5)
    alike = st.builds(lambda name, number: [name] * number, st.sampled_from([*BLOCKS]), st.integers(2, 4))
    rarely = st.integers(0, 3).map(lambda number: number == 3)
    drawn = st.builds(
        Program,
        blocks=st.one_of(alike, several).map(tuple),
        lists=st.sampled_from((1, 2)),
        carrier=st.sampled_from(_CARRIERS),
        order=st.sampled_from(ORDERS),
        position=st.booleans(),
        scale=st.booleans(),
        tied=rarely,
        frozen=st.one_of(st.just(frozenset()), st.frozensets(st.sampled_from(_PARTS), max_size=3)),
        without_grad=st.sampled_from((0, 0, 0, 1)),
        groups=st.sampled_from(("none", "none", "none", "plain", "reentrant")),
        chunks=st.booleans(),
        autocast=rarely,
        accumulate=st.integers(1, 3),
        forwards=st.sampled_from((1, 1, 2)),
        clip=st.booleans(),
        apart=rarely,
        evaluate=st.sampled_from(("never", "after steps", "between passes")),
        spoilt=rarely,
        schedule=st.booleans(),
        resume=st.sampled_from(("never", "in place", "in another session")),
        measure=rarely,
        swap=rarely,
        checkpoints=st.sampled_from(("tier", "tier", "device")),
        versions=st.sampled_from((None, None, 1)),
        arm=st.sampled_from(("optimized", "optimized", "naive", "none")),
    )
    return drawn.map(lambda p: replace(p, groups="none") if _STATEFUL & {*p.blocks} else p)


# -- the model ---------------------------------------------------------------------------------------------------------


class Carried(nn.Module):
    """A block of tensors that passes them in the form that `carrier` names."""

    def __init__(self, inner: nn.Module, carrier: str) -> None:
        super().__init__()
        self.inner, self.carrier = inner, carrier

    def forward(self, state: Any) -> Any:
        if self.carrier == "dict":
            hidden = self.inner(state["hidden"])
            return {**state, "hidden": hidden, "norm": hidden.norm(), "nothing": None}
        state.hidden = self.inner(state.hidden)
        if self.carrier == "dataclass":
            state.trail = [*state.trail, state.hidden.square().mean()]
        return state


class Body(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program, self.passes = program, 0
        self.embed = nn.Embedding(WORDS, WIDTH)
        if program.position:
            self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))
        blocks = [BLOCKS[name]() for name in program.blocks]
        if program.carrier != "tensor":
            blocks = [Carried(block, program.carrier) for block in blocks]
        first = len(blocks) // 2 if program.lists == 2 else len(blocks)
        self.layers = nn.ModuleList(blocks[:first])
        if program.lists == 2:
            self.others = nn.ModuleList(blocks[first:])

    def all_blocks(self) -> list[nn.Module]:
        return [*self.layers, *(self.others if self.program.lists == 2 else ())]

    def called(self) -> list[nn.Module]:
        """Return the blocks of this pass in order."""
        blocks, order = self.all_blocks(), self.program.order
        if order == "reversed":
            blocks.reverse()
        elif order == "twice":
            blocks *= 2
        elif order == "another each pass":
            at = self.passes % len(blocks)
            blocks = blocks[at:] + blocks[:at]
        elif order == "one left out":
            del blocks[self.passes % len(blocks)]
        elif order == "one never":
            del blocks[-1]
        return blocks

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states, and a loss in addition to that of the head."""
        x = self.embed(ids)
        if self.program.position:
            x = x + self.position
        self.auxiliary_losses: list[torch.Tensor] = []
        blocks = self.called()
        self.passes += self.training
        with torch.no_grad() if self.program.without_grad else contextlib.nullcontext():
            x = self.run(blocks[: self.program.without_grad], x)
        x = self.arranged(blocks[self.program.without_grad :], x)
        losses, self.auxiliary_losses = self.auxiliary_losses, []
        return x, 0.1 * sum(losses)

    def arranged(self, blocks: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
        order, groups = self.program.order, self.program.groups
        if order == "branches":
            return x + sum(self.run([block], x) for block in blocks)
        if order == "skips":
            down, middle = [x], len(blocks) // 2
            for block in blocks[:middle]:
                down.append(self.run([block], down[-1]))
            x = down.pop()
            for block in blocks[middle:]:
                x = self.run([block], x) + (down.pop() if down else 0)
            return x
        if groups == "none" or not torch.is_grad_enabled():
            return self.run(blocks, x)
        for begin in range(0, len(blocks), 2):
            group = blocks[begin : begin + 2]
            run = lambda y, group=group: self.run(group, y, collect=False)  # noqa: E731
            x = checkpoint(run, x, use_reentrant=groups == "reentrant")
        return x

    def run(self, blocks: Iterable[nn.Module], x: torch.Tensor, collect: bool = True) -> torch.Tensor:
        carrier = self.program.carrier
        state: Any = x
        if carrier == "dict":
            state = {"hidden": x, "mask": None}
        elif carrier == "dataclass":
            state = shapes.State(x)
        elif carrier == "object":
            state = shapes.Bag(x)
        for block in blocks:
            state = block(state)
            auxiliary = getattr(getattr(block, "inner", block), "auxiliary", None)
            if auxiliary is not None and collect:
                self.auxiliary_losses.append(auxiliary)
        if carrier == "tensor":
            return state
        if carrier == "dict":
            if collect and "norm" in state:
                self.auxiliary_losses.append(0.01 * state["norm"])
            return state["hidden"]
        if collect:
            self.auxiliary_losses += state.trail
        return state.hidden


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        if program.scale:
            self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.model = Body(program)
        self.head = nn.Linear(WIDTH, WORDS)
        if program.tied:
            self.head.weight = self.model.embed.weight
        blocks = self.model.all_blocks()
        parts = {"embed": self.model.embed, "head": self.head, "first block": blocks[0], "last block": blocks[-1]}
        for name in program.frozen - {"position"}:
            parts[name].requires_grad_(False)
        if program.position and "position" in program.frozen:
            self.model.position.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.scored(ids, self.scale if self.program.scale else None)

    def scored(self, ids: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the loss from the parts alone."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.program.autocast):
            x, auxiliary = self.model(ids)
            if scale is not None:
                x = x * scale
            pieces = zip(x.split(3, dim=1), ids.split(3, dim=1)) if self.program.chunks else [(x, ids)]
            losses = [F.cross_entropy(self.head(p).flatten(0, 1), i.flatten(), reduction="sum") for p, i in pieces]
            return (sum(losses) / ids.numel() + auxiliary).float()


def made(program: Program) -> Model:
    torch.manual_seed(0)
    return Model(program)


def take_over(model: nn.Module, before: nn.Module) -> None:
    """Copy attributes as a checkpoint of the user's own would."""
    for now, then in zip(model.modules(), before.modules(), strict=True):
        vars(now).update({name: value for name, value in vars(then).items() if name in PLAIN_STATE})


# -- the loop ----------------------------------------------------------------------------------------------------------


def train(
    program: Program,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    seen: Callable[[], None] = lambda: None,
) -> list[float]:
    """Return the losses of these steps.

    `around`: a context for each forward and backward pass; `seen`: called before each update.
    """
    losses = []
    for step in steps:
        if program.spoilt and step == 1:
            with around():
                loss_of(program, model, 500).backward()
        optimizer.zero_grad()
        for micro in range(program.accumulate):
            with around():
                loss = loss_of(program, model, 10 * step + 2 * micro)
                loss.backward()
            losses.append(loss.item())
            if program.evaluate == "between passes" and micro + 1 < program.accumulate:
                losses.append(evaluated(model))
        if program.clip:
            clip(model)
        seen()
        optimizer.step()
        if program.evaluate != "never":
            losses.append(evaluated(model))
        if scheduler is not None:
            scheduler.step()
    return losses


def scheduled(program: Program, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if program.schedule else None


def loss_of(program: Program, model: nn.Module, number: int) -> torch.Tensor:
    score = model.scored if program.apart else model
    return sum(score(batch(number + n)) for n in range(program.forwards))


def evaluated(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        loss = model(batch(99)).item()
    model.train()
    return loss


def clip(model: nn.Module) -> None:
    """Clip by a power of two: norms may differ in their last digit, and products with it are exact."""
    gradients = [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]
    norm = float(torch.tensor([float(gradient.norm()) for gradient in gradients]).norm())
    factor = 1.0
    while norm * factor > MAX_NORM:
        factor /= 2
    for gradient in gradients:
        gradient.mul_(factor)
