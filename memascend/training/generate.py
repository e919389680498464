"""`memascend generate`: generate text with a run's newest weights, read block by block from its states on the SSD."""

from __future__ import annotations

import time
from pathlib import Path

from memascend.integrations import text
from memascend.training.folder import RunFolder
from memascend.training.kept import kept_backend, kept_source, require_run
from memascend.training.preparation import read_prepared
from memascend.training.progress import read_metrics


def generate(run: Path, prompt: str, tokens: int, temperature: float = 0.0, seed: int = 0) -> str:
    """Print `prompt` and at most `tokens` following tokens as they are generated.

    Returns a line that says which step the weights are from and how long generation took. Each token reads all weights
    once, and no more of them are in memory than in a training step. Keys and values of the tokens so far are kept in
    memory. With `temperature` 0 the most likely token is taken, otherwise one is sampled with `seed`. A step whose
    update was interrupted is completed first.

    Raises a one-line ValueError if `run` is not a run, is training or has no states on the SSD, or if prompt and tokens
    exceed the model's positions.
    """
    folder = RunFolder(run)
    require_run(folder)
    backend = kept_backend(folder)
    with folder.held(resume=True):
        if backend is None or not backend.kept_step():
            raise ValueError(_why_none(folder, streams=backend is not None))
        if not folder.tokenizer.is_dir():
            raise ValueError(f"{folder.tokenizer} does not exist: generate needs the run's tokenizer")
        step = backend.open_kept(kept_source(folder))
        try:
            began = time.perf_counter()
            made = text.go_on(
                backend.model, folder.tokenizer, prompt, tokens, backend.device, temperature=temperature, seed=seed
            )
            seconds = time.perf_counter() - began
        finally:
            backend.close_kept()
    return f"({made} tokens in {seconds:.1f} s, from the weights of step {step} of {run})"


def _why_none(folder: RunFolder, *, streams: bool) -> str:
    """Return why a run has no states to read weights from, and what to do. `streams`: whether its system keeps
    states."""
    if folder.model.exists():
        return (
            f"{folder.root} has no states on the SSD (--system lohan keeps them with --checkpoints weights or none): "
            f"load its newest checkpoint, {folder.model}, with from_pretrained"
        )
    if streams:
        made = max((row["step"] for row in read_metrics(folder.metrics)), default=0)
        if made > 1:  # the first step may have been interrupted before its states were kept
            return f"{folder.root} has finished {made} steps, but its states are missing: restore them"
        return f"{folder.root} has no weights yet: no step of it was completed"
    if read_prepared(folder) is None:
        return f"{folder.root} has no weights yet: it ended before training began; continue it with train --resume"
    return (
        f"{folder.root} has no states on the SSD, and no checkpoint: generate needs the states of a run of --system "
        "lohan with --checkpoints weights or none"
    )
