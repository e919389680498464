"""Measure the step times of several arms on one machine in one run: they alternate, step by step.

Each arm is a process with its own swap files, and another DeepSpeed if it names an environment. While one computes, the
others wait, so that drift of the machine (other users, the drive, the clock) affects all arms alike. Memory is not
traced, which would slow the steps.
One immutable record, kind ``step-times``: every step's time by phase, and its bytes of I/O.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from memascend.baselines.protocol import RunSpec, load_system
from memascend.planner import model_spec
from memascend.training import processes
from workflows import staleness
from workflows.refusals import ready
from workflows.run import children, provenance
from workflows.run.training import job_of, parameters_of, parser, point, require_space, sizes_of

POINT = ("sequence", "batch", "accumulation")
WARM_UP_STEPS = 2  # the first creates the Adam states, the second the prefetcher's records


SAVED = ("copied", "referenced")  # how a checkpoint stores the states
ARMS = {"nargs": "+", "required": True, "metavar": "SYSTEM:ARM:DTYPE[:ENVIRONMENT]"}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    rounds = {"type": int, "default": 5, "metavar": "N", "help": "measured rounds per point: one step of each arm"}
    own = {"arms": ARMS, "points": {"required": True}, "time_limit": {"default": 600}, "rounds": rounds}
    own["checkpoints"] = {
        "type": int,
        "default": 0,
        "metavar": "N",
        "help": "checkpoints after the rounds, of each kind (sharing and copying the states)",
    }
    return parser(__doc__, "run-id", "model", "k", "device", "matmul", "nvme", "out", **own).parse_args(argv)


def interpreter(environment: str) -> str:
    """Return the Python of an environment that make has built; ours if none is named."""
    if not environment:
        return sys.executable
    python = Path(f".cache/envs/{environment}/bin/python").absolute()
    if not python.exists():
        raise ValueError(f"--arms: environment {environment} is missing; make it with: make {environment}")
    return str(python)


class Arm:
    """The process or processes of one arm, which step on request."""

    def __init__(self, word: str, args: argparse.Namespace, twin: Any) -> None:
        words = word.split(":")
        if len(words) not in (3, 4) or not all(words):
            raise ValueError(
                f"--arms: {word!r} is not an arm: expected system:arm:dtype, such as memascend:memascend:fp16"
            )
        self.system_name, self.arm, self.dtype, self.environment = [*words, ""][:4]
        self.python = interpreter(self.environment)
        self.system = load_system(self.system_name, self.arm)
        self.name = "-".join(words)
        self.swap = Path(args.nvme).absolute() / f"{args.run_id}-{self.name}"
        sequence, batch = point(args.points[0])
        more = {"system": self.system_name, "arm": self.arm, "dtype": self.dtype, "sequence": sequence, "batch": batch}
        self.ranks = getattr(args, "ranks", 1)
        spec = RunSpec(run_id=args.run_id, model=args.model, k=args.k, steps=1, seed=0, ranks=self.ranks, **more)
        sizes = sizes_of(twin, self.ranks)
        require_space(self.swap, sizes.parameters)
        for place in getattr(args, "paths", [])[1:]:  # the system's folder in the first links to the others
            (place / self.swap.name).mkdir(exist_ok=True)
            (self.swap / place.name).symlink_to(place / self.swap.name)
        self.streamed = not hasattr(self.system, "deepspeed_config")  # whether memascend's own engine runs this arm
        self.config = {} if self.streamed else self.system.deepspeed_config(spec, sizes, str(self.swap))
        self.parts = {} if self.streamed else self.system.parts(self.arm)
        self.model = {"model": args.model, "twin": args.k, "dtype": self.dtype, "ways": [self.arm]}

    def start(
        self, twin: Any, work: Path, threads: int, device: str, matmul: str, *, record_step: bool = False, **more: Any
    ) -> None:
        """Start the processes of all ranks; each of them waits for requests once it is ready."""
        self.work, self.port = work, processes.free_port()
        threads = max(1, threads // self.ranks)
        settings = {"threads": threads, "mode": "time", "dtype": self.dtype, "device": device, "matmul": matmul, **more}
        settings |= {"hash_master_weights": False, "record_step": record_step, "ranks": self.ranks}
        job = job_of(twin, self.parts, self.config, **settings)
        job |= {"streamed": {**self.model, "folder": str(self.swap), "threads": threads}} if self.streamed else {}
        self.processes: list[children.Run] = []
        self.turns: list[IO[str]] = []
        self.done: list[IO[str]] = []
        for rank in range(self.ranks):
            turn_in, turn_out = os.pipe()
            done_in, done_out = os.pipe()
            fds = {"turn_fd": turn_in, "done_fd": done_out}
            env = children.environment(rank, self.ranks, self.port, threads, device, "time")
            name = f"{self.name}{rank or ''}"
            own = job | fds | {"rank": rank}
            self.processes.append(children.start(own, work, name, env, tuple(fds), python=self.python))
            os.close(turn_in)
            os.close(done_out)
            self.turns.append(os.fdopen(turn_out, "w", buffering=1))
            self.done.append(os.fdopen(done_in))

    @property
    def labels(self) -> dict[str, str]:
        """The fields that identify this arm in a record."""
        here = {"system": self.system_name, "arm": self.arm, "dtype": self.dtype}
        return here | ({"environment": self.environment} if self.environment else {})

    def wait_until_ready(self, deadline: float) -> None:
        """Wait until every rank has built its model. Raises as `wait_lines` does."""
        self.deepspeed = self.wait_lines(deadline)[0].split()[1]

    def wait_lines(self, deadline: float) -> list[str]:
        """Return the next line of each rank; raise TimeoutError, or RuntimeError with the end of its log."""
        lines = []
        for rank, done in enumerate(self.done):
            if not select.select([done], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            lines.append(done.readline())
            if not lines[-1]:
                log = (self.work / f"log{self.name}{rank or ''}.txt").read_text()
                raise RuntimeError(f"arm {self.name} ended early:\n{log[-3000:]}")
        return lines

    def step(self, point: Sequence[int], deadline: float) -> dict[str, Any]:
        """Take one step at a point on every rank; return the combined measurements. Raises as `wait_lines` does."""
        for turns in self.turns:
            turns.write(f"{' '.join(map(str, point))}\n")
        return of_ranks([json.loads(line) for line in self.wait_lines(deadline)])

    def end(self) -> None:
        """Kill the processes; remove their swap files and shared buffers."""
        for process in getattr(self, "processes", []):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if hasattr(self, "port"):
            processes.remove_shared_buffers(self.port)
        shutil.rmtree(self.swap, ignore_errors=True)


def of_ranks(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the ranks' measurements of a step: the longest seconds, the sum of bytes, one list of transfers."""
    first, *others = steps
    if not others:
        return first
    found: dict[str, Any] = {}
    for name, value in first.items():
        values = [step[name] for step in steps]
        if name.endswith("_s") or name == "seconds":
            found[name] = max(values)
        elif name == "paths":  # bytes of all ranks, and the first rank's rates
            found[name] = [[sum(each[0] for each in path), *path[0][1:]] for path in zip(*values, strict=True)]
        else:
            found[name] = sum(values, [] if isinstance(value, list) else 0)
    return found


