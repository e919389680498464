"""Packed token files, written from text once per run, and access to their sequences."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from memascend.training.folder import TOKEN_BYTES

_DOCUMENTS_AT_A_TIME = 256
_DTYPE = np.dtype(f"<u{TOKEN_BYTES}")


def in_eval(number: int, seed: int, share: float) -> bool:
    """Return whether document `number` is used for evaluation: an independent random draw for each document."""
    return share > 0 and np.random.Generator(np.random.PCG64([seed, 7, number])).random() < share


def write_tokens(
    folder: Path,
    documents: Iterable[str],
    encode: Callable[[list[str]], list[list[int]]],
    *,
    seed: int,
    eval_share: float,
) -> dict[str, int]:
    """Write train.tokens and eval.tokens (little-endian uint32) in `folder`; return the document and token counts."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = {"train_documents": 0, "eval_documents": 0, "train_tokens": 0, "eval_tokens": 0}
    number = 0
    with (folder / "train.tokens").open("wb") as train, (folder / "eval.tokens").open("wb") as evaluation:
        for texts in _batches(documents, _DOCUMENTS_AT_A_TIME):
            for ids in encode(texts):
                name, file = ("eval", evaluation) if in_eval(number, seed, eval_share) else ("train", train)
                file.write(np.asarray(ids, dtype=_DTYPE).tobytes())
                counts[f"{name}_documents"] += 1
                counts[f"{name}_tokens"] += len(ids)
                number += 1
        for file in (train, evaluation):
            file.flush()
            os.fsync(file.fileno())
    return counts


def _batches(items: Iterable[str], size: int) -> Iterator[list[str]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def move_tail(folder: Path, tokens: int) -> None:
    """Move the last `tokens` of train.tokens to eval.tokens, for texts with too few documents to split."""
    with (folder / "train.tokens").open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - tokens * TOKEN_BYTES)
        file.seek(start)
        (folder / "eval.tokens").write_bytes(file.read())
        file.truncate(start)


class Sequences:
    """A token file as sequences of `context` tokens; an incomplete last sequence is left out."""

    def __init__(self, path: Path, context: int) -> None:
        tokens = path.stat().st_size // TOKEN_BYTES
        self._count = tokens // context
        self._context = context
        self._tokens = np.memmap(path, dtype=_DTYPE, mode="r") if tokens else np.zeros(0, dtype=_DTYPE)

    def __len__(self) -> int:
        return self._count

    def rows(self, numbers: Iterable[int]) -> np.ndarray:
        """Return the given sequences as an int64 array of shape (len(numbers), context)."""
        size = self._context
        return np.stack([self._tokens[n * size : (n + 1) * size] for n in numbers]).astype(np.int64)
