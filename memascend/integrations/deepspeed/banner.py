"""Messages that a run shows: one line once the sizes are known, and a warning if nothing is offloaded."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .auto_settings import DerivedSettings
from .config import Parts

_PRINCIPAL = ("pool", "pinned", "overflow", "aio")  # other parts are named only if they are not the default


def enabled_line(parts: Parts, derived: DerivedSettings, pool_bytes: int | None) -> str:
    """Return a line with the parts, the settings derived from model and machine, and the folders of swap files.

    ``pool_bytes``: size of the parameter pool; None if parameters are not on NVMe or the pool does not exist yet.
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
    """Return the warning for a configuration that keeps parameters and optimizer on the device, or None."""
    zero = ds_config.get("zero_optimization") or {}
    names = ("offload_param", "offload_optimizer")
    if any((zero.get(name) or {}).get("device") in ("cpu", "nvme") for name in names):
        return None
    return (
        "nothing is offloaded, so memascend saves no memory here: zero_optimization.offload_param and "
        "offload_optimizer are left out or have no device; set their device to 'nvme' or 'cpu', or take memascend out"
    )
