"""The streaming engine trains as plain PyTorch in memory, bit by bit; its buffers do not grow with the depth."""

import copy
import dataclasses
import gc
import logging
import threading
import weakref

import pytest
import torch
from torch import nn

from memascend.engine.errors import NotStreamable, NotThisModel
from memascend.engine.find_blocks import find_blocks
from memascend.engine.layout import Kind, make_layout
from memascend.engine.limit import Phase, Rates, limit_of
from memascend.engine.model_units import ModelUnits
from memascend.engine.options import EngineOptions
from memascend.engine.runtime import StreamingEngine
from memascend.memory.ledger import Ledger, verify_by_address
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.ops.adamw import AdamW

HIDDEN, VOCABULARY, RATE = 32, 200, 1e-2
SETTINGS = {"lr": RATE, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


class Block(nn.Module):
    def __init__(self, hidden=HIDDEN, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, *, scale):
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x))))) * scale


class Model(nn.Module):
    """A model. `order`: which layer is run when; `tied`: the head's matrix is the embedding's."""

    def __init__(self, depth=4, hidden=HIDDEN, tied=False, dropout=0.0, order=None):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(Block(hidden, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, VOCABULARY, bias=False)
        self.order = range(depth) if order is None else order
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        x, scale = self.embedding(ids), torch.tensor(0.5)
        for number in self.order:
            x = self.layers[number](x, scale=scale.to(x.dtype))
        return nn.functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), ids.flatten())


def model(seed=0, dtype=torch.float32, **shape):
    torch.manual_seed(seed)
    return Model(**shape).to(dtype)


def batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (2, 16), generator=generator) for _ in range(count)]


def groups(of, **settings):
    return [{"params": [p for p in of.parameters() if p.requires_grad], **SETTINGS, **settings}]


def streamed(of, folder, ledger=None, **options):
    allocator = PageAlignedPinnedAllocator(ledger or Ledger(), lock=False)
    return StreamingEngine.start(of, folder / "session", groups(of), EngineOptions(**options), allocator=allocator)


def train(of, engine, data):
    losses = []
    for ids in data:
        loss = of(ids)
        loss.backward()
        engine.finish_step()
        losses.append(loss.item())
    return losses


def train_in_memory(of, data, accumulate=1):
    optimizer, losses = AdamW([p for p in of.parameters() if p.requires_grad], **SETTINGS), []
    for number, ids in enumerate(data, 1):
        loss = of(ids)
        loss.backward()
        losses.append(loss.item())
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def assert_equal(engine, other):
    found = {name: values.clone() for name, values in engine.read_weights()}
    for name, values in other.named_parameters():
        assert torch.equal(found[name], values.cpu()), name


