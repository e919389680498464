"""The configuration as the rules need it: which exhibit needs which record, and what makes a record stale.

This module needs only the standard library, yaml and jsonschema, and the modules of ours imported below. Every error in
the configuration ends the program with one line (`fail`).
"""

from __future__ import annotations

import ast
import contextlib
import csv
import difflib
import json
import math
import os
import re
import tomllib
from collections import Counter
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NoReturn

from memascend.suggestions import did_you_mean
from workflows import registry
from workflows.experiments import Experiments
from workflows.refusals import checked, fail
from workflows.run import no_result, provenance
from workflows.staleness import Tree, versions

NAMED_TARGETS = ("figures", "tables", "claims", "report", "exhibits", "artifact", "artifact-verify", "flagship")
PAPER_TARGETS = {"mlpoffload": "mlp-offload"}  # target name where it differs from the folder
HOST = r"(?=.*[a-z])[a-z0-9]+([._-]+[a-z0-9]+)*"
# Names in results/raw, results/derived and figures of results without a host; a host's folder must not collide with
# them.
NOT_HOSTS = frozenset(
    ("benchmarks", "exhibits", "gallery", "gpu", "gpu-rehearsal", "logs", "modelled", "records", "runs", "traces")
)
FILES = (".json", ".csv", ".html", ".css", ".js", ".svg", ".pdf", ".png", ".md", ".zip", ".log", ".tsv")
# Overhead of a job on a node in addition to the run: two Snakemake processes, and minutes to read a cold file system.
STARTS_GIB, STARTS_MIN = 1.0, 10


