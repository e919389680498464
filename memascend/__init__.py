"""memascend: full-parameter fine-tuning where host memory is scarce.

Two calls are all that a training script needs::

    import memascend
    memascend.enable(ds_config)   # before deepspeed.initialize / zero.Init
    ...
    memascend.disable()           # stock DeepSpeed again

Around any loop, with DeepSpeed or without, activations go to the SSD::

    with memascend.offload_activations("/mnt/nvme"):
        ...

And a plain PyTorch loop trains a model whose weights, gradients and optimizer states live on an SSD::

    from memascend import EngineOptions, offload_activations, streaming
    with streaming("/mnt/nvme/run") as session:
        model = session.hook(model)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-5)

Nothing is imported or patched before the call; `streaming` and the other names of a loop are imported when they are
first asked for.
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

__version__: str  # of the installed package; pyproject.toml has it
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
    if name == "_C":  # `from memascend import _C` asks here first
        return importlib.import_module(".extension", __name__).load(__name__)
    if name in _RENAMED:
        from .deprecation import warn_renamed

        warn_renamed(f"{__name__}.{name}", f"{__name__}.{_RENAMED[name]}")
        globals()[name] = found = __getattr__(_RENAMED[name])  # `from memascend import` asks twice
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
    """Put MemAscend's parts into DeepSpeed. Call before ``deepspeed.zero.Init`` and ``deepspeed.initialize``.

    Process-wide, and of the thread that trains: call it once, not while an engine is being built.

    Args:
        ds_config: the DeepSpeed configuration as a dict, a path or JSON in base64; it stays as it is. Its section
            ``"memascend"`` chooses parts; ``{"enabled": false}`` leaves DeepSpeed alone.
        options: any key of that section, which it overrides; `ledger`, the account that buffers are written to. See
            `memascend.integrations.deepspeed.enable`.

    Returns:
        What was enabled: `parts`, `ledger`, `io` (bytes that were moved).

    Raises:
        ValueError: one line that names the key and the fix.
        TypeError: an unknown keyword.
        RuntimeError: it is enabled already, or this DeepSpeed lacks what is replaced.

    Example:

        memascend.enable("ds_config.json")
        engine, *_ = deepspeed.initialize(model=model, config="ds_config.json")
    """
    from memascend.integrations.deepspeed import enable as enable_deepspeed

    return enable_deepspeed(ds_config, **options)


def disable() -> None:
    """Give DeepSpeed back as it was before `enable`; does nothing when it is not enabled.

    Engines that were built meanwhile keep their parts until they are gone. Same thread rule as `enable`.
    """
    from memascend.integrations.deepspeed import disable as disable_deepspeed

    disable_deepspeed()


def offload_activations(where: str | PathLike[str] | Tier, **options: Any) -> AbstractContextManager[ActivationCache]:
    """What forward passes save for backward waits on the SSD inside this context.

    Forward passes of the thread that entered it; a backward pass has to end inside. Contexts nest.

    Args:
        where: a folder on the SSD (a file is made in it and removed at the end), or an open tier, which is closed at
            the end.
        options: fields of `memascend.activation.options.CacheOptions`: `amount`, bytes per pass, "all" or "auto",
            and others.

    Returns:
        A context that yields the cache: `statistics`, and `record` of the last forward pass. Gradients are those of
        keeping everything, to the bit.

    Raises:
        ValueError: an unknown option.
        StorageError: no such folder, or no room.
        ActivationError: from `backward`: a saved tensor is lost, or was changed in place since; it is named. As in
            plain PyTorch, changes through `.data` or NumPy are not seen; backward may then use the values as saved.

    Example:

        with memascend.offload_activations("/mnt/nvme", amount="all"):
            model(batch).backward()
            optimizer.step()
    """
    from memascend.activation import offload_activations as offload

    return offload(where, **options)
