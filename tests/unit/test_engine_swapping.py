"""Activations that are swapped rather than recomputed: the same bits, decided by LoHan's model of an iteration."""

import errno

import pytest
import torch
from torch import nn
from torch.nn import functional

from memascend import _C
from memascend.activation.saved import ActivationError
from memascend.engine import swap
from memascend.engine.operators import Measuring, Replaying, Taking
from memascend.engine.options import EngineOptions
from memascend.engine.runtime import StreamingEngine
from memascend.engine.swap import Iteration, decide
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.ops.adamw import AdamW
from memascend.storage.direct_engine import DirectEngine
from memascend.swapping import Operator, Rates, algorithm_1, best, is_convex, iteration_s, prefixes, released

HIDDEN = 64
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
PRODUCTS = 4  # in, attention, out, down: products of a block


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.down, self.dropout = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = self.mix(self.norm(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed).relu_())  # in place, on a product's result
        return x + self.down(x).mul_(0.5)


class Model(nn.Module):
    def __init__(self, depth=4, dropout=0.0):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(100, HIDDEN), nn.ModuleList(Block(dropout) for _ in range(depth))
        self.head = nn.Linear(HIDDEN, 100)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


def model(dtype=torch.float32, **shape):
    torch.manual_seed(0)
    return Model(**shape).to(dtype)


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 100, (2, 24), generator=generator) for _ in range(count)]


def streamed(of, folder, ledger=None, **options):
    groups = [{"params": list(of.parameters()), **SETTINGS}]
    allocator = PageAlignedPinnedAllocator(ledger or Ledger(), lock=False)
    return StreamingEngine.start(of, folder / "session", groups, EngineOptions(**options), allocator=allocator)


def train(of, finish, data):
    torch.manual_seed(7)
    losses = []
    for ids in data:
        losses.append(of(ids))
        losses[-1].backward()
        finish()
    return [loss.item() for loss in losses]