@cache
def machine_gib() -> float:
    """Return this machine's memory in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


class Configuration:
    """The configuration of one call of Snakemake."""

    def __init__(self, config: dict[str, Any], words: list[str]) -> None:
        if "host" in config:
            refuse_host(config["host"])
        checked(config, "config.schema.json", "config")
        self.config, self.words = config, words
        self.published, self.reference = config["published_dir"], config["reference_dir"]
        self.host: str | None = config.get("host")
        self.raw, self.derived, self.figures = (
            self._own(config[f"{name}_dir"]) for name in ("raw", "derived", "figures")
        )
        for folder in (self.raw, self.derived, self.figures):
            existing = next(p for p in [Path(folder), *Path(folder).parents] if p.exists())
            if not (existing.is_dir() and os.access(existing, os.W_OK)):
                fix = f"make {existing.absolute()} writable or name another folder"
                fail(f"config: {folder} cannot be written; {fix}")
        drive = self.node["scratch"] if self.node else None
        self.experiments = Experiments(config["experiments"], config["profile"], drive)
        try:
            self.entries = {entry["id"]: entry for entry in registry.exhibits(Path.cwd())}
            for path in self.said("exhibits.yaml"):
                checked(registry.read(Path(path)), "exhibits.schema.json", path)
        except ValueError as error:
            fail(str(error))
        self._refuse_unknown_exhibits()
        self.papers = list(registry.PAPERS)
        self.built = [name for name, entry in self.entries.items() if entry["status"] == "built"]
        self.with_table = [name for name in self.built if registry.has_table(self.entries[name])]
        self.sources = Tree(Path.cwd())

    @property
    def runs(self) -> dict[str, dict[str, Any]]:
        """Runs of the profile in use, by id."""
        return self.experiments.runs

    def run(self, run_id: str) -> dict[str, Any]:
        """Return the run of that name in the profile in use."""
        if run_id not in self.runs:
            fail(f"{run_id} is no run of profile {self.config['profile']}; its runs: {', '.join(self.runs)}")
        return self.runs[run_id]

    @property
    def node(self) -> dict[str, Any] | None:
        """Properties of a cluster node if runs are jobs of a cluster; None if they run on this machine."""
        return {"scratch": "/tmp"} | self.config["node"] if "node" in self.config else None

    def _own(self, folder: str) -> str:
        """Return a result folder; a named host gets its own, so that two that share a file system never write one
        record."""
        return f"{folder}/{self.host}" if self.host else folder

    @property
    def lock(self) -> str:
        """Path of the lock that measurements take. It is per machine or node, not per shared file system."""
        return f"{self.node['scratch']}/.memascend-machine.lock" if self.node else f"{self.raw}/.machine.lock"

    @property
    def resources(self) -> dict[str, Any]:
        """Resources of a record's job for an executor that hands it to a node; on one machine they have no effect."""

        def mem_mb(wildcards: Any, attempt: int) -> int:
            return self.mem_mb(wildcards.run_id, attempt)

        found: dict[str, Any] = {"mem_mb": mem_mb, "runtime": lambda wildcards: self.runtime(wildcards.run_id)}
        if self.node:
            found["slurm_extra"] = lambda wildcards: "--exclusive" if self.run(wildcards.run_id)["alone"] else ""
        if self.node and any(run["gpus"] for run in self.runs.values()):
            # A profile without GPUs must not ask for zero of them: an executor may only look for the name.
            found["gpu"] = lambda wildcards: self.run(wildcards.run_id)["gpus"]
        return found

    def mem_mb(self, run_id: str, attempt: int = 1) -> int:
        """Return the MiB that a run and the processes that start it need, multiplied by the attempt.

        A run that must run exclusively gets the whole memory of a node. Ends with one line if a node has too little.
        """
        run = self.run(run_id)
        all_of_it = int(1024 * self.node["memory_gib"]) if self.node else None
        needed = math.ceil(1024 * (run["needs_gib"] + STARTS_GIB))
        if all_of_it and needed > all_of_it:
            gib = f"{run_id} needs about {needed / 1024:.1f} GiB, and a job can ask for {self.node['memory_gib']:g}"
            fail(f"config: node/memory_gib: {gib}; use larger nodes, or leave out what is drawn from it")
        if run["alone"] and all_of_it:
            return all_of_it
        return min(needed * attempt, all_of_it) if all_of_it else needed * attempt

    def runtime(self, run_id: str) -> int:
        """Return the minutes after which a run counts as hung. Its own limit comes first, so that its time-out is
        recorded."""
        return math.ceil(self.run(run_id)["allowed_s"] / 60) + STARTS_MIN

    def command(self, run_id: str) -> str:
        """Return the command that makes the record.

        The program holds the machine's lock exclusively if it is timed, and shared otherwise. If it ends without a
        record, a second program writes a record of that.
        """
        run = self.run(run_id)
        lock = f"flock {'' if run['alone'] else '--shared '}{self.lock}"
        if self.node:
            lock = f"TMPDIR={self.node['scratch']} MEMASCEND_NVME={self.node['scratch']} {lock}"
        # Ctrl-C ends flock, but not `timeout`, which leads a process group of its own: the kernel ends it with flock.
        limit = f"setpriv --pdeathsig TERM timeout {run['time_limit_s']} " if run["time_limit_s"] else ""
        one = run["environments"][0] if run["module"] == "training" else None
        python = f".cache/envs/{one}/bin/python" if one else "python"
        names = f"--run-id {run_id} --out {self.raw}/{run_id}.json"
        otherwise = f"python -m workflows.run.no_result {names} --log {self.raw}/logs/{run_id}.log --exit-status $?"
        return f"{lock} {limit}{python} -m workflows.run.{run['module']} {names} {run['words']} || {otherwise}"

    def threads(self, run_id: str, cores: int) -> int:
        """Return all cores for a timed run; other runs share them, as many at once as the machine's memory allows."""
        run, memory = self.run(run_id), self.node["memory_gib"] if self.node else machine_gib()
        if run["alone"] or cores < 2:
            return cores
        at_once = max(1, int(0.7 * memory / max(run["gib"], 0.1)))
        return max(2 if cores >= 4 else 1, -(-cores // at_once))

    @property
    def not_sampled(self) -> str:
        """Pattern of runs whose processes are not children of their job, so that Snakemake's benchmark would not see
        them.

        These are the runs that a server forks; on a cluster no run is forked.
        """
        names = [] if self.node else [run_id for run_id, run in self.runs.items() if run["forked"]]
        return "|".join(map(re.escape, names)) or "(?!)"

    def interpreters(self, run_id: str) -> list[str]:
        """Return the interpreters of the environments that a run needs; each other DeepSpeed has an environment of its
        own."""
        found = []
        for environment in filter(None, self.run(run_id)["environments"]):
            python = f".cache/envs/{environment}/bin/python"
            if not Path(python).exists():
                fail(f"environment {environment} is missing; make it with: make {environment}")
            found.append(python)
        return found

    def measures(self, run_id: str) -> str:
        """Return a digest of what can change the record; empty for a probe, which never becomes stale."""
        if self.run(run_id)["module"] == "probe":
            return ""
        return f"{self.measured_by(run_id)} {json.dumps(versions(), sort_keys=True)}"

    def measured_by(self, run_id: str, kind: str = "") -> str:
        """Return a digest of the code that makes the record, as the record states it.

        `kind` is the kind of an existing record: one of a run without a result is made by other code.
        """
        if kind == no_result.KIND:
            return self._digest("workflows.run.no_result", (), ())
        run = self.run(run_id)
        models = None if run["models"] is None else tuple(run["models"])
        return self._digest(f"workflows.run.{run['module']}", tuple(run["systems"]), models)

    def code(self, program: str, systems: tuple = (), models: tuple | None = (), more: Any = "") -> str:
        """Return a digest of the code that a program with these systems and models uses, and of `more`."""
        return f"{self._digest(program, systems, models)} {json.dumps(more, sort_keys=True) if more else ''}".strip()

    @cache  # noqa: B019  (one object per call of Snakemake)
    def _digest(self, program: str, systems: tuple, models: tuple | None) -> str:
        return self.sources.digest(program, systems, models)

    def models(self, paper: str) -> str:
        """Return a digest of what a paper's modelled lane is computed from: code, its systems, models and testbeds."""
        testbeds = {str(p): p.stat().st_size for p in sorted(Path("hardware").glob("**/*.yaml"))}
        texts = [Path(path).read_text() for path in testbeds]
        own = [Path("workflows/papers/releases.yaml"), *sorted(Path("workflows/papers", paper).glob("*.yaml"))]
        drawn = ("exhibits.yaml", "figures.yaml", "captions.yaml", "claims.yaml", "errata.yaml", "paper.yaml")
        own += [path for path in sorted(Path(self.published).glob("*.csv")) if path.stem.replace("_", "") == paper]
        texts += [path.read_text() for path in own if path.name not in drawn]
        return self.code(f"workflows.papers.{paper}.rows", systems_named(paper), None, texts)

    def derives(self, exhibit: str) -> str:
        """Return a digest of what determines an exhibit's table and picture, including the labels of systems' arms."""
        systems = {s for run in self.runs.values() if exhibit in (run["exhibits"] or []) for s in run["systems"]}
        labels = [(self.sources.folder(s) / "system.py").read_text() for s in sorted(systems)]
        paper = self.entries[exhibit]["paper"]
        more = [self.code(f"workflows.papers.{paper}.rows"), labels, self._picture(exhibit)]
        return self.code("workflows.derive.table", more=more)

    def draws(self, exhibit: str) -> str:
        """Return a digest of the code that draws an exhibit without a table, and of its specification."""
        return self.code("workflows.derive.figure", more=self._picture(exhibit))

    def _picture(self, exhibit: str) -> str:
        return registry.picture_digest(self.entries[exhibit], Path.cwd())

    def records_of(self, exhibit: str) -> list[str]:
        """Return the paths of the records that one exhibit is drawn from."""
        if exhibit not in self.with_table:
            return []
        wanted = [r for r, run in self.runs.items() if run["exhibits"] is None or exhibit in run["exhibits"]]
        return [f"{self.raw}/{run_id}.json" for run_id in wanted] if self.is_measured(exhibit) else []

    @property
    def simulator(self) -> list[str]:
        """Record of how far the simulator is off on this machine; empty in a profile that does not measure that."""
        return [f"{self.raw}/{run_id}.json" for run_id, run in self.runs.items() if run["module"] == "validation"]

    def no_simulator(self) -> NoReturn:
        """End with one line: the target was named in a profile that does not measure it."""
        fail(f"profile {self.config['profile']} does not measure how far the simulator is off: --config profile=paper")

    @property
    def exhibits_of_runs(self) -> str:
        """JSON of {run id: exhibits}, which records carry; a change in it makes no record stale."""
        return json.dumps({run_id: run["exhibits"] or [] for run_id, run in self.runs.items()})

    def is_measured(self, exhibit: str) -> bool:
        """Return whether an exhibit has a measured lane."""
        return "measured" in self.entries[exhibit]["lanes"]

    def all_records(self, exhibits: list[str]) -> list[str]:
        """Return the records as targets: Snakemake makes a deleted record again only if it is asked for by name."""
        return sorted({record for exhibit in exhibits for record in self.records_of(exhibit)})

    def modelled_of(self, exhibit: str) -> list[str]:
        """Return the path of the modelled lane that an exhibit is drawn from, as a list."""
        return [f"{self.derived}/modelled/{self.entries[exhibit]['paper']}.csv"]

    def published_of(self, exhibit: str) -> list[str]:
        """Return the files with what the exhibit's paper states."""
        paper = self.entries[exhibit]["paper"]
        return [str(p) for p in sorted(Path(self.published).glob("*.csv")) if p.stem.replace("_", "") == paper]

    def drawn(self, exhibits: list[str]) -> list[str]:
        """Return the pictures of exhibits and the records behind them."""
        return [*(f"{self.figures}/{exhibit}.svg" for exhibit in exhibits), *self.all_records(exhibits)]

    def planned(self, exhibit: str) -> Any:
        """Return the input function of an exhibit that is not built, which ends with the part that it waits for."""
        entry = self.entries[exhibit]
        return lambda wildcards: fail(f"{exhibit} is not built yet: it waits for {entry['waits_for']}.")

    def of_paper(self, paper: str) -> Any:
        """Return the pictures of one paper; if none is built, a function that ends with what its exhibits wait for."""
        mine = [entry for entry in self.entries.values() if entry["paper"] == paper]
        built = [entry["id"] for entry in mine if entry["status"] == "built"]
        parts = "; ".join(dict.fromkeys(e["waits_for"] for e in mine if e["status"] == "planned"))
        words = f"{PAPER_TARGETS.get(paper, paper)}: no exhibit is built yet; they wait for: {parts}."
        return self.drawn(built) if built else (lambda wildcards: fail(words))

    def _refuse_unknown_exhibits(self) -> None:
        """End with one line that suggests similar ids if a word looks like an exhibit's id but is none."""
        for word in self.words:
            if re.fullmatch(r"([a-z]+-)?(fig|tab|alg|eq)[a-z]*-?\d+[a-z]?", word) and word not in self.entries:
                near = difflib.get_close_matches(word, self.entries, n=3, cutoff=0.5)
                hint = f"did you mean {', '.join(near)}? " if near else ""
                fail(f"{word} is no exhibit; {hint}snakemake exhibits lists them all")

    def refuse_missing_profile(self) -> None:
        """End if the --workflow-profile does not exist; Snakemake would ignore it and measure on this machine."""
        for word, following in zip(self.words, [*self.words[1:], ""], strict=True):
            option, equals, value = word.partition("=")
            named = value if equals else following
            if option == "--workflow-profile" and named != "none" and not Path(named).exists():
                known = sorted(str(path) for path in Path("profiles").iterdir())
                fail(
                    f"--workflow-profile: there is no {named}{did_you_mean(named, known)}; here are {', '.join(known)}"
                )

    def refuse_mistyped_targets(self, rule_names: list[str]) -> None:
        """End with one line that names the target if a word of the command line is almost a target and no rule."""
        targets = [*NAMED_TARGETS, *(PAPER_TARGETS.get(paper, paper) for paper in self.papers), *self.entries]
        for word in self.words:
            if re.fullmatch(r"[a-z][a-z0-9-]+", word) and word not in rule_names:
                near = difflib.get_close_matches(word, targets, n=1, cutoff=0.7)
                if near:
                    named = ", ".join(NAMED_TARGETS)
                    fail(f"{word} is no target; did you mean {near[0]}? Targets: {named}, a paper or an exhibit")

    def paper_of(self, exhibit: str) -> str:
        """Return the name of the paper that contains an exhibit."""
        return registry.PAPERS[self.entries[exhibit]["paper"]]

    def caption(self, exhibit: str) -> str:
        """Return the prose under an exhibit."""
        return registry.caption(exhibit, Path.cwd())

    def report_labels(self, exhibit: str) -> dict[str, str]:
        """Return the columns of an exhibit in Snakemake's report: title, lanes, and its verdicts if they exist."""
        found = self._verdicts.get(exhibit, Counter())
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in found.most_common()) or "-"
        lanes = ", ".join(self.entries[exhibit]["lanes"]) or "a drawing"
        return {"exhibit": exhibit, "title": self.entries[exhibit]["title"], "lanes": lanes, "verdicts": verdicts}

    @cached_property
    def _verdicts(self) -> dict[str, Counter[str]]:
        """Exhibit -> number of claims by verdict, over both lanes."""
        counts: dict[str, Counter[str]] = {}
        with contextlib.suppress(FileNotFoundError), open(Path(self.derived, "claims.csv"), newline="") as file:
            for line in csv.DictReader(file):
                counts.setdefault(line["exhibit_id"], Counter())[line["verdict"]] += 1
        return counts

    @property
    def artifact(self) -> str:
        """Path of the profile's zip, which is named after the project's version."""
        project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
        folder = self._own(self.config.get("artifact_dir", "artifact"))
        return f"{folder}/memascend-{project['version']}-{self.config['profile']}.zip"

    @property
    def commit(self) -> str:
        """The commit of the checkout, whose sources the artifact contains, and a digest of uncommitted changes."""
        return provenance.checkout()

    @property
    def bundle(self) -> str:
        """The zip that artifact-verify checks: the configured one, or the profile's own."""
        path = self.config.get("bundle", self.artifact)
        if not Path(path).is_file():
            what = f"{path} is not a file" if Path(path).exists() else f"there is no {path}"
            fail(f"{what}: name a zip with --config bundle=FILE, or make one with snakemake artifact")
        return path

    @property
    def own_experiments(self) -> list[str]:
        """Option that tells a check which list of runs this call uses; empty if it is the project's."""
        usual = registry.read(Path("workflows/config/config.yaml"))["experiments"]
        named = self.config["experiments"]
        return [] if Path(named) == Path(usual) else ["--experiments", named]

    @property
    def claimed(self) -> list[str]:
        """Exhibits with a table that a claim reads."""
        named = {claim["exhibit_id"] for claim in registry.claims(Path.cwd())}
        return [exhibit for exhibit in self.with_table if exhibit in named]

    def said(self, *names: str) -> list[str]:
        """Return the files of these names in the papers' folders."""
        return [str(path) for name in names for path in sorted(Path("workflows/papers").glob(f"*/{name}"))]

    @property
    def site_sources(self) -> list[str]:
        """Templates, style sheet and scripts of the report."""
        folders = (Path("workflows/derive/site", name) for name in ("assets", "templates"))
        return [str(path) for folder in folders for path in sorted(folder.iterdir())]

    @property
    def against(self) -> list[str]:
        """The other claims.csv that the report compares with, if one is named."""
        named = self.config.get("against")
        if named and not Path(named).is_file():
            fail(f"config: against: {named} is no file; name a claims.csv, as results/reference/<host>/claims.csv")
        return [named] if named else []

    def reference_of(self, exhibit: str) -> list[str]:
        """Return the committed records of named machines that may have rows of an exhibit, including those that name
        none."""
        if not self.is_measured(exhibit):
            return []
        return [path for path, exhibits in self._reference.items() if exhibits is None or exhibit in exhibits]

    @cached_property
    def _reference(self) -> dict[str, list[str] | None]:
        paths = sorted(Path(self.reference).glob("*/*.json"))
        read = {str(path): json.loads(path.read_text()) for path in paths if path.name != "times.json"}
        return {path: record.get("exhibits") for path, record in read.items() if "key" in record}

    def target_of(self, paper: str) -> str:
        """Return the name of a paper's target on the command line."""
        return PAPER_TARGETS.get(paper, paper)

    @cached_property
    def _times(self) -> dict[str, float]:
        """Seconds of runs on the machines of the committed references."""
        paths = sorted(Path(self.reference).glob("*/times.json"))
        return {run: seconds for path in paths for run, seconds in json.loads(path.read_text()).items()}

    def seconds(self, run_id: str) -> float | None:
        """Return what a run took the last time, on this machine or else where a reference was made; None if unknown."""
        own = Path(self.raw, f"{run_id}.json")
        with contextlib.suppress(OSError, ValueError):
            if own.exists() and "wall_s" in (record := json.loads(own.read_text())):
                return record["wall_s"]
        return self._times.get(run_id)

    def budget(self, exhibit: str) -> str:
        """Return in words how long the runs of an exhibit's records take."""
        names = [Path(path).stem for path in self.records_of(exhibit)]
        known = [self.seconds(name) for name in names if name != "testbed-local"]
        if not known:
            return "seconds"
        minutes, missing = sum(filter(None, known)) / 60, known.count(None)
        if not minutes:
            return f"{len(known)} run{'s' if len(known) > 1 else ''}, not timed yet"
        more = f", {missing} of {len(known)} runs not timed yet" if missing else ""
        return f"about {minutes:.1f} min of runs{more}"

    @cached_property
    def listing(self) -> list[str]:
        """One line per exhibit (title, lanes, and the time of its runs in this profile or what it waits for), then the
        number of built exhibits per paper."""
        width = max(map(len, self.entries))
        lines = []
        for name, entry in self.entries.items():
            if entry["status"] == "built":
                drawn = "drawn; " if Path(self.figures, f"{name}.svg").exists() else ""
                text = f"{drawn}{', '.join(entry['lanes']) or 'a drawing of structure'}; {self.budget(name)}"
            else:
                text = f"not built, waits for {entry['waits_for']}"
            lines.append(f"{name:<{width}}  {entry['title']}  ({text})")
        built = Counter(self.entries[name]["paper"] for name in self.built)
        counts = ", ".join(f"{name} {built[paper]}" for paper, name in registry.PAPERS.items())
        lines.append(f"{len(self.built)} of {len(self.entries)} exhibits are built ({counts}).")
        runs = [self.seconds(run) for run in self.runs if self.runs[run]["exhibits"] is not None]
        of, whole = f"Profile {self.config['profile']}: {len(runs)} runs", sum(filter(None, runs)) / 60
        return [*lines, f"{of}, about {whole:.0f} min where times are known."]


def refuse_host(name: Any) -> None:
    """End with one line if the name is malformed or its results would collide with those without a host."""
    if not isinstance(name, str) or not re.fullmatch(HOST, name) or name in ("null", "none", "true", "false"):
        said = "nothing" if name in ("", None) else repr(name)
        fail(
            f"config: host: {said} is no name of a host: use lower-case letters and digits, with - _ . between them, "
            "as in genoa-2; without host= results have no host"
        )
    if name in NOT_HOSTS or name.endswith(FILES):
        fail(f"config: host: {name} is a name of results that have no host: choose another, such as host-{name}")


def systems_named(paper: str) -> tuple[str, ...]:
    """Return the systems whose names occur as strings in the modules of a paper's rows."""
    trees = [ast.parse(path.read_text()) for path in Path("workflows/papers", paper, "rows").glob("*.py")]
    words = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    systems = (path.parent.name for path in Path("baselines").glob("*/system.yaml"))
    return tuple(sorted(words.intersection(systems)))


def score(table: Path) -> dict[str, str]:
    """Return paper and lane -> its held-out verdicts in words, from claims.csv; lanes without a decided claim are
    absent."""
    if not table.exists():
        return {}
    found: dict[str, list[str]] = {}
    with table.open(newline="") as file:
        for line in csv.DictReader(file):
            if line["basis"] == "held out" and line["verdict"] in registry.DECIDED:
                where = f"{registry.PAPERS[line['exhibit_id'].rpartition('-')[0]]}, {line['lane']}"
                found.setdefault(where, []).append(line["verdict"])
    return {where: registry.scored(verdicts) for where, verdicts in found.items()}
