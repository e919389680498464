"""Checks of a device: its users, its contents, and whether a store may be created on it. Nothing here writes.

A device is refused if it is mounted, used as swap, part of LVM, RAID or another mapping, partitioned, carries a known
signature or any data at either end, or holds a store. In addition, formatting requires its exact serial number (for a
file or a loop device: its path), so that no mistyped name can destroy data. The kernel has the final say: a block
device is opened exclusively (O_EXCL) before anything is written.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

EDGE_BYTES = 1 << 20  # at either end, where signatures and backup partition tables are
SYS = Path("/sys")
PROC = Path("/proc")


class DeviceRefused(ValueError):
    """A device that must not be used or overwritten; the message says why, and how to fix it."""


@dataclass(frozen=True)
class Signature:
    """A signature: `magic` at `offset` from the beginning or, if negative, from the end."""

    name: str
    offset: int
    magic: bytes


# Offsets and magic numbers are those of util-linux, libblkid/src/superblocks and partitions.
SIGNATURES = (
    Signature("ext2/3/4 file system", 0x438, b"\x53\xef"),
    Signature("XFS file system", 0, b"XFSB"),
    Signature("btrfs file system", 0x10040, b"_BHRfS_M"),
    Signature("F2FS file system", 1024, b"\x10\x20\xf5\xf2"),
    Signature("NTFS file system", 3, b"NTFS    "),
    Signature("exFAT file system", 3, b"EXFAT   "),
    Signature("squashfs file system", 0, b"hsqs"),
    Signature("ISO 9660 file system", 0x8001, b"CD001"),
    Signature("bcachefs or bcache device", 0x1018, bytes.fromhex("c68573f64e1a45ca8265f57f48ba6d81")),
    Signature("ZFS pool member", 0x3FD8, bytes.fromhex("0210da7ab10c7a11")[::-1]),
    Signature("swap area", 4086, b"SWAPSPACE2"),
    Signature("swap area", 4086, b"SWAP-SPACE"),
    Signature("LUKS container", 0, b"LUKS\xba\xbe"),
    Signature("BlueStore device", 0, b"bluestore block device"),
    Signature("GUID partition table", 512, b"EFI PART"),
    Signature("GUID partition table", 4096, b"EFI PART"),
    Signature("GUID partition table (backup)", -512, b"EFI PART"),
    Signature("GUID partition table (backup)", -4096, b"EFI PART"),
    Signature("partition table or FAT file system", 510, b"\x55\xaa"),
    *(Signature("LVM physical volume", sector * 512, b"LABELONE") for sector in range(4)),
    Signature("RAID member (md 1.1)", 0, b"\xfc\x4e\x2b\xa9"),
    Signature("RAID member (md 1.2)", 4096, b"\xfc\x4e\x2b\xa9"),
)
MD_AT_END = (8 << 10, 64 << 10)  # md 1.0 and 0.90; positions are rounded down to 4 and 64 KiB


@dataclass(frozen=True)
class DeviceReport:
    """Findings about a device. `word` confirms formatting; `problems` forbid any use, `contents` forbid formatting."""

    path: str
    kind: str  # block, loop, partition or file
    size_bytes: int
    serial: str | None
    model: str
    word: str
    owner: str | None  # owner of the store on the device
    problems: tuple[str, ...]
    contents: tuple[str, ...]


def inspect(path: str | os.PathLike[str]) -> DeviceReport:
    """Inspect a device or file without writing to it. Raises DeviceRefused if it is neither, and OSError."""
    name = os.fspath(path)
    status = os.stat(name)
    if stat.S_ISREG(status.st_mode):
        return _inspect_file(name, status)
    if not stat.S_ISBLK(status.st_mode):
        raise DeviceRefused(f"{name} is neither a block device nor a regular file: name one of these")
    number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    node = (SYS / "dev/block" / number).resolve()
    if not node.is_dir():
        raise DeviceRefused(f"{name} ({number}) is unknown to the kernel: the device is gone")
    kind = "partition" if (node / "partition").exists() else "loop" if (node / "loop").is_dir() else "block"
    disk = node.parent if kind == "partition" else node
    serial = None if kind == "loop" else _serial(disk)
    size = int((node / "size").read_text()) * 512
    word = os.path.realpath(name)
    if serial:
        word = serial + (f"-part{_read(node / 'partition')}" if kind == "partition" else "")
    problems = (*_users(name, number, node), *([] if size else ["has no medium, or a size of 0"]))
    found = () if problems else tuple(_contents(name, size))
    return DeviceReport(name, kind, size, serial, _model(disk), word, _owner(name), problems, found)


def _inspect_file(name: str, status: os.stat_result) -> DeviceReport:
    """Return the report on a regular file: whether anything else uses it, and its contents."""
    real = os.path.realpath(name)
    problems = []
    for backing in SYS.glob("block/loop*/loop/backing_file"):
        if _read(backing).removesuffix(" (deleted)") == real:
            problems.append(f"is the file behind /dev/{backing.parts[-3]}: use that, or detach it (losetup -d)")
    if real in _swaps():
        problems.append("is in use as swap: swapoff it, or choose another file")
    if status.st_nlink > 1:
        problems.append("has more than one name (hard links): choose a file of its own")
    found = () if problems else tuple(_contents(name, status.st_size))
    return DeviceReport(
        name, "file", status.st_size, None, "", real, _owner(name), tuple(problems), found
    )  # fmt: skip


def require_usable(path: str | os.PathLike[str]) -> DeviceReport:
    """Check before opening a store: the path has one, and no other user. Raises DeviceRefused, OSError."""
    report = inspect(path)
    if report.problems:
        raise DeviceRefused(f"{report.path} {report.problems[0]}")
    if report.owner is None:
        if report.contents:
            raise DeviceRefused(f"{report.path} holds no store but {report.contents[0]}: name the devices of a store")
        raise DeviceRefused(f"{report.path} holds no store: create one with memascend storage format")
    return report


def require_formattable(path: str | os.PathLike[str], word: str | None, discard_contents: bool = False) -> DeviceReport:
    """Check before formatting: no users, no contents, and the matching `word`. Raises DeviceRefused, OSError.

    `discard_contents` permits overwriting data of unknown kind, but never a signature, a store or a device in use.
    """
    report = inspect(path)
    if report.problems:
        raise DeviceRefused(f"{report.path} {report.problems[0]}")
    if report.owner is not None:
        raise DeviceRefused(f"{report.path} holds a store of '{report.owner}': to delete it: memascend storage destroy")
    kept = [what for what in report.contents if not (discard_contents and what == UNKNOWN_CONTENTS)]
    if kept:
        fix = f"wipefs --all {report.path}" if kept[0] != UNKNOWN_CONTENTS else "--discard-contents"
        raise DeviceRefused(f"{report.path} holds {kept[0]}: choose another device, or if it may be overwritten: {fix}")
    return require_word(report, word)


def require_word(report: DeviceReport, word: str | None) -> DeviceReport:
    """Check that `word` is the exact serial number or path of the device. Raises DeviceRefused."""
    what = "serial number" if report.serial else "path"
    if word is None:
        size = f"{report.size_bytes / 1e9:.1f} GB"
        raise DeviceRefused(
            f"{report.path} ({' '.join([report.model or report.kind, size])}) would lose its contents: confirm with "
            f"its {what}: --serial {report.word}"
        )
    if word != report.word:
        raise DeviceRefused(f"{report.path} has the {what} '{report.word}', not '{word}': check which device you mean")
    return report


UNKNOWN_CONTENTS = "data of unknown kind"


def _contents(name: str, size: int) -> Iterator[str]:
    """Yield signatures, first from our table, then from libblkid; if none, whether either end has non-zero bytes."""
    try:
        with open(name, "rb", buffering=0) as file:
            head = file.read(min(size, EDGE_BYTES))
            file.seek(max(0, size - EDGE_BYTES))
            tail = file.read(EDGE_BYTES)
    except OSError as error:
        yield f"what cannot be read ({error.strerror})"
        return
    if _owner(name) is not None:
        return
    names = list(dict.fromkeys([*_table_hits(head, tail, size), *_blkid_hits(name)]))
    yield from names
    if not names and (any(head) or any(tail)):
        yield UNKNOWN_CONTENTS


def _table_hits(head: bytes, tail: bytes, size: int) -> Iterator[str]:
    """Yield the names of the signatures in our table that match. `head`, `tail`: the first and last `EDGE_BYTES` of a
    device of `size` bytes."""
    for signature in SIGNATURES:
        data, at = (head, signature.offset) if signature.offset >= 0 else (tail, len(tail) + signature.offset)
        if at >= 0 and data[at : at + len(signature.magic)] == signature.magic:
            yield signature.name
    for back in MD_AT_END:
        unit = 4096 if back == MD_AT_END[0] else back
        at = (size // unit * unit - back) - max(0, size - EDGE_BYTES)
        if at >= 0 and tail[at : at + 4] in (b"\xfc\x4e\x2b\xa9", b"\xa9\x2b\x4e\xfc"):
            yield "RAID member (md, at the end)"


def _blkid_hits(name: str) -> Iterator[str]:
    """Yield what libblkid recognises on the device; nothing without the program blkid."""
    tool = shutil.which("blkid") or shutil.which("blkid", path="/usr/sbin:/sbin")
    if tool is None:
        return
    done = subprocess.run([tool, "-p", "-o", "export", name], capture_output=True, text=True, timeout=60)
    if done.returncode == 8:
        yield "several signatures (blkid -p)"
    for key, value in re.findall(r"^(TYPE|PTTYPE)=(.+)$", done.stdout, re.MULTILINE):
        yield f"a {value} partition table" if key == "PTTYPE" else f"a {value} signature"


def _owner(name: str) -> str | None:
    """Return the owner of the store on the device. A superblock that cannot be parsed is contents, not a store."""
    from memascend.storage.native import _C

    try:
        block = _C.storage_superblock(name)
    except (OSError, RuntimeError):
        return None
    return None if block is None else str(block["owner"])


def _users(name: str, number: str, node: Path) -> Iterator[str]:
    """Yield the users of the device or of its partitions."""
    parts = [part.parent for part in node.glob("*/partition")]
    numbers = {number: name, **{_read(part / "dev"): f"partition {part.name}" for part in parts}}
    for line in _lines(PROC / "self/mountinfo"):
        fields = line.split()
        source = fields[fields.index("-") + 2] if "-" in fields else ""
        if fields[2] in numbers or _device_number(source) in numbers:
            yield f"is mounted on {fields[4]}: unmount it, or choose another device"
    for swap in _swaps():
        if _device_number(swap) in numbers:
            yield "is in use as swap: swapoff it, or choose another device"
    for place in (node, *parts):
        for holder in sorted((place / "holders").glob("*")):
            yield f"is in use by {holder.name} (LVM, RAID or another mapping): take it out of that first"
    members = {match for line in _lines(PROC / "mdstat") for match in re.findall(r"(\w+)\[\d+\]", line)}
    if members & {node.name, *(part.name for part in parts)}:
        yield "is a member of a RAID (/proc/mdstat): take it out of that first"
    if parts:
        yield f"is partitioned ({', '.join(sorted(part.name for part in parts))}): use a partition, or an empty device"
    if _read(node / "ro") == "1":
        yield "is read-only: choose another device"
    if _is_claimed(name):
        yield "is in use by the kernel (mount, mapping or RAID): end that first"


def _is_claimed(name: str) -> bool:
    """Return whether the kernel has claimed the device. A store of ours is not claimed: its engines negotiate."""
    if _owner(name) is not None:
        return False  # the engine itself decides who may share a store
    try:
        os.close(os.open(name, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
    except OSError as error:
        return error.errno == errno.EBUSY
    return False


def _serial(disk: Path) -> str | None:
    """Return the serial number of a disk, given its folder in /sys, or None if it has none."""
    for place in (disk / "device/serial", disk / "serial", disk / "device/wwid", disk / "wwid"):
        text = _read(place)
        if text:
            return text
    page = disk / "device/vpd_pg80"
    text = page.read_bytes()[4:].decode("ascii", "replace").strip() if page.exists() else ""
    return text or None


def _model(disk: Path) -> str:
    return _read(disk / "device/model")


def _swaps() -> list[str]:
    """Return the paths that are in use as swap."""
    return [line.split()[0].replace("\\040", " ") for line in _lines(PROC / "swaps")[1:] if line.split()]


def _device_number(path: str) -> str:
    """Return "major:minor" of a block device, or an empty string for any other path."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return ""
    if not stat.S_ISBLK(status.st_mode):
        return ""
    return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


def _read(path: Path) -> str:
    return _text(path).strip()


def _text(path: Path) -> str:
    """Return the text of the file, or an empty one on an OSError."""
    try:
        return path.read_text()
    except OSError:
        return ""
