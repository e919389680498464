"""The environment that builds and checks a release: torch, build tools, and constraints-release.txt."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".cache/envs/release"
USUAL, TOOLS = ROOT / "constraints.txt", ROOT / "constraints-release.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
COMPILE = ("ninja", "packaging", "setuptools", "wheel")


def ensure() -> Path:
    """Return the folder of the environment's programs, rebuilt if a pin changed; `uv` and `twine`
    need no activation."""
    stamp = ENVIRONMENT / ".made"
    digest = hashlib.sha256(USUAL.read_bytes() + TOOLS.read_bytes() + sys.version.encode()).hexdigest()
    if not (stamp.is_file() and stamp.read_text(encoding="utf-8") == digest):
        python = new_environment(ENVIRONMENT)
        install_torch(python)
        pip(python, "-c", str(USUAL), "-c", str(TOOLS), "-r", str(TOOLS), *COMPILE)
        stamp.write_text(digest, encoding="utf-8")
    return ENVIRONMENT / "bin"


def new_environment(folder: Path) -> Path:
    """Create an empty virtual environment and return its interpreter."""
    run([sys.executable, "-m", "venv", "--clear", str(folder)])
    return folder / "bin/python"


def install_torch(python: Path) -> None:
    """Install only the pinned torch: the CPU build if there is no NVIDIA device and its index can be reached."""
    pip(python, "-c", str(USUAL), *cpu_build(), "torch")


def cpu_build() -> list[str]:
    """Return pip's options for the CPU build of torch; none with a GPU, or if its index cannot be reached."""
    asks = ["nvidia-smi", "-L"]
    if shutil.which(asks[0]) and not subprocess.run(asks, capture_output=True, check=False).returncode:
        return []
    try:
        urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=5).close()
    except (OSError, urllib.error.URLError):
        return []
    return ["--extra-index-url", CPU_INDEX]


def pip(python: Path, *words: str) -> None:
    """Run pip of that interpreter. Raises ValueError if it fails."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", *words]
    run(command, env=clean(python.parent))


def clean(programs: Path) -> dict[str, str]:
    """Return the variables of a user without our settings, with one virtual environment's programs before the system's.

    A PYTHONPATH that contains a checkout would make pip find memascend there and install nothing.
    """
    ours = ("MEMASCEND", "PYTHON", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "PATH": f"{programs}:{os.environ.get('PATH', os.defpath)}", "PYTHONNOUSERSITE": "1"}


def run(command: list[str], **more: object) -> str:
    """Return a program's output; raise ValueError with the end of it if the program fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **more)
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        said = " | ".join(lines[-3:]) or f"exit status {done.returncode}"
        raise ValueError(f"{' '.join(command[:6])} ... failed: {said}")
    return done.stdout