def rounds(
    arms: list[Arm], points: Sequence[tuple[int, ...]], count: int, deadline: float, warm_up: int = WARM_UP_STEPS
) -> list[dict[str, Any]]:
    """Measure every step of every arm at every point, after warm-up rounds.

    Points are (tokens, batch) or (tokens, batch, accumulated batches). The first point has `warm_up` warm-up rounds and
    later ones have one. The order of the arms alternates between rounds.
    """
    out = []
    for at in points:
        steps: dict[str, list[dict[str, float]]] = {arm.name: [] for arm in arms}
        for number in range(warm_up + count):
            for arm in arms if number % 2 else reversed(arms):
                measured = arm.step(at, deadline)
                if number >= warm_up:
                    steps[arm.name].append(measured)
        warm_up = 1
        for arm in arms:
            series = {name: [step[name] for step in steps[arm.name]] for name in steps[arm.name][0]}
            out.append({**dict(zip(POINT, at, strict=False)), **arm.labels, **series})
    return out


def checkpoints(arms: list[Arm], count: int, deadline: float) -> list[dict[str, Any]]:
    """Measure seconds and bytes written of each arm's checkpoints next to its swap files, in both ways in turn."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for number in range(count):
        for way in SAVED if number % 2 else reversed(SAVED):
            for arm in arms:
                folder = arm.swap.with_name(f"{arm.swap.name}-saved")
                for turns in arm.turns:
                    turns.write(f"save {folder} {way}\n")
                took = of_ranks([json.loads(line) for line in arm.wait_lines(deadline)])
                shutil.rmtree(folder)
                point = found.setdefault(
                    (arm.name, way), {**arm.labels, "way": way, "seconds": [], "bytes_written": []}
                )
                for name in ("seconds", "bytes_written"):
                    point[name].append(took[name])
    return list(found.values())


@contextlib.contextmanager
def started(args: argparse.Namespace, twin: Any, threads: int = 0, **how: Any) -> Iterator[list[Arm]]:
    """Yield the started arms, with this many threads each (0: all cores); they end with the block."""
    ready(args.out.parent, "--out")
    arms: list[Arm] = []
    try:
        for word in args.arms:
            arms.append(Arm(word, args, twin))
        with children.scratch_folder() as work:
            for arm in arms:
                arm.start(twin, work, threads or len(os.sched_getaffinity(0)), args.device, args.matmul, **how)
            yield arms
    finally:
        for arm in arms:
            arm.end()


def requested(args: argparse.Namespace) -> dict[str, Any]:
    """Return the record's fields that follow from the command line alone; None marks a field that must be absent."""
    spec, points = model_spec(args.model), [list(point(text)) for text in args.points]
    return turns_requested(args, spec) | {"points_requested": points, "time_twin": None, "duplex": None}


