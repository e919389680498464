"""`memascend verify`: train the same few steps on a given system and on a reference, and list the differences by name.

Both runs start from the same weights and see the same batches, with the same seed. They run one after the other, so
that the machine needs memory for only one at a time. Losses and gradient norms are compared step by step; weights and
optimizer states are compared after the last step, one tensor at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memascend.suggestions import did_you_mean
from memascend.systems import arrangement
from memascend.training import systems
from memascend.training.backends import IN_MEMORY, STREAMING, UPDATES, Setup
from memascend.training.children import Stopping
from memascend.training.config import TrainConfig
from memascend.training.folder import RunFolder
from memascend.training.launch import launch
from memascend.training.processes import exit_status
from memascend.training.progress import read_metrics
from memascend.training.schedule import learning_rate

STEPS = 3
REFERENCES = (IN_MEMORY, "zero_offload")


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """How closely two runs should agree: `bound` limits the difference of any weight, 0 means bit-identical."""

    bound: float
    why: str


def verify(config: TrainConfig, reference: str | None, output: Path | None) -> dict[str, Any]:
    """Run both, compare them, and return the result that `as_text` and `--json` show.

    `output` is the folder that keeps both runs' folders; with None they are removed afterwards. Raises a one-line
    ValueError if a run cannot be made.
    """
    config = dataclasses.replace(config, steps=config.steps or STEPS, eval_sequences=0)
    config = dataclasses.replace(config, save_every=0, keep=1, checkpoints="full")  # the final checkpoints are compared
    systems.check(config)
    theirs = reference_of(config, reference)
    parent = output or Path(tempfile.mkdtemp(prefix=f"{config.output_folder.name}-verify-", dir=_place(config)))
    tested, compared = parent / "tested", parent / "reference"
    try:
        gone = output is None
        with _ended_by_signals():
            _run(config, tested, "tested", systems.setup, temporary=gone)
            _run(theirs, compared, "reference", functools.partial(_like, config), temporary=gone)
            return report(config, theirs, tested, compared)
    finally:
        if output is None:
            shutil.rmtree(parent, ignore_errors=True)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and a closed terminal raise SystemExit, so that the block ends as with Ctrl-C and is cleaned up."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(exit_status(number))

    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _place(config: TrainConfig) -> Path:
    """Return the nearest existing parent of the folder that a run of this configuration would write to."""
    return next(folder for folder in config.output_folder.parents if folder.is_dir())


def reference_of(config: TrainConfig, reference: str | None) -> TrainConfig:
    """Return the configuration of the run that `config` is compared with.

    Without a named `reference` it is the in-memory system, or ZeRO-Offload if there are several ranks or `config` is
    itself in memory. Raises ValueError for an unknown reference or one that does not support these options.
    """
    alone = config.ranks == 1 and config.system != IN_MEMORY
    name = reference or (IN_MEMORY if alone else "zero_offload")
    if name not in REFERENCES:
        raise ValueError(
            f"--reference: {name!r} is unknown{did_you_mean(name, REFERENCES)}; choose one of {', '.join(REFERENCES)}"
        )
    arms = {update: arm for arm, update in UPDATES.items()}
    arm = arms[_update(config)] if name == IN_MEMORY else None
    nowhere: dict[str, Any] = {"nvme": None, "devices": [], "tiers": [], "write_budget": None}
    theirs = dataclasses.replace(config, system=name, arm=arm, host_memory=None, trace=None, **nowhere)
    if name == IN_MEMORY:
        on_the_ssd = ("state_versions", "accumulation", "checkpoints")  # these do not affect the results
        theirs = dataclasses.replace(theirs, **{key: getattr(TrainConfig, key) for key in on_the_ssd})
    try:
        systems.check(theirs)
    except ValueError as error:
        raise ValueError(f"the reference {name} cannot be trained with these options: {error}") from None
    return theirs


def _update(config: TrainConfig) -> str:
    """Return which AdamW implementation the run uses, by its name in `memascend.training.backends.updates`."""
    if config.system == IN_MEMORY:
        return UPDATES[config.arm or next(iter(UPDATES))]
    parts = arrangement(config.system, config.arm).parts
    fast = parts.get("numerics") == "fast" or config.states != "fp32"
    return "memascend" if fast else "deepspeed"


def expectation(config: TrainConfig, theirs: TrainConfig) -> Expectation:
    """Return the expected agreement: equal bits if both runs use the same AdamW, else a bound on the differences."""
    ours, other = _update(config), _update(theirs)
    if ours == other:
        return Expectation(
            bound=0.0, why=f"all bits: the same order of sums, groups of the same size, and the AdamW of {ours} in both"
        )
    rates = [_rate(config, step) for step in range(config.steps or STEPS)]
    # Kingma and Ba, Adam (2015), 2.1: for any gradients, a step is at most the learning rate times this factor.
    most = max(1.0, (1 - config.beta1) / math.sqrt(1 - config.beta2))
    return Expectation(
        bound=2 * most * sum(rates),
        why=f"a bound: the AdamW of {ours} and that of {other} round in another order, and no step of either moves a "
        f"weight by more than {most:.2f} times the learning rate",
    )


def _rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate of a step, counted from 0."""
    peak, steps = config.peak_learning_rate, config.steps or STEPS
    return learning_rate(step, peak=peak, steps=steps, warmup=config.warmup, schedule=config.schedule)