def train_in_memory(of, data):
    optimizer = AdamW(list(of.parameters()), **SETTINGS)

    def finish():
        optimizer.step()
        optimizer.zero_grad()

    return train(of, finish, data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("host_bytes", [0, 60_000, 1 << 30], ids=["ssd", "both", "host"])
def test_swapping_everything_changes_no_bit_and_leaves_nothing_behind(tmp_path, dtype, host_bytes):
    ours, theirs, ledger = model(dtype, dropout=0.1), model(dtype, dropout=0.1), Ledger()
    engine = streamed(ours, tmp_path, ledger, swap="all", swap_room=host_bytes)
    assert train(ours, engine.finish_step, batches(4)) == train_in_memory(theirs, batches(4))
    for name, values in engine.read_weights():
        assert torch.equal(values, theirs.get_parameter(name)), name
    statistics = engine._swapping.cache.statistics
    size = dtype.itemsize * 2 * 24 * HIDDEN
    attention = size + 2 * 4 * 24 * 4  # with its sums in fp32
    assert engine.decision.more_bytes == engine.decision.offered_bytes == 4 * (3 * size + attention + 2 * size)
    assert statistics.written == 3 * 4 * 6 * size  # all steps but the first; the sums are too small to be worth it
    assert statistics.live_tensors == 0
    assert {engine._swapping.computed_again(unit.key) for unit in engine.layout.units} == {0.0, 1.0}  # blocks, others
    assert engine.limit.bound_s > 0
    in_host = sum(e.reserved_bytes for e in ledger.live("host") if e.owner == "swapped_activations")
    assert in_host <= host_bytes
    assert (in_host > 0) == (host_bytes > 0)
    engine.close(destroy=True)
    assert list(tmp_path.iterdir()) == []


def test_lost_swapped_activation_is_reported_with_checkpoints_on_device(tmp_path, monkeypatch):
    faults, opened = _C.FaultLayer(), DirectEngine.__init__

    def with_faults(engine, devices, owner, config=None, own_faults=None):
        volatile = config is not None and config.volatile
        opened(engine, devices, owner, config, faults if volatile else own_faults)

    monkeypatch.setattr(DirectEngine, "__init__", with_faults)
    ours, data = model(), batches(3)
    engine = streamed(ours, tmp_path, checkpoints="device", swap="all", swap_room=0)
    train(ours, engine.finish_step, data[:2])
    loss = ours(data[2])
    faults.add("read", error=errno.EIO)
    with pytest.raises(ActivationError, match=r"activation layers\.\d\S* \(\d+ bytes\) is lost"):
        loss.backward()
    faults.clear()
    del loss
    engine.close(destroy=True)


@pytest.mark.parametrize("rule", ["best", "algorithm 1", "released", "20000"])
def test_every_rule_gives_the_same_bits_and_reports_its_decision(tmp_path, rule):
    ours, theirs = model(), model()
    engine = streamed(ours, tmp_path / "swapped", swap=rule, clip=1.0)
    assert engine.decision is None
    losses = train(ours, engine.finish_step, batches(3))
    assert engine.decision.rule == rule
    assert "of products' results" in str(engine.decision)
    assert "\n" not in str(engine.decision)
    if rule == "20000":
        # the largest product does not fit, but the next one does
        assert engine.decision.more_bytes == 4 * 2 * 24 * HIDDEN
        shares = [engine._swapping.computed_again(f"layers.{number}") for number in range(4)]
        assert 0 < shares[0] < shares[-1] == 1.0
    without = streamed(theirs, tmp_path / "computed again", clip=1.0)
    assert losses == train(theirs, without.finish_step, batches(3))
    weights = {name: values.clone() for name, values in without.read_weights()}
    for name, values in engine.read_weights():
        assert torch.equal(values, weights[name]), name
    engine.close()
    without.close()


def test_only_chosen_products_are_skipped_in_recomputation():
    block, x = model().layers[0], torch.randn(2, 24, HIDDEN)
    with torch.no_grad(), Measuring() as measured:
        block(x)
    assert len(measured.seen) == PRODUCTS
    assert measured.seen[0].flops == 2 * 48 * HIDDEN * 3 * HIDDEN
    assert measured.seen[1].flops == 4 * 2 * 4 * 24 * 24 * (HIDDEN // 4)
    with torch.no_grad():
        mode = Taking(frozenset({1, 2}))
        with mode:
            expected = block(x)
    tensors = mode.taken.tensors()
    assert mode.taken.tensors() == []
    mode.taken.bring_back([torch.full_like(each, 2.0) for each in tensors])
    with Replaying(mode.taken, "block 0"):
        assert not torch.equal(block(x), expected)  # the replaced values are used
    mode.taken.bring_back(tensors)
    with Replaying(mode.taken, "block 0"):
        assert torch.equal(block(x), expected)
    with Replaying(mode.taken, "block 0"):  # it can be repeated: nothing was changed in place
        assert torch.equal(block(x), expected)


def test_undefined_results_of_a_product_stay_undefined_in_replay(monkeypatch):
    """A GPU's flash attention returns tensors, numbers, and undefined tensors between them."""
    monkeypatch.setattr("memascend.engine.operators.Generators", lambda _: 0)  # "meta" has none
    query = torch.empty(2, 4, 16, 8, dtype=torch.bfloat16, device="meta")
    attend = torch.ops.aten._scaled_dot_product_flash_attention.default

    def kinds(results):
        return [each if isinstance(each, int | None) else each.shape for each in results]

    mode = Taking(frozenset({0}))
    with mode:
        expected = kinds(attend(query, query, query))
    assert None in expected
    mode.taken.bring_back(mode.taken.tensors())
    with Replaying(mode.taken, "block 0"):
        assert kinds(attend(query, query, query)) == expected


def test_recomputing_other_products_is_an_error_that_names_the_block():
    block, x = model().layers[0], torch.randn(2, 24, HIDDEN)
    with torch.no_grad():
        mode = Taking(frozenset({0}))
        with mode:
            block(x)
    message = r"block 0 computes something else in its recomputation \(product 0: aten.mm"
    with pytest.raises(RuntimeError, match=message), Replaying(mode.taken, "block 0"):
        block.down(x)


def iteration(**changes):
    products = (Operator("down", 8e12, 2e9), Operator("mix", 6e12, 6e9), Operator("attention", 1e12, 2e9))
    facts = {
        "layers": 4, "between_blocks": 2e9, "block_flops": 15e12, "forward_flops": 16e12, "weights": 1e9,
        "gradients": 1e9, "update_read": 7e9, "update_written": 7e9, "products": products,
    }  # fmt: skip
    return Iteration(**facts | changes)


def test_swapping_pays_when_compute_bound_but_not_when_ssd_bound():
    fast = Rates(gpu=1e12, link=20e9, read=10e9, write=10e9)
    chosen = decide(iteration(), fast, "best")
    assert chosen.more_bytes == chosen.offered_bytes == 10e9
    assert "backward is bound by compute" in str(chosen)
    slow = Rates(gpu=1e15, link=20e9, read=1e9, write=1e9)
    kept = decide(iteration(), slow, "best")  # erratum L17: swapping does not make it shorter
    assert kept.more_bytes == 0 == decide(iteration(), slow, "algorithm 1").more_bytes
    assert "backward is bound by SSD" in str(kept)
    assert decide(iteration(), slow, "all").more_bytes == 10e9
    assert decide(iteration(), slow, "3000000000").more_bytes == 3e9
    assert [decide(iteration(), slow, share).more_bytes for share in ("0%", "25%", "100%")] == [0, 2.5e9, 10e9]


def test_algorithm_1_stops_at_a_plateau_unlike_a_full_search():
    """A convex time has no plateau except at its minimum; a time in an order that is not by benefit may have one."""
    rates = Rates(gpu=1e12, link=20e9, read=10e9, write=10e9)
    assert is_convex(iteration(), rates)
    assert algorithm_1(iteration(), rates) == best(iteration(), rates)

    class Unsorted(Iteration):
        def operators(self):
            return [Operator("norm", 0.0, 1e9), *self.products]

    step = Unsorted(**{name: getattr(iteration(), name) for name in Iteration.__dataclass_fields__})
    assert not is_convex(step, rates)
    assert algorithm_1(step, rates) == step.between_blocks < best(step, rates)
    assert iteration_s(step, rates, best(step, rates)) == min(iteration_s(step, rates, a) for a in prefixes(step))


def test_released_rule_considers_only_the_forward_pass():
    """Erratum L18: 0.3 of the forward pass at 18 GiB/s."""
    step = iteration(products=(Operator("down", 8e12, 400e9),), layers=100)
    swapped = released(step, Rates(gpu=1e12, link=1.0, read=1.0, write=1.0))
    assert swapped == pytest.approx(0.3 * 16 * 18 * 2**30, rel=0.05)


@pytest.mark.parametrize("wanted", ["most", "-1", "1.5", "%", "-5%"])
def test_unknown_swap_rule_is_refused(wanted):
    with pytest.raises(ValueError, match=r"EngineOptions\.swap: best, algorithm 1, released, all, bytes, a share"):
        EngineOptions(swap=wanted)


@pytest.mark.parametrize(("rule", "steps"), [("best", 2), ("algorithm 1", 2), ("all", 1), ("50%", 1)])
def test_rules_of_the_paper_decide_on_seconds_of_an_unobserved_pass(tmp_path, rule, steps):
    ours = model()
    engine = streamed(ours, tmp_path, swap=rule)
    decided = [train(ours, engine.finish_step, [data]) and engine.decision is not None for data in batches(3)]
    assert decided.index(True) == steps - 1
    engine.close(destroy=True)


@pytest.mark.parametrize("rule", ["best", "algorithm 1", "released", "all"])
def test_rules_are_not_offered_results_that_cost_more_to_swap_than_to_recompute(tmp_path, monkeypatch, rule):
    offered = []
    for name, cost_s in (("free", 0.0), ("dear", 60.0)):
        monkeypatch.setattr(swap, "_COST_S", cost_s)
        engine = streamed(ours := model(), tmp_path / name, swap=rule)
        train(ours, engine.finish_step, batches(2))
        offered.append(engine.decision.offered_bytes)
        engine.close(destroy=True)
    assert offered[0] > 0
    assert offered[1] == (offered[0] if rule == "all" else 0)  # what the user asks for is swapped
