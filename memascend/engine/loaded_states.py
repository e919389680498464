"""Conversion of loaded states to the form of a layout: they are checked before anything changes, and encoded.

8-bit moments (`Layout.states` torch.int8) come as codes and scales, as in `memascend.ops.adamw8.AdamW8bit`, or as
numbers, as in torch.optim: these are encoded, rounded to nearest, a few at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from memascend.engine.layout import Layout, numel_of_state
from memascend.ops.adamw8 import encode_moments, scales_shape

_LARGEST = torch.finfo(torch.float32).max
_ELEMENTS = 1 << 18  # at a time, in whole blocks: encoding takes some 50 bytes per element


def checked(layout: Layout, name: str, shape: torch.Size, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the states of one parameter of this shape. Raises ValueError if one is missing, has another shape, or is
    of another kind than in the layout."""
    moments = ("exp_avg", "exp_avg_sq")
    codes = any(isinstance(found := saved.get(key), torch.Tensor) and found.dtype == torch.uint8 for key in moments)
    if codes and layout.states != torch.int8:
        kind = str(layout.states).removeprefix("torch.")
        raise ValueError(
            f"{name}: its moments are 8-bit codes in the loaded state, but {kind} here: decode them "
            "(memascend.ops.adamw8.decode_moments), or train with EngineOptions(states=torch.int8)"
        )
    needed = (*moments, "scales") if codes else moments
    if missing := [key for key in needed if not isinstance(saved.get(key), torch.Tensor)]:
        raise ValueError(f"{name}: {missing[0]} is missing in the loaded state")
    states = {key: saved[key] for key in ("master", *needed) if saved.get(key) is not None}
    for key, values in states.items():
        wanted = shape_of(key, shape)
        if tuple(values.shape) != wanted:
            of = f"its blocks {wanted}" if key == "scales" else f"the parameter {wanted}"
            raise ValueError(f"{name}: {key} has shape {tuple(values.shape)}, and {of}")
        if codes and key != "master" and values.dtype != torch.uint8:
            raise ValueError(f"{name}: {key} is {values.dtype} with 8-bit codes: all three must be torch.uint8")
    if layout.states == torch.int8 and not codes:
        _require_encodable(name, states)
    return states


def _require_encodable(name: str, states: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError for numbers that no code can represent: infinite, NaN, too large, or a negative variance."""
    for key in ("exp_avg", "exp_avg_sq"):
        for part in states[key].reshape(-1).split(_ELEMENTS):
            if part.numel():
                least, most = (float(each) for each in torch.aminmax(part.float()))
                most = max(most, -least)
                # The largest scale is 2^126; for a variance it is the scale of the square root.
                limit, negative = (2.0**126, "") if key == "exp_avg" else (_LARGEST, " or negative")
                if not most <= limit or (negative and least < 0):
                    raise ValueError(
                        f"{name}: {key} has values in the loaded state that are NaN, infinite{negative}, or above "
                        f"{limit:.3g}, which 8-bit codes cannot represent: load the state of an earlier step"
                    )


def as_kept(layout: Layout, states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `checked` states in the form that `TierContents.write_states` takes."""
    if layout.states != torch.int8 or "scales" in states:
        return states
    momentum, variance = (states[key].reshape(-1).split(_ELEMENTS) for key in ("exp_avg", "exp_avg_sq"))
    made = none(layout, sum(map(len, momentum)))
    begin = 0
    for part in zip(momentum, variance, strict=True):
        end = begin + len(part[0])
        for key, values in zip(layout.state_names, encode_moments(*part), strict=True):
            made[key][numel_of_state(key, begin) : numel_of_state(key, end)].copy_(values.reshape(-1))
        begin = end
    return {**states, **made}


def none(layout: Layout, numel: int) -> dict[str, torch.Tensor]:
    """Return the flat moments of `numel` elements before the first step."""
    keys = [key for key in layout.state_names if key != "master"]
    return {key: torch.zeros(numel_of_state(key, numel), dtype=layout.stored_states) for key in keys}


def shape_of(state: str, shape: torch.Size) -> tuple[int, ...]:
    """Return the shape of a state in an optimizer's `state_dict`, for a parameter of this shape."""
    return scales_shape(math.prod(shape)) if state == "scales" else tuple(shape)
