"""Give the environment DeepSpeed's CPU ops ready made, so that none compiles on first use and pollutes a timing.

DeepSpeed's own route is taken: its source distribution, built into a wheel with DS_BUILD_<OP>=1. The wheel is kept in
the user's cache under a key of everything that the binaries depend on (DeepSpeed, torch, Python, and the processor,
since they are compiled with -march=native), so that another checkout installs it in seconds. Ops compiled on first use
cannot be shared like this: their build files hold the paths of one environment.

With MEMASCEND_CPU_LEVEL=x86-64-v3 (or -v2, -v4) they are compiled for every processor of that level instead, which an
image for other machines needs: a stand-in for the compiler replaces what DeepSpeed asks for.

usage: python workflows/setup/build_ops.py     (by the interpreter of the environment, which has torch and deepspeed)
Reads MEMASCEND_CACHE (default: $XDG_CACHE_HOME/memascend or ~/.cache/memascend), MAX_JOBS (default: one per core)
and MEMASCEND_CPU_LEVEL (default: this processor).
"""

import fcntl
import hashlib
import importlib.metadata
import inspect
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

# Ops that a CPU run of ZeRO-3 with NVMe offload loads -> variable that makes DeepSpeed build them.
OPS = {
    "async_io": "DS_BUILD_AIO",
    "cpu_adam": "DS_BUILD_CPU_ADAM",
    "deepspeed_shm_comm": "DS_BUILD_SHM_COMM",
    "pin_memory": "DS_BUILD_PIN_MEMORY",
}
# Level of the x86-64 ABI -> macro that selects the vector instructions in DeepSpeed's sources (csrc/includes/simd.h).
LEVELS = {"x86-64-v2": "__SCALAR__", "x86-64-v3": "__AVX256__", "x86-64-v4": "__AVX512__"}
MARK = "MEMASCEND_OPS"  # file in DeepSpeed's .dist-info with the key of the compiled ops
CHECK = """
import sys
from deepspeed.git_version_info import accelerator_name, installed_ops
from deepspeed.ops.op_builder.all_ops import ALL_OPS
wanted = [name for name in sys.argv[1:] if name in ALL_OPS]  # older releases have no pin_memory
missing = [name for name in wanted if not installed_ops.get(name)]
if missing or accelerator_name != "cpu":
    sys.exit("not installed: " + ", ".join(missing or wanted))
for name in wanted:
    ALL_OPS[name].load(verbose=False)
"""


def cache_dir() -> Path:
    """Return the folder outside the checkout that keeps compiled ops."""
    chosen = os.environ.get("MEMASCEND_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "memascend"


def processor() -> str:
    """Return the machine type and a digest of this processor's instruction sets, as the kernel lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"


def level() -> str:
    """Return what the ops are compiled for: a level of x86-64, or empty for this processor."""
    asked = os.environ.get("MEMASCEND_CPU_LEVEL", "")
    if asked and asked not in LEVELS:
        sys.exit(f"MEMASCEND_CPU_LEVEL={asked}: not a level that ops are built for; take {', '.join(LEVELS)}, or none")
    if asked and platform.machine() != "x86_64":
        sys.exit(f"MEMASCEND_CPU_LEVEL={asked}: this machine is {platform.machine()}; leave the variable out")
    return asked


def key(deepspeed_version: str) -> str:
    """Return the name of the cache folder, which covers everything that the binaries depend on."""
    recipe = hashlib.sha256(f"{OPS}{inspect.getsource(build_wheel)}".encode()).hexdigest()[:8]
    torch_version = importlib.metadata.version("torch")
    place = f"{sys.implementation.cache_tag}-{level() or processor()}"
    return f"deepspeed-{deepspeed_version}-torch-{torch_version}-{place}-{recipe}"


def works() -> str | None:
    """Return None if every prebuilt op loads in a fresh interpreter, otherwise the reason why not."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", CHECK, *OPS], capture_output=True, text=True, env=environment)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]


def mark() -> Path:
    """Return the file that says what the installed ops were compiled for."""
    (info,) = {file.locate().parent for file in importlib.metadata.files("deepspeed") or () if file.name == "METADATA"}
    return Path(info) / MARK


def installed(wanted: str) -> bool:
    """Return whether the ops of this key are installed and load.

    Ops without a mark were compiled for this processor, by versions that wrote no mark.
    """
    of = mark().read_text() if mark().exists() else ""
    return (of == wanted or not (of or level())) and works() is None


def pip(*words: str, env: dict[str, str] | None = None) -> None:
    """Run this environment's pip; its output goes to ours."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *words]
    done = subprocess.run(command, env=env)
    if done.returncode != 0:
        sys.exit(f"pip ended with {done.returncode}: {' '.join(words)}")


def compiler_without_debug_information(folder: Path) -> Path:
    """Write a wrapper for the compiler that disables DeepSpeed's -g: the same machine code in three quarters of the
    time.

    It also replaces -march=native by the requested level, if there is one.
    """
    asked, made = level(), folder / "g++"
    lines = ["#!/bin/bash", "words=()"]
    if asked:
        vectors = "|".join(f"-D{macro}" for macro in LEVELS.values())
        cases = f"-march=native) words+=(-march={asked}) ;; {vectors}) words+=(-D{LEVELS[asked]}) ;;"
        lines.append(f'for word; do case $word in {cases} *) words+=("$word") ;; esac; done')
    else:
        lines.append('words=("$@")')
    made.write_text("\n".join([*lines, f'exec {os.environ.get("CXX", "g++")} "${{words[@]}}" -g0', ""]))
    made.chmod(0o755)
    return made


def build_wheel(folder: Path, version: str) -> None:
    """Compile the ops into a wheel that appears in `folder` once it is whole."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "DS_ENABLE_NINJA": "1"}
    environment.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
    environment.update(dict.fromkeys(OPS.values(), "1"))
    # DeepSpeed's ahead-of-time build of the CPU ops leaves its own -laio out.
    environment["LDFLAGS"] = f"-Wl,--no-as-needed -laio {os.environ.get('LDFLAGS', '')}".strip()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        environment["CXX"] = str(compiler_without_debug_information(Path(scratch)))
        source = ("--no-deps", "--no-build-isolation", "--no-cache-dir", "--no-binary", "deepspeed")
        pip("wheel", *source, "--wheel-dir", scratch, f"deepspeed=={version}", env=environment)
        (wheel,) = Path(scratch).glob("deepspeed-*.whl")
        os.replace(wheel, folder / wheel.name)


def main() -> int:
    version = importlib.metadata.version("deepspeed")
    name = key(version)
    if installed(name):
        print("DeepSpeed's CPU ops are installed")
        return 0
    folder = cache_dir() / "ops" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        sys.exit(f"{folder}: {error.strerror}; name a writable folder: MEMASCEND_CACHE=/path make setup")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(folder.glob("deepspeed-*.whl")):
            print(f"compiling {', '.join(OPS)} into {folder}", flush=True)
            build_wheel(folder, version)
        source = ("--no-index", "--find-links", str(folder))
        pip("install", "--no-deps", "--force-reinstall", *source, f"deepspeed=={version}")
    reason = works()
    if reason is not None:
        sys.exit(f"DeepSpeed's CPU ops do not load: {reason}; remove {folder} and try again")
    mark().write_text(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