def _like(tested: TrainConfig, config: TrainConfig, *run: Any) -> Setup:
    """Return the reference's setup with the settings of the tested run that determine the order of sums.

    These are the sizes of the groups that are updated together and, if the tested system streams, the slices of the
    vocabulary.
    """
    setup, other = systems.setup(config, *run), systems.setup(tested, *run)
    if other.backend == STREAMING and setup.backend == IN_MEMORY:
        return dataclasses.replace(setup, settings=setup.settings | {"vocabulary_slices": True})
    if "deepspeed_config" not in other.settings:
        return setup
    size = other.settings["deepspeed_config"]["zero_optimization"]["sub_group_size"]
    if "group_elements" in setup.settings:
        return dataclasses.replace(setup, settings=setup.settings | {"group_elements": size})
    setup.settings["deepspeed_config"]["zero_optimization"]["sub_group_size"] = size
    return setup


def _run(config: TrainConfig, output: Path, name: str, setup_of: Any, *, temporary: bool) -> None:
    """Train one of the two runs. Its progress goes to standard error, since standard output is for the result."""
    print(f"-- {name}: {config.system}{f' ({config.arm})' if config.arm else ''}", file=sys.stderr, flush=True)
    config, stopping = dataclasses.replace(config, output=str(output)), Stopping()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            status = launch(config, resume=False, wanted={}, setup_of=setup_of, temporary=temporary, stopping=stopping)
    finally:
        if temporary and (states := systems.states_folder(config)) is not None:  # left by a run that did not finish
            shutil.rmtree(states, ignore_errors=True)
    if status or stopping.asked:  # a run that was asked to stop may just have finished
        print(f"memascend: the {name} run was interrupted; nothing was compared", file=sys.stderr)
        raise SystemExit(status or stopping.status)


def report(config: TrainConfig, theirs: TrainConfig, tested: Path, reference: Path) -> dict[str, Any]:
    """Compare two finished runs: their metrics step by step, and the tensors of their newest checkpoints."""
    from memascend.training.compare import Saved, differences

    expected = expectation(config, theirs)
    steps = list(_steps(tested, reference))
    kinds: dict[str, dict[str, Any]] = {}
    with Saved.of_run(tested) as ours, Saved.of_run(reference) as other:
        for kind in ours.kinds:
            found = list(differences(ours, other, kind))
            kinds[kind] = {
                "tensors": len(ours.names(kind)),
                "different": len(found),
                "first": found[0].as_dict() if found else None,
                "largest": max((each.largest for each in found), default=0.0),
            }
    equal = all(step["equal"] for step in steps) and not any(kind["different"] for kind in kinds.values())
    within = kinds["master weights"]["largest"] <= expected.bound
    return {
        "system": config.system,
        "arm": config.arm,
        "reference": theirs.system,
        "reference_arm": theirs.arm,
        "seed": config.seed,
        "expected": dataclasses.asdict(expected),
        "steps": steps,
        "tensors": kinds,
        "verdict": "equal" if equal else "bounded" if within and expected.bound else "different",
    }


def _steps(tested: Path, reference: Path) -> Iterator[dict[str, Any]]:
    """Yield loss and gradient norm of both runs for each step, and whether they are equal."""
    rows = [
        [row for row in read_metrics(RunFolder(folder).metrics) if row["kind"] == "step"]
        for folder in (tested, reference)
    ]
    for ours, other in zip(*rows, strict=True):
        names = ("loss", "grad_norm")
        yield {
            "step": ours["step"],
            **{name: ours[name] for name in names},
            **{f"reference_{name}": other[name] for name in names},
            "equal": all(ours[name] == other[name] for name in names),
        }


def as_text(found: dict[str, Any]) -> str:
    """Return the comparison as readable text, with the verdict in the last line."""

    def label(name: str, arm: str | None) -> str:
        return f"{name} ({arm})" if arm else name

    ours = label(found["system"], found["arm"])
    theirs = label(found["reference"], found["reference_arm"])
    lines = [
        f"{ours} against {theirs}: {len(found['steps'])} steps, seed {found['seed']}",
        f"expected: {found['expected']['why']}",
        f"{'step':>6}{'loss':>20}{'of the reference':>20}{'grad norm':>16}{'of the reference':>20}",
    ]
    for step in found["steps"]:
        values = (step["loss"], step["reference_loss"], step["grad_norm"], step["reference_grad_norm"])
        cells = "".join(f"{_cell(value):>{width}}" for value, width in zip(values, (20, 20, 16, 20), strict=True))
        lines.append(f"{step['step']:>6}{cells}{'' if step['equal'] else '   differ'}")
    for kind, each in found["tensors"].items():
        lines.append(
            f"{kind}: {each['tensors'] - each['different']} of {each['tensors']} tensors equal to the last bit"
        )
        if each["first"]:
            lines.append(f"  first that differs: {_first(each['first'])}; largest difference {each['largest']:.3g}")
    lines.append(_verdict(found))
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return "skipped" if value is None else f"{value:.9g}"


def _first(first: dict[str, Any]) -> str:
    """Return a phrase about the first tensor that differs."""
    return (
        f"{first['name']}, {first['different']} of {first['elements']} elements, by at most {first['largest']:.3g}; "
        f"element {first['index']} is {first['tested']!r}, and {first['reference']!r} in the reference"
    )


def _verdict(found: dict[str, Any]) -> str:
    bound = found["expected"]["bound"]
    if found["verdict"] == "equal":
        return "verdict: equal to the last bit"
    if found["verdict"] == "bounded":
        return f"verdict: within the bound, master weights differ by at most {bound:.3g}"
    limit = f"master weights may differ by {bound:.3g}" if bound else "every bit should be equal"
    return f"verdict: DIFFERENT; {limit}"
