"""What a seed stands for: what is trained, which fault strikes it and when, and what the user does then. No torch.

A draw is a function of the seed alone. It is the same on every machine and at all times, as long as nothing here
changes (`DRAWN_AS` counts such changes; a record with another count is not continued).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

DRAWN_AS = 2
STEPS = 4  # of the loops

# The faults, in a user's words.
FAULTS = {
    "kill": "SIGKILL at a moment, or at a read, write or flush of the states",
    "torn write": "a write of the states moves some of its sectors, then the process is killed",
    "power cut": "writes since the last flush are kept, lost or torn at random, from a log of all writes",
    "SIGTERM": "at a moment; the loop leaves by an exception, or dies",
    "Ctrl-C": "KeyboardInterrupt at a line of the library, drawn from all that the training runs through",
    "ENOSPC": "a write or the growth of a file finds no room: injected at the system call",
    "full file system": "a real one that has less room than the training needs",
    "EIO": "a read, write or flush fails: injected at the system call",
    "a path that hangs": "transfers stand still for a while; or for long, and the user presses Ctrl-C",
    "memory limit": "something else in the process eats its control group's memory until the kernel kills",
    "clock jump": "the clock of the process jumps by hours to years, forwards or back; files are dated elsewhere",
}
# Weights of the targets, and of the faults of each target.
TARGETS = {"engine": 74, "activations": 12, "drop-in": 5, "train": 9}
_EVERYWHERE = {"kill": 6, "SIGTERM": 2, "ENOSPC": 3, "EIO": 4, "full file system": 3, "clock jump": 2}
_IN_PROCESS = {**_EVERYWHERE, "Ctrl-C": 6, "a path that hangs": 3, "memory limit": 2}
SHARES = {
    "engine": {**_IN_PROCESS, "torn write": 3, "power cut": 6},
    "activations": _IN_PROCESS,
    "drop-in": {**_EVERYWHERE, "a path that hangs": 3},
    "train": {"kill": 6, "SIGTERM": 3, "Ctrl-C": 3, "full file system": 3, "memory limit": 2},
}
SYSTEMS = (
    "memascend",
    "memascend, two paths",
    "lohan",
    "lohan, one version",
    "mlp_offload",
    "ssdtrain",
    "cxl",
    "zero_infinity",
    "zero_offload",
    "in_memory",
)


@dataclass(frozen=True)
class Draw:
    """The experiment that one seed stands for.

    `training` says what is trained, and identifies its undisturbed run. `at` is the place of the fault in the run, in
    [0, 1). `how` has the remaining details: for example, an earlier process trains `after_steps` steps first, and the
    disturbed process resumes from its states.
    """

    seed: int
    target: str
    training: dict[str, Any]
    fault: str
    at: float
    how: dict[str, Any] = field(default_factory=dict)

    @property
    def rng(self) -> random.Random:
        """Return the generator for everything that is left to chance while the seed runs."""
        return random.Random(f"run {self.seed}")


def draw(seed: int, shapes: list[str]) -> Draw:
    """Draw the experiment of a seed. `shapes`: names of the zoo's shapes that the engine accepts."""
    chance = random.Random(f"draw {DRAWN_AS} {seed}")
    target = _one_of(chance, TARGETS)
    fault = _one_of(chance, SHARES[target])
    how = {"after_steps": chance.choice([0, 0, 2]), **_DETAILS[fault](chance)}
    return Draw(seed, target, _TRAININGS[target](chance, shapes), fault, chance.random(), how)


def _one_of(chance: random.Random, shares: dict[str, int]) -> str:
    return chance.choices(list(shares), weights=list(shares.values()))[0]


def _engine(chance: random.Random, shapes: list[str]) -> dict[str, Any]:
    states = _one_of(chance, {"two versions": 5, "one version, redone": 3, "one version, torn": 2})
    return {
        "shape": chance.choice(shapes),
        "states": states,
        "arm": _one_of(chance, {"optimized": 6, "naive": 2, "none": 2}),
        "accumulate": chance.choice([1, 1, 2]),
        "clip": chance.choice([0.0, 0.0, 0.5]),
        "checkpoints": chance.choice(["tier", "tier", "device"]),
        "swap": chance.choice([None, None, None, "all"]),
    }


def _activations(chance: random.Random, shapes: list[str]) -> dict[str, Any]:
    return {"shape": chance.choice(shapes), "accumulate": chance.choice([1, 2])}


def _drop_in(chance: random.Random, _: list[str]) -> dict[str, Any]:
    return {"paths": chance.choice([1, 2]), "accumulate": chance.choice([1, 2]), "clip": chance.choice([0.0, 1.0])}


def _train(chance: random.Random, _: list[str]) -> dict[str, Any]:
    return {"system": chance.choice(SYSTEMS), "clip": chance.choice([0.0, 1.0])}


_TRAININGS = {"engine": _engine, "activations": _activations, "drop-in": _drop_in, "train": _train}


def _leave_or_again(chance: random.Random) -> str:
    """Draw what the user does after an error: repeat the step in the same process, or start another process."""
    return chance.choice(["again", "leave"])


def _transfers(chance: random.Random, ops: list[str]) -> dict[str, Any]:
    return {"op": chance.choice(ops), "times": chance.choice([1, 1, 3, -1]), "then": _leave_or_again(chance)}


_DETAILS = {
    "kill": lambda chance: {
        "where": chance.choice(["moment", "read", "write", "flush"]),
        "times": chance.choice([1, 1, 2]),
    },
    "torn write": lambda chance: {"op": "write", "sectors": chance.randint(0, 6)},
    "power cut": lambda chance: {
        "keep": chance.choice([0.0, 0.3, 0.7, 1.0]),
        "control": chance.choice(["kept", "lost"]),
    },
    "SIGTERM": lambda chance: {"handled": chance.random() < 0.6},
    "Ctrl-C": lambda chance: {"then": chance.choice(["again", "leave", "leave"])},
    "ENOSPC": lambda chance: _transfers(chance, ["write"]),
    "full file system": lambda chance: {"then": _leave_or_again(chance)},
    "EIO": lambda chance: _transfers(chance, ["read", "write", "flush"]),
    "a path that hangs": lambda chance: (
        {"op": chance.choice(["read", "write"]), "interrupted": True, "times": 1, "seconds": 20.0}
        if chance.random() < 0.3
        else {"op": chance.choice(["read", "write", "any"]), "times": chance.randint(1, 3), "seconds": 0.4}
    ),
    "memory limit": lambda chance: {},
    "clock jump": lambda chance: {
        "seconds": chance.choice([-1, 1]) * chance.choice([3600, 86400, 400 * 86400, 20 * 365 * 86400]),
        "killed": chance.random() < 0.6,
    },
}


def as_stock(drawn: Draw) -> Draw | None:
    """Return the same fault for stock DeepSpeed, or None if it cannot be arranged without our fault layer."""
    fault = {"ENOSPC": "full file system"}.get(drawn.fault, drawn.fault)
    if fault not in ("kill", "SIGTERM", "Ctrl-C", "full file system", "clock jump"):
        return None
    how = {**drawn.how, "then": "leave"} | ({"where": "moment"} if fault == "kill" else {})
    training = {**_drop_in(random.Random(f"stock {drawn.seed}"), []), "paths": 1}
    return Draw(drawn.seed, "stock", training, fault, drawn.at, how)
