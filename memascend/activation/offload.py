"""`offload_activations`: a context manager around any training loop."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memascend.activation.cache import ActivationCache
from memascend.activation.options import options_from
from memascend.storage.engine_tiers import DirectTier
from memascend.storage.folders import swap_folder
from memascend.storage.tier import Tier


@contextmanager
def offload_activations(where: str | os.PathLike[str] | Tier, **options: Any) -> Iterator[ActivationCache]:
    """What forward passes save for backward waits on the SSD inside this context.

        with memascend.offload_activations("/mnt/nvme"):
            for batch in batches:
                model(batch).backward()
                optimizer.step(); optimizer.zero_grad()

    Args:
        where: a folder on the SSD (created if only its last part is missing; a file is made in it and removed at the
            end), or an open tier, which is closed at the end.
        options: see :class:`memascend.activation.cache.CacheOptions`.
    Yields the cache: `statistics`, and `record` of the last forward pass. Gradients are those of keeping everything,
    bit for bit. A backward pass has to end inside the context.
    Raises:
        ValueError: an unknown option, or a folder that cannot be created or written. StorageError: no room.
        ActivationError (from `backward`): a saved tensor is lost, or was changed in place since; it is named. As in
            plain PyTorch, changes through `.data` or NumPy are not seen; backward may then use the values as saved.
    """
    chosen = options_from(options)
    if isinstance(where, Tier):
        tier = where
    else:
        tier = DirectTier.in_file(swap_folder(where, "offload_activations"), owner="activations")
    cache = ActivationCache(tier, chosen)
    try:
        with cache.active():
            yield cache
    finally:
        cache.close()
