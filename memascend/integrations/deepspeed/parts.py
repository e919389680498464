"""Which parts stand in which place of DeepSpeed: the choices, their presets and what is refused."""

from __future__ import annotations

import difflib
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from memascend.integrations.drop_in import CONFIG_KEY
from memascend.integrations.memory_options import CHOICES as MEMORY_CHOICES
from memascend.integrations.memory_options import MemoryOptions
from memascend.storage.devices import require_usable


@dataclass(frozen=True, kw_only=True)
class Parts:
    """One choice for each place where MemAscend (sections IV-B to IV-D) differs from ZeRO-Infinity.

    pinned: page-locked allocator of every host buffer. ``stock`` is whatever this DeepSpeed does,
        ``power_of_two`` PyTorch's CachingHostAllocator rounding (the papers' baseline), ``exact`` IV-C.
    pool: parameter buffer pool. ``stock`` is DeepSpeed's own swapper and pool, ``monolithic_separate`` nine
        embedding-sized buffers, each pinned by itself (what the paper's totals describe), ``monolithic`` the same in
        one tensor (DeepSpeed 0.16), ``adaptive`` IV-B.
    overflow: ``chain`` is isinf().any() then isnan().any(), ``aminmax`` one torch.aminmax, ``fused`` IV-D.
    aio: ``stock`` is DeepNVMe, ``file`` our engine on a file for each tensor (any address, any length, every completion
        audited), ``direct`` IV-E: all tensors in one preallocated file, or on raw devices (``devices``).
    optimizer_states: ``bf16`` keeps master weights, gradients and Adam states in bf16 (half the bytes a step).
    gradients: ``swapped`` go over NVMe to the optimizer as in ZeRO-Infinity, ``kept`` wait in the flat gradient buffer.
    numerics: ``exact`` keeps DeepSpeed's norm and AdamW, ``fast`` takes ours (see :mod:`.numerics`).
    """

    pinned: Literal["stock", "power_of_two", "exact"] = "exact"
    pool: Literal["stock", "monolithic_separate", "monolithic", "adaptive"] = "adaptive"
    overflow: Literal["stock", "chain", "aminmax", "fused"] = "fused"
    aio: Literal["stock", "file", "direct"] = "direct"
    optimizer_states: Literal["fp32", "bf16"] = "fp32"
    gradients: Literal["swapped", "kept"] = "swapped"
    numerics: Literal["exact", "fast"] = "exact"

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"memascend.{name}: {getattr(self, name)!r} is unknown; choose one of {', '.join(allowed)}"
                )
        if (self.pinned == "stock") != (self.aio == "stock"):
            raise ValueError(
                f"memascend: pinned={self.pinned!r} with aio={self.aio!r} makes no sense: DeepNVMe copies every buffer "
                "that it did not allocate through a second buffer; to leave pinned memory out, set pinned, aio and "
                "pool to 'stock'"
            )
        if self.pinned == "stock" and self.pool != "stock":
            raise ValueError(
                f"memascend: pool={self.pool!r} needs an allocator of ours; to leave pinned memory out, set pinned, "
                "aio and pool to 'stock'"
            )
        if self.numerics == "fast" and self.overflow != "fused":
            raise ValueError(
                f"memascend: numerics='fast' finds overflow as it takes the norm, overflow={self.overflow!r} "
                "asks for a pass of its own; set overflow to 'fused', or numerics to 'exact'"
            )

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


_CHOICES: dict[str, tuple[str, ...]] = {
    "pinned": ("stock", "power_of_two", "exact"),
    "pool": ("stock", "monolithic_separate", "monolithic", "adaptive"),
    "overflow": ("stock", "chain", "aminmax", "fused"),
    "aio": ("stock", "file", "direct"),
    "optimizer_states": ("fp32", "bf16"),
    "gradients": ("swapped", "kept"),
    "numerics": ("exact", "fast"),
}

TODAY = Parts(pinned="stock", pool="stock", overflow="stock", aio="stock")


