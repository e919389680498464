"""Readers of /proc, /sys and nvidia-smi that need no torch and no root, and write nothing. Tests pass another root."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
# Dense 16-bit matrix rate with 32-bit accumulation, in TFLOPS, from NVIDIA's data sheets. The first key that occurs in
# the GPU's name applies, so longer keys come first.
GPU_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 6000 Ada": 364.0,
    "RTX A6000": 154.8,
    "RTX A5000": 111.1,
    "A5000": 111.1,
    "A10": 125.0,
    "V100": 125.0,
    "RTX 4090": 165.2,
    "RTX 4080": 97.5,
    "RTX 3090": 71.0,
}
# GB/s per PCIe lane and direction, by generation.
PCIE_LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU; `flops_per_s` and `pcie_bytes_per_s` are None if the name or the driver does not give them."""

    name: str
    memory_bytes: int
    flops_per_s: float | None
    pcie_bytes_per_s: float | None


def read_text(path: Path) -> str:
    """Return a file's text, or an empty string if it does not exist or cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def swap_bytes(root: Path = Path("/")) -> int:
    """Return the size of all swap space in bytes."""
    found = re.search(r"^SwapTotal:\s+(\d+) kB", read_text(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def nvidia_smi() -> str:
    """Return name, memory in MiB, PCIe generation and PCIe width of each GPU, one GPU per line.

    Raises OSError or SubprocessError without a driver.
    """
    fields = "name,memory.total,pcie.link.gen.max,pcie.link.width.max"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout


def gpus(query: Callable[[], str] = nvidia_smi) -> list[Gpu]:
    """Return the NVIDIA GPUs of this machine; none if there is no driver."""
    try:
        lines = query().strip().splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in lines:
        name, mib, generation, width = (field.strip() for field in f"{line},,,".split(",")[:4])
        lane = PCIE_LANE_GB_PER_S.get(int(generation)) if generation.isdecimal() else None
        tflops = next((rate for word, rate in GPU_TFLOPS.items() if word in name), None)
        found.append(
            Gpu(
                name=name,
                memory_bytes=int(mib) << 20 if mib.isdecimal() else 0,
                flops_per_s=tflops * 1e12 if tflops else None,
                pcie_bytes_per_s=lane * int(width) * 1e9 if lane and width.isdecimal() else None,
            )
        )
    return found


def kernel_version(release: str | None = None) -> tuple[int, int]:
    """Return (major, minor) of a kernel release, by default the running one, or (0, 0) if it has no such numbers."""
    found = re.match(r"(\d+)\.(\d+)", os.uname().release if release is None else release)
    return (int(found[1]), int(found[2])) if found else (0, 0)
