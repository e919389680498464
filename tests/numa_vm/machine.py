"""Boots a guest, which is one of three kinds.

NODES: a processor with 3 GiB, and two nodes of 256 MiB without processors, as CXL cards are. TWO_PROCESSORS: a second
processor, on a node without memory, which is nearest to the second card. CARDS: a processor with 3 GiB and two emulated
CXL type-3 cards of 256 MiB, which become memory when they are brought up.

The processor is emulated (KVM is neither needed nor used), so nothing in the guest may be timed. The host's files are
visible read-only under a temporary overlay; the files that the command leaves in /out are returned.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.numa_vm.images import CARDS_WANTED, Images

# MiB by node; the first has the processor. Distances are the firmware's (SLIT); HMAT is in ns and MB/s.
NODES_MIB = (3072, 256, 256)
DISTANCES = {(0, 1): 20, (0, 2): 24, (1, 2): 28}
LATENCY_NS = (100, 200, 250)
BANDWIDTH_MB_PER_S = (100_000, 25_000, 25_000)
NODES, TWO_PROCESSORS, CARDS = "nodes", "two processors", "cards"
# The init process loads the cards' modules; only movable pages, not the kernel's own, may use their memory.
CARD_WORDS = f" {CARDS_WANTED} memhp_default_state=online_movable"
SECOND_PROCESSOR_DISTANCES = {(0, 3): 32, (1, 3): 36, (2, 3): 15}


@dataclass(frozen=True)
class Outcome:
    """How a command in the guest ended; `status` is None if the guest ended without reporting it."""

    status: int | None
    console: str


def _machine_options(kind: str) -> list[str]:
    if kind == CARDS:
        return _card_options()
    # With a node that has no memory the kernel considers QEMU's HMAT invalid.
    alone = kind == NODES
    options = ["-cpu", "max", "-smp", "1" if alone else "2", "-M", f"q35,hmat={'on' if alone else 'off'}"]
    options += ["-m", f"{sum(NODES_MIB)}M"]
    for number, mib in enumerate(NODES_MIB):
        options += ["-object", f"memory-backend-memfd,id=m{number},size={mib}M"]
        role = "cpus=0-0" if number == 0 else "initiator=0" if alone else ""
        options += ["-numa", ",".join(filter(None, (f"node,nodeid={number},memdev=m{number}", role)))]
    distances = DISTANCES
    if not alone:
        options += ["-numa", f"node,nodeid={len(NODES_MIB)},cpus=1"]
        distances = DISTANCES | SECOND_PROCESSOR_DISTANCES
    for (source, target), value in distances.items():
        options += ["-numa", f"dist,src={source},dst={target},val={value}"]
    for number in range(len(NODES_MIB)) if alone else ():
        common = f"hmat-lb,initiator=0,target={number},hierarchy=memory"
        options += ["-numa", f"{common},data-type=access-latency,latency={LATENCY_NS[number]}"]
        options += ["-numa", f"{common},data-type=access-bandwidth,bandwidth={BANDWIDTH_MB_PER_S[number]}M"]
    return options


def _card_options() -> list[str]:
    # Under a hypervisor the kernel refuses to flush CPU caches for memory that is added or removed.
    options = ["-cpu", "max,-hypervisor", "-smp", "1", "-m", f"{NODES_MIB[0]}M,maxmem=8G,slots=4"]
    words = ["q35,cxl=on"]
    devices = []
    for number, mib in enumerate(NODES_MIB[1:]):
        words += [f"cxl-fmw.{number}.targets.0=cxl.{number}", f"cxl-fmw.{number}.size=1G"]
        devices += ["-object", f"memory-backend-ram,id=m{number},size={mib}M"]
        devices += ["-device", f"pxb-cxl,bus_nr={64 * (number + 1)},bus=pcie.0,id=cxl.{number}"]
        devices += ["-device", f"cxl-rp,port=0,bus=cxl.{number},id=port{number},chassis={number},slot={number + 2}"]
        devices += ["-device", f"cxl-type3,bus=port{number},volatile-memdev=m{number},id=card{number}"]
    return [*options, "-M", ",".join(words), *devices]


def command_line(images: Images, out: Path, kind: str = NODES) -> list[str]:
    """Return QEMU's command line, with `out` as the guest's /out."""
    share = "security_model=none,multidevs=remap"
    folders = []
    for tag, where in (("hostroot", "path=/,readonly=on"), ("out", f"path={out}")):
        folders += ["-fsdev", f"local,id={tag},{where},{share}"]
        folders += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag},bus=pcie.0"]
    append = f"console=ttyS0 quiet panic=-1 mitigations=off apparmor=0 audit=0{CARD_WORDS if kind == CARDS else ''}"
    return [
        images.qemu,
        *images.firmware(),
        *("-accel", "tcg,thread=multi"),
        *_machine_options(kind),
        *("-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio", "-no-reboot"),
        *folders,
        *("-kernel", str(images.kernel), "-initrd", str(images.initramfs), "-append", append),
    ]


def boot(
    images: Images,
    command: list[str],
    out: Path,
    *,
    cwd: Path,
    environment: Mapping[str, str],
    timeout_s: float,
    kind: str = NODES,
) -> Outcome:
    """Run `command` in a new guest.

    `out` becomes the guest's /out; its path must not contain commas. Raises TimeoutError, with the end of the console's
    output, if the guest does not end in time.
    """
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
    script = f"{exports}ulimit -l unlimited\ncd {shlex.quote(str(cwd))} || exit 97\nexec {shlex.join(command)}\n"
    (out / "run.sh").write_text(script, encoding="utf-8")
    with tempfile.TemporaryFile() as console:
        process = subprocess.Popen(
            command_line(images, out, kind),
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            env=images.environment(),
        )
        late = False
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            process.kill()
            process.wait()
        console.seek(0)
        said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", console.read().decode(errors="replace"))
    if late:
        raise TimeoutError(f"the guest did not end within {timeout_s:.0f} s; its last words:\n{said[-2000:]}")
    status = (out / "status").read_text().strip() if (out / "status").exists() else ""
    return Outcome(int(status) if status.isdecimal() else None, said)
