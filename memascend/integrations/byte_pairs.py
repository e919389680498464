"""Training of a byte-level BPE tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

END_OF_TEXT = "<|endoftext|>"  # id 0
ALPHABET = 256  # ids that a byte tokenizer needs in addition to END_OF_TEXT


def train_byte_pairs(texts: Iterable[str], vocabulary: int) -> Any:
    """Train a ``tokenizers.Tokenizer`` with at most ``vocabulary`` ids (ALPHABET + 1 or more) on ``texts``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
