"""Build a release from the last commit and try it as a stranger would: dist/, and a line for each thing that was tried.

usage: python -m workflows.release.make [--out dist]     (make release)

The source distribution is built from the files of the commit, the wheel from the unpacked source distribution, in an
environment with nothing but torch and build tools. Then a new, empty environment gets torch, the packages of
locks/huggingface.txt by their hashes, and the wheel. There, in an empty folder and away from the checkout, `memascend
doctor`, `plan` and `train` run. Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from workflows.refusals import ready
from workflows.release import contents, tools
from workflows.release.tools import ROOT, clean, run

LOCK = ROOT / "locks/huggingface.txt"
# Libraries that torch ships; a second OpenMP in the wheel would run a second thread pool.
FROM_TORCH = ("libc10*", "libgomp*", "libtorch*")
TRAIN = "--model qwen2.5-0.5b --twin 16 --files *.py --context 64 --steps 3 --eval-sequences 2 --system lohan"


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Print a line with the seconds of a step that succeeded."""
    began = time.monotonic()
    yield
    print(f"ok    {what}, {time.monotonic() - began:.0f} s", flush=True)


def checkout(into: Path) -> Path:
    """Extract the files of the last commit into a new folder, and return it."""
    into.mkdir()
    run(["git", "-C", str(ROOT), "archive", "--output", f"{into}.tar", "HEAD"])
    run(["tar", "-x", "-f", f"{into}.tar", "-C", str(into)])
    return into


def build(source: Path, work: Path, out: Path) -> tuple[Path, Path]:
    """Return (source distribution, wheel); the wheel is built from the distribution, and its name states the glibc."""
    programs = tools.ensure()
    environment = {**clean(programs), "MAX_JOBS": str(len(os.sched_getaffinity(0)))}
    builder = [str(programs / "python"), "-m", "build", "--no-isolation"]
    with step("source distribution"):
        run([*builder, "--sdist", "--outdir", str(out), str(source)], env=environment)
        (sdist,) = out.glob("*.tar.gz")
    with step("wheel, compiled from it"):
        (work / "sdist").mkdir()
        run(["tar", "-x", "-f", str(sdist), "-C", str(work / "sdist")])
        (unpacked,) = (work / "sdist").iterdir()
        run([*builder, "--wheel", "--outdir", str(work / "wheel"), str(unpacked)], env=environment)
        (plain,) = (work / "wheel").iterdir()
        excluded = [word for name in FROM_TORCH for word in ("--exclude", name)]
        run([str(programs / "auditwheel"), "repair", *excluded, "-w", str(out), str(plain)], env=environment)
        (wheel,) = out.glob("*.whl")
    with step("metadata, by twine"):
        run([str(programs / "twine"), "check", "--strict", str(sdist), str(wheel)], env=environment)
    return sdist, wheel


def install(wheel: Path, folder: Path) -> Path:
    """Create an environment with torch, the locked packages and the wheel; return the folder of its programs."""
    python = tools.new_environment(folder)
    with step("empty environment with torch"):
        tools.install_torch(python)
    with step(f"packages of {LOCK.relative_to(ROOT)}, by their hashes"):
        tools.pip(python, "--require-hashes", "--no-deps", "-r", str(LOCK))
    with step(f"pip install {wheel.name}"):
        tools.pip(python, "--no-index", f"{wheel}[huggingface]")
        run([str(python), "-m", "pip", "check"], env=clean(python.parent))
    return python.parent


def use(programs: Path, empty: Path, version: str) -> None:
    """Run a new user's first commands; raise ValueError if a result is not as documented."""
    empty.mkdir()
    (empty / "texts").mkdir()
    for module in (inspect, tarfile, argparse):
        shutil.copy(Path(inspect.getfile(module)), empty / "texts")
    more = {"cwd": empty, "env": clean(programs)}
    memascend = str(programs / "memascend")
    expect(version in run([memascend, "--version"], **more), f"memascend --version says {version}")
    place = run([str(programs / "python"), "-c", "import memascend; print(memascend.__file__)"], **more).strip()
    expect(Path(place).is_relative_to(programs.parent), "memascend is imported from where it was installed")
    with step("memascend doctor"):
        output = subprocess.run([memascend, "doctor"], capture_output=True, text=True, check=False, **more).stdout
        expect("ok    extension" in output, "doctor loads the extension", output)
    with step("memascend plan, on a described testbed"):
        words = "plan --model llama3.1-8b --system lohan --testbed lohan-4090 --json"
        json.loads(run([memascend, *words.split()], **more))
    with step("memascend train, three steps on the streaming engine"):
        run([memascend, "train", *TRAIN.split(), "--data", "texts", "--output", "run"], **more)
        expect(any((empty / "run/model").glob("*.safetensors")), "train leaves weights")


def expect(true: bool, what: str, said: str = "") -> None:
    """Raise ValueError, with the end of the output `said`, unless `true`."""
    if not true:
        raise ValueError(f"this does not hold: {what}" + (f": {' '.join(said.split())[-300:]}" if said else ""))


def release(out: Path) -> None:
    """Build and try the release; the files are left in `out`. Raises ValueError for the first thing that is wrong."""
    changed = run(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"]).splitlines()
    if changed:
        print(f"note  {len(changed)} files differ from the commit, which is what is built")
    ready(out, "--out")
    if any(out.iterdir()):
        raise ValueError(f"{out} is not empty: remove what is in it, or name another folder with --out")
    with tempfile.TemporaryDirectory(prefix="memascend-release-") as folder:
        work = Path(folder)
        source = checkout(work / "source")
        version = json.loads((source / "codemeta.json").read_text(encoding="utf-8"))["version"]
        sdist, wheel = build(source, work, out)
        wrong = [f"{sdist.name}: {line}" for line in contents.wrong_in_sdist(sdist, source, version)]
        wrong += [f"{wheel.name}: {line}" for line in contents.wrong_in_wheel(wheel, source, version)]
        if wrong:
            raise ValueError(f"{'; '.join(wrong[:3])}" + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""))
        print("ok    contents: one top-level name, every file that the package reads, one extension")
        with step("instruction sets: AVX in functions that are named for it alone"):
            (extension,) = (work / "sdist").glob("*/build/lib*/memascend/_C.*.so")
            bound = contents.bound_to_a_processor(extension)
            expect(not bound, f"only functions named for AVX use it: {len(bound)} others do", ", ".join(bound[:3]))
        use(install(wheel, work / "stranger"), work / "empty", version)
    for path in (sdist, wheel):
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("dist"), metavar="FOLDER", help="a new or empty one")
    args = parser.parse_args()
    began = time.monotonic()
    try:
        release(args.out.absolute())
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"PASS  {time.monotonic() - began:.0f} s; upload it with: twine upload {args.out}/*")


if __name__ == "__main__":
    main()
