"""The runs of a profile, resolved from experiments.yaml: programs, command lines and requirements."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any

from workflows import registry
from workflows.refusals import checked, fail

FORKED = ("memory", 1, "cpu", None)  # mode, ranks, device and environment of the runs that the fork server runs
_MEASURED = ("sequence", "batch", "steps", "ranks", "mode", "device", "matmul", "evaluate_every", "time_limit_s")


def twin_point(context: int, sequences: int, k: int, ranks: int, where: str) -> str:
    """Return TOKENSxBATCH of one rank for a context of the original and the number of sequences in a whole step.

    Ends with one line if k does not divide the context, or the ranks do not divide the sequences.
    """
    if context % k or sequences % ranks:
        fail(f"{where}: a context of {context} with {sequences} sequences has no twin at k = {k} on {ranks} ranks")
    return f"{context // k}x{sequences // ranks}"


class Experiments:
    """The runs of one profile. A resolved run has at least the keys {module, words, systems, models, exhibits, alone,
    environments}: the program, its command line, what can change its record, the exhibits drawn from it, and whether it
    must run exclusively. Models of None mean all models."""

    def __init__(self, path: str, profile: str, drive: str | None = None) -> None:
        """Read the file at `path`. `drive` is the folder that benchmarks of a drive use in place of the one in the
        file."""
        self.path, self.profile, self.drive = path, profile, drive
        try:
            document = registry.read(Path(path))
        except ValueError as error:
            fail(str(error))
        self.document = checked(document, "experiments.schema.json", path)

    @cached_property
    def runs(self) -> dict[str, dict[str, Any]]:
        """Return run id -> resolved run; the probe of the machine belongs to every exhibit."""
        mine = self.document["profiles"][self.profile]
        found = {"testbed-local": resolved("probe", "", None, alone=False)}
        found |= self._training(mine["training"])
        for bench in mine.get("bench", []):
            shown = {n: ",".join(map(str, v)) if isinstance(v, list) else v for n, v in bench["options"].items()}
            shown |= {name: self.drive for name in ("folder", "tiers") if self.drive and name in shown}
            words = f"--part {bench['part']} -- {' '.join(f'--{n} {v}' for n, v in shown.items())}"
            more = {"time_limit_s": bench["time_limit_s"], "allowed_s": bench["time_limit_s"]}
            more["gpus"] = gpus_of(bench["options"].get("device", "cpu"), 1)
            more |= {"models": None} if bench["part"] == "pool" else {}  # it may use any model
            found[bench["run_id"]] = resolved("bench", words, bench["exhibits"], **more)
        for run in mine.get("validation", []):
            limit = run["time_limit_s"]
            more = {name: run[name] for name in ("systems", "models")} | {"time_limit_s": limit, "allowed_s": limit}
            found[run["run_id"]] = resolved("validation", "", [], needs_gib=4.0, **more)
        return found | {run["run_id"]: self._turns(run) for run in mine.get("times", [])}

    def named(self, section: str, name: str) -> dict[str, Any]:
        """Return the entry of that name; otherwise end with one line that lists the known ones."""
        known = self.document[section]
        if name not in known:
            known_ones = f"known {section}: {', '.join(known)}; define further ones under {section}"
            fail(f"{self.path}: unknown {section[:-1]} {name!r}; {known_ones}: in this file")
        return known[name]

    def _training(self, groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Expand the groups, which are cross products; groups that ask for the same run share its record."""
        runs: dict[str, dict[str, Any]] = {}
        for group in groups:
            group = {**self.document["defaults"], **group}
            crossed = [
                (model, k, arm, dtype, seed)
                for model, k in group["models"].items()
                for arm in group["arms"]
                for dtype in group["dtypes"]
                for seed in group["seeds"]
            ]
            for one in crossed:
                run_id, run = self._one_training(group, *one)
                known = runs.setdefault(run_id, run)
                if {**known, "exhibits": 0} != {**run, "exhibits": 0}:
                    fail(f"{self.path}: {self.profile}: {run_id} is asked for with two settings")
                known["exhibits"] = sorted({*known["exhibits"], *run["exhibits"]})
        return runs

    def _one_training(self, group: dict[str, Any], model: str, k: int, arm: str, dtype: str, seed: int) -> tuple:
        """Return the id and the resolved run of one training of a group."""
        gpus, named = group.get("gpus", group["ranks"]), self.named("arms", arm)
        points = group.get("points", [])
        points = [twin_point(c, b * gpus, k, group["ranks"], self.path) for c, b in points]
        stacks = [self.named("stacks", name) for name in group.get("stacks", [])]
        timed = group["mode"] == "time" and not group["evaluate_every"]
        words = ["train", model, f"k{k}", dtype, arm, *([f"s{seed}"] if seed else [])]
        words += [f"r{group['ranks']}"] if group["ranks"] > 1 else []
        words += ["stacks"] if len(stacks) > 1 else ["sweep"] if points else []
        words += [group["device"]] if group["device"] != "cpu" else []
        words += ["curve"] if group["evaluate_every"] else []
        words += ["time"] if timed else []
        fields = {"system": named["system"], "arm": named["arm"], "model": model, "k": k, "dtype": dtype, "seed": seed}
        fields |= {name: group[name] for name in _MEASURED} | {"gpus": gpus}
        line = [f"--{name.removesuffix('_s').replace('_', '-')} {value}" for name, value in fields.items()]
        line += ["--points", *points] if points else []
        names = ("checkpointing", "attention", "loss")
        line += ["--stacks", *(":".join(stack[name] for name in names) for stack in stacks)] if stacks else []
        more = {"systems": [named["system"]], "models": [model], "environments": [named.get("environment")]}
        more |= {"gib": gib(model, k), "needs_gib": gib(model, k) * group["ranks"]}
        more |= {"allowed_s": group["time_limit_s"], "gpus": gpus_of(group["device"], group["ranks"])}
        # The condition under which workflows.run.children forks the run.
        more["forked"] = (group["mode"], group["ranks"], group["device"], *more["environments"]) == FORKED
        return "-".join(words), resolved("training", " ".join(line), sorted(group["exhibits"]), alone=timed, **more)

    def _turns(self, run: dict[str, Any]) -> dict[str, Any]:
        """Return the resolved run in which several arms take turns, over limited paths if it names some."""
        arms, named = [], []
        for word in run["arms"]:
            arm, _, dtype = word.partition(":")
            named.append(self.named("arms", arm))
            words = [named[-1]["system"], named[-1]["arm"], dtype, named[-1].get("environment")]
            arms.append(":".join(filter(None, words)))
        points = [twin_point(c, b, run["k"], 1, self.path) for c, b in run["points"]]
        line = f"--model {run['model']} --k {run['k']} --rounds {run['rounds']} --matmul {run['matmul']}"
        line += f" --device {run.get('device', 'cpu')} --time-limit {run['time_limit_s']}"
        line += f" --arms {' '.join(arms)} --points {' '.join(points)}"
        more = {"systems": sorted({arm["system"] for arm in named}), "models": [run["model"]]}
        environments, module = [arm.get("environment") for arm in named], "interleaved"
        if "paths" in run:
            module, more["models"] = "path_twin", []
            line += f" --rates {' '.join(run['paths'])} --ranks {run.get('ranks', 1)}"
            line += "".join(f" --{flag}" for flag in ("simplex", "transfers") if run.get(flag))
            line += " --accumulate " + " ".join(map(str, run["accumulate"])) if "accumulate" in run else ""
        more |= {"needs_gib": gib(run["model"], run["k"]) * len(arms), "allowed_s": run["time_limit_s"]}
        more["gpus"] = gpus_of(run.get("device", "cpu"), run.get("ranks", 1))
        alone = run["rounds"] > 1 or "paths" in run  # one round measures bytes, but of paths seconds
        return resolved(module, line, run["exhibits"], alone=alone, environments=environments, **more)


def resolved(module: str, words: str, exhibits: list[str] | None, *, alone: bool = True, **more: Any) -> dict[str, Any]:
    """Return a resolved run: the program, its command line, its exhibits, and defaults for all other keys."""
    own = {"module": module, "words": words, "exhibits": exhibits, "alone": alone}
    usual = {"systems": [], "models": [], "environments": [], "time_limit_s": None, "gib": 1.0}
    return own | usual | {"needs_gib": 1.0, "allowed_s": 600, "gpus": 0, "forked": False} | more


def gpus_of(device: str, ranks: int) -> int:
    """Return the number of GPUs that the ranks of a run need on this device."""
    return ranks if device.startswith("cuda") else 0


def gib(model: str, k: int) -> float:
    """Estimate the GiB of a run of a twin: 20 bytes per parameter (host and device role), plus the interpreter."""
    size = re.search(r"(\d+(?:\.\d+)?)b", model)
    return 1.5 + (20e9 * float(size[1]) / k**2 / 2**30 if size else 0.0)
