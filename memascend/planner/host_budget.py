"""Comparison of a plan with a host-memory budget before anything is allocated, and changes that would make it fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from memascend import systems
from memascend.planner.footprint import Plan, plan
from memascend.planner.limits import Limits, largest_model, largest_sizes
from memascend.planner.workload import Workload

GIB = 2**30
# How a change is worded: as flags of `plan` and `train`, or as keys of a DeepSpeed configuration.
FLAGS = {
    "batch": "--batch {}",
    "context": "--context {}",
    "checkpointing": "--checkpointing {}",
    "gradients": "--gradients {}",
    "states": "--states {}",
    "system": "--system {}",
    "host_memory": "--host-memory",
}
KEYS = {
    "batch": '"train_micro_batch_size_per_gpu": {}',
    "context": "{} tokens per sequence",
    "checkpointing": '"memascend": {{"checkpointing": "{}"}}',
    "gradients": '"data_types": {{"grad_accum_dtype": "{}"}}',
    "states": '"memascend": {{"optimizer_states": "{}"}}',
    "system": 'the section "{}"',
    "host_memory": '"host_memory"',
}


class HostMemoryTooSmall(ValueError):
    """Raised when a run is planned to exceed its host-memory budget.

    `needed_bytes` and `budget_bytes` are the two sizes. `fits` lists changes that would fit, each as a dict with the
    field names of Workload (or `checkpointing` of its stack).
    """

    def __init__(self, made: Plan, budget_bytes: int, fits: list[Change], words: Mapping[str, str]) -> None:
        self.needed_bytes, self.budget_bytes = made.host_bytes, budget_bytes
        self.fits = [change.settings for change in fits]
        parts = made.components()
        name = max(parts, key=lambda part: parts[part])
        ways = [change.text(words) for change in fits]
        super().__init__(
            f"this run needs {_gib(made.host_bytes)} of host memory, {_gib(made.host_bytes - budget_bytes)} more than "
            f"the {words['host_memory']} of {_gib(budget_bytes)}; largest part: {name}, {_gib(parts[name])}; "
            + (f"what fits: {'; or '.join(ways)}" if ways else _nothing(made.work, budget_bytes, words))
        )


@dataclass(frozen=True, kw_only=True)
class Change:
    """Changed settings of a run, and the host memory that it then needs."""

    settings: dict[str, str | int]
    host_bytes: int

    def words(self, words: Mapping[str, str]) -> str:
        """Return the change as flags or keys, without its size."""
        return " ".join(words[name].format(value) for name, value in self.settings.items())

    def text(self, words: Mapping[str, str] = FLAGS) -> str:
        """Return the change as flags or keys, with the host memory that it leads to."""
        return f"{self.words(words)} ({_gib(self.host_bytes)})"


def require_host_memory(work: Workload, budget_bytes: int | None = None, *, words: Mapping[str, str] = FLAGS) -> Plan:
    """Return the plan of `work` if its host memory is within the budget. Nothing is allocated.

    The budget defaults to `work.host_memory`; None means no limit. Raises HostMemoryTooSmall, a one-line ValueError
    that says how much is missing, what the largest part is, and what would fit, in `words` (FLAGS or KEYS).
    """
    budget_bytes = work.host_memory if budget_bytes is None else budget_bytes
    made = plan(work)
    if budget_bytes is None or made.host_bytes <= budget_bytes:
        return made
    raise HostMemoryTooSmall(made, budget_bytes, what_fits(work, budget_bytes, words=words), words)


def what_fits(work: Workload, budget_bytes: int, *, words: Mapping[str, str] = FLAGS) -> list[Change]:
    """Return changes that bring the run under the budget; empty if nothing does.

    These are all single changes that suffice or, if none does, the first combination that does. Batch and context are
    the largest that fit. The system with the least host memory is suggested only if `words` is FLAGS, since a DeepSpeed
    configuration can only choose the drop-in.
    """
    fits = [change for change in _each(work, budget_bytes) if change.host_bytes <= budget_bytes]
    fits = fits or _together(work, budget_bytes)
    leanest = _leanest_system(work) if words is FLAGS else None
    if leanest and leanest.host_bytes <= budget_bytes and leanest.settings not in [change.settings for change in fits]:
        fits.append(leanest)
    return fits


def _together(work: Workload, budget_bytes: int) -> list[Change]:
    """Return one change that combines settings, in the order of `_options`, until the run fits; empty if it
    never does."""
    settings: dict[str, str | int] = {}
    for name, value in _options(work):
        settings[name] = value
        changed = _with(work, settings)
        if changed is None:
            del settings[name]
        elif (needed := plan(changed).host_bytes) <= budget_bytes:
            return [Change(settings=settings, host_bytes=needed)]
        else:
            for more in _sizes(changed, budget_bytes):
                return [Change(settings=settings | more.settings, host_bytes=more.host_bytes)]
    return []


def _each(work: Workload, budget_bytes: int) -> Iterator[Change]:
    """Yield every single change with the host memory that it needs, whether or not that is within the budget."""
    yield from _sizes(work, budget_bytes)
    for name, value in _options(work):
        changed = _with(work, {name: value})
        if changed is not None:
            yield Change(settings={name: value}, host_bytes=plan(changed).host_bytes)


def _sizes(work: Workload, budget_bytes: int) -> Iterator[Change]:
    """Yield the largest batch and the largest context that fit, if host memory depends on them."""
    if not (work.offloads_checkpoints or work.on_cpu):
        return
    context, batch = largest_sizes(work, Limits(ram_bytes=budget_bytes))
    for name, size in (("batch", batch), ("context", context)):
        if size and size < getattr(work, name):
            sizes: dict[str, Any] = {name: size}
            changed = replace(work, **sizes)
            yield Change(settings=sizes, host_bytes=plan(changed).host_bytes)


def _options(work: Workload) -> Iterator[tuple[str, str]]:
    """Yield settings that need less host memory, those with the least cost first."""
    if work.system != "memascend":
        yield "system", "memascend"
    if work.offloads_checkpoints:
        yield "checkpointing", "plain"
    if work.dtype == "bf16":
        if work.kept_states == "fp32":
            yield "states", "bf16"
        if work.gradients == "fp32":
            yield "gradients", "bf16"


def _leanest_system(work: Workload) -> Change | None:
    """Return the system that needs the least host memory for this run in one process, with its default arm.

    None if it is the run's own system, or if the run has several ranks.
    """
    if work.ranks > 1:
        return None
    needed = {work.system: plan(work).host_bytes}
    for name in systems.names():
        first = next(iter(systems.load(name).arms.values()))
        if name == work.system or first.states_on == "gpu" or not first.runs:
            continue
        if (changed := _with(work, {"system": name})) is not None:
            needed[name] = plan(changed).host_bytes
    leanest = min(needed, key=lambda name: needed[name])
    return None if leanest == work.system else Change(settings={"system": leanest}, host_bytes=needed[leanest])


def _with(work: Workload, settings: Mapping[str, str | int]) -> Workload | None:
    """Return `work` with changed settings, or None if they exclude one another, such as bf16 states and DeepSpeed."""
    fields: dict[str, Any] = dict(settings)
    if "checkpointing" in fields:
        fields["stack"] = replace(work.stack, checkpointing=str(fields.pop("checkpointing")))
    if "system" in fields:
        fields |= {"arm": None, "parts": None}
    try:
        return replace(work, **fields)
    except ValueError:
        return None


def _nothing(work: Workload, budget_bytes: int, words: Mapping[str, str]) -> str:
    """Return the advice for a run that no setting makes fit, with the largest model that would."""
    model = largest_model(replace(work, batch=1), Limits(ram_bytes=budget_bytes))
    known = f" ({model} fits at batch 1)" if model else ""
    return f"no setting brings it under that: raise {words['host_memory']}, or take a smaller model{known}"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
