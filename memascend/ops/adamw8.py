"""AdamW with bf16 parameters and 8-bit moments: 4.06 bytes per parameter; fp32 states with a bf16 copy take 14.

The bf16 parameter, rounded stochastically, is the only master. The moments are quantised block by block (Dettmers et
al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861) in a format of three uint8 tensors:

- A block is 32 consecutive elements of a tensor, as in OCP's Microscaling formats and in FlashOptim (arXiv 2602.23349):
  an outlier spoils the resolution of 31 neighbours, not of 2,047, and a block fills the registers for one iteration.
- `scales` holds two powers of two per block, one per moment, as biased exponents of float32, which are at least 8
  (2^-119; smaller ones are read as 8). If the largest value itself were the scale, it would change in every step and
  with it every other value of the block. With powers of two the grid stays the same, and so does an unchanged value.
- `exp_avg` holds a sign, 3 bits of exponent and 4 of fraction: steps of 1/32 to 1/16 of the value over 7 octaves, and
  below them evenly spaced steps of 2^-10 of the scale.
- `exp_avg_sq` holds the square root in 3 bits of exponent and 5 of fraction: steps of 1/64 to 1/32 of the value over 7
  octaves, and below them steps of 2^-11 of the scale. The update needs the root anyway, and in 8 bits the root has the
  range of a variance in 16. A code is never zero: a value that would be rounded to zero takes the smallest code, since
  a zero under a nonzero momentum would make a huge step (the zero point problem of Li et al., arXiv 2309.01507).

Both moments are rounded stochastically. Rounded to nearest, an average with beta2 = 0.999 never moves: a step changes
the root by at most 1/2000 of its value when the gradients fall, but half a step of the code is 1/128 or more. The
average goes stale (Topollai and Choromanska, arXiv 2603.16731, who reset the states instead). With stochastic rounding
the expectation is exact, however small a change is. Each update adds at most (step of the code) * (change) to the
variance of the stored value, because a value that has not changed is on the grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from memascend import _C
from memascend.memory.pinned import Allocator
from memascend.memory.placement import Placement
from memascend.ops.adamw import AdamW

_LOADED = _C.__name__  # importing it registers the operators

BLOCK = 32
"""Elements that share a scale. Tensors are cut at multiples of it."""
BYTES_PER_PARAMETER = 2 + 1 + 1 + 2 / BLOCK

_MOMENTUM_BITS, _ROOT_BITS = 4, 5  # bits of the fraction
_LINEAR = 2.0**-6  # codes below this value are evenly spaced
_EXPONENTS = 8, 253  # smallest and largest biased exponent of a scale


# More than eight parameters: those of `adamw_`, and the scales of the codes.
def adamw8_(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    scales: torch.Tensor,
    *,
    step: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    grad_scale: float = 1.0,
    seed: int = 0,
    element_offset: int = 0,
) -> None:
    """Update `param`, `exp_avg`, `exp_avg_sq` and `scales` in place; the defaults are those of torch.optim.AdamW.

    All tensors are contiguous CPU tensors. `param` is bfloat16; `grad` is float32, float16 or bfloat16, has the shape
    of `param` and is multiplied by `grad_scale` as it is read; `exp_avg` and `exp_avg_sq` are uint8 codes of the shape
    of `param`, and `scales` is uint8 of `scales_shape(param.numel())`. Before the first step all three are zero. `step`
    counts from one.

    The parameter is updated with the new moments in float32, before they are rounded. The random numbers are those of
    `adamw_`, keyed by `seed`, `step` and the element's index: equal inputs give equal bits, with any number of threads
    and on any processor. A slice of a larger tensor that begins at a multiple of 32 gives the bits of the whole if
    `element_offset` is the index of its first element.

    Raises ValueError for shapes, dtypes and options that do not fit, among them an `element_offset` inside a block.
    Raises RuntimeError, naming tensor and element, if a number is infinite or NaN before or after the step; its block
    then stays unchanged and the rest is updated. Call has_overflow or unscale_norm_overflow_ on the gradients first.
    """
    with torch.no_grad():
        torch.ops.memascend.adamw8_(
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            scales,
            step=step,
            lr=lr,
            beta1=betas[0],
            beta2=betas[1],
            eps=eps,
            weight_decay=weight_decay,
            grad_scale=grad_scale,
            seed=seed,
            element_offset=element_offset,
        )


def scales_shape(numel: int) -> tuple[int, int]:
    """Return the shape of the scales of `numel` elements: one row per block begun, with the momentum's scale first."""
    return -(-numel // BLOCK), 2


def decode_moments(
    exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return momentum and variance as new float32 tensors of the codes' shape, together 8 bytes per element."""
    by_block = _powers_of_two(scales.int().clamp(min=_EXPONENTS[0]))
    by_element = by_block.repeat_interleave(BLOCK, dim=0)[: exp_avg.numel()]
    sign = 1.0 - 2.0 * (exp_avg.flatten() >> 7).float()
    momentum = sign * _value_of(exp_avg.flatten() & 127, _MOMENTUM_BITS) * by_element[:, 0]
    root = _value_of(exp_avg_sq.flatten(), _ROOT_BITS) * by_element[:, 1]
    return momentum.view(exp_avg.shape), root.square().view(exp_avg_sq.shape)


def encode_moments(momentum: torch.Tensor, variance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the codes of both moments, rounded to nearest, and their scales, for states of another optimizer.

    Encoding the result of `decode_moments` gives the same codes, except for a variance below about 1e-38. Raises
    ValueError for numbers that are infinite, NaN or, in the variance, negative.
    """
    root = variance.float().sqrt()
    codes, exponents = [], []
    for name, values, bits in (("momentum", momentum.float(), _MOMENTUM_BITS), ("variance", root, _ROOT_BITS)):
        blocks = _blocks(values.abs())
        largest = blocks.amax(dim=1).view(torch.int32) if blocks.numel() else torch.zeros(0, dtype=torch.int32)
        exponent = ((largest + (1 << (23 - bits)) - 1) >> 23).clamp(min=_EXPONENTS[0])
        if (exponent > _EXPONENTS[1]).any():
            raise ValueError(f"adamw8: the {name} has values that are infinite, NaN, negative, or at least 2^127")
        relative = blocks.double() / _powers_of_two(exponent).double().unsqueeze(1)
        codes.append(_nearest_code(relative, bits).flatten()[: values.numel()])
        exponents.append(exponent.to(torch.uint8))
    signed = codes[0] | torch.signbit(momentum).flatten().to(torch.uint8) << 7
    return signed.view(momentum.shape), codes[1].clamp(min=1).view(variance.shape), torch.stack(exponents, dim=1)


def rounding_bounds(momentum: torch.Tensor, variance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest change of one rounding, for each element of the momentum and of the variance's square root.

    The momentum moves by less than the larger of 1/16 of its value and 2^-10 of its block's scale, the root by less
    than the larger of 1/32 of its value and 2^-11 of the scale; the scale is less than twice the block's largest value.
    """
    bounds = []
    for values, bits in ((momentum.float().abs(), _MOMENTUM_BITS), (variance.float().sqrt(), _ROOT_BITS)):
        largest = _blocks(values).amax(dim=1).repeat_interleave(BLOCK)[: values.numel()].view(values.shape)
        bounds.append(torch.maximum(values * 2.0**-bits, largest * 2.0 ** -(bits + 5)))
    return bounds[0], bounds[1]


def _blocks(values: torch.Tensor) -> torch.Tensor:
    """Return the values as one row per block, the last one padded with zeros."""
    flat = values.flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)


def _powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return the powers of two, in float32, that have these biased exponents."""
    return (exponents << 23).view(torch.float32)


def _value_of(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values of codes without sign, at a scale of one."""
    exponent, fraction = codes.int() >> bits, (codes.int() & ((1 << bits) - 1)).float() * 2.0**-bits
    return torch.where(exponent == 0, fraction * _LINEAR, (1 + fraction) * _powers_of_two(exponent + 127 - 7))


def _nearest_code(relative: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes nearest to values that are given relative to the scale and without sign."""
    values = _value_of(torch.arange(8 << bits, dtype=torch.uint8), bits).double()
    middles = (values[1:] + values[:-1]) / 2
    return torch.bucketize(relative, middles).to(torch.uint8)


class AdamW8bit(AdamW):
    """AdamW over bfloat16 parameters in host memory, with 8-bit moments in memory from an allocator (`adamw8_`).

    Not thread-safe, like any torch optimizer. A state dict has codes and scales; `decode_moments` decodes them.
    """

    OWNERS: Mapping[str, str] = {"exp_avg": "momentum", "exp_avg_sq": "variance", "scales": "variance"}
    DTYPES = (torch.bfloat16,)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        seed: int = 0,
        allocator: Allocator | None = None,
        placements: Mapping[str, Placement] | None = None,
    ) -> None:
        """Create the optimizer; `params`, `allocator` and `placements` are those of AdamW.

        `seed` seeds the stochastic rounding. A run resumed from a state dict draws the same random numbers as an
        uninterrupted one if its seed and the order of its parameters are the same.

        Raises ValueError for invalid options and for parameters that are not contiguous bfloat16 CPU tensors.
        """
        self._seed = seed
        self._first_elements: dict[torch.Tensor, int] = {}
        self._elements = 0
        super().__init__(params, lr, betas, eps, weight_decay, allocator=allocator, placements=placements)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as AdamW does, and number its elements for the stochastic rounding."""
        super().add_param_group(param_group)
        # Elements are numbered over all parameters, and each parameter begins a new block.
        for parameter in self.param_groups[-1]["params"]:
            self._first_elements[parameter] = self._elements
            self._elements += scales_shape(parameter.numel())[0] * BLOCK

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load options and states.

        Raises ValueError for states of another optimizer, which `encode_moments` converts.
        """
        for number, state in state_dict["state"].items():
            for key in self.OWNERS:
                if key not in state or state[key].dtype != torch.uint8:
                    raise ValueError(
                        f"AdamW8bit: {key} of parameter {number} is not a uint8 tensor: convert float32 states with "
                        "encode_moments"
                    )
        super().load_state_dict(state_dict)

    def _begin(self, parameter: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {"step": torch.tensor(0.0)}
        for key, owner in self.OWNERS.items():
            shape = scales_shape(parameter.numel()) if key == "scales" else parameter.shape
            state[key] = self._take(shape, f"{name} {key}", owner, self._placements.get(key), torch.uint8)
        self.state[parameter] = state
        return state

    def _advance(self, parameter: torch.Tensor, state: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
        adamw8_(
            parameter.detach(),
            parameter.grad.contiguous(),
            state["exp_avg"],
            state["exp_avg_sq"],
            state["scales"],
            seed=self._seed,
            element_offset=self._first_elements[parameter],
            **options,
        )
