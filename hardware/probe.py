"""This machine as a testbed, from /proc, /sys and nvidia-smi: no torch, no root, no write outside --out.

`python -m hardware.probe --out local.yaml` (or .json; without --out to the screen). Readers take a root, so that tests
can show them other machines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from hardware.registry import check
from memascend.memory.cgroup import host_memory, ram_bytes
from memascend.memory.topology import Topology

GIB = 2**30
# Excluded: loop devices, RAM disks, compressed swap, mappings of other devices, optical, floppy and network drives.
_NOT_A_DRIVE = re.compile(r"^(loop|ram|zram|dm-|md|sr|fd|nbd)")
_PCIE_GENERATION = {"2.5": "Gen1", "5.0": "Gen2", "8.0": "Gen3", "16.0": "Gen4", "32.0": "Gen5", "64.0": "Gen6"}


def probe(root: Path = Path("/")) -> dict[str, Any]:
    """Return the machine described under `root`, with the keys of the testbed schema.

    Values that cannot be read are null or empty, never guessed.
    """
    cpu, sockets, cores, logical = read_cpu(root)
    ram, _ = ram_bytes(root)
    testbed = {
        "id": "local",
        "paper": None,
        "name": "this machine",
        "cpu": cpu,
        "sockets": sockets,
        "cores": cores,
        "memory": None,
        "memory_gib": round(ram / GIB, 2),
        "pcie": read_pcie(root),
        "gpus": read_gpus(),
        "gpu_link": None,
        "ssds": read_drives(root),
        "cxl": [],
        "bandwidths": [],
        "software": {"os": read_os(root), "python": platform.python_version()},
        "quotes": [],
        "not_in_paper": [],
        "note": "",
        "local": {
            "kernel": platform.release(),
            "logical_cores": logical,
            "usable_cores": len(os.sched_getaffinity(0)),
            "usable_memory_gib": round(host_memory(root).limit_bytes / GIB, 2),
            "numa_nodes": read_numa(root),
        },
    }
    check(testbed, "probe")
    return testbed


def read_cpu(root: Path) -> tuple[str | None, int | None, int | None, int]:
    """Return (model, sockets, physical cores, logical cores).

    Sockets and physical cores are None if a virtual machine hides the topology.
    """
    blocks = [dict(_fields(block)) for block in _read(root / "proc/cpuinfo").strip().split("\n\n") if block]
    model = next((b[key] for b in blocks for key in ("model name", "Model", "Processor") if b.get(key)), None)
    ids = [(b.get("physical id"), b.get("core id")) for b in blocks]
    known = ids and all(None not in pair for pair in ids)
    sockets = len({physical for physical, _ in ids}) if known else None
    return model, sockets, len(set(ids)) if known else None, max(1, len(blocks))


def read_numa(root: Path) -> list[dict[str, Any]]:
    """Return the memory nodes with their CPUs and memory."""
    return [
        {"node": node.number, "cpus": node.cpus, "memory_gib": round(node.total_bytes / GIB, 2)}
        for node in Topology.read(root).nodes.values()
    ]


def read_drives(root: Path) -> list[dict[str, Any]]:
    """Return the non-rotating drives, one entry for each."""
    drives = []
    for path in sorted((root / "sys/block").glob("*")):
        sectors = _read(path / "size").strip()
        if _NOT_A_DRIVE.match(path.name) or not sectors.isdecimal() or int(sectors) == 0:
            continue
        if _read(path / "queue/rotational").strip() == "1" and not path.name.startswith("vd"):
            continue  # virtio drives (vd*) are kept: they report rotation whatever the underlying drive is
        model = _read(path / "device/model").strip() or f"virtual drive ({path.name.rstrip('0123456789')})"
        drives.append(
            {
                "model": model,
                "count": 1,
                "capacity_tb": round(int(sectors) * 512 / 1e12, 4) or None,
                "raid": None,
                "device": path.name,
            }
        )
    return drives


def read_pcie(root: Path) -> str | None:
    """Return the PCIe generation of the fastest negotiated link of a drive or display controller; None if unknown."""
    speeds = [_read(path) for path in (root / "sys/class/nvme").glob("*/device/current_link_speed")]
    speeds += [_read(path) for path in (root / "sys/class/drm").glob("card*/device/current_link_speed")]
    found = [match[1] for text in speeds if (match := re.match(r"([\d.]+) GT/s", text))]
    return _PCIE_GENERATION.get(max(found, key=float)) if found else None


def read_gpus() -> list[dict[str, Any]]:
    """Return the NVIDIA GPUs that nvidia-smi lists, equal ones in one entry; none if there is no driver."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    counts: dict[tuple[str, str], int] = {}
    for line in done.stdout.strip().splitlines():
        name, _, mib = line.rpartition(",")
        counts[name.strip(), mib.strip()] = counts.get((name.strip(), mib.strip()), 0) + 1
    return [
        {"model": name, "count": count, "memory_gib": round(int(mib) / 1024, 1) if mib.isdecimal() else None}
        for (name, mib), count in counts.items()
    ]


def read_os(root: Path) -> str:
    """Return the name of the operating system: PRETTY_NAME of os-release, or the platform's name."""
    found = re.search(r'^PRETTY_NAME="?([^"\n]*)', _read(root / "etc/os-release"), re.MULTILINE)
    return found[1] if found else platform.system()


def _fields(block: str) -> list[tuple[str, str]]:
    """Return the (key, value) pairs of a block of /proc/cpuinfo."""
    return [(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in block.splitlines())]


def _read(path: Path) -> str:
    """Return a file's text, or an empty string if it does not exist or cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to write, .yaml or .json (default: the screen, as YAML)")
    options = parser.parse_args(argv)
    try:
        testbed = probe()
        as_json = options.out is not None and options.out.suffix == ".json"
        text = json.dumps(testbed, indent=2) + "\n" if as_json else yaml.safe_dump(testbed, sort_keys=False)
        if options.out is None:
            print(text, end="")
        else:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"hardware.probe: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
