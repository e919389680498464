"""Kick the tires: run every line of the badge list on a fresh clone, and write down which are met.

usage: python -m workflows.artifact.kick_the_tires [--out FOLDER] [--with VENV] [--all | --only LINE ...] [--list]

The commit that is checked out is cloned into a temporary folder, so that nothing counts that is not committed. What
runs there has an empty environment (a PATH, a HOME of its own) and, where the kernel allows it, no network after
set-up. Set-up is `make setup` in the clone, some ten minutes; `--with .venv` takes the packages of an environment that
is there, and only builds the clone's own extension. `--all` adds the lines that take an hour. In the container
(docs/how-to/run-in-a-container.md) this is a fresh clone in a bare Debian without a network.

FOLDER (results/badges) gets badges.json and badges.md, written after each line: met, not met, not run, or in need of
the outside world, which no command decides. The page in docs/ is made by `--with .venv --all --out docs`. Exit status:
0 if all that ran is met, 1 if a line is not, 2 on an error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workflows import refusals
from workflows.artifact import badges
from workflows.artifact.badges import LINES, Line
from workflows.artifact.verify import without_network
from workflows.run.provenance import ROOT, atomically, host

MET, NOT_MET, NOT_RUN, OUTSIDE = "met", "not met", "not run", "needs the outside world"
JSON, TABLE = "badges.json", "badges.md"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SET_UP = Line(name="set-up", badge=badges.FUNCTIONAL, says="set up by one command", command="make setup", minutes=90)
# A network namespace starts with its loopback down, and the ranks of a training communicate over it. 0x8914 is
# SIOCSIFFLAGS, 1 is IFF_UP.
LOOPBACK = (
    "import fcntl, os, socket, struct, sys\n"
    "fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sH22x', b'lo', 1))\n"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
LETTERS = 300  # kept of a command's last line


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a line; `found` is the last line of the command's output, or why it did not run."""

    name: str
    badge: str
    says: str
    status: str
    found: str
    command: str = ""
    seconds: float = 0.0


