"""memascend: full-parameter fine-tuning where host memory is scarce.

Two calls are all that a training script needs::

    import memascend
    memascend.enable(ds_config)   # before deepspeed.initialize / zero.Init
    ...
    memascend.disable()           # stock DeepSpeed again

Nothing is imported or patched before the call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memascend.integrations.deepspeed.hooks import Enabled

__version__ = "0.1.0"
__all__ = ["__version__", "disable", "enable"]


def enable(ds_config: dict[str, Any], **options: Any) -> Enabled:
    """Swap MemAscend's parts into DeepSpeed; see :func:`memascend.integrations.deepspeed.enable`."""
    from memascend.integrations.deepspeed import enable as enable_deepspeed

    return enable_deepspeed(ds_config, **options)


def disable() -> None:
    """Give DeepSpeed back as it was before :func:`enable`; does nothing when it is not enabled."""
    from memascend.integrations.deepspeed import disable as disable_deepspeed

    disable_deepspeed()