def turns_requested(args: argparse.Namespace, spec: Any) -> dict[str, Any]:
    """Return such fields of every program in which arms of this model take turns."""
    words = [[*word.split(":"), None][:4] for word in args.arms]
    arms = [dict(zip(("system", "arm", "dtype", "environment"), each, strict=True)) for each in words]
    twin = {"k": args.k, "parameters": parameters_of(spec, args.k)}
    return of_turns(args) | {"twin": twin, "arms": arms}


def of_turns(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that the options of such a program have in common."""
    fields = {name: getattr(args, name) for name in ("model", "rounds", "device", "matmul")}
    return fields | {"time_limit_s": args.time_limit}


def write(
    args: argparse.Namespace, program: str, twin: Any, arms: list[Arm], *, committed: bool = True, **fields: Any
) -> dict[str, Any]:
    """Write the record of a run in which arms took turns; `committed`: the model is in memascend/planner/models."""
    systems, models = sorted({arm.system_name for arm in arms}), [args.model] if committed else []
    code = staleness.digest(f"workflows.run.{program}", systems, models)
    common = of_turns(args) | {
        "twin": {"k": args.k, "parameters": sum(t.numel for t in twin.tensors())},
        "arms": [{**a.labels, "parts": a.parts, "deepspeed": getattr(a, "deepspeed", "")} for a in arms],
        "environment": children.settings("time"),
    }
    return provenance.write_record(args.out, args.run_id, "step-times", code, common | fields)


def run(args: argparse.Namespace) -> int:
    """Run the arms in turn and write the record; return the exit status. A time-out is a record, a crash is none."""
    twin = model_spec(args.model).twin(args.k)
    points = [point(text) for text in args.points]
    children.require_device(args.device)
    found: dict[str, Any] = {"status": "ok", "points_requested": [list(p) for p in points]}
    deadline = time.monotonic() + args.time_limit
    try:
        with started(args, twin) as arms:
            for arm in arms:
                arm.wait_until_ready(deadline)
            found["points"] = rounds(arms, points, args.rounds, deadline)
            if args.checkpoints:
                found["checkpoints"] = checkpoints(arms, args.checkpoints, deadline)
    except TimeoutError:
        found["status"] = "timeout"
    except RuntimeError as error:
        log = args.out.with_suffix(".crash.log")
        log.write_text(str(error))
        print(f"interleaved: {error}\nsee {log}", file=sys.stderr)
        return 1
    write(args, "interleaved", twin, arms, **found)
    print(f"{args.run_id}: {found['status']}, {len(found.get('points', []))} series")
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return provenance.program("interleaved", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
