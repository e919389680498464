"""Options by which a transformers model needs less device memory: attention, loss and checkpointing, each by name.

MemAscend II-C: FlashAttention, the Liger kernels and offloaded gradient checkpointing. They are used on request where
a GPU and the libraries are available; SDPA, the chunked cross-entropy and our own offloading do the same work anywhere.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from memascend.activation import (
    ActivationCache,
    CacheOptions,
    CheckpointStore,
    attach_cache,
    offload_checkpoints,
)
from memascend.activation.checkpointing import switch_on
from memascend.activation.mix import block_policies, recompute_blocks
from memascend.activation.options import CacheStatistics, options_from
from memascend.activation_policy import EXAMPLE, ActivationPolicy
from memascend.memory.pinned import Allocator, PageAlignedPinnedAllocator
from memascend.ops.cross_entropy import DEFAULT_CHUNK_BYTES, LogitTransform, chunked_linear_cross_entropy
from memascend.planner.options import MODEL_OPTIONS
from memascend.storage.engine_tiers import DirectTier
from memascend.storage.folders import swap_folder
from memascend.suggestions import did_you_mean

_ATTENTION_NAMES = {"eager": "eager", "sdpa": "sdpa", "flash": "flash_attention_2"}

Undo = Callable[[], Any]
log = logging.getLogger("memascend")
_MIX = "memascend.activations.mix"


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Memory options of a model; None leaves that aspect of the model unchanged.

    attention: ``auto`` is SDPA if the model supports it; ``flash`` is FlashAttention-2 (needs a GPU and 16 bits).
    loss: ``chunked`` never holds all logits; ``liger`` is Liger-Kernel's fused linear cross-entropy (needs a GPU).
    checkpointing: ``plain`` is torch's gradient checkpointing, ``offloaded`` keeps its checkpoints in host memory,
        ``unsloth`` is Unsloth's offloaded checkpointing (needs a GPU), ``ssd`` sends the tensors that autograd saves to
        the SSD and recomputes nothing.
    activations: for ``ssd``: ``folder`` on the SSD, ``mix`` (a policy per block, instead of ``amount``, as parsed by
        :class:`memascend.activation_policy.ActivationPolicy`), and the other fields of :class:`CacheOptions`.
    """

    attention: str | None = None
    loss: str | None = None
    checkpointing: str | None = None
    activations: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _check_activations(self.activations, self.checkpointing)
        for name, allowed in MODEL_OPTIONS.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                hint = did_you_mean(value, allowed)
                raise ValueError(f"memascend.{name}: {value!r} is unknown{hint}; choose one of {', '.join(allowed)}")

    def __bool__(self) -> bool:
        return any(getattr(self, f.name) is not None for f in fields(self))


def _check_activations(section: Any, checkpointing: str | None) -> None:
    """Raise ValueError, with the fix, for a section ``activations`` that is no mapping, is invalid, or has no
    effect."""
    if section is None:
        return
    if not isinstance(section, Mapping):
        raise ValueError(f'memascend.activations must be a section such as {{"amount": "auto"}}, got {section!r}')
    if checkpointing != "ssd":
        raise ValueError(
            f"memascend.activations only applies with checkpointing 'ssd', but checkpointing is {checkpointing!r}: set "
            "it to 'ssd', or remove activations"
        )
    _cache_options(section)


def _cache_options(section: Mapping[str, Any]) -> CacheOptions:
    """Return the cache's options. Raises ValueError for an invalid key, value, mix or folder."""
    if (mix := section.get("mix")) is not None:
        if not isinstance(mix, str):
            raise ValueError(f'memascend.activations.mix must be a text such as "{EXAMPLE}", got {mix!r}')
        if "amount" in section:
            raise ValueError("memascend.activations: 'amount' and 'mix' are mutually exclusive: remove one")
        ActivationPolicy.parse(mix, _MIX)
    if (folder := section.get("folder")) is not None and not (isinstance(folder, str | os.PathLike) and str(folder)):
        raise ValueError(
            f"memascend.activations.folder must be the path of a folder on the SSD, got {folder!r}; or omit it"
        )
    return options_from(section, others=("folder", "mix"))


