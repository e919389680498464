"""Models, tokenizer and text made by transformers and tokenizers from local files: no hub, no download.

The text is the source code of Python's standard library, which every installation has; the tokenizer is trained on it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from memascend.integrations.byte_pairs import train_byte_pairs


def standard_library_text(limit_bytes: int = 24_000_000) -> list[str]:
    """Return the sources of the standard library in sorted order, without tests and packages.

    Stops at the file with which the total reaches ``limit_bytes`` characters. Raises ValueError if none are installed.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"}
    texts, total = [], 0
    for path in sorted(root.rglob("*.py")):
        if skip & set(path.relative_to(root).parts):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        texts.append(text)
        total += len(text)
        if total >= limit_bytes:
            break
    if not texts:
        raise ValueError(f"no Python sources under {root}; install the standard library's sources")
    return texts


def token_file(cache_dir: Path, vocabulary: int, tokens: int = 2_000_000) -> Path:
    """Return a ``.npy`` file of int32 token ids (1-D): the standard library's text in a byte-level BPE trained on it.

    ``vocabulary`` is the largest number of ids, ``tokens`` the largest length. The file is made once per vocabulary and
    cached in ``cache_dir`` with its tokenizer.
    """
    out = cache_dir / f"stdlib-bpe{vocabulary}.npy"
    if out.exists():
        return out
    cache_dir.mkdir(parents=True, exist_ok=True)
    texts = standard_library_text()
    tokenizer = train_byte_pairs(texts[:400], vocabulary)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch_fast(texts):
        ids += [0, *encoding.ids]
        if len(ids) >= tokens:
            break
    tokenizer.save(str(cache_dir / f"stdlib-bpe{vocabulary}.json"))
    _write_atomically(out, np.asarray(ids[:tokens], dtype=np.int32))
    return out


def _write_atomically(path: Path, array: np.ndarray) -> None:
    """Write a ``.npy`` file under a temporary name and rename it, since ranks may write the same file at once."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".npy")
    with os.fdopen(handle, "wb") as f:
        np.save(f, array)
    os.replace(name, path)


def batches(tokens: np.ndarray, sequence: int, batch: int, ranks: int, rank: int, step: int) -> np.ndarray:
    """Return the input ids of one step, int64 of shape (batch, sequence): consecutive windows, distinct by rank."""
    first = (step * ranks + rank) * batch * sequence
    wrapped = np.arange(first, first + batch * sequence) % (len(tokens) - 1)
    return np.asarray(tokens[wrapped], dtype=np.int64).reshape(batch, sequence)


@contextlib.contextmanager
def _initialised_with(std: float) -> Iterator[None]:
    """Draw linear and embedding weights from N(0, std^2), as transformers does, and set biases to zero.

    Under ``deepspeed.zero.Init`` a module's weights are partitioned as soon as it is constructed, so transformers' own
    initialisation, which runs later, finds nothing to fill.
    """
    import torch

    def normal(module: Any) -> None:
        torch.nn.init.normal_(module.weight, std=std)
        if getattr(module, "bias", None) is not None:
            torch.nn.init.zeros_(module.bias)

    stock = torch.nn.Linear.reset_parameters, torch.nn.Embedding.reset_parameters
    torch.nn.Linear.reset_parameters = torch.nn.Embedding.reset_parameters = normal
    try:
        yield
    finally:
        torch.nn.Linear.reset_parameters, torch.nn.Embedding.reset_parameters = stock


def causal_lm(config: dict[str, Any], *, checkpointing: str) -> Any:
    """Return a randomly initialised causal language model of ``config`` (a dict as in ``config.json``), for training.

    ``checkpointing`` is the kind of gradient checkpointing: "reentrant", "non-reentrant" or "none".
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from memascend.activation.checkpointing import switch_on  # imported here because tokens alone need no torch

    settings = {k: v for k, v in json.loads(json.dumps(config)).items() if k != "architectures"}
    model_config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model_config.use_cache = False
    with _initialised_with(model_config.initializer_range):
        model = AutoModelForCausalLM.from_config(model_config, attn_implementation="sdpa")
    if checkpointing != "none":
        switch_on(model, {"use_reentrant": checkpointing == "reentrant"})
    model.train()
    return model
