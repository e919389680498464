"""Kernel, initial file system and QEMU of the guest, unpacked from Debian packages: nothing is installed.

    python -m tests.numa_vm.images        # once (make numa-guest); some 125 MB are downloaded, 60 MB kept

A private apt configuration uses the archive that this machine's own sources name, and its backports, so it works
without root and leaves the machine's lists alone. The results are kept in the user's cache (MEMASCEND_CACHE).
"""

from __future__ import annotations

import contextlib
import gzip
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Weighted interleaving of pages came with 6.9; the `auto` weights, which are read if they exist, with 6.16.
LEAST_KERNEL = (6, 9)
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# Modules by which the guest sees the host's files under an overlay, and for a file system on a loop device; their
# dependencies are found in the files.
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay", "loop", "crc32c_generic", "ext4")
# Modules that turn CXL cards into memory, if the kernel's command line asks for it.
CARD_MODULES = ("cxl_acpi", "cxl_pci", "cxl_mem", "device_dax", "kmem", "dax_cxl")
CARDS_WANTED = "memascend.cards=1"
QEMU = "qemu-system-x86_64"
LEAST_QEMU = (8, 2)  # cards of volatile memory came with 8.1
FORMAT = 3  # format of the kept files; they are made anew if it differs
MAKE = "make numa-guest"
# Output of apt: `Inst NAME (VERSION ORIGIN)`, or with the installed version in brackets before it.
_INSTALLED = re.compile(r"^Inst (\S+)(?: \[\S+\])? \((\S+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Images:
    """Files of a guest. `qemu_folder` is None for an installed QEMU;
    `packages` are the names of the downloaded packages."""

    kernel: Path
    initramfs: Path
    qemu_folder: Path | None
    packages: tuple[str, ...]

    @property
    def qemu(self) -> str:
        return str(self.qemu_folder / "usr/bin" / QEMU) if self.qemu_folder else QEMU

    def environment(self) -> dict[str, str]:
        """Return the environment of QEMU's process, with its libraries if it is not the installed one."""
        if self.qemu_folder is None:
            return dict(os.environ)
        folders = [self.qemu_folder / "usr/lib/x86_64-linux-gnu", self.qemu_folder / "lib/x86_64-linux-gnu"]
        return os.environ | {"LD_LIBRARY_PATH": ":".join(map(str, folders))}

    def firmware(self) -> list[str]:
        """Return QEMU's options for the folders of its firmware."""
        if self.qemu_folder is None:
            return []
        return [word for name in ("qemu", "seabios") for word in ("-L", str(self.qemu_folder / "usr/share" / name))]


def cache_folder() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memascend"
    return Path(os.environ.get("MEMASCEND_CACHE") or default) / "numa-guest"


def images() -> Images | None:
    """Return what `make numa-guest` has made, or None if it is missing or of an older format."""
    folder = cache_folder()
    try:
        made = json.loads((folder / "images.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if made.get("format") != FORMAT or not (made["own_qemu"] or shutil.which(QEMU)):
        return None
    return Images(
        kernel=folder / "vmlinuz",
        initramfs=folder / "initramfs.gz",
        qemu_folder=folder / "qemu" if made["own_qemu"] else None,
        packages=tuple(made["packages"]),
    )


def prepare() -> Images:
    """Return the images, making them if they are missing. ValueError, in one line, if they cannot be had here."""
    if (found := images()) is not None:
        return found
    codename = _debian()
    final = cache_folder()
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix="numa-guest-") as name:
        folder = Path(name)
        with _private_apt(folder / "apt", codename) as apt:
            packages = _download(apt, folder / "packages")
        made = folder / "made"
        made.mkdir()
        own_qemu = _unpack(folder / "packages", made)
        facts = {"format": FORMAT, "packages": packages, "own_qemu": own_qemu}
        (made / "images.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        made.rename(final)
    found = images()
    assert found is not None
    return found


def _debian() -> str:
    """Return the code name of this release of Debian."""
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)', Path("/etc/os-release").read_text(), re.MULTILINE))
    tools = [tool for tool in ("apt-get", "dpkg") if shutil.which(tool) is None]
    if release.get("ID") != "debian" or tools or os.uname().machine != "x86_64":
        raise ValueError(
            f"the guest is made of Debian's packages on x86-64, and this is {release.get('PRETTY_NAME', 'unknown')} on "
            f"{os.uname().machine}: run these tests on Debian, or on a machine with several NUMA nodes"
        )
    return release["VERSION_CODENAME"]


class _Apt:
    """apt with its own configuration, lists and cache."""

    def __init__(self, config: Path, codename: str) -> None:
        self.codename = codename
        self._environment = os.environ | {"APT_CONFIG": str(config), "LC_ALL": "C"}

    def __call__(self, *command: str, cwd: Path | None = None) -> str:
        done = subprocess.run(command, env=self._environment, cwd=cwd, capture_output=True, text=True, timeout=600)
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
            raise ValueError(f"{' '.join(command[:3])}: {last}; the images need Debian's archive, once")
        return done.stdout


@contextlib.contextmanager
def _private_apt(folder: Path, codename: str) -> Iterator[_Apt]:
    for part in ("lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True)
    uri = _archive(codename)
    suites = (codename, f"{codename}-backports")
    signed = f"[signed-by={KEYRING}] " if KEYRING.exists() else ""
    (folder / "sources.list").write_text("".join(f"deb {signed}{uri} {suite} main\n" for suite in suites))
    settings = {
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "APT::Default-Release": codename,
        "APT::Install-Recommends": 0,
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
    }
    (folder / "apt.conf").write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))
    apt = _Apt(folder / "apt.conf", codename)
    apt("apt-get", "update", "-q")
    yield apt


def _archive(codename: str) -> str:
    """Return the URI that this machine's own sources give for its release, in either of apt's two formats."""
    root = Path("/etc/apt")
    files = [root / "sources.list", *sorted(root.glob("sources.list.d/*"))]
    for path in files:
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        one_line = re.search(rf"^deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+{codename}\s.*\bmain\b", text, re.MULTILINE)
        if one_line:
            return one_line[1]
        for stanza in re.split(r"\n\s*\n", text):
            fields = dict(re.findall(r"^([A-Za-z-]+):\s*(.*)$", stanza, re.MULTILINE))
            if codename in fields.get("Suites", "").split() and "main" in fields.get("Components", "").split():
                return fields["URIs"].split()[0]
    raise ValueError(f"no source of {codename} main in /etc/apt: the images are made of packages from there")


def _download(apt: _Apt, folder: Path) -> list[str]:
    """Download a kernel that is new enough, busybox, and QEMU with its
    dependencies if it is not installed; return file names."""
    folder.mkdir()
    wanted = [_kernel_package(apt), "busybox-static"]
    if not _qemu_is_new_enough():
        newest = ("-t", f"{apt.codename}-backports")
        simulated = apt("apt-get", "install", "--simulate", *newest, "qemu-system-x86")
        wanted += [f"{name}={version}" for name, version in _INSTALLED.findall(simulated)]
    apt("apt-get", "download", "-q", *wanted, cwd=folder)
    return sorted(path.name for path in folder.glob("*.deb"))


def _qemu_is_new_enough() -> bool:
    if shutil.which(QEMU) is None:
        return False
    said = subprocess.run([QEMU, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    numbers = re.search(r"version (\d+)\.(\d+)", said)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= LEAST_QEMU


def _kernel_package(apt: _Apt) -> str:
    """Return name=version of the oldest kernel that is new enough."""
    found = []
    for line in apt("apt-cache", "madison", "linux-image-amd64").splitlines():
        version = line.split("|")[1].strip()
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
        if numbers[:2] >= LEAST_KERNEL:
            found.append((numbers, version))
    if not found:
        least = ".".join(map(str, LEAST_KERNEL))
        raise ValueError(f"no kernel from {least} on in {apt.codename} or its backports")
    shown = apt("apt-cache", "show", f"linux-image-amd64={min(found)[1]}")
    name, version = re.search(r"^Depends: (linux-image-\S+) \(= (\S+)\)", shown, re.MULTILINE).groups()
    return f"{name}={version}"


def _unpack(packages: Path, made: Path) -> bool:
    """Unpack kernel, initramfs and QEMU into `made`; return whether QEMU is among them."""
    kernel, busybox = packages / "kernel", packages / "busybox"
    own_qemu = False
    for path in packages.glob("*.deb"):
        folder = {"linux-image": kernel, "busybox-sta": busybox}.get(path.name[:11], made / "qemu")
        own_qemu = own_qemu or folder.name == "qemu"
        subprocess.run(["dpkg", "-x", path, folder], check=True)
    shutil.copy(next((kernel / "boot").glob("vmlinuz-*")), made / "vmlinuz")
    contents = {"bin/busybox": (busybox / "bin/busybox").read_bytes(), "init": INIT.encode()}
    always = modules(kernel, MODULES)
    for_cards = [path for path in modules(kernel, MODULES + CARD_MODULES) if path not in always]
    for order, paths in (("order", always), ("cards", for_cards)):
        names = {path.name.removesuffix(".xz"): path for path in paths}
        for name, path in names.items():
            data = path.read_bytes()
            contents[f"modules/{name}"] = lzma.decompress(data) if path.suffix == ".xz" else data
        contents[f"modules/{order}"] = "".join(f"{name}\n" for name in names).encode()
    with gzip.open(made / "initramfs.gz", "wb", compresslevel=1) as file:
        file.write(cpio(contents))
    return own_qemu


def modules(kernel: Path, wanted: tuple[str, ...]) -> list[Path]:
    """Return the files of modules, each after the modules that it depends on; built-in modules have none."""
    files = {re.sub(r"\.ko(\.xz)?$", "", path.name).replace("-", "_"): path for path in kernel.rglob("*.ko*")}
    ordered: list[Path] = []

    def add(name: str) -> None:
        path = files.get(name.replace("-", "_"))
        if path is None or path in ordered:
            return
        data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        depends = re.search(rb"\0depends=([^\0]*)\0", data)
        for other in depends[1].decode().split(",") if depends and depends[1] else []:
            add(other)
        ordered.append(path)

    for name in wanted:
        add(name)
    return ordered


def cpio(contents: dict[str, bytes]) -> bytes:
    """Return an archive of the `newc` format, which a kernel unpacks, with the folders that the files are in."""
    folders = sorted({str(parent) for name in contents for parent in Path(name).parents} - {"."})
    entries = [(name, 0o040755, b"") for name in folders]
    entries += [(name, 0o100755, data) for name, data in contents.items()] + [("TRAILER!!!", 0, b"")]
    archive = bytearray()
    for number, (name, mode, data) in enumerate(entries):
        path = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0)
        archive += b"070701" + b"".join(b"%08X" % field for field in fields) + path
        archive += bytes(-len(archive) % 4) + data
        archive += bytes(-len(archive) % 4)
    return bytes(archive)


# The guest's first process. It sees the host's files under a temporary overlay; only /out is kept.
INIT = """#!/bin/busybox sh
B=/bin/busybox
$B mkdir -p /proc /sys /dev /host /layer /new
$B mount -t proc proc /proc
$B mount -t sysfs sysfs /sys
$B mount -t devtmpfs dev /dev
orders=/modules/order
$B grep -q "CARDS_WANTED" /proc/cmdline && orders="$orders /modules/cards"
for module in $($B cat $orders); do $B insmod /modules/$module; done
share=trans=virtio,version=9p2000.L,msize=1048576
$B mount -t 9p -o $share,ro,cache=loose hostroot /host || { echo "no host files"; $B poweroff -f; }
$B mount -t tmpfs layer /layer
$B mkdir /layer/upper /layer/work
$B mount -t overlay -o lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work overlay /new
$B mkdir -p /new/out
$B mount -t 9p -o $share out /new/out
for folder in proc sys dev; do $B mount -o move /$folder /new/$folder; done
$B mount -t tmpfs shm /new/dev/shm 2>/dev/null || { $B mkdir -p /new/dev/shm; $B mount -t tmpfs shm /new/dev/shm; }
$B mount -t tmpfs tmp /new/tmp
$B chroot /new /bin/sh /out/run.sh
echo $? > /new/out/status
$B sync
$B poweroff -f
""".replace("CARDS_WANTED", CARDS_WANTED)


def main() -> int:
    try:
        made = prepare()
    except (ValueError, OSError, subprocess.SubprocessError) as error:
        print(f"numa-guest: {error}", file=sys.stderr)
        return 1
    kernel = next((name for name in made.packages if name.startswith("linux-image")), "")
    print(f"numa-guest: {kernel.split('_')[0]} and {made.qemu}; run: pytest -m numa_vm")
    return 0


if __name__ == "__main__":
    sys.exit(main())
