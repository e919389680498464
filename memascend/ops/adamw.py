"""AdamW over CPU memory, in one pass: one step as a function, and an optimizer that allocates its own states.

`adamw_` takes fp32 states, or bf16 states with stochastic rounding. `AdamW` is a torch optimizer on top of it whose
fp32 states come from an allocator, so that they are pinned, placed on NUMA nodes, booked by name and limited by a
budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from memascend import _C
from memascend.memory.pinned import Allocator, PageAlignedPinnedAllocator
from memascend.memory.placement import Placement
from memascend.memory.topology import Topology

_LOADED = _C.__name__  # importing it registers the operators


# More than eight parameters: the tensors and options are those of torch's own AdamW, for one tensor.
def adamw_(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    half_copy: torch.Tensor | None = None,
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
    """Update `param`, `exp_avg` and `exp_avg_sq` in place; the defaults are those of torch.optim.AdamW.

    All tensors are contiguous CPU tensors of one shape. The three states are all float32, or all bfloat16 and then
    rounded stochastically by a counter-based generator (ARS-5 keyed by `seed`, `step` and the element's index; 16 bits
    per state, pairwise independent): equal inputs give equal bits, with any number of threads and on any processor.
    `grad` is float32, float16 or bfloat16 and multiplied by `grad_scale` (1 / loss scale, clipping) as it is read.
    `half_copy` (float16 or bfloat16) receives the updated parameter, rounded to nearest. `step` counts from one.

    A slice of a larger tensor gives the bits of the whole if `element_offset` is the index of its first element.

    Raises ValueError for shapes, dtypes and options that do not fit. Raises RuntimeError, naming tensor and element, if
    a number is infinite or NaN before or after the step (or a variance is negative); the group of 32 elements around it
    then stays unchanged and the rest is updated. Call has_overflow or unscale_norm_overflow_ on the gradients first.
    """
    with torch.no_grad():
        torch.ops.memascend.adamw_(
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            half_copy,
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


def chunk_counts() -> tuple[int, int]:
    """Return how many chunks of 16,384 elements this process has updated on the NUMA node of their data and elsewhere.

    Only updates that were divided over several nodes with processors count.
    """
    return _C.numa_chunk_counts()


def divided_work(near: int, elsewhere: int, topology: Topology) -> dict[str, Any] | None:
    """Return, for a report, how updates were divided over nodes: nodes with processors and `chunk_counts` of all ranks.

    Returns None on a machine with one such node, where nothing can be divided.
    """
    nodes = [node.number for node in topology.with_cpus]
    return {"nodes": nodes, "near": near, "elsewhere": elsewhere} if len(nodes) > 1 else None


# The seed of stochastic rounding wherever the library runs the training itself: a resumed run rounds exactly as one
# that was not interrupted.
ROUNDING_SEED = 0x4D656D41
# The states that a parameter may need, by key, with the owner of their ledger entries.
STATE_OWNERS = {"master": "master_weights", "exp_avg": "momentum", "exp_avg_sq": "variance"}


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW over parameters in host memory, with fp32 states in memory from an allocator.

    A float32 parameter is its own master; a 16-bit parameter gets a float32 master ("master" in its state), of which it
    is the rounded copy. Results agree with torch's within 1e-6, and state dicts of float32 parameters are
    interchangeable with torch's (without amsgrad and maximize). Not thread-safe, like any torch optimizer.
    """

    OWNERS: Mapping[str, str] = STATE_OWNERS
    DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        allocator: Allocator | None = None,
        placements: Mapping[str, Placement] | None = None,
    ) -> None:
        """Create the optimizer.

        Args:
            params: as torch takes them; if they have names, the ledger's entries use these.
            allocator: allocates all states (default: exact pinned memory, no ledger).
            placements: NUMA policy by state ("master", "exp_avg" ...).

        States are allocated at a parameter's first step, or all at once by `allocate_states`. Raises ValueError for
        invalid options and for parameters that are not contiguous CPU tensors of 32 or 16 bits.
        """
        unknown = sorted(set(placements or {}) - set(self.OWNERS))
        if unknown:
            raise ValueError(f"AdamW: unknown state {unknown[0]!r} in placements: use {', '.join(self.OWNERS)}")
        _check_options(lr, betas, eps, weight_decay)
        self._allocator = PageAlignedPinnedAllocator() if allocator is None else allocator
        self._placements = dict(placements or {})
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does. Raises ValueError for all but contiguous CPU parameters of `DTYPES`."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            fits = parameter.device.type == "cpu" and parameter.is_contiguous()
            if not fits or parameter.dtype not in self.DTYPES:
                names = [str(dtype).removeprefix("torch.") for dtype in self.DTYPES]
                raise ValueError(
                    f"{type(self).__name__}: a parameter of {tuple(parameter.shape)} is {parameter.dtype} on "
                    f"{parameter.device}: contiguous CPU tensors of {_alternatives(names)} are needed"
                )

    def allocate_states(self) -> None:
        """Allocate the states of all trainable parameters now. Raises MemoryError, naming state and owner, if they do
        not fit."""
        for parameter, name in self._named():
            if parameter.requires_grad and not self.state[parameter]:
                self._begin(parameter, name)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient and return the value of `closure`, or None without one.

        Raises RuntimeError for infinite numbers and NaN, as `adamw_` does.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        names = dict(self._named())
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, names[parameter], group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load options and states; states are copied into memory of the allocator.

        torch's own method would cast float32 states to the 16 bits of a parameter. Raises ValueError for groups that do
        not match, and for amsgrad and maximize, which this optimizer does not support.
        """
        for group in state_dict["param_groups"]:
            for option in ("amsgrad", "maximize"):
                if group.get(option):
                    raise ValueError(
                        f"AdamW: the state was saved with {option}, which is not supported here: train without it"
                    )
        super().load_state_dict({**state_dict, "state": {}})  # checks the groups and releases the previous states
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, (parameter, name) in zip(numbers, self._named(), strict=True):
            if saved := state_dict["state"].get(number):
                state = self._begin(parameter, name)
                for key, value in saved.items():
                    if key in state:
                        state[key].copy_(torch.as_tensor(value))

    def _named(self) -> list[tuple[torch.Tensor, str]]:
        """Return the parameters in the order of the groups, with their names, or "parameter N" without names."""
        named = []
        for group in self.param_groups:
            names = group.get("param_names") or [None] * len(group["params"])
            for parameter, name in zip(group["params"], names, strict=True):
                named.append((parameter, name or f"parameter {len(named)}"))
        return named

    def _begin(self, parameter: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
        """Allocate and return the state of a parameter before its first step."""
        state: dict[str, torch.Tensor] = {"step": torch.tensor(0.0)}
        for key, owner in STATE_OWNERS.items():
            if key != "master" or parameter.dtype != torch.float32:
                state[key] = self._take(parameter.shape, f"{name} {key}", owner, self._placements.get(key))
        if "master" in state:
            state["master"].copy_(parameter.detach())
        self.state[parameter] = state
        return state

    def _take(
        self,
        shape: Sequence[int],
        name: str,
        owner: str,
        placement: Placement | None,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Allocate a state, booked as `name` under `owner`; one without elements is not booked."""
        numel = math.prod(shape)
        if numel == 0:
            return torch.empty(shape, dtype=dtype)
        return self._allocator.allocate(numel, dtype, name=name, owner=owner, placement=placement).view(shape)

    def _update(self, parameter: torch.Tensor, name: str, group: dict[str, Any]) -> None:
        """Update a parameter that has a gradient. Raises ValueError for a sparse gradient, amsgrad and maximize."""
        if parameter.grad.layout != torch.strided:
            raise ValueError(f"{type(self).__name__}: the gradient of {name} is sparse: use a dense one")
        if asked := [option for option in ("amsgrad", "maximize") if group.get(option)]:
            raise ValueError(
                f"{type(self).__name__}: a param group sets {asked[0]}, which is not supported here: remove it"
            )
        state = self.state[parameter] or self._begin(parameter, name)
        state["step"] += 1
        options = {"step": int(state["step"]), "lr": float(group["lr"])}
        options |= {key: group[key] for key in ("betas", "eps", "weight_decay")}
        self._advance(parameter, state, options)

    def _advance(self, parameter: torch.Tensor, state: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
        """Make the step of one parameter with the native kernel. `options`: those of `adamw_`."""
        master = state.get("master")
        adamw_(
            parameter.detach() if master is None else master,
            parameter.grad.contiguous(),
            state["exp_avg"],
            state["exp_avg_sq"],
            None if master is None else parameter.detach(),
            **options,
        )


def _alternatives(names: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _check_options(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raise ValueError for an option that is out of range."""
    for name, value in {"lr": float(lr), "eps": eps, "weight_decay": weight_decay}.items():
        if not value >= 0:
            raise ValueError(f"AdamW: {name} is {value}: it must be at least 0")
    for beta in betas:
        if not 0 <= beta < 1:
            raise ValueError(f"AdamW: a beta is {beta}: it must be at least 0 and below 1")
