"""Configuration of the parts that replace DeepSpeed's: the choices, the stock preset and the validation."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args, get_type_hints

from memascend.arrangements import where_gradients_wait
from memascend.integrations.conventions import CONFIG_KEY
from memascend.integrations.memory_options import MemoryOptions
from memascend.memory.budget import parse_bytes
from memascend.memory.placement_policy import PlacementPolicy
from memascend.storage.devices import DeviceRefused, require_usable
from memascend.storage.folders import direct_limits, swap_folder
from memascend.suggestions import did_you_mean, refuse_misspelled

from .tier_options import NO_TIERS, TierOptions, as_options, check_paths, refuse_with_tiers


@dataclass(frozen=True, kw_only=True)
class Parts:
    """One choice for each place where MemAscend (sections IV-B to IV-D) differs from ZeRO-Infinity.

    pinned: page-locked allocator of every host buffer. ``stock`` is the behaviour of the installed DeepSpeed,
        ``power_of_two`` the rounding of PyTorch's CachingHostAllocator (the papers' baseline), ``exact`` IV-C.
    pool: parameter buffer pool. ``stock`` is DeepSpeed's own swapper and pool, ``monolithic_separate`` nine
        embedding-sized buffers, each pinned separately (as the paper's totals describe), ``monolithic`` the same in
        one tensor (DeepSpeed 0.16), ``adaptive`` IV-B.
    overflow: ``chain`` is isinf().any() then isnan().any(), ``aminmax`` one torch.aminmax, ``fused`` IV-D.
    aio: ``stock`` is DeepNVMe, ``file`` our engine with one file per tensor (any address, any length, every completion
        checked), ``direct`` IV-E: all tensors in one preallocated file, or on raw devices (``devices``).
    optimizer_states: ``bf16`` keeps master weights, gradients and Adam states in bf16 (half the bytes per step).
    gradients: ``nvme`` sends them over NVMe to the optimizer as in ZeRO-Infinity, ``host`` leaves them in the flat
        gradient buffer. (Before 1.1: ``swapped`` and ``kept``.)
    numerics: ``exact`` keeps DeepSpeed's norm and AdamW, ``fast`` uses ours (see :mod:`.numerics`).
    """

    pinned: Literal["stock", "power_of_two", "exact"] = "exact"
    pool: Literal["stock", "monolithic_separate", "monolithic", "adaptive"] = "adaptive"
    overflow: Literal["stock", "chain", "aminmax", "fused"] = "fused"
    aio: Literal["stock", "file", "direct"] = "direct"
    optimizer_states: Literal["fp32", "bf16"] = "fp32"
    gradients: Literal["nvme", "host"] = "nvme"
    numerics: Literal["exact", "fast"] = "exact"

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"memascend.{name}: {getattr(self, name)!r} is unknown"
                    f"{did_you_mean(getattr(self, name), allowed)}; choose one of {', '.join(allowed)}"
                )
        if (self.pinned == "stock") != (self.aio == "stock"):
            raise ValueError(
                f"memascend: pinned={self.pinned!r} cannot be combined with aio={self.aio!r}: DeepNVMe copies every "
                "buffer that it did not allocate through a second one; to disable our pinned memory, set pinned, aio "
                "and pool to 'stock'"
            )
        if self.pinned == "stock" and self.pool != "stock":
            raise ValueError(
                f"memascend: pool={self.pool!r} needs memascend's allocator; to disable our pinned memory, set pinned, "
                "aio and pool to 'stock'"
            )
        if self.numerics == "fast" and self.overflow != "fused":
            raise ValueError(
                f"memascend: numerics='fast' detects overflow while computing the norm, but overflow={self.overflow!r} "
                "requests a separate pass; set overflow to 'fused', or numerics to 'exact'"
            )

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


# The allowed values of each part, taken from its annotation.
_CHOICES: dict[str, tuple[str, ...]] = {name: get_args(hint) for name, hint in get_type_hints(Parts).items()}

STOCK = Parts(pinned="stock", pool="stock", overflow="stock", aio="stock")


def switched_off(ds_config: dict[str, Any], enabled: bool | None = None) -> bool:
    """Return whether ``"memascend": {"enabled": false}`` leaves DeepSpeed unchanged; the keyword ``enabled`` overrides
    it."""
    section = ds_config.get(CONFIG_KEY)
    if enabled is None and isinstance(section, dict):
        enabled = section.get("enabled")
    return enabled is False


@dataclass(frozen=True, kw_only=True)
class EnableOptions:
    """The checked options of one call of `enable`: the section ``"memascend"``, overridden by the call's keywords.

    parts: the part that replaces each place of DeepSpeed.
    memory: the memory options applied to each new model.
    paths: several drives instead of ``nvme_path``.
    blocks_in_flight: N of MemAscend IV-B, the transformer blocks whose weights may be in host memory at once.
    devices: formatted raw devices for ``aio="direct"``; if empty, files in ``nvme_path`` are used.
    host_memory: limit on our buffers on this machine, such as "24GiB", divided equally among its ranks. An allocation
        that would exceed it raises HostBudgetExceeded, which names its owner. None: no limit.
    require_direct: refuse a file system without O_DIRECT, where tensors would go through the page cache.
    placement: NUMA nodes of host buffers by class, as in `memascend.memory.placement_policy`: a name, or a mapping.
    prestage_checkpoints: a checkpoint references swapped states on its own file system (by reflinks, or by hard links
        with ``aio="file"``) if possible; false copies them all.
    minimum_swap_bytes: replaces DeepSpeed's hard-coded 1 MiB below which tensors stay in memory (twins scale it).
    gather_clone: False leaves out the CPU repair of the gather; only for the negative control of the tests.
    """

    parts: Parts = Parts()
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    paths: TierOptions = NO_TIERS
    blocks_in_flight: int = 1
    devices: tuple[str, ...] = ()
    host_memory: str | int | None = None
    require_direct: bool = False
    placement: str | None = None
    prestage_checkpoints: bool = True
    minimum_swap_bytes: int | None = None
    gather_clone: bool = True

    def __post_init__(self) -> None:
        if type(self.blocks_in_flight) is not int or self.blocks_in_flight < 1:
            raise ValueError(
                f'"{CONFIG_KEY}.blocks_in_flight" must be a whole number of at least 1, got {self.blocks_in_flight!r}'
            )
        if self.blocks_in_flight > 1 and self.parts.pool == "stock":
            raise ValueError(
                "memascend: blocks_in_flight has no effect with pool='stock', whose buffers DeepSpeed counts: set pool "
                "to 'adaptive', or remove blocks_in_flight"
            )
        for name in ("require_direct", "prestage_checkpoints"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f'"{CONFIG_KEY}.{name}" must be true or false, got {getattr(self, name)!r}')
        if self.require_direct and self.parts.aio == "stock":
            raise ValueError(
                "memascend: require_direct has no effect with aio='stock' (DeepNVMe); set aio to 'direct' or 'file', "
                "or remove require_direct"
            )
        refuse_with_tiers(self.paths, aio=self.parts.aio, devices=self.devices)
        _check_devices(self.devices, self.parts)
        if self.placement is not None and self.parts.pinned != "exact":
            raise ValueError(
                f"memascend.placement needs memascend's allocator, but pinned is {self.parts.pinned!r}: set pinned "
                "to 'exact'"
            )
        if self.host_memory is not None:
            parse_bytes(self.host_memory, f'"{CONFIG_KEY}.host_memory"')


_KEYWORDS_ONLY = ("minimum_swap_bytes", "gather_clone")  # keywords of `enable` that are not keys of the section
_GROUPS = {"parts": Parts, "memory": MemoryOptions, "paths": TierOptions}
_KEYS = (
    *(f.name for group in _GROUPS.values() for f in fields(group)),
    *(f.name for f in fields(EnableOptions) if f.name not in (*_GROUPS, *_KEYWORDS_ONLY)),
    "enabled",
)


def enable_options(ds_config: dict[str, Any], keywords: dict[str, Any]) -> EnableOptions:
    """Read the optional section ``ds_config["memascend"]``, overridden by those ``keywords`` that are not None.

    Raises ValueError, in one line, for an invalid key or value, and TypeError for an unknown keyword.
    """
    refuse_misspelled(ds_config, CONFIG_KEY)
    section = ds_config.get(CONFIG_KEY)
    section = {} if section is None else section
    if not isinstance(section, dict):
        raise ValueError(f'"{CONFIG_KEY}" must be a section such as {{"pool": "adaptive"}}, got {section!r}')
    _refuse_unknown(section, keywords)
    given = section | {name: value for name, value in keywords.items() if value is not None}
    enabled = given.pop("enabled", True)
    if not isinstance(enabled, bool):
        raise ValueError(f'"{CONFIG_KEY}.enabled" must be true or false, got {enabled!r}')
    if given.get("devices", ()) is None:
        del given["devices"]
    if isinstance(given.get("devices"), list):
        given["devices"] = tuple(given["devices"])
    if given.get("placement") is not None:
        given["placement"] = PlacementPolicy.parse(given["placement"], f'"{CONFIG_KEY}.placement"').as_text()
    if "gradients" in given:
        given["gradients"] = where_gradients_wait(given)
    given = as_options(given)
    groups = {
        name: group(**{f.name: given.pop(f.name) for f in fields(group) if f.name in given})
        for name, group in _GROUPS.items()
    }
    return EnableOptions(**groups, **given)


def _refuse_unknown(section: dict[Any, Any], keywords: dict[str, Any]) -> None:
    unknown = sorted(set(section) - set(_KEYS), key=str)
    if unknown:
        hint = did_you_mean(unknown[0], _KEYS) or f"; known keys: {', '.join(_KEYS)}"
        raise ValueError(f'"{CONFIG_KEY}": unknown key {unknown[0]!r} in the DeepSpeed config{hint}')
    known = (*_KEYS, *_KEYWORDS_ONLY)
    for name in keywords:
        if name not in known:
            hint = did_you_mean(name, known) or f"; known: {', '.join(known)}"
            raise TypeError(f"memascend.enable has no keyword {name!r}{hint}")


def _check_devices(devices: Any, parts: Parts) -> None:
    """Raise ValueError, with the fix, for devices that are missing, repeated or unusable, or given without
    ``direct``."""
    if not isinstance(devices, tuple) or not all(isinstance(device, str) for device in devices):
        raise ValueError(f'"{CONFIG_KEY}.devices" must be a list of paths such as ["/dev/nvme1n1"], got {devices!r}')
    if devices and parts.aio != "direct":
        raise ValueError(
            f"memascend: devices cannot be combined with aio={parts.aio!r}, which needs a file system; set aio to "
            "'direct', or remove devices"
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

# Limits of our engines; a thread of the direct engine replaces two of DeepNVMe's.
_AIO_LIMITS = {"queue_depth": 1024, "intra_op_parallelism": 128}
_PAGE_BYTES = 4096


def validate_deepspeed_config(ds_config: dict[str, Any], options: EnableOptions) -> None:
    """Raise ValueError, with the fix, for a configuration that cannot work. Called before anything is patched."""
    _require_sections(ds_config)
    zero = ds_config.get("zero_optimization") or {}
    if zero.get("stage") != 3:
        raise ValueError(
            f"memascend needs ZeRO stage 3, got zero_optimization.stage={zero.get('stage')!r}; set it to 3"
        )
    if options.parts.aio != "stock":
        _require_numbers(ds_config)
    offloads = {name: zero.get(name) or {} for name in _OFFLOADS}
    fast_init = offloads["offload_optimizer"].get("fast_init")
    if options.parts.pool == "adaptive" and offloads["offload_param"].get("device") == "nvme" and fast_init:
        raise ValueError(
            "offload_optimizer.fast_init needs every pool buffer to hold the largest sub-group, which the adaptive "
            "pool avoids; set fast_init to false or memascend.pool to 'monolithic'"
        )
    for name, offload in offloads.items():
        _check_offload(f"zero_optimization.{name}", offload)
        if options.require_direct and offload.get("device") == "nvme" and not (options.devices or options.paths):
            _check_direct(f"zero_optimization.{name}.nvme_path", offload["nvme_path"])
    check_paths(options.paths)
    for path in options.paths.tiers if options.require_direct else ():
        _check_direct(f"memascend.tiers: {path}", path)
    if not __debug__ and any(offload.get("device") == "nvme" for offload in offloads.values()):
        raise ValueError(
            "python -O removes assert statements, in which DeepSpeed starts and awaits its transfers to NVMe: training "
            "would be silently wrong; start python without -O and without PYTHONOPTIMIZE"
        )
    named = "devices" if options.devices else "tiers"
    if (options.devices or options.paths) and not any(o.get("device") == "nvme" for o in offloads.values()):
        raise ValueError(
            f'"{CONFIG_KEY}.{named}" apply to what DeepSpeed keeps on NVMe, but nothing is: set '
            f"zero_optimization.offload_param.device or offload_optimizer.device to 'nvme', or remove {named}"
        )


def _require_sections(ds_config: dict[str, Any]) -> None:
    """Raise ValueError unless every section that is read here or by the parts is a dict or absent."""
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
    """Raise ValueError unless the numbers that the derived settings take from the user are valid, "auto" or null."""
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
        raise ValueError(f"aio.block_size must be a multiple of {_PAGE_BYTES} bytes, got {block!r}; omit it for 1 MiB")


def _require_number(key: str, value: Any, least: int, most: float = math.inf) -> None:
    """Raise ValueError unless ``value`` is a whole number from ``least`` to ``most``, "auto" or None."""
    if value is None or value == "auto":
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value <= most or value % 1:
        limits = f"of at least {least}" if math.isinf(most) else f"from {least} to {most}"
        raise ValueError(f"{key} must be a whole number {limits}, got {value!r}; or omit it")


def _check_offload(key: str, offload: dict[str, Any]) -> None:
    """Raise ValueError for an unknown device of an offload section or, on NVMe, an unusable ``nvme_path``."""
    device, folder = offload.get("device"), offload.get("nvme_path")
    if device not in (None, "none", "cpu", "nvme"):
        raise ValueError(f"{key}.device: {device!r} is unknown; choose one of none, cpu, nvme")
    if device != "nvme":
        return
    if not folder:
        raise ValueError(f"{key}.device is 'nvme' but nvme_path is missing; name a folder on the SSD")
    if not isinstance(folder, str | os.PathLike):
        raise ValueError(f"{key}.nvme_path must be the path of a folder on the SSD, got {folder!r}")
    swap_folder(folder, f"{key}.nvme_path")


def _check_direct(key: str, folder: Any) -> None:
    """Raise ValueError if the file system of ``folder`` refuses O_DIRECT."""
    if not direct_limits(folder).served:
        raise ValueError(
            f"{key}: the file system of {folder} refuses O_DIRECT, which memascend.require_direct requires: name a "
            "folder on ext4 or XFS on the SSD itself, or set require_direct to false"
        )
