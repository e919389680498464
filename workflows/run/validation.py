"""The simulator against measured steps of this machine, phase by phase.

Rates come from micro-benchmarks alone: a decoder block by itself for the device, AdamW's benchmark, a try of the SSD
and of memory, and for what the runtime takes for itself the same system on a model whose bytes and products are
negligible. Never from the steps that are judged. `--stage rates` and `--stage steps` measure (keep the machine free of
other work, two minutes each), `--stage judge` simulates and writes the record.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memascend.doctor.speed import device_speed, memory_speed
from memascend.planner import Workload, model_spec
from memascend.planner.machine import Calibrations, Machine
from memascend.planner.options import Stack
from memascend.planner.pieces import forward_flops
from memascend.planner.step_time import step_time
from memascend.simulator import read_trace
from memascend.simulator.side_by_side import StepOf, step_of_trace

SYSTEMS = {"zero_infinity": "as_published", "memascend": "memascend", "zero_offload": "today", "lohan": "optimized"}
PHASES = ("forward", "backward", "optimizer")
MODEL, DTYPE, TINY_K = "llama3.2-1b", "bf16", 32
# (k, tokens a sequence, sequences): one bound by storage, one by products.
POINTS = ((8, 32, 1), (8, 256, 2))
_TEXT = Path(sysconfig.get_paths()["stdlib"]) / "json"
_ADAM_NUMEL, ROUNDS = 30_000_000, 15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", choices=("rates", "steps", "judge"), required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where rates and traces are kept")
    parser.add_argument("--point", type=int, choices=range(len(POINTS)), default=0, help="which --stage steps trains")
    parser.add_argument("--out", type=Path, help="the record that --stage judge writes")
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    if options.stage == "rates":
        (folder / "rates.json").write_text(json.dumps(rates(folder), indent=1) + "\n")
    elif options.stage == "steps":
        for system, arm in SYSTEMS.items():
            train(folder, system, arm, *POINTS[options.point])
    else:
        record = judge(folder)
        text = json.dumps(record, indent=1) + "\n"
        (options.out or folder / "validation.json").write_text(text)
        print(as_text(record))
    return 0


# -- what is measured --------------------------------------------------------------------------------------------------


def trace_of(folder: Path, system: str, k: int, context: int, batch: int) -> Path:
    return folder / f"{system}-k{k}-c{context}-b{batch}.json"


def train(folder: Path, system: str, arm: str, k: int, context: int, batch: int) -> None:
    """Three steps by `memascend train`, of which the second leaves its trace; one that is there is kept."""
    trace = trace_of(folder, system, k, context, batch)
    if trace.exists():
        return
    command = [sys.executable, "-m", "memascend.cli", "train", "--output", str(folder / f"run-{trace.stem}")]
    command += ["--model", MODEL, "--twin", str(k), "--data", str(_TEXT), "--files", "*.py", "--eval-sequences", "0"]
    command += ["--context", str(context), "--batch", str(batch), "--steps", "3", "--dtype", DTYPE]
    command += ["--system", system, "--arm", arm, "--trace", str(trace), "--clip", "0"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def rates(folder: Path) -> dict[str, Any]:
    """Micro-benchmarks, each with what it is of."""
    import torch

    from memascend.engine.swap import link_rate

    speed, memory = device_speed(folder), memory_speed()
    for system, arm in SYSTEMS.items():
        train(folder, system, arm, TINY_K, 8, 1)
    own = {system: phases_of(trace_of(folder, system, TINY_K, 8, 1)).phase_s for system in SYSTEMS}
    return {
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "memory_bytes_per_s": memory,
        "copy_bytes_per_s": link_rate(),
        "ssd_read_bytes_per_s": speed.read_bytes_per_s,
        "ssd_write_bytes_per_s": speed.write_bytes_per_s,
        "adamw_bytes_per_s": _adamw_rate(),
        "blocks": [_block(k, context, batch) for k, context, batch in POINTS],
        "own_s": own,
    }


def _adamw_rate() -> float:
    """Bytes a second of DeepSpeed's AdamW over fp32 states, by `memascend bench adamw`: 28 an element."""
    command = [sys.executable, "-m", "memascend.cli", "bench", "adamw", "--json"]
    command += ["--numels", str(_ADAM_NUMEL), "--repeats", "5"]
    done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    point = next(each for each in done["points"] if each["method"] == "deepspeed")
    return point["bytes"] / statistics.median(point["seconds"])