@dataclass
class AppliedOptions:
    """The choices that `apply_memory_options` made, by name; `undo` restores the model to its previous state."""

    chosen: dict[str, str] = field(default_factory=dict)
    store: CheckpointStore | None = None
    cache: ActivationCache | None = None
    _before: CacheStatistics | None = field(default=None, repr=False)
    _undo: list[Undo] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()

    def begin_step(self) -> None:
        """Note the cache's counters, from which `moved` counts."""
        self._before = self.cache.statistics if self.cache is not None else None

    def moved(self) -> dict[str, int]:
        """Return the bytes of activations read and written since `begin_step`, under the names of a step's record."""
        if self.cache is None:
            return {"read_bytes": 0, "written_bytes": 0}
        now, before = self.cache.statistics, self._before or CacheStatistics()
        return {"read_bytes": now.read - before.read, "written_bytes": now.written - before.written}

    def activation_facts(self) -> dict[str, Any]:
        """Return facts for a run's report: the cache's SSD traffic and waits in backward. Empty without a cache."""
        return {"activations": asdict(self.cache.statistics)} if self.cache is not None else {}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.chosen.items())


def apply_memory_options(
    model: Any,
    options: MemoryOptions,
    *,
    allocator: Allocator | None = None,
    use_reentrant: bool = False,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    folder: str | None = None,
) -> AppliedOptions:
    """Apply the options to a transformers causal LM, before or after ``deepspeed.initialize``, once per model.

    `allocator` allocates offloaded checkpoints (default: exact pinned memory, no ledger). `chunk_bytes` bounds the
    memory of logits in the chunked loss. `folder`, on the SSD, is for activations whose section names none. Raises
    ValueError, in one line, for options that the model does not support and for missing libraries; the model is then
    left unchanged.
    """
    applied = AppliedOptions()
    try:
        if options.attention is not None:
            _apply_attention(model, options.attention, applied)
        if options.loss is not None:
            _apply_loss(model, options.loss, applied, chunk_bytes)
        if options.checkpointing == "ssd":
            _apply_ssd(model, options.activations or {}, folder, applied, allocator, {"use_reentrant": use_reentrant})
        elif options.checkpointing is not None:
            _apply_checkpointing(model, options.checkpointing, applied, allocator, {"use_reentrant": use_reentrant})
    except BaseException:
        applied.undo()
        raise
    return applied


def applying_options(
    options: MemoryOptions, allocator: Allocator | None, folder: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator of functions with an argument `model`, which apply the options to each new model first.

    A model gets them once, from whichever of the functions sees it first. Offloaded checkpoints are allocated by
    `allocator`; activations go to `folder` unless their section names another.
    """
    seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def with_options(*args: Any, **kwargs: Any) -> Any:
            model = inspect.signature(function).bind(*args, **kwargs).arguments.get("model")
            if model is not None and model not in seen:
                apply_memory_options(model, options, allocator=allocator, folder=folder)
                seen.add(model)
            return function(*args, **kwargs)

        return with_options

    return decorate


def _require(what: str, module: str, extra: str = "make setup CUDA=1") -> None:
    """Raise ValueError, in one line, if there is no CUDA GPU or the package `module` is not installed."""
    if not torch.cuda.is_available():
        raise ValueError(
            f"{what} needs a CUDA GPU, but torch finds none here: remove it, or use an option that runs anywhere"
        )
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"{what} needs the package {module}, which is not installed: {extra}, or pip install {module}")


def _apply_attention(model: Any, wanted: str, applied: AppliedOptions) -> None:
    """Switch the model's attention if it differs from ``wanted``. Raises ValueError if it cannot be switched."""
    if wanted == "flash":
        _require("attention 'flash'", "flash_attn")
        if model.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"attention 'flash' works in 16 bits, the model is in {model.dtype}: use 'sdpa' or bf16")
    if wanted == "auto":
        wanted = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    name, before = _ATTENTION_NAMES[wanted], model.config._attn_implementation
    if name != before:
        _set_attention(model, name)
        applied._undo.append(lambda: _set_attention(model, before))
    applied.chosen["attention"] = wanted


def _set_attention(model: Any, name: str) -> None:
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation(name)
    elif hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS"):
        model.config._attn_implementation = name  # in transformers 4.51 these models read it in each forward pass
    if model.config._attn_implementation != name:
        raise ValueError(
            f"{type(model).__name__} cannot switch to attention {name!r} after creation in this version of "
            f"transformers: load it with attn_implementation={name!r}"
        )


def _apply_loss(model: Any, wanted: str, applied: AppliedOptions, chunk_bytes: int) -> None:
    """Replace the model's loss unless ``plain`` is wanted."""
    if wanted != "plain":
        from memascend.integrations.head_loss import replace_head_loss

        loss = _liger_loss() if wanted == "liger" else _chunked_loss(chunk_bytes)
        applied._undo.append(replace_head_loss(model, loss))
    applied.chosen["loss"] = wanted


