"""The keys of the section "memascend" that distribute swapped tensors over several drives (MLP-Offload)."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from memascend.integrations.conventions import CONFIG_KEY
from memascend.storage.devices import DeviceRefused, require_usable
from memascend.storage.folders import swap_folder
from memascend.storage.placement import PLACEMENTS
from memascend.storage.write_budget import WriteBudget

ORDERS = ("alternating", "ascending")


@dataclass(frozen=True, kw_only=True)
class TierOptions:
    """Destinations of swapped tensors instead of `nvme_path`; without `tiers` the other keys are refused.

    tiers: folders (of any file system) and formatted raw devices; each is a separate path, without RAID.
    tier_placement: ``balanced`` makes the paths' times equal, ``as_published`` is MLP-Offload's Eq. 1, a list of
        numbers is an explicit ratio.
    tier_rehome: whether sub-groups move between paths to follow the observed rates.
    tier_exclusive: whether only one process at a time uses a path; None: only if several ranks share the machine.
    sub_group_order: ``alternating`` reverses the order of the update with each step, so that it begins with the
        sub-groups that the last one left in host memory; ``ascending`` is DeepSpeed's order, which leaves none.
    write_budget: bytes that may be written to each folder, ``300TB`` in total or ``0.5TB/day``. A warning is logged
        from 80 % on.
    write_budget_stops: whether an exceeded `write_budget`, which it needs, is an error, raised before the next update.
    """

    tiers: tuple[str, ...] = ()
    tier_placement: Literal["balanced", "as_published"] | tuple[float, ...] = "balanced"
    tier_rehome: bool = True
    tier_exclusive: bool | None = None
    sub_group_order: Literal["alternating", "ascending"] = "alternating"
    write_budget: str | None = None
    write_budget_stops: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.tiers, tuple) or not all(isinstance(path, str) and path for path in self.tiers):
            raise ValueError(
                f'"{CONFIG_KEY}.tiers" must be a list of paths such as ["/mnt/a", "/mnt/b"], got {self.tiers!r}'
            )
        if len({os.path.realpath(path) for path in self.tiers}) < len(self.tiers):
            raise ValueError(f'"{CONFIG_KEY}.tiers" names a path more than once: {list(self.tiers)}; name each once')
        placed = self.tier_placement
        if isinstance(placed, tuple):
            numbers = all(type(share) in (int, float) and math.isfinite(share) for share in placed)
            if not numbers or len(placed) != len(self.tiers) or min(placed) < 0 or sum(placed) <= 0:
                raise ValueError(
                    f'"{CONFIG_KEY}.tier_placement" must be {", ".join(PLACEMENTS)} or a number for each of '
                    f"{len(self.tiers)} paths, got {list(placed)!r}"
                )
        elif placed not in PLACEMENTS:
            raise ValueError(f'"{CONFIG_KEY}.tier_placement": {placed!r} is unknown; choose {" or ".join(PLACEMENTS)}')
        if self.sub_group_order not in ORDERS:
            raise ValueError(
                f'"{CONFIG_KEY}.sub_group_order": {self.sub_group_order!r} is unknown; choose {" or ".join(ORDERS)}'
            )
        if self.write_budget is not None:
            WriteBudget.parse(self.write_budget, key=f'"{CONFIG_KEY}.write_budget"')
        for name in ("tier_rehome", "tier_exclusive", "write_budget_stops"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name == "tier_exclusive"):
                raise ValueError(f'"{CONFIG_KEY}.{name}" must be true or false, got {value!r}')
        if not self.tiers and any(getattr(self, each.name) != each.default for each in fields(self)):
            raise ValueError(
                f'"{CONFIG_KEY}": tier_placement, tier_rehome, tier_exclusive, sub_group_order and write_budget '
                "apply to several paths: name them in tiers, or remove these keys"
            )
        if self.write_budget_stops and self.write_budget is None:
            raise ValueError(
                f'"{CONFIG_KEY}.write_budget_stops" needs a write_budget: set one, such as "300TB" or "0.5TB/day", or '
                "remove write_budget_stops"
            )

    def budget(self) -> WriteBudget | None:
        """Return the parsed write budget, or None without one."""
        return (
            None if self.write_budget is None else WriteBudget.parse(self.write_budget, stops=self.write_budget_stops)
        )

    def __bool__(self) -> bool:
        return bool(self.tiers)


NO_TIERS = TierOptions()


def as_options(given: dict[str, Any]) -> dict[str, Any]:
    """Convert JSON lists to tuples; with `tiers`, let gradients stay in host memory unless the user set the option."""
    given = dict(given)
    for name in ("tiers", "tier_placement"):
        if isinstance(given.get(name), list):
            given[name] = tuple(given[name])
        elif given.get(name, "") is None:
            del given[name]
    if given.get("tiers"):
        given.setdefault("gradients", "host")
    return given


def refuse_with_tiers(options: TierOptions, *, aio: str, devices: tuple[str, ...]) -> None:
    """Raise ValueError, in one line with the fix, for options that exclude several paths."""
    if not options:
        return
    if devices:
        raise ValueError(
            f'"{CONFIG_KEY}": devices and tiers are mutually exclusive: list the devices in tiers, or remove tiers'
        )
    if aio == "stock":
        raise ValueError(
            "memascend: tiers have no effect with aio='stock': DeepNVMe writes to nvme_path; set aio to 'direct' or "
            "'file', or remove tiers"
        )
    for path in options.tiers:
        if aio == "file" and _is_device(path):
            raise ValueError(
                f"memascend: {path} in tiers cannot be used with aio='file', which needs a file system; set 'direct'"
            )


def check_paths(options: TierOptions) -> None:
    """Raise ValueError, in one line with the fix, for folders and devices that cannot be used."""
    for path in options.tiers:
        if not _is_device(path):
            swap_folder(path, f'"{CONFIG_KEY}.tiers"')
            continue
        try:
            require_usable(path)
        except DeviceRefused as refused:
            raise ValueError(f'"{CONFIG_KEY}.tiers": {refused}') from None


def _is_device(path: str) -> bool:
    return Path(path).is_block_device()
