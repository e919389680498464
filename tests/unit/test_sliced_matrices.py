"""Embedding and head by slices: the bits of training in memory with the
same slices, and buffers without the vocabulary."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional

from memascend.engine.layout import Kind, rows_of_a_slice
from memascend.engine.matrices import slice_in_memory
from memascend.engine.options import EngineOptions
from memascend.engine.runtime import StreamingEngine
from memascend.engine.streaming import streaming
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.ops.adamw import AdamW
from memascend.ops.cross_entropy import LogitTransform, chunked_linear_cross_entropy
from memascend.ops.rows import WholeRows, slice_module, sliced_cross_entropy

HIDDEN, VOCABULARY = 128, 2000
PIECE = 1 << 16  # 512 rows: the vocabulary is four slices, the last of them smaller
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
WORDS = [(0, 512), (512, 1024), (1024, 1536), (1536, 2000)]


class Model(nn.Module):
    """A model. `uses`: how often the embedding is looked up; `answers`: words of the head."""

    def __init__(self, vocabulary=VOCABULARY, tied=False, bias=False, uses=1, hidden=HIDDEN, answers=None):
        super().__init__()
        self.embedding, self.uses = nn.Embedding(vocabulary, hidden, padding_idx=3), uses
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(hidden, hidden), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(hidden, answers or vocabulary, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = sum(self.embedding(ids) for _ in range(self.uses))
        for layer in self.layers:
            x = x + layer(x)
        labels = ids % self.head.out_features
        return functional.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


def model(dtype=torch.float32, **shape):
    torch.manual_seed(0)
    return Model(**shape).to(dtype)


def batches(count, vocabulary=VOCABULARY):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocabulary, (2, 24), generator=generator) for _ in range(count)]


def streamed(of, folder, ledger=None, **options):
    groups = [{"params": [p for p in of.parameters() if p.requires_grad], **SETTINGS}]
    allocator = PageAlignedPinnedAllocator(ledger or Ledger(), lock=False)
    options = EngineOptions(**{"piece_elements": PIECE, "checkpoints": "device", **options})
    return StreamingEngine.start(of, folder / "session", groups, options, allocator=allocator)


def train(of, engine, data):
    losses = []
    for ids in data:
        losses.append(of(ids))
        losses[-1].backward()
        engine.finish_step()
    return [loss.item() for loss in losses]


def train_in_memory(of, data):
    optimizer, losses = AdamW([p for p in of.parameters() if p.requires_grad], **SETTINGS), []
    for ids in data:
        losses.append(of(ids))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def assert_equal(engine, other):
    found = {name: values.clone() for name, values in engine.read_weights()}
    assert set(found) == {name for name, _ in other.named_parameters()}
    for name, values in other.named_parameters():
        assert torch.equal(found[name], values.cpu()), name


@pytest.mark.parametrize("arm", ["optimized", "naive", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [{}, {"tied": True}, {"bias": True}], ids=["untied", "tied", "bias"])
def test_streamed_slices_train_bit_identically_to_slices_in_memory(tmp_path, arm, dtype, shape):
    ours, theirs = model(dtype, **shape), model(dtype, **shape)
    engine = streamed(ours, tmp_path, arm=arm)
    undo = slice_in_memory(theirs, piece_elements=PIECE)
    assert [len(units) for units in engine.units.matrices.values()] == [4] * (1 if shape.get("tied") else 2)
    assert train(ours, engine, batches(3)) == train_in_memory(theirs, batches(3))
    assert_equal(engine, theirs)
    engine.close(destroy=True)
    undo()
    assert not {"forward"} & {*vars(theirs.head), *vars(ours.embedding), *vars(ours.head)}
    assert list(tmp_path.iterdir()) == []


def test_embedding_used_twice_with_evaluation_between_matches_torch_exactly(tmp_path):
    """No sum is over the vocabulary here; the head is small enough not to be sliced."""
    ours, theirs = model(uses=2, answers=100), model(uses=2, answers=100)
    engine, data = streamed(ours, tmp_path), batches(3)
    assert list(engine.units.matrices) == ["embedding"]
    losses = train(ours, engine, data[:2])
    with torch.no_grad():
        evaluated = ours(data[0]).item()
    assert losses + train(ours, engine, data[2:]) == train_in_memory(theirs, data)
    assert_equal(engine, theirs)
    with torch.no_grad():
        assert ours(data[0]).item() == theirs(data[0]).item() < evaluated
    engine.close()


def test_sliced_losses_equal_unsliced_ones_within_rounding(tmp_path):
    ours, theirs = model(), model()
    engine = streamed(ours, tmp_path)
    torch.testing.assert_close(train(ours, engine, batches(3)), train_in_memory(theirs, batches(3)), rtol=1e-5, atol=0)
    engine.close()


def test_the_host_peak_does_not_grow_with_the_vocabulary(tmp_path):
    """It grows only by the one slice that is smaller than the others. Unsliced,
    the matrices would take 4 MiB at 8,000 words."""
    peaks = []
    for vocabulary in (1000, 2000, 8000):
        ledger, ours = Ledger(), model(vocabulary=vocabulary)
        engine = streamed(ours, tmp_path, ledger, clip=1.0)
        train(ours, engine, batches(2, vocabulary))
        peaks.append(ledger.peak_bytes("host", "reserved_bytes"))
        engine.close(destroy=True)
        gc.collect()
        assert ledger.in_use() == {}
    assert max(peaks) - min(peaks) <= PIECE * 4
    unsliced = streamed(model(vocabulary=8000), tmp_path, ledger, clip=1.0, piece_elements=1 << 20)
    assert not unsliced.units.matrices
    assert ledger.peak_bytes("host", "reserved_bytes") > max(peaks) + 2 * 8000 * HIDDEN * 4
    unsliced.close()


def test_norm_and_clipping_cover_gradients_of_all_accumulated_passes(tmp_path):
    for shape in ({}, {"tied": True}):
        ours, theirs = model(**shape), model(**shape)
        engine, undo = streamed(ours, tmp_path, accumulate=2, clip=0.1), slice_in_memory(theirs, piece_elements=PIECE)
        optimizer = AdamW(theirs.parameters(), **SETTINGS)
        for each in (ours, theirs):
            for ids in batches(2):
                each(ids).backward()
        norm = engine.finish_step()
        expected = sum(float(p.grad.double().square().sum()) for p in theirs.parameters()) ** 0.5
        assert norm == pytest.approx(expected, rel=1e-6)
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        optimizer.step()
        for name, values in engine.read_weights():
            torch.testing.assert_close(values, theirs.get_parameter(name), rtol=1e-5, atol=1e-7, check_device=False)
        engine.close(destroy=True)
        undo()


def test_forward_without_backward_does_not_affect_later_training(tmp_path):
    ours, theirs = model(tied=True), model(tied=True)
    engine, undo = streamed(ours, tmp_path), slice_in_memory(theirs, piece_elements=PIECE)
    data = batches(3)
    dropped = ours(data[0])
    del dropped
    assert train(ours, engine, data[1:]) == train_in_memory(theirs, data[1:])
    assert_equal(engine, theirs)
    engine.close()
    undo()


def test_step_that_failed_in_backward_is_repeated_exactly(tmp_path):
    ours, theirs = model(tied=True), model(tied=True)
    engine, undo = streamed(ours, tmp_path), slice_in_memory(theirs, piece_elements=PIECE)
    data = batches(2)
    hook = ours.layers[1].register_full_backward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("in the middle")))
    with pytest.raises(RuntimeError, match="in the middle"):
        ours(data[0]).backward()
    hook.remove()
    assert train(ours, engine, data) == train_in_memory(theirs, data)
    assert_equal(engine, theirs)
    engine.close()
    undo()


def test_state_dicts_hold_whole_matrices_and_training_resumes_exactly(tmp_path):
    data, theirs = batches(4), model(bias=True)
    undo = slice_in_memory(theirs, piece_elements=PIECE)
    options = EngineOptions(piece_elements=PIECE, checkpoints="device")
    losses = []
    for resume in (False, True):
        ours = model(bias=True)
        with streaming(tmp_path / "session", resume=resume) as session:
            session.hook(ours)
            optimizer = session.optimizer(torch.optim.AdamW, options=options, **SETTINGS)
            for ids in data[2 * resume : 2 * resume + 2]:
                losses.append(ours(ids))
                losses[-1].backward()
                optimizer.step()
            weights = {name: values.clone() for name, values in ours.state_dict().items()}
            states = optimizer.state_dict()["state"]
            assert states[0]["exp_avg"].shape == (VOCABULARY, HIDDEN)
            optimizer.load_state_dict(optimizer.state_dict())
    assert [loss.item() for loss in losses] == train_in_memory(theirs, data)
    for name, values in theirs.named_parameters():
        assert torch.equal(weights[name], values), name
    undo()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("bias", [False, True])
def test_sliced_loss_equals_the_chunked_loss(softcap, bias):
    torch.manual_seed(0)
    transform = LogitTransform(scale=0.5, softcap=softcap)
    hidden, labels = torch.randn(2, 40, HIDDEN), torch.randint(0, VOCABULARY, (2, 40))
    labels[0, :7] = -100
    found = []
    for sliced in (False, True):
        torch.manual_seed(1)
        head, x = nn.Linear(HIDDEN, VOCABULARY, bias=bias), hidden.clone().requires_grad_()
        if sliced:
            slice_module(head, WholeRows(head.weight, WORDS))
            loss = sliced_cross_entropy(head, x, labels, transform=transform)
        else:
            settings = {"reduction": "sum", "transform": transform}
            loss = chunked_linear_cross_entropy(x, head.weight, labels, head.bias, **settings)
        (loss / 73).backward()
        found.append([loss.detach(), x.grad, *(p.grad for p in head.parameters())])
    for plain, by_slices in zip(*found, strict=True):
        torch.testing.assert_close(by_slices, plain, rtol=1e-5, atol=1e-6)


def test_slices_begin_at_boundaries_of_partial_sums_of_squares():
    for width, limit in ((3584, 1 << 24), (100, 1 << 22), (64, 1 << 16)):
        size = rows_of_a_slice(width, limit) * width
        assert size % (1 << 16) == 0
        assert limit // 2 < size <= limit
    assert rows_of_a_slice(127, 1 << 16) == 1 << 16  # a lower number of rows does not end where a sum does


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hook_of_sliced_matrix_is_refused_by_name(tmp_path, kind):
    ours = model()
    engine = streamed(ours, tmp_path)
    handle = getattr(ours.embedding.weight, kind)(lambda _: None)
    with pytest.raises(RuntimeError, match=r"embedding\.weight has a gradient hook.* remove it") as refused:
        ours(batches(1)[0])
    assert "\n" not in str(refused.value)
    handle.remove()
    train(ours, engine, batches(1))
    engine.close()


def test_matrix_in_a_block_keeps_its_gradient_hook(tmp_path):
    ours, seen = model(), []
    blocks = [*ours.layers, ours.embedding]
    engine = StreamingEngine.start(
        ours, tmp_path / "states", [{"params": list(ours.parameters()), **SETTINGS}], blocks=blocks
    )
    ours.embedding.weight.register_hook(lambda gradient: seen.append(tuple(gradient.shape)))
    train(ours, engine, batches(1))
    assert seen == [(VOCABULARY, HIDDEN)]
    engine.close()


def test_embedding_that_computes_otherwise_is_not_sliced(tmp_path):
    class Scaled(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) * 2

    ours = model()
    ours.embedding = Scaled(VOCABULARY, HIDDEN)
    engine = streamed(ours, tmp_path)
    assert list(engine.units.matrices) == ["head"]
    kinds = {unit.key: unit.kind for unit in engine.layout.units}
    assert kinds["embedding"] is Kind.RESIDENT
    train(ours, engine, batches(1))
    engine.close()


@pytest.mark.parametrize("label", [-1, 24, 1 << 40])
def test_label_out_of_bounds_raises_index_error_as_in_torch(label):
    head = nn.Linear(8, 24)
    labels = torch.tensor([3, label, -100])
    with pytest.raises(IndexError):
        torch.nn.functional.cross_entropy(head(torch.randn(3, 8)), labels)
    undo = slice_module(head, WholeRows(head.weight, [(0, 16), (16, 24)]))
    with pytest.raises(IndexError, match=f"label {label} is out of bounds"):
        sliced_cross_entropy(head, torch.randn(3, 8), labels)
    undo()