def switched_off(ds_config: dict[str, Any]) -> bool:
    """True where the configuration says ``"memascend": {"enabled": false}``: DeepSpeed is then left alone."""
    section = ds_config.get(CONFIG_KEY)
    return isinstance(section, dict) and section.get("enabled") is False


def parts_from_config(ds_config: dict[str, Any], overrides: dict[str, Any]) -> tuple[Parts, int, list[str]]:
    """Read ``ds_config["memascend"]`` (optional) and keyword overrides -> (parts, blocks in flight N, raw devices)."""
    section = ds_config.get(CONFIG_KEY)
    section = {} if section is None else section
    if not isinstance(section, dict):
        raise ValueError(f'"{CONFIG_KEY}" must be a section such as {{"pool": "adaptive"}}, got {section!r}')
    section = dict(section)
    section.update({k: v for k, v in overrides.items() if v is not None})
    enabled = section.pop("enabled", True)
    if not isinstance(enabled, bool):
        raise ValueError(f'"{CONFIG_KEY}.enabled" must be true or false, got {enabled!r}')
    MemoryOptions.take(section)  # checked here, applied to the model by deepspeed.initialize
    blocks_in_flight = section.pop("blocks_in_flight", 1)
    devices = section.pop("devices", None) or []
    unknown = sorted(set(section) - set(_CHOICES))
    if unknown:
        known = [*_CHOICES, *MEMORY_CHOICES, "blocks_in_flight", "devices", "enabled"]
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else f"; known keys: {', '.join(known)}"
        raise ValueError(f'"{CONFIG_KEY}": unknown key {unknown[0]!r} in the DeepSpeed config{hint}')
    if type(blocks_in_flight) is not int or blocks_in_flight < 1:
        raise ValueError(
            f'"{CONFIG_KEY}.blocks_in_flight" must be a whole number of at least 1, got {blocks_in_flight!r}'
        )
    parts = Parts(**section)
    _check_devices(devices, parts)
    return parts, blocks_in_flight, list(devices)


def _check_devices(devices: Any, parts: Parts) -> None:
    if not isinstance(devices, list) or not all(isinstance(device, str) for device in devices):
        raise ValueError(f'"{CONFIG_KEY}.devices" must be a list of paths such as ["/dev/nvme1n1"], got {devices!r}')
    if devices and parts.aio != "direct":
        raise ValueError(
            f"memascend: devices with aio={parts.aio!r} makes no sense: files lie on a file system; set aio to "
            "'direct', or leave devices out"
        )
    for device in devices:
        if not os.path.exists(device):
            raise ValueError(f'"{CONFIG_KEY}.devices": there is no {device}; name formatted devices')
        require_usable(device)


def validate_deepspeed_config(ds_config: dict[str, Any], parts: Parts) -> None:
    """Refuse, with the mend, what cannot work. Called before anything is patched."""
    zero = ds_config.get("zero_optimization") or {}
    if zero.get("stage") != 3:
        raise ValueError(
            f"memascend needs ZeRO stage 3, got zero_optimization.stage={zero.get('stage')!r}; set it to 3"
        )
    param = zero.get("offload_param") or {}
    fast_init = (zero.get("offload_optimizer") or {}).get("fast_init")
    if parts.pool == "adaptive" and param.get("device") == "nvme" and fast_init:
        raise ValueError(
            "offload_optimizer.fast_init needs every pool buffer to hold the largest sub-group, which is what the "
            "adaptive pool removes; set fast_init to false or memascend.pool to 'monolithic'"
        )
    for section in ("offload_param", "offload_optimizer"):
        offload = zero.get(section) or {}
        if offload.get("device") == "nvme" and not offload.get("nvme_path"):
            raise ValueError(
                f"zero_optimization.{section}.device is 'nvme' but nvme_path is missing; name a folder on the SSD"
            )
        if offload.get("device") == "nvme":
            _require_writable(f"zero_optimization.{section}.nvme_path", Path(offload["nvme_path"]))


def _require_writable(key: str, folder: Path) -> None:
    """The swap folder exists or can be made, and a file in it can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{key}: {folder} cannot be written ({error.strerror}); name a folder on the SSD") from None
