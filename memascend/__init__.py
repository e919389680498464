"""memascend: full-parameter fine-tuning where host memory is scarce.

Two calls are all that a training script needs::

    import memascend
    memascend.enable(ds_config)   # before deepspeed.initialize / zero.Init
    ...
    memascend.disable()           # stock DeepSpeed again

Around any loop, with DeepSpeed or without, activations go to the SSD::

    with memascend.offload_activations("/mnt/nvme"):
        ...

Nothing is imported or patched before the call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from os import PathLike

    from memascend.activation.cache import ActivationCache
    from memascend.integrations.deepspeed.hooks import Enabled

__version__ = "0.1.0"
__all__ = ["__version__", "disable", "enable", "offload_activations"]


def enable(ds_config: dict[str, Any] | str | PathLike[str], **options: Any) -> Enabled:
    """Swap MemAscend's parts into DeepSpeed; see :func:`memascend.integrations.deepspeed.enable`."""
    from memascend.integrations.deepspeed import enable as enable_deepspeed

    return enable_deepspeed(ds_config, **options)


def disable() -> None:
    """Give DeepSpeed back as it was before :func:`enable`; does nothing when it is not enabled."""
    from memascend.integrations.deepspeed import disable as disable_deepspeed

    disable_deepspeed()


def offload_activations(where: Any, **options: Any) -> AbstractContextManager[ActivationCache]:
    """Send what forward passes save to the SSD; see :func:`memascend.activation.offload_activations`."""
    from memascend.activation import offload_activations as offload

    return offload(where, **options)
