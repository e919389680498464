"""The engine's count for a plan is what it moves, to the byte, and what its folder takes."""

import itertools
import json

import pytest
import torch
from torch import nn

from memascend.engine.layout import Kind
from memascend.engine.model_units import ModelUnits
from memascend.engine.options import EngineOptions
from memascend.engine.streaming import streaming
from memascend.engine.traffic import RECORDS, folder_bytes, matrix_uses, step_traffic
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator

HIDDEN, TOKENS = 32, 400
SLICED, WHOLE = 5000, 60  # words: a matrix of three slices, and one that is not sliced


class Model(nn.Module):
    def __init__(self, words=WHOLE, tied=False, depth=5, frozen=False, inner=300):
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, HIDDEN), nn.Linear(HIDDEN, words, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, inner), nn.Tanh(), nn.Linear(inner, HIDDEN)) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(HIDDEN)
        if tied:
            self.head.weight = self.embedding.weight
        if frozen:
            for layer in self.layers:
                layer[0].requires_grad_(False)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)), ids)


def moved_and_counted(folder, dtype=torch.float32, model=None, **options):
    """Return ((bytes read, written) of the third step, their count, bytes in the folder, their count)."""
    torch.manual_seed(0)
    made = Model(**(model or {})).to(dtype)
    words = made.embedding.num_embeddings
    ids = torch.arange(TOKENS) * (words // TOKENS or 1) % words  # every slice has some of them
    allocator = PageAlignedPinnedAllocator(Ledger(), lock=False)
    with streaming(folder, allocator=allocator) as session:
        session.hook(made)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-3, options=EngineOptions(**{"versions": 2, **options}))
        engine = session.engine
        for _ in range(3):
            before = engine.transferred
            for _ in range(engine.options.accumulate):
                made(ids).backward()
            optimizer.step()
        moved = [after - earlier for after, earlier in zip(engine.transferred, before, strict=True)]
        size = {"input_numel": TOKENS * HIDDEN, "uses": matrix_uses(engine.units)}
        facts = len(json.dumps(optimizer.facts()))
        counted = step_traffic(engine.layout, engine.options, facts_bytes=facts, **size)
        taken = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
        return moved, counted, taken, folder_bytes(engine.layout, engine.options, **size)


def assert_same(moved, counted, taken, expected):
    read, written = moved
    assert counted.total_read == read
    records = counted.written_by_kind()[RECORDS]
    # numbers in the records may have fewer digits than counted
    assert written == pytest.approx(counted.total_written, abs=records / 4)
    assert taken == pytest.approx(expected, rel=0.01)


WAYS = {
    "as they come": {},
    "two passes": {"accumulate": 2},
    "four passes": {"accumulate": 4},
    "clipped": {"clip": 1.0},
    "clipped, three passes": {"clip": 1.0, "accumulate": 3, "gradients": torch.bfloat16},
    "one version": {"versions": 1},
    "torn": {"versions": 1, "redo": False, "clip": 1.0, "accumulate": 2},
    "inputs on the device": {"checkpoints": "device", "accumulate": 2},
    "after backward": {"arm": "none"},
    "one after the other": {"arm": "naive", "accumulate": 2},
    "five blocks in flight": {"blocks_in_flight": 5},
    "one block in flight": {"blocks_in_flight": 1, "accumulate": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_counted_traffic_and_folder_size_match_a_real_step(tmp_path, way):
    assert_same(*moved_and_counted(tmp_path / "states", **WAYS[way]))


@pytest.mark.parametrize("tied", [False, True], ids=["two matrices", "tied"])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {"clip": 1.0, "accumulate": 2}),
        (torch.bfloat16, {"states": torch.bfloat16, "clip": 1.0}),
        (torch.bfloat16, {"versions": 1, "checkpoints": "device"}),
        pytest.param(torch.bfloat16, {"states": torch.int8, "clip": 1.0}, marks=pytest.mark.slow),
    ],
    ids=["fp32", "clipped", "bf16 states", "one version", "8 bits"],
)
@pytest.mark.parametrize("words", [SLICED, WHOLE], ids=["sliced", "whole"])
def test_reads_of_embedding_and_head_match_the_count(tmp_path, words, dtype, options, tied):
    assert_same(*moved_and_counted(tmp_path / "states", dtype, {"words": words, "tied": tied}, **options))


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True], ids=["two matrices", "tied"])
def test_slice_as_large_as_a_block_is_counted_exactly(tmp_path, tied, accumulate):
    model = {"words": SLICED, "tied": tied, "inner": 450}
    made = ModelUnits(Model(**model)).layout
    blocks, last = (
        {made.unit_numel(unit) for unit in made.units if unit.kind is kind} for kind in (Kind.BLOCK, Kind.SLICE)
    )
    assert blocks < last
    assert_same(*moved_and_counted(tmp_path / "states", model=model, clip=1.0, accumulate=accumulate))


@pytest.mark.parametrize("options", [{}, {"clip": 1.0}], ids=["as they come", "clipped"])
def test_traffic_with_frozen_weights_matches_the_count(tmp_path, options):
    assert_same(*moved_and_counted(tmp_path / "states", model={"frozen": True}, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "states"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16),
     (torch.float16, torch.float32), (torch.bfloat16, torch.int8)],
    ids=["fp32", "bf16", "bf16 states", "fp16", "8 bits"],
)  # fmt: skip
@pytest.mark.parametrize("tied", [False, True], ids=["two matrices", "tied"])
def test_traffic_of_every_option_combination_matches_the_count(tmp_path, dtype, states, tied):
    versions = [{"versions": 2}, {"versions": 1}, {"versions": 1, "redo": False}]
    ways = itertools.product((0.0, 1.0), (1, 2, 4), versions, ("tier", "device"))
    for number, (clip, accumulate, kept, checkpoints) in enumerate(ways):
        options = {"clip": clip, "accumulate": accumulate, "checkpoints": checkpoints, "states": states, **kept}
        model = {"words": SLICED, "tied": tied}
        assert_same(*moved_and_counted(tmp_path / str(number), dtype, model, **options))
