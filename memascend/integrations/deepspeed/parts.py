"""Which parts stand in which place of DeepSpeed: the choices, their presets and what is refused."""

from __future__ import annotations

import difflib
import math
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from memascend.integrations.drop_in import CONFIG_KEY
from memascend.integrations.memory_options import CHOICES as MEMORY_CHOICES
from memascend.integrations.memory_options import MemoryOptions
from memascend.storage.devices import DeviceRefused, require_usable


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
    if not isinstance(ds_config, dict):
        raise ValueError(
            f"memascend.enable takes the DeepSpeed configuration as a dict, got {ds_config!r}; read the file with "
            f'json.load, or give DeepSpeed a file with the key "{CONFIG_KEY}" and leave enable out'
        )
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
    devices = section.pop("devices", None)
    devices = [] if devices is None else devices
    unknown = sorted(set(section) - set(_CHOICES), key=str)
    if unknown:
        known = [*_CHOICES, *MEMORY_CHOICES, "blocks_in_flight", "devices", "enabled"]
        near = difflib.get_close_matches(str(unknown[0]), known, n=1)
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
            raise ValueError(f'"{CONFIG_KEY}.devices": there is no {device!r}; name formatted devices')
        if devices.count(device) > 1:
            raise ValueError(f'"{CONFIG_KEY}.devices" names {device} more than once; name each device once')
        try:
            require_usable(device)
        except DeviceRefused as refused:
            raise ValueError(f'"{CONFIG_KEY}.devices": {refused}') from None


_OFFLOADS = ("offload_param", "offload_optimizer")

_SECTION_EXAMPLES = {
    "zero_optimization": '{"stage": 3}',
    **dict.fromkeys(_OFFLOADS, '{"device": "nvme", "nvme_path": "/mnt/nvme"}'),
    "aio": '{"block_size": 1048576}',
    "optimizer": '{"type": "AdamW"}',
    "params": '{"lr": 1e-5}',
}

# What our engines take; a thread of the direct engine stands for two of DeepNVMe's.
_AIO_LIMITS = {"queue_depth": 1024, "intra_op_parallelism": 128}
_PAGE_BYTES = 4096


def validate_deepspeed_config(ds_config: dict[str, Any], parts: Parts, devices: list[str]) -> None:
    """Refuse, with the mend, what cannot work. Called before anything is patched."""
    _require_sections(ds_config)
    zero = ds_config.get("zero_optimization") or {}
    if zero.get("stage") != 3:
        raise ValueError(
            f"memascend needs ZeRO stage 3, got zero_optimization.stage={zero.get('stage')!r}; set it to 3"
        )
    if parts.aio != "stock":
        _require_numbers(ds_config)
    offloads = {name: zero.get(name) or {} for name in _OFFLOADS}
    fast_init = offloads["offload_optimizer"].get("fast_init")
    if parts.pool == "adaptive" and offloads["offload_param"].get("device") == "nvme" and fast_init:
        raise ValueError(
            "offload_optimizer.fast_init needs every pool buffer to hold the largest sub-group, which is what the "
            "adaptive pool removes; set fast_init to false or memascend.pool to 'monolithic'"
        )
    for name, offload in offloads.items():
        _check_offload(f"zero_optimization.{name}", offload)
    if devices and not any(offload.get("device") == "nvme" for offload in offloads.values()):
        raise ValueError(
            f'"{CONFIG_KEY}.devices" hold what DeepSpeed keeps on NVMe, and nothing is: set '
            "zero_optimization.offload_param.device or offload_optimizer.device to 'nvme', or leave devices out"
        )


def _require_sections(ds_config: dict[str, Any]) -> None:
    """The sections that are read here and in the parts are sections."""
    zero, optimizer = ds_config.get("zero_optimization"), ds_config.get("optimizer")
    sections = {name: ds_config.get(name) for name in ("zero_optimization", "fp16", "bf16", "bfloat16", "aio")}
    if isinstance(zero, dict):
        sections |= {f"zero_optimization.{name}": zero.get(name) for name in _OFFLOADS}
    sections["optimizer"] = optimizer
    if isinstance(optimizer, dict):
        sections["optimizer.params"] = optimizer.get("params")
    for name, section in sections.items():
        if section is not None and not isinstance(section, dict):
            example = _SECTION_EXAMPLES.get(name.rpartition(".")[2], '{"enabled": true}')
            raise ValueError(f'"{name}" in the DeepSpeed config must be a section such as {example}, got {section!r}')


def _require_numbers(ds_config: dict[str, Any]) -> None:
    """What the derived settings take over from the user; "auto" and null are left to them."""
    zero = ds_config["zero_optimization"]
    for name in _OFFLOADS:
        section = zero.get(name) or {}
        for key in ("buffer_count", "buffer_size", "max_in_cpu"):
            _require_number(f"zero_optimization.{name}.{key}", section.get(key), int(key == "buffer_count"))
    aio = ds_config.get("aio") or {}
    for key in ("block_size", *_AIO_LIMITS):
        _require_number(f"aio.{key}", aio.get(key), 1, _AIO_LIMITS.get(key, math.inf))
    block = aio.get("block_size")
    if block not in (None, "auto") and block % _PAGE_BYTES:
        raise ValueError(
            f"aio.block_size must be a multiple of {_PAGE_BYTES} bytes, got {block!r}; leave it out for 1 MiB"
        )


def _require_number(key: str, value: Any, least: int, most: float = math.inf) -> None:
    if value is None or value == "auto":
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value <= most or value % 1:
        limits = f"of at least {least}" if math.isinf(most) else f"from {least} to {most}"
        raise ValueError(f"{key} must be a whole number {limits}, got {value!r}; or leave it out")


def _check_offload(key: str, offload: dict[str, Any]) -> None:
    device, folder = offload.get("device"), offload.get("nvme_path")
    if device not in (None, "none", "cpu", "nvme"):
        raise ValueError(f"{key}.device: {device!r} is unknown; choose one of none, cpu, nvme")
    if device != "nvme":
        return
    if not folder:
        raise ValueError(f"{key}.device is 'nvme' but nvme_path is missing; name a folder on the SSD")
    if not isinstance(folder, str | os.PathLike):
        raise ValueError(f"{key}.nvme_path must be the path of a folder on the SSD, got {folder!r}")
    _require_writable(f"{key}.nvme_path", Path(folder))


def _require_writable(key: str, folder: Path) -> None:
    """The swap folder exists or can be made, and a file in it can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{key}: {folder} cannot be written ({error.strerror}); name a folder on the SSD") from None
