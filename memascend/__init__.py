"""memascend: full-parameter fine-tuning where host memory is scarce.

Two calls are all that a training script needs::

    import memascend
    memascend.enable(ds_config)   # before deepspeed.initialize / zero.Init
    ...
    memascend.disable()           # stock DeepSpeed again

Around any training loop, with or without DeepSpeed, saved activations can go to the SSD::

    with memascend.offload_activations("/mnt/nvme"):
        ...

A plain PyTorch loop can train a model whose weights, gradients and optimizer states live on an SSD::

    from memascend import EngineOptions, offload_activations, streaming
    with streaming("/mnt/nvme/run") as session:
        model = session.hook(model)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-5)

Nothing is imported or patched before the call; `streaming` and the other names used in a loop are imported on first
access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from os import PathLike

    from memascend.activation.cache import ActivationCache
    from memascend.engine.errors import InterruptedUpdate, NotStreamable
    from memascend.engine.options import EngineOptions
    from memascend.engine.streaming import streaming
    from memascend.integrations.deepspeed.hooks import Enabled
    from memascend.storage.errors import StorageError
    from memascend.storage.tier import Tier

__version__: str  # of the installed package, as set in pyproject.toml
__all__ = [
    "EngineOptions",
    "InterruptedUpdate",
    "NotStreamable",
    "StorageError",
    "__version__",
    "disable",
    "enable",
    "offload_activations",
    "streaming",
]

_WHERE = {
    "EngineOptions": ".engine.options",
    "InterruptedUpdate": ".engine.errors",
    "NotStreamable": ".engine.errors",
    "StorageError": ".storage.errors",
    "streaming": ".engine.streaming",
}
_RENAMED = {"TornStates": "InterruptedUpdate"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name == "_C":  # `from memascend import _C` looks it up here first
        return importlib.import_module(".extension", __name__).load(__name__)
    if name in _RENAMED:
        from .deprecation import warn_renamed

        warn_renamed(f"{__name__}.{name}", f"{__name__}.{_RENAMED[name]}")
        globals()[name] = found = __getattr__(_RENAMED[name])  # `from memascend import` looks it up twice
        return found
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_WHERE[name], __name__), name)
    globals()[name] = found
    return found


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version(__name__)
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def enable(ds_config: dict[str, Any] | str | PathLike[str], **options: Any) -> Enabled:
    """Install MemAscend's parts in DeepSpeed. Call before ``deepspeed.zero.Init`` and ``deepspeed.initialize``.

    The change is process-wide: call it once, from the thread that trains, and not while an engine is being built.

    Args:
        ds_config: the DeepSpeed configuration as a dict, a path or base64-encoded JSON; it is not modified. Its section
            ``"memascend"`` chooses the parts; ``{"enabled": false}`` leaves DeepSpeed unchanged.
        options: any key of that section, which takes precedence over it, or `ledger`, the ledger in which buffers are
            recorded. See `memascend.integrations.deepspeed.enable`.

    Returns:
        A description of what was enabled: `parts`, `ledger` and `io` (bytes moved).

    Raises:
        ValueError: the configuration is invalid; the one-line message names the key and the fix.
        TypeError: a keyword is unknown.
        RuntimeError: MemAscend is enabled already, or this version of DeepSpeed lacks a function to be replaced.

    Example:

        memascend.enable("ds_config.json")
        engine, *_ = deepspeed.initialize(model=model, config="ds_config.json")
    """
    from memascend.integrations.deepspeed import enable as enable_deepspeed

    return enable_deepspeed(ds_config, **options)


def disable() -> None:
    """Restore DeepSpeed to its state before `enable`; do nothing if MemAscend is not enabled.

    Engines built in the meantime keep their parts until they are destroyed, and with them the changes to DeepSpeed that
    their steps and checkpoints need. The thread rule of `enable` applies.
    """
    from memascend.integrations.deepspeed import disable as disable_deepspeed

    disable_deepspeed()


def offload_activations(where: str | PathLike[str] | Tier, **options: Any) -> AbstractContextManager[ActivationCache]:
    """Keep the tensors that forward passes save for backward on the SSD while this context is active.

    Only forward passes of the thread that entered the context are affected, and each backward pass must finish inside
    it. Contexts can be nested.

    Args:
        where: a folder on the SSD (a file is created in it and removed at the end), or an open tier, which is closed
            at the end.
        options: fields of `memascend.activation.options.CacheOptions`, such as `amount` (bytes per pass, "all" or
            "auto").

    Returns:
        A context manager that yields the cache, with its `statistics` and the `record` of the last forward pass.
        Gradients are bit-identical to those of a run that keeps everything in memory.

    Raises:
        ValueError: an option is unknown.
        StorageError: the folder does not exist, or its file system has too little free space.
        ActivationError: raised from `backward` when a saved tensor is lost or was modified in place; the message names
            it. As in plain PyTorch, changes through `.data` or NumPy are not detected; backward may then use the
            values as saved.

    Example:

        with memascend.offload_activations("/mnt/nvme", amount="all"):
            model(batch).backward()
            optimizer.step()
    """
    from memascend.activation import offload_activations as offload

    return offload(where, **options)