def _chunked_loss(chunk_bytes: int) -> Callable[..., torch.Tensor]:
    """Return a `SummedLoss` whose chunks of logits take at most ``chunk_bytes``."""

    def summed(hidden, weight, labels, bias, ignore_index, transform):
        return chunked_linear_cross_entropy(
            hidden,
            weight,
            labels,
            bias,
            ignore_index=ignore_index,
            reduction="sum",
            transform=transform,
            chunk_bytes=chunk_bytes,
        )

    return summed


def _liger_loss() -> Callable[..., torch.Tensor]:
    """Return a `SummedLoss` by Liger-Kernel. Raises ValueError without a GPU or the package."""
    _require("loss 'liger'", "liger_kernel")
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def summed(hidden, weight, labels, bias, ignore_index, transform: LogitTransform):
        if transform.scale != 1.0:
            raise ValueError("loss 'liger' does not support this model's scaled logits: use loss 'chunked'")
        return liger_fused_linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            labels.reshape(-1),
            bias,
            ignore_index=ignore_index,
            reduction="sum",
            softcap=transform.softcap,
            accum_dtype=torch.float32,
        )

    return summed


def _apply_checkpointing(
    model: Any, wanted: str, applied: AppliedOptions, allocator: Allocator | None, options: dict[str, Any]
) -> None:
    """Apply every kind of checkpointing but ``ssd``; ``options`` are those of torch's ``checkpoint``."""
    if wanted == "offloaded":
        applied.store = CheckpointStore(allocator or PageAlignedPinnedAllocator())
        applied._undo.append(offload_checkpoints(model, applied.store, **options))
    else:
        function = _unsloth_checkpoint() if wanted == "unsloth" else None
        applied._undo.append(_remember_checkpointing(model))
        if wanted == "none":
            _switch_off(model)
        else:
            switch_on(model, options)
        if function is not None:
            model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)
    applied.chosen["checkpointing"] = wanted


def _apply_ssd(
    model: Any,
    section: Mapping[str, Any],
    folder: str | None,
    applied: AppliedOptions,
    allocator: Allocator | None,
    options: dict[str, Any],
) -> None:
    """Attach an activation cache on the SSD, which exists as long as the model or until it is undone."""
    named = section.get("folder") or folder
    if not named:
        raise ValueError(
            "checkpointing 'ssd' needs a folder on the SSD: name one in \"memascend\", "
            '"activations": {"folder": "/mnt/nvme"}'
        )
    cache_options, policies = _cache_options(section), None
    if (mix := section.get("mix")) is not None:
        policies = block_policies(model, ActivationPolicy.parse(mix, _MIX), _MIX)
        applied._undo.append(_remember_checkpointing(model))
        _switch_off(model)
        recompute_blocks(model, policies, options)
    elif any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        log.warning(
            "memascend: this model checkpoints its blocks, so only their inputs are offloaded and the rest is "
            "recomputed; call model.gradient_checkpointing_disable() to offload everything"
        )
    where = swap_folder(str(named), "memascend.activations.folder")
    tier = DirectTier.in_file(where, owner="activations")
    cache = ActivationCache(tier, cache_options, policies, allocator=allocator)
    try:
        detach = attach_cache(model, cache)
    except BaseException:
        cache.close()
        raise
    close = weakref.finalize(model, cache.close)
    close.atexit = False  # at the end of the process the tier closes itself, before its users
    applied._undo += [close, detach]
    applied.cache = cache
    applied.chosen["checkpointing"] = "ssd" if mix is None else f"ssd ({mix})"


def _unsloth_checkpoint() -> Callable[..., Any]:
    """Return Unsloth's checkpoint function. Raises ValueError without a GPU or the package."""
    _require("checkpointing 'unsloth'", "unsloth_zoo")
    from unsloth_zoo.gradient_checkpointing import unsloth_offloaded_gradient_checkpoint

    return unsloth_offloaded_gradient_checkpoint


def _switch_off(model: Any) -> None:
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False


def _remember_checkpointing(model: Any) -> Undo:
    """Return a function that restores which modules checkpoint, and with which function."""
    names = ("gradient_checkpointing", "_gradient_checkpointing_func")
    before = [(module, name, vars(module).get(name)) for module in model.modules() for name in names]

    def undo() -> None:
        for module, name, value in before:
            if value is not None:
                setattr(module, name, value)
            else:
                vars(module).pop(name, None)

    return undo
