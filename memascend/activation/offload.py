"""`offload_activations`: a context manager around any training loop."""

from __future__ import annotations

import os
from contextlib import ContextDecorator, ExitStack
from typing import Any

from memascend.activation.cache import ActivationCache
from memascend.activation.options import CacheOptions, options_from
from memascend.storage.engine_tiers import DirectTier
from memascend.storage.folders import swap_folder
from memascend.storage.tier import Tier


def offload_activations(where: str | os.PathLike[str] | Tier, **options: Any) -> OffloadedActivations:
    """Context manager in which tensors that forward passes save for backward are offloaded to the SSD.

        with memascend.offload_activations("/mnt/nvme"):
            for batch in batches:
                model(batch).backward()
                optimizer.step(); optimizer.zero_grad()

    Args:
        where: a folder on the SSD (created if only its last component is missing; a file is created in it and removed
            at the end), or an open tier, which is closed at the end.
        options: see :class:`memascend.activation.cache.CacheOptions`.
    Entering it returns the cache, with `statistics`, and `record` of the last forward pass. Gradients are bit for bit
    those of keeping everything. A backward pass must end inside the context. With a folder, the context can be entered
    again after its end, with a new cache; it can also be used as a decorator.
    Raises:
        ValueError: an unknown option, or a folder that cannot be created or written. StorageError: no space.
        ActivationError (from `backward`): a saved tensor is lost, or was changed in place since; it is named. As in
            plain PyTorch, changes through `.data` or NumPy are not detected; backward may then use the saved values.
    """
    if not isinstance(where, Tier) and (not isinstance(where, str | os.PathLike) or not os.fspath(where)):
        raise ValueError(f"offload_activations(where): the path of a folder on the SSD, or an open tier, got {where!r}")
    return OffloadedActivations(where, options_from(options))


class OffloadedActivations(ContextDecorator):
    """The context manager that `offload_activations` returns."""

    def __init__(self, where: str | os.PathLike[str] | Tier, options: CacheOptions) -> None:
        self._where, self._options = where, options
        self._entered: ExitStack | None = None

    def __enter__(self) -> ActivationCache:
        if self._entered is not None:
            raise RuntimeError("this offload_activations(...) is already active: call it again for another context")
        tier = self._where
        if not isinstance(tier, Tier):
            tier = DirectTier.in_file(swap_folder(tier, "offload_activations"), owner="activations")
        cache = ActivationCache(tier, self._options)
        with ExitStack() as entered:
            entered.callback(cache.close)
            entered.enter_context(cache.active())
            self._entered = entered.pop_all()
        return cache

    def _recreate_cm(self) -> OffloadedActivations:
        """Return a new context for each call of a decorated function."""
        return OffloadedActivations(self._where, self._options)

    def __exit__(self, *error: Any) -> bool | None:
        entered, self._entered = self._entered, None
        return None if entered is None else entered.__exit__(*error)
