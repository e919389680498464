"""All micro-batches pass a block before the next one: equal bits, and bytes per step that do not grow with them."""

import gc
import itertools
import logging
import random
import signal
import threading

import numpy
import pytest
import torch
from torch import nn

from memascend.engine.errors import NotStreamable
from memascend.engine.layout import padded
from memascend.engine.options import EngineOptions
from memascend.engine.streaming import streaming
from memascend.engine.vertical import Route
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from tests.unit import test_sliced_matrices as sliced
from tests.zoo.shapes import DEPTH, LENGTH, REFUSED, SHAPES, WIDTH, Mlp, Stack, batch

STEPS = 3  # the first of them inspects the micro-batches one after the other
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
INDEPENDENT = [
    "TiedEmbedding",
    "BatchNormInBlocks",
    "IdleExperts",
    "BlocksCalledTwice",
    "SkipConnections",
    "FrozenBlocks",
]
DEPENDENT = [
    "RandomNumbers",
    "CountersInBlocks",
    "AuxiliaryLossOfAnAttribute",
    "AuxiliaryLossByHooks",
    "StochasticDepth",
]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


OTHERS = [slow(name) for name in SHAPES if name not in (*INDEPENDENT, *REFUSED)]


class Loop:
    """A model in a session, and the body of a loop over micro-batches."""

    def __init__(self, model, folder, count, *, order="vertical", **options):
        self.model, self.count, self.order = model, count, order
        self.session = streaming(folder, allocator=PageAlignedPinnedAllocator(Ledger(), lock=False))
        self.session.hook(model)
        settings = {"accumulate": count, "options": EngineOptions(**options), **SETTINGS}
        self.optimizer = self.session.optimizer(torch.optim.AdamW, **settings)
        self.moved = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.session.close()

    def body(self, ids):
        loss = self.model(ids) / self.count
        loss.backward()
        return loss.item()

    def accumulate(self, step, body=None):
        data = [batch(step * self.count + n) for n in range(self.count)]
        return self.session.accumulate(body or self.body, data, order=self.order)

    def step(self, step, body=None):
        before = self.session.engine.transferred
        losses = self.accumulate(step, body)
        self.optimizer.step()
        self.moved.append([now - then for now, then in zip(self.session.engine.transferred, before, strict=True)])
        return losses

    def contents(self):
        engine = self.session.engine
        found = {name: values.clone() for name, values in engine.read_weights()}
        for name in engine.steps:
            found |= {f"{name} {key}": values.clone() for key, values in engine.read_states(name).items()}
        return found | {f"buffer {name}": values.clone() for name, values in self.model.named_buffers()}


def made(kind, dtype=torch.float32):
    torch.manual_seed(0)
    return (SHAPES[kind] if isinstance(kind, str) else kind)().to(dtype)


def trained(kind, folder, count, order, dtype=torch.float32, **options):
    """Return the losses, the contents of the tier, the next random numbers, and the order of the last step."""
    with Loop(made(kind, dtype), folder, count, order=order, **options) as loop:
        torch.manual_seed(7)
        losses = [loop.step(number) for number in range(STEPS)]
        return losses, loop.contents(), torch.rand(3), loop.session.engine.accumulated[0]


def assert_both_orders_are_equal(kind, folder, count, expected, *rest, **options):
    one, other = (trained(kind, folder / order, count, order, *rest, **options) for order in ("horizontal", "vertical"))
    assert other[0] == one[0]
    assert other[1].keys() == one[1].keys()
    for name, values in one[1].items():
        assert torch.equal(other[1][name], values), name
    assert torch.equal(other[2], one[2])
    assert (one[3], other[3]) == ("horizontal", expected)


# -- equal bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.0, 0.5], ids=["as they come", "clipped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("count", [slow(1), 2, slow(4), slow(8)])
def test_any_number_of_micro_batches_trains_like_horizontal_order(tmp_path, count, dtype, clip):
    assert_both_orders_are_equal("Plain", tmp_path, count, "vertical" if count > 1 else "horizontal", dtype, clip=clip)


