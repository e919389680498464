"""What a run shows of memascend: one line once its sizes are known, and a warning where it has nothing to do."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .auto_settings import DerivedSettings
from .config import Parts

_PRINCIPAL = ("pool", "pinned", "overflow", "aio")  # the others are named where they are not the default


def enabled_line(parts: Parts, derived: DerivedSettings, pool_bytes: int | None) -> str:
    """The parts, what was derived from model and machine, and where the swap files are.

    ``pool_bytes``: of the parameter pool; None where parameters are not on NVMe, or the pool is not made yet.
    """
    defaults = asdict(Parts())
    chosen = {n: v for n, v in asdict(parts).items() if n in _PRINCIPAL or v != defaults[n]}
    shown = [f"{name} {value}" for name, value in chosen.items()]
    if pool_bytes is not None:
        shown[list(chosen).index("pool")] += f" ({pool_bytes / 2**20:,.1f} MiB)"
    line = f"memascend is on: {', '.join(shown)}"
    if derived.chosen:
        sizes = ", ".join(f"{name} {value:,}" for name, value in derived.chosen.items())
        line += f"; derived from model and machine: {sizes}"
    if derived.folders:
        line += f"; {derived.io}; swap files in {', '.join(derived.folders)}"
    return line


def nothing_offloaded(ds_config: dict[str, Any]) -> str | None:
    """The warning for a configuration that keeps parameters and optimizer on the device, or None."""
    zero = ds_config.get("zero_optimization") or {}
    names = ("offload_param", "offload_optimizer")
    if any((zero.get(name) or {}).get("device") in ("cpu", "nvme") for name in names):
        return None
    return (
        "nothing is offloaded, so memascend saves no memory here: zero_optimization.offload_param and "
        "offload_optimizer are left out or have no device; set their device to 'nvme' or 'cpu', or take memascend out"
    )