def clone(folder: Path) -> tuple[Path, str]:
    """Clone the commit that is checked out; return the folder and the commit. ValueError has git's message."""
    target = folder / "memascend"
    words = ["git", "-c", "safe.directory=*", "clone", "--quiet", "--no-local", str(ROOT), str(target)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"git clone: {done.stderr.strip().splitlines()[-1]}; call this in a checkout of the project")
    head = subprocess.run(["git", "-C", str(target), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    return target, head.stdout.strip()


def bare(home: Path, venv: Path) -> dict[str, str]:
    """Return the complete environment of the commands that run in the clone."""
    kept = ("MEMASCEND_CPU_LEVEL", "MAX_JOBS", "PIP_CONFIG_FILE")  # build settings, and the package index
    return {
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "PATH": f"{venv / 'bin'}:{SYSTEM_PATH}",
        "PYTHONPATH": str(home.parent / "memascend"),
        **{name: os.environ[name] for name in kept if name in os.environ},
    }


def execute(line: Line, where: Path, env: dict[str, str], isolated: Sequence[str], *, patience: float = 1.0) -> Result:
    """Run a line's command within its time limit multiplied by `patience`."""
    began, minutes = time.monotonic(), line.minutes * patience
    child = subprocess.Popen(
        [*isolated, "bash", "-c", f"set -o pipefail; {line.command}"],
        cwd=where,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    late = False
    try:
        said, _ = child.communicate(timeout=60 * minutes)
    except subprocess.TimeoutExpired:
        late = True
        end(child)
        said, _ = child.communicate()
    finally:
        end(child)  # also kills processes left behind, and runs after Ctrl-C
    for folder in (Path(env["PATH"].partition(":")[0]).parent, env["HOME"], where):  # no local paths
        said = said.replace(f"{folder}/", "")
    lines = [text.strip("= ") for text in said.splitlines() if text.strip("= ")]
    found = lines[-1][:LETTERS] if lines else f"exit status {child.returncode}, without a word"
    if late:
        found = f"stopped after {minutes:g} minutes; last: {found}"
    status = MET if child.returncode == 0 and not late else NOT_MET
    return result(line, status, found, time.monotonic() - began)


def offline() -> list[str]:
    """Return the prefix that starts a program with only a loopback network; empty if this is not allowed."""
    isolated = without_network()
    return [*isolated, sys.executable, "-c", LOOPBACK] if isolated else []


def end(child: subprocess.Popen[str]) -> None:
    """Kill the command and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def result(line: Line, status: str, found: str, seconds: float = 0.0) -> Result:
    """Return the result of a line."""
    about = {"name": line.name, "badge": line.badge, "says": line.says, "command": line.command}
    return Result(**about, status=status, found=found, seconds=round(seconds, 1))


def check_all(
    lines: Sequence[Line],
    where: Path,
    env: dict[str, str],
    isolated: Sequence[str],
    *,
    long: bool,
    only: Collection[str],
    patience: float = 1.0,
) -> Iterator[Result]:
    """Run the lines that can be run, in order, and yield each result; a line with an unmet need does not start."""
    found: dict[str, Result] = {}
    for number, line in enumerate(lines, 1):
        missing = [name for name in line.needs if found[name].status != MET]
        if line.outside:
            made = result(line, OUTSIDE, line.outside)
        elif only and line.name not in only:
            made = result(line, NOT_RUN, "not asked for")
        elif line.long and not long and not only:
            made = result(line, NOT_RUN, f"takes up to {line.minutes:g} minutes: --all, or --only {line.name}")
        elif missing:
            made = result(line, NOT_RUN, f"it needs {', '.join(missing)}")
        else:
            made = execute(line, where, env, isolated, patience=patience)
        found[line.name] = made
        seconds = f", {made.seconds:.0f} s" if made.status in (MET, NOT_MET) else ""
        print(f"[{number}/{len(lines)}] {line.badge}, {line.name}: {made.status}{seconds}: {made.found}", flush=True)
        yield made


def asked(lines: Sequence[Line], only: Sequence[str]) -> set[str]:
    """Return the names of these lines and of all that they need; raise ValueError for an unknown name."""
    known = {line.name: line for line in lines}
    if unknown := [name for name in only if name not in known]:
        raise ValueError(f"{', '.join(unknown)}: no line of the list; they are {', '.join(known)}")
    wanted, look = set(), list(only)
    while look:
        wanted.add(name := look.pop())
        look += [each for each in known[name].needs if each not in wanted]
    return wanted


def complete(results: Sequence[Result]) -> list[Result]:
    """Return the results with entries for the lines that were not reached."""
    there = {each.name for each in results}
    rest = [result(line, NOT_RUN, "not reached") for line in LINES if line.name not in there and not line.outside]
    return [
        *results,
        *rest,
        *(result(line, OUTSIDE, line.outside) for line in LINES if line.name not in there and line.outside),
    ]


def surroundings(isolated: Sequence[str], venv: Path | None, commit: str) -> dict[str, Any]:
    """Return the properties of this machine and run that the table states."""
    release = dict(
        line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if line.count("=") == 1
    )
    devices = [path.name for path in Path("/sys/class/net").glob("*") if path.name != "lo"]
    network = "off (a network namespace of its own)" if isolated else "on" if devices else "off (the machine has none)"
    return {
        "commit": commit,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "host": host(),
        "system": release.get("PRETTY_NAME", "").strip('"'),
        "container": Path("/run/.containerenv").exists() or "APPTAINER_CONTAINER" in os.environ,
        "python": platform.python_version(),
        "network": network,
        "packages": "of an environment that was there" if venv else "by make setup, in the clone",
        "cpu_level": os.environ.get("MEMASCEND_CPU_LEVEL", ""),
    }


def document(results: Sequence[Result], where: dict[str, Any]) -> dict[str, Any]:
    """Return the content of badges.json."""
    return {"schema_version": 1, **where, "lines": [asdict(each) for each in results]}


def table(said: dict[str, Any]) -> str:
    """Return the page of one run with a table per badge. No badge is called earned: evaluators decide that."""
    inside = ", in a container" if said["container"] else ""
    text = [
        f"Commit `{said['commit'][:12]}`, {said['date']}, {said['system']}{inside}, {said['host']['cores']} cores "
        f"({said['host']['cpu']}), Python {said['python']}. Network: {said['network']}. Packages: {said['packages']}.",
    ]
    for badge in badges.BADGES:
        mine = [each for each in said["lines"] if each["badge"] == badge]
        count = Counter(each["status"] for each in mine)
        text += [
            "",
            f"## {badge}",
            "",
            f"*{badges.MEANING[badge][0].upper()}{badges.MEANING[badge][1:]}*: "
            + ", ".join(f"{count[status]} {status}" for status in (MET, NOT_MET, NOT_RUN, OUTSIDE) if count[status])
            + ".",
            "",
            "| line | | what was found | seconds | command |",
            "|---|---|---|---|---|",
        ]
        for each in mine:
            cells = [
                each["says"],
                f"**{each['status']}**",
                each["found"],
                f"{each['seconds']:.0f}" if each["seconds"] else "",
            ]
            cells += [f"`{each['command']}`" if each["command"] else ""]
            text.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([*text, ""])


def page(said: dict[str, Any]) -> str:
    """Return docs/badges.md, from the committed results."""
    text = [
        "# Badge list, executed",
        "",
        "<!-- made from badges.json, by python -m workflows.artifact.kick_the_tires --with .venv --all --out docs -->",
        "",
        "What artifact evaluators check for each of ACM's badges, with the command that checks it here. The commands "
        "ran in a fresh clone with an empty environment. What needs the outside world, such as an archive, is listed "
        "but was not checked. The line on the version's tag is not met until the version is released. Which badges "
        "this earns is for evaluators to decide. To run it yourself after `make setup`:",
        "",
        "```",
        "python -m workflows.artifact.kick_the_tires --with .venv",
        "```",
        "",
        "Without `--with`, it also sets up an environment in the clone. `--list` prints the commands, `--all` adds "
        "those that take an hour.",
        "",
        table(said),
    ]
    return "\n".join(text)


def write(folder: Path, said: dict[str, Any]) -> None:
    """Write badges.json and badges.md, each atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    atomically(folder / JSON, lambda path: path.write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n"))
    atomically(folder / TABLE, lambda path: path.write_text(page(said)))


def run(args: argparse.Namespace) -> int:
    """Run what is asked for, writing the results after each line; return the exit status. Raises ValueError or
    OSError."""
    only = asked(LINES, args.only)
    if args.venv and not (args.venv / "bin/python").exists():
        raise ValueError(f"--with {args.venv}: there is no bin/python in it; make setup makes .venv")
    refusals.ready(args.out, "--out")
    with tempfile.TemporaryDirectory(prefix="memascend-tires-") as made:
        folder = Path(made).resolve()
        where, commit = clone(folder)
        (home := folder / "home").mkdir()
        venv = args.venv.absolute() if args.venv else where / ".venv"
        env = bare(home, venv)
        isolated = offline()
        results, place = [], surroundings(isolated, args.venv, commit)
        if not args.venv:
            print("set-up: make setup in the clone ...", flush=True)
            results.append(execute(SET_UP, where, env, (), patience=args.patience))
            print(f"set-up: {results[0].status}, {results[0].seconds:.0f} s: {results[0].found}", flush=True)
        ready = args.venv or results[0].status == MET
        how = {"long": args.all, "only": only, "patience": args.patience}
        for made in check_all(LINES if ready else (), where, env, isolated, **how):
            results.append(made)
            write(args.out, document(complete(results), place))  # so that an interruption leaves what was found
        write(args.out, document(complete(results), place))
    count = Counter(each.status for each in results)
    print(f"{', '.join(f'{number} {status}' for status, number in count.items())}; {args.out / TABLE}")
    return 1 if count[NOT_MET] else 0


def factor(text: str) -> float:
    """Parse --patience: a finite number above 0."""
    with contextlib.suppress(ValueError):
        if math.isfinite(found := float(text)) and found > 0:
            return found
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0: use 2 for twice the minutes")


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=Path("results/badges"), metavar="FOLDER", help="default: %(default)s")
    p.add_argument("--with", dest="venv", type=Path, metavar="VENV", help="take the packages of this environment")
    p.add_argument("--all", action="store_true", help="also the lines that take an hour")
    p.add_argument("--patience", type=factor, default=1.0, metavar="FACTOR", help="times each line's limit of minutes")
    p.add_argument("--only", nargs="+", default=[], metavar="LINE", help="these lines, and what they need")
    p.add_argument("--list", action="store_true", help="print the lines and their commands, run none")
    args = p.parse_args(argv)
    if args.list:
        for line in LINES:
            print(f"{line.badge}, {line.name}: {line.says}\n    {line.command or line.outside}")
        return 0
    try:
        return run(args)
    except (ValueError, OSError) as error:
        print(f"kick_the_tires: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
