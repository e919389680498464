"""Saving and restoring a process's random generators: tensors go into the tensor file, the rest into JSON."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch

from memascend.storage.tensor_file import TensorFileReader


def tensors() -> dict[str, torch.Tensor]:
    """Return the states of torch's CPU generator and of the current GPU's generator, as uint8 tensors by name."""
    states = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["random.cuda"] = torch.cuda.get_rng_state()
    return states


def facts() -> dict[str, Any]:
    """Return the states of Python's and numpy's generators, as JSON types."""
    version, words, gauss = random.getstate()
    return {
        "python_random": [version, list(words), gauss],
        "numpy_random": [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
    }


def as_json() -> dict[str, Any]:
    """Return the combined content of `tensors` and `facts` as JSON types, for a file that cannot store tensors."""
    raw = {name: base64.b64encode(bytes(value.numpy())).decode() for name, value in tensors().items()}
    return {"tensors": raw, **facts()}


def restore_json(saved: dict[str, Any]) -> None:
    """Restore all generators from the result of `as_json`."""
    for name in tensors():
        value = torch.frombuffer(bytearray(base64.b64decode(saved["tensors"][name])), dtype=torch.uint8)
        (torch.set_rng_state if name == "random.cpu" else torch.cuda.set_rng_state)(value)
    _restore_others(saved)


def restore(reader: TensorFileReader, saved: dict[str, Any]) -> None:
    """Restore all generators from the tensors in `reader` (`tensors`) and the JSON in `saved` (`facts`)."""
    for name, value in tensors().items():
        reader.read_into(name, value)
        (torch.set_rng_state if name == "random.cpu" else torch.cuda.set_rng_state)(value)
    _restore_others(saved)


def _restore_others(saved: dict[str, Any]) -> None:
    version, words, gauss = saved["python_random"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(saved["numpy_random"]))
