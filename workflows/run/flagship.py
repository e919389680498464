"""Train all weights of a model larger than host memory under a memory limit, and kill the run on the way.

usage: python -m workflows.run.flagship --model llama3.1-8b --out results/raw/flagship-llama3.1-8b.json

What it does, in one run on one machine:
1. `memascend train --system lohan` from initialised weights on packages of Python's standard library, in a control
   group that limits memory; stopped after --compared steps, keeping its losses.
2. The same from scratch, killed (SIGKILL) at --kills random instants in these steps and resumed each time; then
   continued to --steps, with evaluations on held-out text. Losses of the first steps must equal those of 1 to the bit.
3. `memascend generate` and `memascend export` under the same limit. The exported folder is loaded by from_pretrained,
   without a limit, and must continue with the same text; two more steps are trained from it.
4. Bounds of a step: matrix products at the model's shapes, timed alone with the same threads, and the bytes of a step
   divided by the rate of fio at the same mix of reads and writes on the same drive; both before and after the training.

With --training-only 1, 3 and all kills are left out, and nothing is kept to repeat a step from, which for a model near
the drive's size leaves room for one version of the states alone.

One record, kind ``flagship``: each step of each call, the peaks of memory, bytes on the disk, bounds, and which checks
passed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hardware.memory_limit import MemoryGroup
from memascend.planner import model_spec
from memascend.training.progress import read_metrics
from workflows import staleness
from workflows.run import children, provenance

_GIB = 1 << 30
_TEXT = ("asyncio", "email", "json")  # packages of the standard library: about 200,000 tokens
_POLL_S = 0.1
_REPEATS = 5  # timed repeats per product
_FIRST_STEP_S = 30.0  # estimate, for a kill in the first step
_FROM_EXPORT = 2  # training steps from the exported folder
_PROMPT, _TOKENS = "def main(argv):", 8
_FIO_S, _FIO_BYTES = 15, 8 << 30


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="llama3.1-8b", help="built-in model (default llama3.1-8b)")
    p.add_argument(
        "--twin",
        type=int,
        default=1,
        metavar="K",
        help="divide the model's widths by K, to try the program (default 1)",
    )
    p.add_argument(
        "--states", choices=("fp32", "bf16", "int8"), default="bf16", help="dtype of the states (default bf16)"
    )
    p.add_argument("--context", type=int, default=128, metavar="TOKENS", help="tokens per step (default 128)")
    p.add_argument("--steps", type=int, default=30, metavar="N", help="training steps (default 30)")
    p.add_argument(
        "--compared", type=int, default=5, metavar="N", help="first steps that are trained twice (default 5)"
    )
    p.add_argument("--kills", type=int, default=3, metavar="N", help="kills during the compared steps (default 3)")
    p.add_argument(
        "--learning-rate",
        type=float,
        default=5e-5,
        metavar="RATE",
        help="(default 5e-5: with 5e-4 the loss of 8B rises)",
    )
    p.add_argument(
        "--evaluate-every", type=int, default=10, metavar="STEPS", help="steps between evaluations (default 10)"
    )
    p.add_argument(
        "--limit-gib", type=float, default=4.0, metavar="GIB", help="memory limit of the control group (default 4)"
    )
    p.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the times of the kills (default 0)")
    p.add_argument(
        "--folder",
        type=Path,
        default=Path(os.environ.get("MEMASCEND_NVME", "nvme")),
        metavar="DIR",
        help="folder on the drive",
    )
    p.add_argument(
        "--training-only",
        action="store_true",
        help="train --steps without a kill, without text or an export, in the least disk space: an interrupted step "
        "cannot be repeated",
    )
    p.add_argument("--run-id", default="", metavar="ID")
    p.add_argument("--out", type=Path, required=True, metavar="FILE", help="run record to write")
    args = p.parse_args(argv)
    if not 0 < args.compared <= args.steps:
        p.error("--compared: from 1 to --steps")
    if not 0 <= args.kills <= args.compared:
        p.error("--kills: at most one in each of the compared steps")
    if shutil.which("fio") is None:
        p.error("fio is not installed: apt-get install fio")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    with children.scratch_folder(args.folder) as place:
        found = training_alone(args, place) if args.training_only else whole(args, place)
    fields = {"points_requested": _asked(args), "points": found, "summary": summary(args, found)}
    code = staleness.digest("workflows.run.flagship", models=None)
    record = provenance.write_record(args.out, args.run_id or args.out.stem, "flagship", code, fields)
    print(json.dumps(record["summary"], indent=1))
    return 0


def whole(args: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Run all four parts in `place` and return their findings."""
    products = [product_seconds(args)]
    compared = Training(args, place / "compared").until(args.compared)
    print(f"{args.compared} steps without a kill: {_spoken(compared['steps'])}", flush=True)
    shutil.rmtree(place / "compared")
    training = Training(args, place / "run")
    kills = training.killed_at_random()
    calls = [*kills, training.to_the_end()]
    used = training.used(place / "model")
    found = trained(training)
    shutil.rmtree(place / "run")
    print(f"generated: {used['text']!r}", flush=True)
    used["as_exported"] = text_of(place / "model")
    pretrained = Training(args, place / "pretrained", place / "model").until(_FROM_EXPORT)
    print(f"from the exported folder: {_spoken(pretrained['steps'])}", flush=True)
    shutil.rmtree(place / "pretrained")
    shutil.rmtree(place / "model")
    drive = [drive_rate(place, _mix(found["steps"][-1])) for _ in range(2)]
    products.append(product_seconds(args))
    found |= {"compared": compared, "calls": calls, "used": used, "pretrained": pretrained}
    return found | {"products": products, "drive": drive}


