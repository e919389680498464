"""Brings up emulated CXL type-3 cards as memory through sysfs, as an administrator without the `cxl` tool does.

For each window of the host bridge this creates a region of volatile memory over one card; its dax device becomes the
memory of a separate node (dax_cxl, kmem). Only for the guest: this changes the machine that it runs on.
"""

from __future__ import annotations

import time
from pathlib import Path

from memascend.memory.topology import Topology

DEVICES = Path("/sys/bus/cxl/devices")
BIND = Path("/sys/bus/cxl/drivers/cxl_region/bind")
ONLINE_S = 60.0


def _say(path: Path, value: object) -> None:
    try:
        path.write_text(f"{value}\n")
    except OSError as error:
        raise RuntimeError(f"the kernel refuses {value!r} in {path}: {error.strerror}") from None


def bring_up() -> tuple[int, ...]:
    """Return the numbers of the cards' nodes in ascending order. RuntimeError that names a refused step."""
    windows = sorted(DEVICES.glob("decoder0.*"))
    endpoints = [path for path in DEVICES.glob("decoder*.0") if (path / "dpa_size").exists()]  # a card's first decoder
    if not windows or not endpoints:
        raise RuntimeError(f"no CXL cards: {len(windows)} windows and {len(endpoints)} endpoints in {DEVICES}")
    sizes = {int(path.read_text(), 0) for path in DEVICES.glob("mem*/ram/size")}
    for window in windows:
        endpoints.remove(_region(window, endpoints, min(sizes)))
    before, until = 0, time.monotonic() + ONLINE_S
    while time.monotonic() < until:
        cards = [node for node in Topology.read().memory_only if node.total_bytes]
        total = sum(node.total_bytes for node in cards)
        if len(cards) == len(windows) and total == before:  # they come online block by block, one card after the other
            return tuple(node.number for node in cards)
        before = total
        time.sleep(0.5)
    raise RuntimeError(f"{len(windows)} regions, and {len(cards)} nodes without processors after {ONLINE_S:.0f} s")


def _region(window: Path, endpoints: list[Path], size: int) -> Path:
    """Bring up a region of `size` bytes in this window, over the card behind it; return the card's endpoint."""
    name = (window / "create_ram_region").read_text().strip()
    _say(window / "create_ram_region", name)
    region = DEVICES / name
    for option, value in (("interleave_granularity", 256), ("interleave_ways", 1), ("size", size)):
        _say(region / option, value)
    refused = []
    for endpoint in endpoints:  # endpoints are not in the order of their windows
        _say(endpoint / "mode", "ram")
        _say(endpoint / "dpa_size", size)
        try:
            _say(region / "target0", endpoint.name)
        except RuntimeError as error:
            refused.append(str(error))
            _say(endpoint / "dpa_size", 0)
            continue
        _say(region / "commit", 1)
        _say(BIND, name)
        return endpoint
    raise RuntimeError("; ".join(refused))


if __name__ == "__main__":
    print(bring_up())