@pytest.mark.parametrize("name", [*INDEPENDENT, *OTHERS])
def test_each_model_shape_trains_like_horizontal_order(tmp_path, name):
    expected = trained(name, tmp_path / "looked at", 3, "vertical")[3]
    if name in INDEPENDENT:
        assert expected == "vertical"
    assert_both_orders_are_equal(name, tmp_path, 3, expected)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"clip": 0.5}, {"gradients": torch.bfloat16, "states": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("name", INDEPENDENT)
def test_each_model_shape_in_bf16_trains_like_horizontal_order(tmp_path, name, count, options):
    assert_both_orders_are_equal(name, tmp_path, count, "vertical", torch.bfloat16, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"arm": "naive"},
        {"versions": 1},
        *(slow(options) for options in ({"arm": "none"}, {"checkpoints": "device"}, {"versions": 1, "redo": False})),
        {"blocks_in_flight": 1, "clip": 0.5},
        slow({"zero_missing": True}),
        slow({"measure": True}),
    ],
    ids=str,
)
def test_engine_options_keep_both_orders_equal(tmp_path, options):
    assert_both_orders_are_equal("IdleExperts", tmp_path, 2, "vertical", **options)


def test_micro_batches_in_two_calls_add_up_in_their_order(tmp_path):
    found = []
    for order in ("horizontal", "vertical"):
        with Loop(made("Plain"), tmp_path / order, 4, order=order) as loop:
            for step in range(STEPS):
                data = [batch(4 * step + n) for n in range(4)]
                loop.session.accumulate(loop.body, data[:2], order=order)
                assert loop.session.engine.accumulated[0] == (order if step else "horizontal")
                loop.session.accumulate(loop.body, data[2:], order=order)
                assert loop.session.engine.accumulated[0] == "horizontal"
                loop.optimizer.step()
            found.append(loop.contents())
    assert all(torch.equal(found[1][name], values) for name, values in found[0].items())


@pytest.mark.parametrize("shape", [{}, {"tied": True}, {"uses": 2, "answers": 100}], ids=str)
@pytest.mark.parametrize("clip", [slow(0.0), 0.1])
def test_sliced_matrices_train_the_same_with_fewer_bytes(tmp_path, shape, clip):
    found, moved = [], []
    for order in ("horizontal", "vertical"):
        model = sliced.model(**shape)
        engine = sliced.streamed(model, tmp_path / order, accumulate=3, clip=clip)

        def body(ids, model=model):
            loss = model(ids) / 3
            loss.backward()
            return loss.item()

        data, losses = sliced.batches(3 * STEPS), []
        for step in range(STEPS):
            before = sum(engine.transferred)
            losses += engine.accumulate(body, data[3 * step : 3 * step + 3], order=order)
            engine.finish_step()
        moved.append(sum(engine.transferred) - before)
        assert engine.accumulated[0] == order
        found.append((losses, {name: values.clone() for name, values in engine.read_weights()}))
        engine.close()
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[1][1][name], values) for name, values in found[0][1].items())
    assert moved[1] < 0.75 * moved[0]