def training_alone(args: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Run only the training and the measurements of its bounds, in `place`."""
    products = [product_seconds(args)]
    training = Training(args, place / "run")
    calls = [training.to_the_end()]
    found = trained(training)
    shutil.rmtree(place / "run")
    print(f"trained: {_spoken(found['steps'])}", flush=True)
    drive = [drive_rate(place, _mix(found["steps"][-1])) for _ in range(2)]
    products.append(product_seconds(args))
    return found | {"calls": calls, "products": products, "drive": drive}


def trained(training: Training) -> dict[str, Any]:
    """Return the steps, evaluations, report and disk space of a finished run, whose folder must still exist."""
    report = json.loads((training.folder / "report.json").read_text())
    report["config"] |= {"output": "run", "data": list(_TEXT)}  # keeps paths of this machine out of the record
    return {
        "steps": training.steps(),
        "evaluations": training.evaluations(),
        "disk_bytes": sum(path.stat().st_blocks * 512 for path in training.folder.rglob("*") if path.is_file()),
        "report": report,
    }


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that belong in the record."""
    return {key: value for key, value in vars(args).items() if key not in ("folder", "out", "run_id")}


def summary(args: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """Return the results of the run, each with the numbers that it is based on."""
    steps = found["steps"]
    timed = [step for step in steps if step["seconds"] is not None]  # others were cut off by a kill
    timed = timed[1:] or timed
    seconds = statistics.median(step["seconds"] for step in timed)
    compute = statistics.median(each["seconds"] for each in found["products"])
    rate = statistics.median(each["bytes_per_s"] for each in found["drive"])
    moved = statistics.median(step["read_bytes"] + step["written_bytes"] for step in timed)
    bound = max(compute, moved / rate)
    parameters = found["report"]["parameters"]
    shown = {
        "parameters": parameters,
        "step_s": seconds,
        "compute_bound_s": compute,
        "drive_bound_s": moved / rate,
        "of_the_bound": seconds / bound,
        "host_peak_bytes": max(call["host_peak_bytes"] for call in found["calls"]),
        "limit_bytes": int(args.limit_gib * _GIB),
        "disk_bytes_a_parameter": found["disk_bytes"] / parameters,
        "held_out_losses": [each["loss"] for each in found["evaluations"]],
    }
    if args.training_only:
        return shown
    losses = [{step["step"]: step["loss"] for step in rows} for rows in (found["compared"]["steps"], steps)]
    compared = sorted(losses[0].keys() & losses[1].keys())
    return shown | {
        "kills": sum(call["killed"] for call in found["calls"]),
        "steps_compared": compared,
        "losses_equal": bool(compared) and all(losses[0][step] == losses[1][step] for step in compared),
        "text_equal": found["used"]["text"] == found["used"]["as_exported"],
        "loss_from_export": found["pretrained"]["steps"][0]["loss"],
    }


def _spoken(steps: list[dict[str, Any]]) -> str:
    """Return losses and seconds of steps as text."""

    def took(seconds: float | None) -> str:
        return "" if seconds is None else f" in {seconds:.1f} s"

    return ", ".join(f"{step['loss']:.4f}{took(step['seconds'])}" for step in steps)


# ---------------------------------------------------------------------------------------------------- the training


class Training:
    """One run of `memascend train` in `folder`, over any number of calls."""

    def __init__(self, args: argparse.Namespace, folder: Path, pretrained: Path | None = None) -> None:
        self.args, self.folder, self._pretrained = args, folder, pretrained
        self._random = random.Random(args.seed)

    def steps(self) -> list[dict[str, Any]]:
        """Return the completed steps; after a kill, a call continues from the step of the last saved states."""
        return [row for row in read_metrics(self.folder / "metrics.jsonl") if row["kind"] == "step"]

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the rows of evaluations so far."""
        return [row for row in read_metrics(self.folder / "metrics.jsonl") if row["kind"] == "eval"]

    def until(self, step: int) -> dict[str, Any]:
        """Run one call and kill it after `step` steps; return the rows of these steps and the peaks of the call."""
        with self._begun() as (process, group):
            while len(self.steps()) < step:
                self._require_running(process)
                time.sleep(_POLL_S)
            call = self._killed(process, group)
        return {**call, "steps": self.steps()[:step]}

    def killed_at_random(self) -> list[dict[str, Any]]:
        """Run calls that are killed, each in a different compared step at a random fraction of it, and return them."""
        calls = []
        for step in sorted(self._random.sample(range(self.args.compared), self.args.kills)):
            share = self._random.random()
            with self._begun() as (process, group):
                while not self._has_done(step):
                    self._require_running(process)
                    time.sleep(_POLL_S)
                times = [row["seconds"] for row in self.steps() if row["seconds"] is not None]
                last = times[-1] if times else _FIRST_STEP_S
                time.sleep(share * last)
                calls.append(self._killed(process, group) | {"after_step": step, "share_of_a_step": share})
            print(f"killed after step {step} and {share * last:.1f} s", flush=True)
        return calls

    def to_the_end(self) -> dict[str, Any]:
        """Run one call until it ends by itself; return the peaks. Raises OSError if it fails."""
        with self._begun() as (process, group):
            while process.poll() is None:
                time.sleep(_POLL_S)
            self._require_ended_well(process)
            return self._call(group, killed=False)

    def _has_done(self, steps: int) -> bool:
        """Return whether so many steps are done; zero are done once the head of the table is in the log."""
        return len(self.steps()) >= steps if steps else "host peak" in self.folder.with_suffix(".log").read_text()

    def used(self, target: Path) -> dict[str, Any]:
        """Generate text from the trained weights and export them to `target`, both within the limit."""
        rows: dict[str, Any] = {}
        folder, log = str(self.folder), self.folder.with_suffix(".log")
        for name, options in (
            ("generate", [folder, "--prompt", _PROMPT, "--tokens", str(_TOKENS)]),
            ("export", [folder, str(target)]),
        ):
            before, began = log.stat().st_size, time.perf_counter()
            with self._begun([sys.executable, "-m", "memascend.cli", name, *options]) as (process, group):
                process.wait()
                self._require_ended_well(process)
                rows[name] = {"seconds": time.perf_counter() - began, "group_peak_bytes": group.peak_bytes}
            if name == "generate":
                said = log.read_bytes()[before:].decode()
                rows["text"] = said[said.index(_PROMPT) : said.rindex("\n(")].rstrip("\n")
        return rows

    @contextlib.contextmanager
    def _begun(self, command: list[str] | None = None) -> Iterator[tuple[subprocess.Popen[bytes], MemoryGroup]]:
        """Yield a call in a new control group, by default one that trains; processes left at the end are killed."""
        group = MemoryGroup(int(self.args.limit_gib * _GIB))
        begin = ["sh", "-c", f'echo $$ > {group.folder}/cgroup.procs && exec "$@"', "sh"]
        log = self.folder.with_suffix(".log")
        try:
            with log.open("ab") as out:
                process = subprocess.Popen(
                    [*begin, *(command or self._command())], stdout=out, stderr=subprocess.STDOUT
                )
            try:
                yield process, group
            finally:
                group.kill()
                process.wait()
        finally:
            group.remove()

    def _command(self) -> list[str]:
        """Return the command of the next call: a new run, or one that resumes."""
        train = [sys.executable, "-m", "memascend.cli", "train", "--output", str(self.folder)]
        if (self.folder / "config.yaml").exists():
            return [*train, "--resume"]
        args = self.args
        model = {"model": args.model, "twin": args.twin} if self._pretrained is None else {"model": self._pretrained}
        options = model | {
            "system": "lohan",
            "states": args.states,
            "gradients": "bf16",
            "state-versions": "checkpoint" if args.training_only else "one",
            "clip": 0,
            "checkpoints": "none",
            "context": args.context,
            "steps": args.steps,
            "learning-rate": args.learning_rate,
            "warmup": 3,
            "eval-every": args.evaluate_every,
            "eval-sequences": 4,
            "files": "*.py",
        }
        named = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        library = Path(sysconfig.get_paths()["stdlib"])
        if self._pretrained is None:
            train.append("--random-weights")
        return [*train, *named, "--data", *(str(library / name) for name in _TEXT)]

    def _killed(self, process: subprocess.Popen[bytes], group: MemoryGroup) -> dict[str, Any]:
        """Kill a call at once; return its peaks. Raises OSError if it has ended by itself."""
        self._require_running(process)
        group.kill()
        process.wait()
        return self._call(group, killed=True)

    def _call(self, group: MemoryGroup, *, killed: bool) -> dict[str, Any]:
        """Return the peaks of memory of a call that has ended."""
        peaks = [step["host_peak_bytes"] or 0 for step in self.steps()]
        return {"killed": killed, "group_peak_bytes": group.peak_bytes, "host_peak_bytes": max(peaks, default=0)}

    def _require_running(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is not None:
            raise OSError(f"training ended with status {process.returncode}: {self._last_line()}")

    def _require_ended_well(self, process: subprocess.Popen[bytes]) -> None:
        if process.returncode != 0:
            raise OSError(f"training ended with status {process.returncode}: {self._last_line()}")

    def _last_line(self) -> str:
        lines = self.folder.with_suffix(".log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def text_of(folder: Path) -> str:
    """Return the text that the exported model generates, loaded into memory in a process of its own."""
    program = (
        "import sys, torch, transformers as t; "
        "from memascend.ops.half_linear import choose_products; "
        "choose_products(torch.bfloat16, 'auto', torch.device('cpu')); "
        "model, tokens = (c.from_pretrained(sys.argv[1]) for c in (t.AutoModelForCausalLM, t.AutoTokenizer)); "
        "ids = tokens(sys.argv[2], return_tensors='pt')['input_ids']; "
        "made = model.generate(ids, max_new_tokens=int(sys.argv[3]), do_sample=False); "
        "print(tokens.decode(made[0], skip_special_tokens=True), end='')"
    )
    command = [sys.executable, "-c", program, str(folder), _PROMPT, str(_TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"the exported folder cannot be used: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


# ---------------------------------------------------------------------------------------------- what bounds a step


def product_seconds(args: argparse.Namespace) -> dict[str, Any]:
    """Time each matrix product of a step alone, and return their sum and the rows.

    A block's forward product counts twice (it is computed again in backward), the head's once, and backward has two
    products each. They run in the dtype that training computes in, without conversions. Attention and elementwise
    operations are left out, so the sum is a lower bound.
    """
    import torch

    from memascend.integrations.pretrained import parameter_shapes
    from memascend.ops.half_linear import products

    kind = torch.float32 if products(torch.bfloat16, "auto", torch.device("cpu")) == "fp32" else torch.bfloat16
    shapes = parameter_shapes(model_spec(args.model).twin(args.twin).hf_config_dict())
    matrices = Counter((shape, "layers." in name) for name, shape in shapes if len(shape) == 2 and "embed" not in name)
    rows, total = [], 0.0
    for ((outputs, inputs), in_block), count in matrices.items():
        weight = torch.randn(outputs, inputs).to(kind)
        given = torch.randn(args.context, inputs).to(kind)
        gradient = torch.randn(args.context, outputs).to(kind)
        forward = _seconds(lambda w=weight, x=given: x @ w.t())
        backward = _seconds(lambda w=weight, g=gradient, x=given: (g @ w, g.t() @ x))
        total += count * ((2 if in_block else 1) * forward + backward)
        row = {"shape": [outputs, inputs], "count": count, "in_block": in_block}
        rows.append({**row, "forward_s": forward, "backward_s": backward})
    return {
        "seconds": total,
        "computed_in": str(kind).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "matrices": rows,
    }


def _seconds(product: Any) -> float:
    """Return the median seconds of a product, after one that is not timed."""
    product()
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        product()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _mix(step: dict[str, Any]) -> int:
    """Return the share of reads in percent."""
    return round(100 * step["read_bytes"] / (step["read_bytes"] + step["written_bytes"]))


def drive_rate(folder: Path, read_percent: int) -> dict[str, Any]:
    """Measure mixed reads and writes by fio with direct I/O, 1 MiB blocks and queue depth 16.

    `bytes_per_s` is the rate of reads and writes together.
    """
    file = folder / "fio"
    command = ["fio", "--name=mixed", f"--filename={file}", f"--size={_FIO_BYTES}", "--rw=randrw", "--bs=1m"]
    command += [f"--rwmixread={read_percent}", "--direct=1", "--ioengine=libaio", "--iodepth=16"]
    command += ["--time_based", f"--runtime={_FIO_S}", "--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    file.unlink(missing_ok=True)
    if done.returncode != 0:
        raise OSError(f"fio ended with status {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    read, written = (job[way]["bw_bytes"] for way in ("read", "write"))
    return {"read_percent": read_percent, "bytes_per_s": read + written, "read": read, "written": written}


if __name__ == "__main__":
    sys.exit(provenance.program("flagship", main))
