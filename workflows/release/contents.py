"""Checks that a wheel and a source distribution of memascend contain what they must, and nothing else."""

from __future__ import annotations

import email
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

from memascend.extension import BUILT_AGAINST

READ = (".csv", ".json", ".py", ".pyi", ".typed", ".yaml")  # suffixes of package files that are read after installation
SOURCES = (".cpp", ".h")
AVX = re.compile(r"^ *[0-9a-f]+:\tv[a-z0-9]+ |%[yz]mm", re.MULTILINE)


def of_package(source: Path) -> set[str]:
    """Return the package's files in a checkout by their names in a wheel, including those in linked folders."""
    folders = [source / "memascend"]
    folders += [link for link in folders[0].rglob("*") if link.is_symlink() and link.is_dir()]
    found = (path for folder in folders for path in Path(folder).rglob("*") if path.suffix in READ and path.is_file())
    return {path.relative_to(source).as_posix() for path in found if "__pycache__" not in path.parts}


def wrong_in_wheel(wheel: Path, source: Path, version: str) -> list[str]:
    """Return what is wrong with a wheel of the checkout `source`, one line each."""
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if not name.endswith("/")}
        if f"memascend-{version}.dist-info/METADATA" not in names:
            return [f"it is not of version {version}"]
        metadata = email.message_from_bytes(file.read(f"memascend-{version}.dist-info/METADATA"))
        extensions = [name for name in names if re.fullmatch(r"memascend/_C\.[^/]*\.so", name)]
        built = [BUILT_AGAINST.search(file.read(name)) for name in extensions]
    tops = {name.partition("/")[0] for name in names} - {f"memascend-{version}.dist-info"}
    wrong = [f"it installs {', '.join(sorted(tops - {'memascend'}))} beside memascend"] if tops != {"memascend"} else []
    wrong += [f"{name} is missing" for name in sorted(of_package(source) - names)]
    wrong += [f"{name} is C++, which is in the source distribution alone" for name in names if name.endswith(SOURCES)]
    if len(built) != 1 or built[0] is None:
        return [*wrong, f"it has {len(built)} extensions, and must have one that says which torch it was built against"]
    needed = [word for word in metadata.get_all("Requires-Dist", []) if re.match(r"torch\b", word)]
    release = ".".join(built[0][1].decode().split(".")[:2])
    if needed != [f"torch=={release}.*"]:
        asked = ", ".join(needed) or "no torch"
        wrong.append(f"its extension was built against torch {release}, and it asks for {asked}")
    if "-linux_x86_64" in wheel.name:
        wrong.append("its platform is linux_x86_64, which an index refuses")
    return wrong


def bound_to_a_processor(extension: Path) -> list[str]:
    """Return the functions that use AVX instructions without AVX2 or AVX-512 in their names.

    Functions with such a name run only after a check of the processor; any other would crash on one without AVX. Needs
    `objdump`, which is installed with a compiler.
    """
    command = ["objdump", "--disassemble", "--no-show-raw-insn", "--demangle", str(extension)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: set[str] = set()
    for function, body in re.findall(r"^[0-9a-f]+ <(.*)>:\n((?:.+\n)*)", listing, re.MULTILINE):
        if not re.search("avx2|avx512", function, re.IGNORECASE) and AVX.search(body):
            found.add(function)
    return sorted(found)


def wrong_in_sdist(sdist: Path, source: Path, version: str) -> list[str]:
    """Return what is wrong with a source distribution, one line each."""
    with tarfile.open(sdist) as file:
        members = {member.name: member for member in file.getmembers() if not member.isdir()}
    root = f"memascend-{version}/"
    names = {name.removeprefix(root) for name in members}
    cpp = {path.relative_to(source).as_posix() for path in (source / "memascend").rglob("*") if path.suffix in SOURCES}
    wanted = {"LICENSE", "README.md", "pyproject.toml", "setup.py", *of_package(source), *cpp}
    wrong = [f"{name} is missing" for name in sorted(wanted - names)]
    wrong += [f"{name} lies outside of {root}" for name in members if not name.startswith(root)]
    return wrong + [f"{name} is a link" for name, member in members.items() if member.issym()]
