"""This machine as the planner's MachineSpec: limits from the kernel, rates from data sheets and short measurements."""

from __future__ import annotations

from pathlib import Path

from memascend.doctor import probe
from memascend.doctor.speed import device_speed, memory_speed
from memascend.memory.cgroup import host_memory
from memascend.memory.topology import Topology
from memascend.planner.machine import MachineSpec
from memascend.planner.node_memory import described_nodes


def local_machine(nvme: Path | None = None) -> MachineSpec:
    """Return the specification of this machine.

    With the folder `nvme`, its SSD is measured for a few seconds (up to 1 GiB, deleted at once). If there are several
    memory nodes, they are described with the firmware's rates. Without a GPU, the GPU's rates are None, and no times
    can be predicted. Raises a one-line ValueError if the folder is not writable.
    """
    found = probe.gpus()
    sources = {"memory_bytes_per_s": "torch's sum of 256 MiB, best of three"}
    read = write = None
    if nvme is not None:
        try:
            speed = device_speed(nvme)
        except OSError as error:
            raise ValueError(
                f"cannot test the SSD in {nvme}: {error.strerror}; name a folder that is writable"
            ) from None
        read, write = speed.read_bytes_per_s, speed.write_bytes_per_s
        tried = f"{speed.tried_bytes / 2**20:.0f} MiB by O_DIRECT in {nvme}"
        sources |= {"ssd_read_bytes_per_s": tried, "ssd_write_bytes_per_s": tried}
    first = found[0] if found else None
    if first is not None:
        sources |= {"gpu_flops_per_s": f"data sheet of {first.name}", "pcie_bytes_per_s": "nvidia-smi"}
    nodes = described_nodes(Topology.read())
    return MachineSpec(
        name="local",
        gpus=len(found) or 1,
        gpu_flops_per_s=first.flops_per_s if first else None,
        gpu_memory_bytes=first.memory_bytes if first else None,
        pcie_bytes_per_s=first.pcie_bytes_per_s if first else None,
        ssd_read_bytes_per_s=read,
        ssd_write_bytes_per_s=write,
        memory_bytes_per_s=memory_speed(),
        ram_bytes=host_memory().limit_bytes,
        described={"memory_nodes": nodes} if len(nodes) > 1 else {},
        sources=sources,
    )