@pytest.mark.parametrize("arm", ["optimized", "naive", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_arm_trains_bit_identically_to_module_in_memory(tmp_path, arm, dtype):
    ours, theirs = model(dtype=dtype), model(dtype=dtype)
    engine = streamed(ours, tmp_path, arm=arm)
    assert train(ours, engine, batches(4)) == train_in_memory(theirs, batches(4))
    assert_equal(engine, theirs)
    engine.close(destroy=True)
    assert list(tmp_path.iterdir()) == []


def test_updates_use_one_thread_during_backward_and_all_afterwards(tmp_path):
    """With a second team of OpenMP threads every product of the process would wait longer for its helpers."""
    ours, (ids,), used = model(), batches(1), []
    engine = streamed(ours, tmp_path)
    stepped = engine.updates.adam.step

    def step(*run):
        used.append((threading.current_thread() is threading.main_thread(), torch.get_num_threads()))
        stepped(*run)

    engine.updates.adam.step = step
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        train(ours, engine, [ids])
        assert set(used) == {(False, 1)}
        used.clear()
        engine.options = dataclasses.replace(engine.options, wait=True)
        train(ours, engine, [ids])
        assert set(used) == {(True, 2)}
    finally:
        torch.set_num_threads(before)
    engine.close()


def test_error_at_start_of_update_thread_is_raised_without_hanging(tmp_path, monkeypatch):
    def fails():
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("memascend.engine.updates.compute_alone", fails)
    ours = model()
    engine = streamed(ours, tmp_path)
    with pytest.raises(RuntimeError, match="no such kernel"):
        train(ours, engine, batches(1))
    engine.close()


def test_gradients_of_several_passes_are_added_up_on_the_tier(tmp_path):
    ours, theirs = model(), model()
    engine = streamed(ours, tmp_path, accumulate=2)
    losses = []
    for first, second in zip(batches(4)[::2], batches(4)[1::2], strict=True):
        for ids in (first, second):
            losses.append(ours(ids))
            losses[-1].backward()
        engine.finish_step()
    assert [loss.item() for loss in losses] == train_in_memory(theirs, batches(4), accumulate=2)
    assert_equal(engine, theirs)
    engine.close()


def test_large_parameters_are_split_and_small_ones_combined():
    parts = [("a", (300_000,), True), ("b", (10,), True), ("frozen", (5,), False), ("c", (20,), True)]
    from memascend.engine.layout import UnitParameters

    unit = UnitParameters(key="u", kind=Kind.BLOCK, parameters=parts)
    order = [("a", 300_000), ("b", 10), ("c", 20)]
    layout = make_layout([unit], order, weights=torch.bfloat16, piece_elements=1 << 17)
    (unit,) = layout.units
    assert [part.name for part in unit.parts] == ["a", "b", "c", "frozen"]
    runs = [[(run.part.name, run.begin, run.end) for run in piece.runs] for piece in unit.pieces]
    assert runs == [[("a", 0, 131072)], [("a", 131072, 262144)], [("a", 262144, 300_000)], [("b", 0, 10), ("c", 0, 20)]]
    assert [piece.first for piece in unit.pieces] == [0, 131072, 262144, 300_000]
    assert layout.state_names == ("master", "exp_avg", "exp_avg_sq")


def test_a_parameter_in_several_pieces_trains_to_the_same_bits(tmp_path):
    torch.manual_seed(0)
    ours = nn.Sequential(*(nn.Linear(300, 300) for _ in range(2)))  # 90,000 elements, and pieces of 65,536
    theirs = copy.deepcopy(ours)
    optimizer = AdamW(theirs.parameters(), **SETTINGS)
    engine = streamed(ours, tmp_path, piece_elements=1 << 16)
    assert max(len(unit.pieces) for unit in engine.layout.units) == 3
    for _ in range(2):
        x = torch.randn(4, 300)
        for each in (ours, theirs):
            each(x).square().mean().backward()
        engine.finish_step()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(engine, theirs)
    engine.close()


@pytest.mark.parametrize("arm", ["optimized", *(pytest.param(a, marks=pytest.mark.slow) for a in ("naive", "none"))])
def test_host_buffers_do_not_grow_with_depth(tmp_path, arm):
    peaks = []
    for depth in (4, 8, 16):
        ledger, ours = Ledger(), model(depth=depth)
        engine = streamed(ours, tmp_path, ledger, arm=arm)
        train(ours, engine, batches(2))
        assert all(check.agrees for check in verify_by_address(ledger.live("host")))
        peaks.append(ledger.peak_bytes("host", "reserved_bytes"))
        engine.close(destroy=True)
        gc.collect()
        assert ledger.in_use() == {}
    assert max(peaks) <= 1.01 * min(peaks)


def test_nothing_of_the_model_stays_in_memory_between_visits(tmp_path):
    ours = model(dtype=torch.bfloat16)
    refs = [weakref.ref(p.untyped_storage()) for p in ours.parameters()]
    engine = streamed(ours, tmp_path)
    gc.collect()
    assert all(ref() is None for ref in refs)
    ours(batches(1)[0]).backward()
    engine.finish_step()
    for parameter in ours.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.element_size()
        with pytest.raises(NotStreamable, match="outside of its module's forward pass"):
            torch.isnan(parameter)
        assert parameter.grad is None
    engine.close()


def test_step_reads_block_weights_twice_and_states_once(tmp_path):
    """Table II and the traffic that follows from it: 2P + 14P read and 14P written with 16-bit weights."""
    ours = model(dtype=torch.bfloat16, depth=6, hidden=256)
    engine = streamed(ours, tmp_path, checkpoints="device")
    train(ours, engine, batches(2))
    before = engine.transferred
    train(ours, engine, batches(1))
    read, written = (now - then for now, then in zip(engine.transferred, before, strict=True))
    blocks = sum(unit.numel for unit in engine.layout.units if unit.kind is Kind.BLOCK)
    others = sum(unit.numel for unit in engine.layout.units if unit.kind is not Kind.BLOCK)
    looked_up = sum(unit.numel for unit in engine.layout.units if unit.kind is Kind.LOOKED_UP)
    kept = engine.options.blocks_in_flight * engine.layout.units[5].numel  # from forward to backward
    # Modules outside the blocks are read once for both passes; the embedding once more for its update.
    expected = 16 * blocks - 2 * kept + 14 * others + 2 * looked_up
    assert read == pytest.approx(expected, rel=0.01)  # padding to 4096 bytes
    assert written == pytest.approx(14 * (blocks + others), rel=0.01)
    engine.close()


@pytest.mark.parametrize(("missing", "again"), [(False, 0), (True, 1)])
def test_delayed_update_reads_only_weights_of_parameters_without_gradient(tmp_path, missing, again):
    """Masters replace a unit's 16-bit weights; those of a parameter without a gradient must be read."""
    ours = model(dtype=torch.bfloat16, depth=6, hidden=256)
    engine = streamed(ours, tmp_path, checkpoints="device", wait=True)
    first = next(unit for unit in engine.layout.units if unit.kind is Kind.BLOCK)
    (ids,) = batches(1)
    ours(ids).backward()
    if missing:
        engine.updates._arrived.discard(first.parts[0].key)
    moved = []
    read = engine.state_store.read
    engine.state_store.read = lambda key, tensor, **how: moved.append(str(key)) or read(key, tensor, **how)
    before = {name: values.clone() for name, values in engine.read_weights()}
    moved.clear()
    engine.finish_step()
    assert moved.count(first.key) == again
    assert [unit.key for unit in engine.layout.units if unit.key in moved and unit is not first] == []
    after = {name: values.clone() for name, values in engine.read_weights()}
    kept = {first.parts[0].name} if missing else set()
    assert {name for name in before if torch.equal(before[name], after[name])} == kept
    engine.close()


def test_an_evaluation_between_forward_and_backward_changes_nothing(tmp_path):
    ours, theirs = model(), model()
    engine = streamed(ours, tmp_path)
    (ids,) = batches(1)
    loss = ours(ids)
    with torch.no_grad():
        assert ours(ids).item() == loss.item()
    loss.backward()
    engine.finish_step()
    train_in_memory(theirs, [ids])
    assert_equal(engine, theirs)
    engine.close()


def test_dropout_is_the_same_in_the_recomputation(tmp_path):
    ours, theirs = model(dropout=0.3), model(dropout=0.3)
    engine = streamed(ours, tmp_path)
    torch.manual_seed(7)
    losses = train(ours, engine, batches(3))
    torch.manual_seed(7)
    assert losses == train_in_memory(theirs, batches(3))
    engine.close()


def test_layer_run_twice_gets_the_sum_of_its_gradients(tmp_path):
    ours, theirs = model(order=(0, 1, 1, 2, 0, 3)), model(order=(0, 1, 1, 2, 0, 3))
    engine = streamed(ours, tmp_path)
    assert train(ours, engine, batches(3)) == train_in_memory(theirs, batches(3))
    assert_equal(engine, theirs)
    engine.close()


def test_tied_embeddings_and_frozen_parameters_train_as_in_memory(tmp_path):
    ours, theirs = model(tied=True, dtype=torch.bfloat16), model(tied=True, dtype=torch.bfloat16)
    for each in (ours, theirs):
        each.layers[0].requires_grad_(False)
        each.layers[2].up.weight.requires_grad_(False)
        each.norm.requires_grad_(False)
    engine = streamed(ours, tmp_path)
    assert train(ours, engine, batches(3)) == train_in_memory(theirs, batches(3))
    assert_equal(engine, theirs)
    engine.close()


def test_parameter_without_a_gradient_is_skipped_as_in_torch(tmp_path):
    ours, theirs = model(order=(0, 1, 3)), model(order=(0, 1, 3))
    engine = streamed(ours, tmp_path)
    train(ours, engine, batches(2))
    train_in_memory(theirs, batches(2))
    assert_equal(engine, theirs)
    assert {engine.steps[name] for name in engine.steps if name.startswith("layers.2.")} == {0}
    engine.close()


class Experts(nn.Module):
    """Two experts of several pieces each, one of which is idle."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(300, 300) for _ in range(2))

    def forward(self, x):
        return x + torch.tanh(self.experts[1](x))


def mixture():
    torch.manual_seed(0)
    return nn.Sequential(*(Experts() for _ in range(5)))  # more than there are slots


@pytest.mark.parametrize(
    "options", [{}, {"arm": "none"}, {"arm": "naive"}, {"wait": True}, {"clip": 1e9}, {"versions": 1}], ids=str
)
def test_pieces_without_gradients_hold_no_slot(tmp_path, monkeypatch, options):
    monkeypatch.setattr("memascend.engine.engine_state.WAIT_S", 20.0)
    ours, theirs = mixture(), mixture()
    engine = streamed(ours, tmp_path, piece_elements=1 << 16, **options)
    assert min(len(unit.pieces) for unit in engine.layout.units) > 2
    data = torch.randn(8, 300)
    optimizer = AdamW(theirs.parameters(), **SETTINGS)
    for _ in range(2):
        ours(data).square().sum().backward()
        engine.finish_step()
        theirs(data).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(engine, theirs)
    engine.close()


def test_blocks_used_only_in_an_earlier_pass_hold_no_slot(tmp_path, monkeypatch):
    monkeypatch.setattr("memascend.engine.engine_state.WAIT_S", 20.0)
    ours, theirs = mixture(), mixture()
    engine = streamed(ours, tmp_path, piece_elements=1 << 16, accumulate=2)
    data = torch.randn(8, 300)
    optimizer = AdamW(theirs.parameters(), **SETTINGS)
    for _ in range(2):
        for each in (ours, theirs):
            each(data).square().sum().backward()
            each[0](data).square().sum().backward()
        engine.finish_step()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(engine, theirs)
    engine.close()


class Growing(nn.Module):
    """A decoder with longer inputs than the encoder's, which are offloaded; with `sixteen` of another dtype, too."""

    def __init__(self, sixteen=False):
        super().__init__()
        self.encoder = nn.ModuleList(Block(256) for _ in range(2))
        self.decoder = nn.ModuleList(Block(256) for _ in range(2))
        self.sixteen = sixteen

    def forward(self, x, y):
        scale = torch.tensor(0.5)
        for layer in self.encoder:
            x = layer(x, scale=scale)
        y = y + x.mean()
        for layer in self.decoder:
            y = layer(y.to(torch.bfloat16) if self.sixteen else y, scale=scale)
        return y.square().mean()


@pytest.mark.parametrize("sixteen", [False, True], ids=["larger", "of another type"])
def test_block_inputs_may_change_size_or_type_within_a_pass(tmp_path, sixteen):
    torch.manual_seed(0)
    ours = Growing(sixteen)
    theirs = copy.deepcopy(ours)
    engine = streamed(ours, tmp_path)
    optimizer = AdamW(theirs.parameters(), **SETTINGS)
    x, waiting = torch.randn(2, 8, 256), []
    for length in (32, 32, 16):
        y = torch.randn(2, length, 256)
        with torch.autocast("cpu", torch.bfloat16, enabled=sixteen):
            losses = [each(x, y) for each in (ours, theirs)]
        waiting.append(sum(kept() is not None for kept in engine._inputs._kept))
        for loss in losses:
            loss.backward()
        engine.finish_step()
        optimizer.step()
        optimizer.zero_grad()
        assert losses[0].item() == losses[1].item()
    assert_equal(engine, theirs)
    assert waiting == ([2, 2, 2] if sixteen else [2, 4, 4])
    engine.close()


def test_blocks_are_found_and_unusable_models_refused():
    found = model(depth=3)
    assert find_blocks(found) == list(found.layers)
    with pytest.raises(NotStreamable, match="Linear has no list of layers"):
        find_blocks(nn.Linear(3, 3))
    shared = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    shared[1].weight = shared[0].weight
    with pytest.raises(NotStreamable, match=r"0\.weight is shared by the blocks 0 and 1"):
        ModelUnits(shared)
    mixed = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())
    with pytest.raises(NotStreamable, match=r"of several types \(float32, float64\)"):
        ModelUnits(mixed)


def test_gradient_checkpointing_of_transformers_is_refused(tmp_path):
    ours = model()
    engine = streamed(ours, tmp_path)
    ours.layers[1].gradient_checkpointing = True
    with pytest.raises(NotStreamable, match=r"gradient checkpointing of transformers is on in layers\.1"):
        ours(batches(1)[0])
    engine.close()


def test_the_next_step_reads_what_this_one_wrote(tmp_path):
    """A fence is needed between a block's write and its next read: both streams return all buffers in between."""
    ours, theirs = model(depth=2), model(depth=2)  # two blocks: the last written is soon the first read
    engine = streamed(ours, tmp_path, blocks_in_flight=2)
    assert train(ours, engine, batches(8)) == train_in_memory(theirs, batches(8))
    engine.close()


def test_run_resumes_from_its_last_completed_step_bit_for_bit(tmp_path):
    data, theirs = batches(6), model(dtype=torch.bfloat16)
    ours = model(dtype=torch.bfloat16)
    engine = streamed(ours, tmp_path)
    first = train(ours, engine, data[:3])
    engine.keep({"at": 3})
    ours(data[3]).backward()  # a step that is not completed
    engine.close()
    again = model(seed=5, dtype=torch.bfloat16)  # the same architecture with other values
    engine, facts = StreamingEngine.resume(again, tmp_path / "session", groups(again))
    assert facts == {"at": 3}
    assert first + train(again, engine, data[3:]) == train_in_memory(theirs, data)
    assert_equal(engine, theirs)
    engine.close()
    other = model(depth=5, dtype=torch.bfloat16)
    with pytest.raises(
        NotThisModel,
        match=r"this model has the part 'layers\.\d.*' of the weights, which it has not\. Create the model as it was",
    ):
        StreamingEngine.resume(other, tmp_path / "session", groups(other))


@pytest.mark.parametrize("chosen", [{}, {"versions": 1}], ids=["two versions", "one version"])
def test_states_in_pieces_of_earlier_version_resume_bit_for_bit(tmp_path, chosen):
    data, theirs = batches(4), model(depth=2, hidden=128)
    ours, again = (model(seed=seed, depth=2, hidden=128) for seed in (0, 5))
    now = ModelUnits(ours).layout
    assert [len(unit.pieces) for unit in now.units if unit.kind is Kind.BLOCK] == [1, 1]
    engine = streamed(ours, tmp_path, piece_elements=now.earlier_piece_elements, **chosen)
    assert [len(unit.pieces) for unit in engine.layout.units if unit.kind is Kind.BLOCK] == [2, 2]
    first = train(ours, engine, data[:2])
    engine.close()
    engine, _ = StreamingEngine.resume(again, tmp_path / "session", groups(again), EngineOptions(**chosen))
    assert first + train(again, engine, data[2:]) == train_in_memory(theirs, data)
    assert_equal(engine, theirs)
    engine.close()


def test_a_step_with_an_infinite_gradient_changes_nothing(tmp_path):
    ours, theirs = model(), model()
    engine = streamed(ours, tmp_path)
    data = batches(3)
    losses = train(ours, engine, data[:1])
    (ours(data[1]) * torch.inf).backward()
    assert engine.finish_step() is None
    losses += train(ours, engine, data[2:])
    assert losses == train_in_memory(theirs, [data[0], data[2]])
    assert_equal(engine, theirs)
    engine.close()


def test_error_during_backward_discards_the_step(tmp_path, caplog):
    ours, theirs = model(), model()
    engine = streamed(ours, tmp_path)
    data = batches(3)
    losses = train(ours, engine, data[:1])

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("the user's own mistake")

    hook = ours.layers[1].register_forward_hook(lambda module, args, out: Fails.apply(out))
    loss = ours(data[1])
    with pytest.raises(ValueError, match="the user's own mistake"):  # layers 2 and 3 have been updated by then
        loss.backward()
    hook.remove()
    with caplog.at_level(logging.WARNING, "memascend"):
        losses += train(ours, engine, data[1:])
    assert "was discarded after an error" in caplog.text
    assert losses == train_in_memory(theirs, data)
    assert_equal(engine, theirs)
    engine.close()


def test_unannounced_second_backward_pass_is_refused(tmp_path):
    ours = model()
    engine = streamed(ours, tmp_path)
    loss = ours(batches(1)[0])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"set their number per step \(accumulate=\)"):
        loss.backward()
    engine.close()