def _block(k: int, context: int, batch: int) -> dict[str, Any]:
    """One decoder block by itself, in memory: seconds forward, and forward with backward."""
    import torch

    from memascend.bench.rounds import alternate
    from memascend.integrations.huggingface import causal_lm

    spec = model_spec(MODEL).twin(k)
    one = dataclasses.replace(spec, layers=1).hf_config_dict()
    model = causal_lm(one, checkpointing="none").to(torch.bfloat16).model
    hidden = torch.randn(batch, context, spec.hidden, dtype=torch.bfloat16, requires_grad=True)
    rotary = model.rotary_emb(hidden, torch.arange(context)[None])

    def forward() -> Any:
        made = model.layers[0](hidden, position_embeddings=rotary, position_ids=torch.arange(context)[None])
        return made if isinstance(made, torch.Tensor) else made[0]

    ways = {"forward_s": torch.no_grad()(forward), "both_s": lambda: forward().sum().backward()}
    seconds = {name: statistics.median(taken) for name, taken in alternate(ways, ROUNDS).items()}
    head = 2.0 * batch * context * spec.vocab * spec.hidden
    flops = (forward_flops(spec, batch, context) - head) / spec.layers
    return {"k": k, "context": context, "batch": batch, "flops": flops} | seconds


# -- what is simulated -------------------------------------------------------------------------------------------------


def phases_of(trace: Path) -> StepOf:
    return step_of_trace(*read_trace(trace))


def local(found: dict[str, Any], block: dict[str, Any], system: str) -> tuple[Machine, Calibrations]:
    """This machine and what it reaches, for the simulator: the device's rate is the block's at these sizes."""
    machine = Machine(
        name="local",
        gpu_flops_per_s=block["flops"] / block["forward_s"],
        pcie_bytes_per_s=found["copy_bytes_per_s"],
        ssd_read_bytes_per_s=found["ssd_read_bytes_per_s"],
        ssd_write_bytes_per_s=found["ssd_write_bytes_per_s"],
        memory_bytes_per_s=found["memory_bytes_per_s"],
    )
    costs = dataclasses.replace(
        Calibrations(),
        gpu_efficiency=1.0,
        host_seconds_per_parameter=0.0,
        adam_memory_efficiency=found["adamw_bytes_per_s"] / found["memory_bytes_per_s"],
        backward_products=max(0.0, block["both_s"] / block["forward_s"] - 1),
        own_s=found["own_s"][system],
    )
    return machine, costs


def judge(folder: Path) -> dict[str, Any]:
    """Simulated and measured seconds of each phase, and how far apart they are."""
    found = json.loads((folder / "rates.json").read_text())
    rows = [row for system, arm in SYSTEMS.items() for row in _rows(folder, found, system, arm)]
    errors = sorted(row["error_percent"] for row in rows if row["phase"] != "step")
    steps = sorted(row["error_percent"] for row in rows if row["phase"] == "step")
    distribution = {"phases": _distribution(errors), "steps": _distribution(steps)}
    return {
        "kind": "simulation-validation",
        "model": MODEL,
        "dtype": DTYPE,
        "rates": found,
        "rows": rows,
    } | distribution


def _rows(folder: Path, found: dict[str, Any], system: str, arm: str) -> Iterator[dict[str, Any]]:
    for block in found["blocks"]:
        shape = {name: block[name] for name in ("k", "context", "batch")}
        own = {"system": system, "arm": arm}
        size = {"dtype": DTYPE, "batch": block["batch"], "context": block["context"]}
        spec, stack = model_spec(MODEL).twin(block["k"]), Stack(checkpointing="offloaded")
        machine, costs = local(found, block, system)
        made = step_time(Workload(spec=spec, stack=stack, **own, **size), machine, calibrations=costs)
        real = phases_of(trace_of(folder, system, **shape))
        simulated = {phase.name: phase.seconds for phase in made.phases} | {"step": made.seconds}
        measured = real.phase_s | {"step": sum(real.phase_s.values())}
        for phase in (*(phase for phase in PHASES if phase in simulated), "step"):
            seconds = {"simulated_s": simulated[phase], "measured_s": measured[phase]}
            percent = 100 * (simulated[phase] / measured[phase] - 1)
            yield own | shape | {"phase": phase, **seconds, "error_percent": percent}


def _distribution(errors: list[float]) -> dict[str, float]:
    sizes = sorted(map(abs, errors))
    return {
        "count": len(errors),
        "lowest_percent": errors[0],
        "median_percent": statistics.median(errors),
        "highest_percent": errors[-1],
        "median_size_percent": statistics.median(sizes),
    }


def as_text(record: dict[str, Any]) -> str:
    lines = [f"{'':<44}{'simulated':>10}{'measured':>10}{'error':>8}"]
    for row in record["rows"]:
        name = f"{row['system']} k={row['k']} {row['batch']} x {row['context']} {row['phase']}"
        lines.append(f"{name:<44}{row['simulated_s']:>10.3f}{row['measured_s']:>10.3f}{row['error_percent']:>7.0f}%")
    for what in ("phases", "steps"):
        spread = record[what]
        lines.append(
            f"{what}: {spread['count']} errors, {spread['lowest_percent']:.0f} to {spread['highest_percent']:.0f} %, "
            f"median {spread['median_percent']:.0f} %, median size {spread['median_size_percent']:.0f} %"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
