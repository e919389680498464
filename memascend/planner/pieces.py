"""The pieces of a model in the order of a forward pass: the units in which schedules stream it through the GPU.

A piece is a quarter of a block, because a block's matrices are streamed one by one, so that reading, copying and
computing overlap within the block. Adjacent blocks of deep models are folded together to limit a step to a few thousand
tasks. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memascend.planner.pool import partition_numel
from memascend.planner.spec import ModelSpec
from memascend.planner.workload import ELEMENT_BYTES, Workload

PIECES_PER_BLOCK = 4
EMBEDDING, OUTPUT = "embedding", "output"
FIRST, LAST = "first", "last"
_MOST_BLOCKS = 32  # with more blocks than this, adjacent ones are folded together


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of the model, for one forward pass of one batch.

    `weight_bytes`: its tensors in the training dtype, as one GPU needs them. `stored_bytes`: the part of them on the
    SSD, summed over the ranks; a tied output matrix is stored with the embedding and read a second time. `flops`:
    floating-point operations on one GPU. `checkpoint_bytes`: activation checkpoints that it leaves, on one GPU.
    `parameters`: elements, each counted once.
    """

    name: str
    weight_bytes: int
    stored_bytes: int
    flops: float
    checkpoint_bytes: int
    parameters: int


def cut(piece: Piece, numels: Sequence[int]) -> list[Piece]:
    """Cut a piece into slices in proportion to `numels`; sums are exact. A single slice keeps the piece's name."""
    if len(numels) < 2:
        return [piece]
    whole, begin, out = sum(numels), 0, []
    for number, numel in enumerate(numels):
        end = begin + numel

        def share(amount: int, begin: int = begin, end: int = end) -> int:
            return amount * end // whole - amount * begin // whole

        out.append(
            replace(
                piece,
                name=f"{piece.name} {number}",
                weight_bytes=share(piece.weight_bytes),
                stored_bytes=share(piece.stored_bytes),
                parameters=share(piece.parameters),
                flops=piece.flops * numel / whole,
            )
        )
        begin = end
    return out


def part_of(piece: Piece) -> str:
    """Return the part of the model: `EMBEDDING`, `OUTPUT` or another word, the same for a slice as for the whole."""
    return piece.name.partition(" ")[0]


def forward_flops(spec: ModelSpec, batch: int, context: int) -> float:
    """Return the floating-point operations of one forward pass on one GPU: 2 per weight and token, plus attention.

    Attention takes 4 C heads head_dim per token and block for scores and values, halved by the causal mask. In a
    mixture only the experts that a token visits count. The embedding is a look-up, the output matrix a product.
    """
    chosen = spec.experts_per_token / spec.experts if spec.experts else 1.0
    weights = float(spec.vocab * spec.hidden)
    for tensor in spec.tensors():
        if tensor.is_matrix and tensor.block is not None:
            weights += tensor.numel * (chosen if ".experts." in tensor.name else 1.0)
    attention = 2.0 * context * spec.heads * spec.head_dim * spec.layers
    return batch * context * (2.0 * weights + attention)


def checkpoint_bytes_a_block(work: Workload) -> int:
    """Return the bytes of one block's activation checkpoints, per batch and GPU (MemAscend, Eq. 1)."""
    return work.batch * work.context * work.spec.hidden * ELEMENT_BYTES[work.dtype]


def pieces(work: Workload) -> list[Piece]:
    """Return the pieces in the order of a forward pass: embedding, blocks, output. Sums are exact, to the byte."""
    spec, swaps, smallest = work.spec, work.swaps, work.swap_threshold_bytes / ELEMENT_BYTES[work.dtype]
    parts = {block: _Part() for block in (FIRST, *range(spec.layers), LAST)}
    for number, tensor in enumerate(spec.tensors()):
        block = (LAST if number else FIRST) if tensor.block is None else tensor.block
        parts[block].numel += tensor.numel
        share = partition_numel(tensor.numel, work.ranks)
        if swaps and share >= smallest:
            parts[block].stored += work.ranks * share
    if swaps and spec.tied:
        parts[LAST].stored += work.ranks * partition_numel(spec.vocab * spec.hidden, work.ranks)
    head_flops = 2.0 * work.batch * work.context * spec.vocab * spec.hidden
    a_block = (forward_flops(spec, work.batch, work.context) - head_flops) / spec.layers
    folded = -(-spec.layers // _MOST_BLOCKS)
    out = [_piece(work, EMBEDDING, parts[FIRST], 0.0)]
    for begin in range(0, spec.layers, folded):
        blocks = range(begin, min(begin + folded, spec.layers))
        out += _blocks(work, blocks, [parts[block] for block in blocks], a_block)
    return [*out, _piece(work, OUTPUT, parts[LAST], head_flops)]


@dataclass
class _Part:
    """Elements of a block, or of the tensors outside blocks: in total, and those that all ranks store on the SSD."""

    numel: int = 0
    stored: int = 0


def _blocks(work: Workload, blocks: range, parts: list[_Part], flops_a_block: float) -> list[Piece]:
    """Return the pieces of one block, or of adjacent blocks folded together."""
    numel, stored = sum(part.numel for part in parts), sum(part.stored for part in parts)
    kept = checkpoint_bytes_a_block(work) * len(blocks) if work.offloads_checkpoints else 0
    label = f"block {blocks[0]}" if len(blocks) == 1 else f"blocks {blocks[0]}-{blocks[-1]}"
    flops = flops_a_block * len(blocks) / PIECES_PER_BLOCK
    return [
        _piece(work, f"{label}.{n}", _Part(_share(numel, n), _share(stored, n)), flops, _share(kept, n))
        for n in range(PIECES_PER_BLOCK)
    ]


def _piece(work: Workload, name: str, part: _Part, flops: float, checkpoint_bytes: int = 0) -> Piece:
    element = ELEMENT_BYTES[work.dtype]
    return Piece(
        name=name,
        weight_bytes=part.numel * element,
        stored_bytes=part.stored * element,
        flops=flops,
        checkpoint_bytes=checkpoint_bytes,
        parameters=part.numel,
    )


def _share(whole: int, part: int) -> int:
    """Return a piece's share of a block's `whole`; the shares differ by at most one and sum to it."""
    return whole * (part + 1) // PIECES_PER_BLOCK - whole * part // PIECES_PER_BLOCK