class AddedWhole(Stack):
    """A parameter whose gradient shares its memory in autograd with that of the hidden states."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(2 * LENGTH * WIDTH))

    def blocks(self, x):
        x = self.layers[1](self.layers[0](x)) + self.shift.view(2, LENGTH, WIDTH)
        for layer in self.layers[2:]:
            x = layer(x)
        return self.layers[0](x)


def test_gradient_sum_does_not_alter_gradients_that_share_memory(tmp_path):
    assert_both_orders_are_equal(AddedWhole, tmp_path, 3, "vertical")


# -- bytes -------------------------------------------------------------------------------------------------------------

WIDE = 192


class WideMlp(Mlp):
    def __init__(self):
        super().__init__(WIDE)


class Wide(Stack):
    """Blocks whose weights are large compared with their inputs."""

    block = WideMlp

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(40, WIDE), nn.Linear(WIDE, 40)


@pytest.mark.parametrize(
    ("options", "horizontally"), [({}, 2.5), slow({"clip": 0.5}, 2.0), slow({"arm": "none"}, 2.0)], ids=str
)
def test_bytes_per_step_grow_only_by_block_inputs(tmp_path, options, horizontally):
    moved = {}
    for count, order in ((1, "vertical"), (8, "vertical"), (8, "horizontal")):
        with Loop(made(Wide), tmp_path / f"{order} {count}", count, order=order, **options) as loop:
            for step in range(STEPS):
                loop.step(step)
            moved[order, count] = loop.moved[-1]
    one, eight = moved["vertical", 1], moved["vertical", 8]
    inputs = DEPTH * padded(batch(0).numel() * WIDE, torch.float32) * 4  # written, and read once
    for direction in range(2):
        # A slot or two may still have an input when backward begins, which is then not read.
        assert 0 <= 7 * inputs - (eight[direction] - one[direction]) + 3 * inputs / DEPTH <= 6 * inputs / DEPTH
    assert sum(eight) <= 1.15 * sum(one)
    assert sum(moved["horizontal", 8]) >= horizontally * sum(one)


# -- micro-batches that are not independent ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", DEPENDENT)
def test_dependent_micro_batches_run_one_after_the_other(tmp_path, name, caplog):
    with caplog.at_level(logging.INFO, "memascend"):
        assert_both_orders_are_equal(name, tmp_path, 2, "horizontal")
    said = [line for line in caplog.messages if "one after the other" in line]
    assert len(said) == 1
    assert "\n" not in said[0]


class DrawsBetweenBlocks(Stack):
    """Draws a number between two blocks, from a source in an attribute."""

    def __init__(self, source, draw):
        super().__init__()
        self.source, self.draw = source, draw

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x) + 0.1 * self.draw(self.source)
        return self.loss(x, ids)


@pytest.mark.parametrize(
    ("source", "draw"),
    [
        (lambda: numpy.random.default_rng(0), lambda source: float(source.random())),
        (lambda: numpy.random.RandomState(0), lambda source: float(source.rand())),
        (lambda: random.Random(0), lambda source: source.random()),
        (lambda: iter(range(1000)), lambda source: next(source) * 0.01),
        (lambda: (number for number in range(1000)), lambda source: next(source) * 0.01),
        (itertools.count, lambda source: next(source) * 0.01),
    ],
    ids=["Generator", "RandomState", "Random", "iterator", "generator function", "count"],
)
def test_draws_between_blocks_keep_their_order(tmp_path, source, draw):
    assert_both_orders_are_equal(lambda: DrawsBetweenBlocks(source(), draw), tmp_path, 2, "horizontal")


class Marked(Stack):
    """Sets attributes in a forward pass for its end, and then removes them."""

    def forward(self, ids):
        self.scale = ids.float().mean() / 10
        try:
            return self.loss(self.blocks(self.embed(ids)) * self.scale, ids)
        finally:
            del self.scale


def test_attribute_set_and_removed_in_forward_keeps_horizontal_order(tmp_path):
    assert_both_orders_are_equal(Marked, tmp_path, 2, "horizontal")


class DrawsLater(Stack):
    draws = marks = False

    def forward(self, ids):
        x = self.embed(ids)
        if self.marks:
            self.layers[0].seen = x
        x = self.blocks(x)
        return self.loss(x + torch.rand(()) if self.draws else x, ids)


@pytest.mark.parametrize("how", ["draws", "marks"])
def test_step_that_becomes_dependent_is_refused_and_can_be_repeated(tmp_path, how):
    found = []
    for order in ("horizontal", "vertical"):
        with Loop(made(DrawsLater), tmp_path / order, 2, order=order) as loop:
            for step in range(STEPS):
                loop.step(step)
            setattr(DrawsLater, how, True)
            try:
                if order == "vertical":
                    with pytest.raises(NotStreamable, match="order='horizontal'") as refused:
                        loop.accumulate(STEPS)
                    assert "\n" not in str(refused.value)
                    assert_nothing_runs()
                    loop.order = "horizontal"
                torch.manual_seed(3)
                loop.step(STEPS)
            finally:
                setattr(DrawsLater, how, False)
            found.append(loop.contents())
    assert all(torch.equal(found[1][name], values) for name, values in found[0].items())


class Dropped(Stack):
    def forward(self, ids):
        return self.loss(self.blocks(nn.functional.dropout(self.embed(ids), 0.5, self.training)), ids)


def test_changed_model_mode_is_inspected_again(tmp_path):
    orders = []
    with Loop(made(Dropped), tmp_path / "run", 2) as loop:
        for training in (True, True, False, False, True):
            loop.model.train(training)
            loop.step(len(orders))
            orders.append(loop.session.engine.accumulated[0])
    assert orders == ["horizontal"] * 3 + ["vertical", "horizontal"]


@pytest.mark.parametrize("around", ["a dispatch mode", "hooks for saved tensors"])
def test_thread_local_contexts_keep_horizontal_order(tmp_path, around):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Loop(made("Plain"), tmp_path / "run", 2) as loop:
        loop.step(0)
        context = Passing()
        if around == "hooks for saved tensors":
            context = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        with context:
            loop.step(1)
        assert loop.session.engine.accumulated[0] == "horizontal"
        loop.step(2)
        assert loop.session.engine.accumulated[0] == "vertical"


def test_autocast_around_the_call_applies_to_the_micro_batches(tmp_path):
    found = []
    for order in ("horizontal", "vertical"):
        with Loop(made("Plain"), tmp_path / order, 2, order=order) as loop:
            for step in range(STEPS):
                with torch.autocast("cpu", torch.bfloat16):
                    loop.step(step)
            assert loop.session.engine.accumulated[0] == order
            found.append(loop.contents())
    assert all(torch.equal(found[1][name], values) for name, values in found[0].items())


# -- errors ------------------------------------------------------------------------------------------------------------


def assert_nothing_runs():
    assert [thread.name for thread in threading.enumerate() if "micro-batch" in thread.name] == []


class Mishap(Exception):
    pass


class Trap:
    """Springs in the second micro-batch of a step in which it is set, at one place of the function or the model."""

    def __init__(self):
        self.where, self.what, self.calls = None, None, 0

    def at(self, where):
        if where == self.where:
            self.calls += 1
            if self.calls == 2:
                self.what()

    def body(self, loop):
        def body(ids):
            self.at("at the beginning")
            loss = loop.model(ids) / loop.count
            loss.register_hook(lambda _: self.at("in backward"))
            loss.backward()
            self.at("at the end")
            return loss.item()

        return body


class Trapped(Stack):
    class block(Mlp):
        trap = Trap()

        def forward(self, x):
            self.trap.at("in a block")
            return super().forward(x)


@pytest.fixture
def trap(monkeypatch):
    trap = Trap()
    monkeypatch.setattr(Trapped.block, "trap", trap)
    return trap


def trained_with_a_trap(trap, folder, where, what, error, **options):
    """Return the contents of the tier after three steps.

    If `error` is given, the trap springs in a first attempt at the third step, which is then repeated.
    """
    with Loop(made(Trapped), folder, 3, **options) as loop:
        body = trap.body(loop)
        loop.step(0, body)
        loop.step(1, body)
        if error is not None:
            trap.where, trap.what = where, what
            with pytest.raises(error):
                loop.accumulate(2, body)
            assert_nothing_runs()
            assert loop.session.steps == 2
            trap.where = None
        loop.step(2, body)
        assert loop.session.engine.accumulated[0] == "vertical"
        return loop.contents()


@pytest.mark.parametrize(
    "options", [pytest.param({}, id="as they come"), pytest.param({"clip": 0.5}, id="clipped", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("where", ["at the beginning", "in a block", "in backward", "at the end"])
def test_step_is_repeatable_after_error_in_one_micro_batch(tmp_path, trap, where, options):
    def what():
        raise Mishap(where)

    expected = trained_with_a_trap(trap, tmp_path / "expected", where, what, None, **options)
    found = trained_with_a_trap(trap, tmp_path / "found", where, what, Mishap, **options)
    assert all(torch.equal(found[name], values) for name, values in expected.items())


@pytest.mark.parametrize("where", ["in a block", "in backward", "at the end"])
def test_step_is_repeatable_after_ctrl_c(tmp_path, trap, where):
    def what():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    expected = trained_with_a_trap(trap, tmp_path / "expected", where, what, None)
    found = trained_with_a_trap(trap, tmp_path / "found", where, what, KeyboardInterrupt)
    assert all(torch.equal(found[name], values) for name, values in expected.items())


def test_handlers_in_the_loop_do_not_see_the_abort(tmp_path):
    """A handler of all exceptions in the loop does not see the one that ends the other micro-batches."""
    calls = []

    def body(ids):
        calls.append(None)
        if len(calls) == 4:
            raise Mishap
        try:
            loop.body(ids)
        except Exception:
            pytest.fail("the loop's own handler saw the end")

    with Loop(made("Plain"), tmp_path / "run", 2) as loop:
        loop.step(0, body)
        with pytest.raises(Mishap):
            loop.accumulate(1, body)
        assert_nothing_runs()


def test_memory_is_released_after_the_call(tmp_path):
    def alive():
        gc.collect()
        return [each for each in gc.get_objects() if type(each).__name__ in ("Lanes", "BlockPass")]

    before = alive()  # graphs of other tests
    with Loop(made("Plain"), tmp_path / "run", 3) as loop:
        for step in range(STEPS):
            loop.step(step)
        assert loop.session.engine._together is None
        assert [each for each in alive() if all(each is not other for other in before)] == []


def test_excess_micro_batches_are_refused_before_any_runs(tmp_path):
    with Loop(made("Plain"), tmp_path / "run", 2) as loop:
        with pytest.raises(
            RuntimeError, match="3 micro-batches after 0 backward passes of a step that was set to have 2"
        ):
            loop.session.accumulate(lambda _: pytest.fail("it was called"), range(3))
        with pytest.raises(ValueError, match="order must be one of vertical, horizontal"):
            loop.session.accumulate(loop.body, [], order="diagonal")
        assert loop.session.accumulate(loop.body, []) == []
        with pytest.raises(RuntimeError, match="called inside the function of a micro-batch"):
            loop.session.accumulate(lambda ids: loop.session.accumulate(loop.body, [ids]), [batch(0), batch(1)])


@pytest.mark.parametrize("order", ["horizontal", "vertical"])
@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "call", ["optimizer.step", "optimizer.zero_grad", "model.zero_grad"], ids=lambda name: name.replace(".", " ")
)
def test_step_and_zero_grad_are_refused_inside_micro_batch_function(tmp_path, call, when, order):
    with (
        Loop(made("Plain"), tmp_path / "ours", 2, order=order) as loop,
        Loop(made("Plain"), tmp_path / "t", 2) as other,
    ):
        of, name = call.split(".")

        def body(ids):
            if when == "before":
                getattr(getattr(loop, of), name)()
            loss = loop.body(ids)
            getattr(getattr(loop, of), name)()
            return loss

        for step in range(3):
            with pytest.raises(RuntimeError, match=rf"{name}\(\) was called inside the function of a micro-batch"):
                loop.accumulate(step, body)
            assert loop.step(step) == other.step(step)
        expected = other.contents()
        assert all(torch.equal(values, expected[name]) for name, values in loop.contents().items())


class Normed(Stack):
    """Blocks with running averages."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([NormedBlock() for _ in range(DEPTH)])


class NormedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.norm = Mlp(), nn.BatchNorm1d(WIDTH)

    def forward(self, h):
        return h + self.norm(self.mlp(h).flatten(0, 1)).view_as(h)


@pytest.mark.parametrize("begins", [0, 1])
def test_evaluation_that_reads_running_averages_matches_or_is_refused(tmp_path, begins):
    found = {}
    for order in ("horizontal", "vertical"):
        with Loop(made(Normed), tmp_path / order, 3, order=order) as loop:

            def body(ids, loop=loop):
                if loop.evaluates:
                    loop.model.eval()
                    with torch.no_grad():
                        target = loop.model(ids)
                    loop.model.train()
                    loss = (loop.model(ids) - target).square()
                else:
                    loss = loop.model(ids)
                loss.backward()
                return loss.item()

            losses = []
            for step in range(3):
                loop.evaluates = step >= begins
                if loop.evaluates and step and begins and order == "vertical":
                    with pytest.raises(NotStreamable, match="running_mean"):
                        loop.step(step, body)
                    losses = None
                    break
                losses.append(loop.step(step, body))
            found[order] = losses
    assert found["vertical"] in (None, found["horizontal"])
    assert (found["vertical"] is None) == bool(begins)


def test_shared_graph_and_second_backward_pass_are_refused(tmp_path):
    kept, again = [], []

    def body(ids):
        kept.append(loop.model(ids))
        if len(kept) != 3:  # the next one uses the graph of this one
            kept[-2 if len(kept) == 4 else -1].backward()

    def twice(ids):
        loss = loop.model(ids)
        loss.backward(retain_graph=bool(again))
        if again:
            loss.backward()

    with Loop(made("Plain"), tmp_path / "run", 2) as loop:
        loop.step(0, body)
        with pytest.raises(NotStreamable, match="over the graph of another micro-batch"):
            loop.accumulate(1, body)
        assert_nothing_runs()
        loop.step(1, twice)
        again.append(True)
        with pytest.raises(RuntimeError, match="second backward pass in one micro-batch"):
            loop.accumulate(2, twice)
        assert_nothing_runs()


def test_a_route_finds_the_next_place_of_a_unit():
    route = Route(["embed", "b0", "b0", "head", "head", "b0"])
    assert route.after((-1, 0), "b0", 0) == (1, 0)
    assert route.after((0, 3), "embed", 5) == (0, 5)
    assert route.after((3, 2), "head", 0) == (4, 0)
    assert route.after((4, 2), "b0", 0) == (5, 0)
    with pytest.raises(NotStreamable, match="embed in another order"):
        route.after((5, 0), "embed", 0)