def test_step_bound_is_sum_of_slowest_resource_per_phase():
    rates = Rates(read=100.0, write=50.0, adamw=10.0)
    forward = Phase(name="forward", seconds=3.0, compute_s=1.0, read=200)
    backward = Phase(name="backward", seconds=9.0, compute_s=5.0, read=100, written=250, updated=20)
    limit = limit_of([forward, backward], rates)
    assert (limit.seconds, limit.bound_s) == (12.0, 2.0 + 6.0)  # reading; reading and writing on one path
    assert str(limit) == "67 % of the bound; bottleneck: SSD write"
    backward.updated = 100
    assert limit_of([forward, backward], rates).bottleneck == "AdamW"


@pytest.mark.parametrize("arm", ["optimized", "none"])
def test_measured_step_has_a_bound_and_trains_bit_identically(tmp_path, arm):
    ours, theirs = model(dropout=0.2), model(dropout=0.2)
    engine = streamed(ours, tmp_path, arm=arm, measure=True)
    assert engine.limit is None
    torch.manual_seed(5)
    losses = train(ours, engine, batches(3))
    torch.manual_seed(5)
    assert losses == train_in_memory(theirs, batches(3))
    assert_equal(engine, theirs)
    assert engine.limit.bound_s > 0
    assert engine.limit.bottleneck in ("compute", "AdamW", "SSD read", "SSD write")
    engine.close()
