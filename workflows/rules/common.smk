# Reads and checks the configuration; small helpers for the other rules.
# Of ours it imports workflows.staleness alone.
import atexit
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jsonschema
import yaml

from workflows.staleness import Tree, versions

# Rules call `python`: the one that runs Snakemake, whether or not its environment is activated.
BIN = os.path.dirname(sys.executable)
shell.prefix(f"export PATH={BIN}:$PATH; ")

NAMED_TARGETS = ("figures", "tables", "claims", "report", "exhibits", "artifact")
# Paper names as typed, where they differ from the registry's.
PAPER_TARGETS = {"mlpoffload": "mlp-offload"}


def start_fork_server():
    """The process that runs are forked from (workflows/scripts/fork_server.py): a third of a short run is imports.

    It ends with this one; the folder of its socket does too, or is collected like those of killed runs.
    """
    folder = tempfile.mkdtemp(prefix="memascend-run-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address = os.path.join(folder, "socket")
    log = Path(RAW, "logs", "fork_server.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        subprocess.Popen(
            [sys.executable, "-m", "workflows.scripts.fork_server", address],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    os.environ.update(MEMASCEND_FORK_SERVER=address)


def stop(message):
    """End with one clear line and no stack trace."""
    sys.exit(message)


def checked(document, schema_name, where):
    """The document, after it passed the JSON schema; otherwise one line that names the place and the fix."""
    schema = json.loads(Path("workflows/schemas", schema_name).read_text())
    error = jsonschema.exceptions.best_match(
        jsonschema.Draft202012Validator(schema).iter_errors(document)
    )
    if error is None:
        return document
    place = "/".join(str(part) for part in error.absolute_path)
    if error.validator == "additionalProperties":
        known = list(error.schema["properties"])
        unknown = next(key for key in error.instance if key not in known)
        near = difflib.get_close_matches(unknown, known, n=1)
        hint = (
            f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        )
        stop(f"{where}: {place or 'top level'}: unknown key {unknown!r}; {hint}")
    stop(f"{where}: {place or 'top level'}: {error.message}")


def read_yaml(path):
    try:
        return yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        stop(f"{path}: cannot be read: {' '.join(str(error).split())}")


def training_runs(experiments, profile):
    """{run id: fields} of the training runs of one profile; groups that share a run share its record."""
    runs = {}
    for group in experiments["profiles"][profile]["training"]:
        group = {**experiments["defaults"], **group}
        for model, k in group["models"].items():
            for arm in group["arms"]:
                named_in(experiments, "arms", arm)
                for dtype in group["dtypes"]:
                    for seed in group["seeds"]:
                        run_id, run = one_training_run(
                            experiments, group, model, k, arm, dtype, seed
                        )
                        known = runs.setdefault(run_id, run)
                        if {**known, "exhibits": 0} != {**run, "exhibits": 0}:
                            stop(
                                f"{config['experiments']}: {profile}: {run_id} is asked for with two settings"
                            )
                        known["exhibits"] = sorted(
                            {*known["exhibits"], *run["exhibits"]}
                        )
    return runs


def named_in(experiments, section, name):
    """The entry of that name; otherwise one line with the known ones."""
    if name not in experiments[section]:
        stop(
            f"{config['experiments']}: unknown {section[:-1]} {name!r}; known {section}: {', '.join(experiments[section])}"
        )
    return experiments[section][name]


def one_training_run(experiments, group, model, k, arm, dtype, seed):
    fields = {
        name: group[name]
        for name in (
            "sequence",
            "batch",
            "steps",
            "ranks",
            "mode",
            "device",
            "matmul",
            "evaluate_every",
            "time_limit_s",
            "exhibits",
        )
    }
    gpus = group.get("gpus", group["ranks"])
    points = [
        twin_point(context, batch * gpus, k, group["ranks"])
        for context, batch in group.get("points", [])
    ]
    stacks = [named_in(experiments, "stacks", name) for name in group.get("stacks", [])]
    words = ["train", model, f"k{k}", dtype, arm]
    words.extend([f"s{seed}"] if seed else [])
    words.extend([f"r{group['ranks']}"] if group["ranks"] > 1 else [])
    words.extend(["stacks"] if len(stacks) > 1 else ["sweep"] if points else [])
    words.extend([group["device"]] if group["device"] != "cpu" else [])
    words.extend(["curve"] if group["evaluate_every"] else [])
    words.extend(
        ["time"] if group["mode"] == "time" and not group["evaluate_every"] else []
    )
    return "-".join(words), {
        **experiments["arms"][arm],
        "model": model,
        "k": k,
        "dtype": dtype,
        "seed": seed,
        "gpus": gpus,
        "points": points,
        "stacks": [
            f"{s['checkpointing']}:{s['attention']}:{s['loss']}" for s in stacks
        ],
        **fields,
    }


def twin_point(context, sequences, k, ranks):
    """TOKENSxBATCH of a rank for a context of the original and the sequences of a whole step."""
    if context % k or sequences % ranks:
        stop(
            f"{config['experiments']}: a context of {context} with {sequences} sequences has no twin at k = {k} on {ranks} ranks"
        )
    return f"{context // k}x{sequences // ranks}"


def systems_of(run):
    """Names of the systems that a run trains with."""
    if "system" in run:
        return [run["system"]]
    arms = (
        named_in(EXPERIMENTS, "arms", word.partition(":")[0]) for word in run["arms"]
    )
    return sorted({arm["system"] for arm in arms})


def code_of(program, run=None):
    """Digest of the code that can change what the program measures; a parameter of every measuring rule."""
    return SOURCES.digest(
        f"workflows.scripts.{program}",
        systems_of(run) if run else (),
        [run["model"]] if run else (),
    )


def python_of(run):
    """The interpreter that a run needs; another DeepSpeed lives in an environment of its own."""
    environment = run.get("environment")
    return f".cache/envs/{environment}/bin/python" if environment else "python"


def environment_of(run):
    """Input of a run: the interpreter of its environment, where it needs one."""
    if "environment" not in run:
        return []
    if not Path(python_of(run)).exists():
        stop(
            f"environment {run['environment']} is missing; make it with: make {run['environment']}"
        )
    return python_of(run)


def environments_of(run):
    """The same for a run of several arms."""
    arms = (
        named_in(EXPERIMENTS, "arms", word.partition(":")[0]) for word in run["arms"]
    )
    return [found for arm in arms if (found := environment_of(arm))]


def training_arguments(run):
    """Command-line words of run_training for one run of experiments.yaml."""
    words = (
        "system",
        "arm",
        "model",
        "k",
        "dtype",
        "sequence",
        "batch",
        "steps",
        "seed",
        "ranks",
        "mode",
        "gpus",
        "device",
        "matmul",
    )
    return " ".join(
        [
            *(f"--{word} {run[word]}" for word in words),
            f"--evaluate-every {run['evaluate_every']}",
            f"--time-limit {run['time_limit_s']}",
            *(["--points", *run["points"]] if run["points"] else []),
            *(["--stacks", *run["stacks"]] if run["stacks"] else []),
        ]
    )


def times_arguments(run):
    """Command-line words of time_arms for one run of experiments.yaml."""
    arms = []
    for word in run["arms"]:
        arm, _, dtype = word.partition(":")
        named = named_in(EXPERIMENTS, "arms", arm)
        words = [named["system"], named["arm"], dtype, named.get("environment")]
        arms.append(":".join(word for word in words if word))
    points = [twin_point(c, b, run["k"], 1) for c, b in run["points"]]
    return (
        f"--model {run['model']} --k {run['k']} --rounds {run['rounds']} --matmul {run['matmul']}"
        f" --device {run.get('device', 'cpu')}"
        f" --time-limit {run['time_limit_s']} --arms {' '.join(arms)} --points {' '.join(points)}"
    )


def overflow_arguments(bench):
    """Command-line words of bench_overflow."""
    numels = " ".join(str(numel) for numel in bench["numels"])
    return f"--dtypes {' '.join(bench['dtypes'])} --numels {numels} --repeats {bench['repeats']}"


def bench_arguments(bench):
    """Command-line words of bench_record."""
    words = [f"--part {bench['part']} --"]
    for name, value in bench["options"].items():
        shown = ",".join(map(str, value)) if isinstance(value, list) else value
        words.append(f"--{name} {shown}")
    return " ".join(words)


def run_named(runs, run_id):
    """The run of that name in the profile in use."""
    if run_id not in runs:
        stop(
            f"{run_id} is no run of profile {config['profile']}; its runs: {', '.join(runs)}"
        )
    return runs[run_id]


def refuse_unknown_exhibits(words):
    """A word of the command line that looks like an exhibit's id and is none: one line with the ids near it."""
    known = [entry["id"] for entry in EXHIBITS]
    for word in words:
        if re.fullmatch(r"([a-z]+-)?(fig|tab|alg|eq)[a-z]*-?\d+[a-z]?", word):
            near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
            if word not in known:
                hint = f"did you mean {', '.join(near)}? " if near else ""
                stop(f"{word} is no exhibit; {hint}snakemake exhibits lists them all")


def refuse_mistyped_targets(words, rule_names):
    """A word of the command line that is nearly a target, and no rule: one line with the target."""
    targets = [*NAMED_TARGETS, *(PAPER_TARGETS.get(paper, paper) for paper in PAPERS)]
    targets += [entry["id"] for entry in EXHIBITS]
    for word in words:
        if re.fullmatch(r"[a-z][a-z0-9-]+", word) and word not in rule_names:
            near = difflib.get_close_matches(word, targets, n=1, cutoff=0.7)
            if near:
                stop(
                    f"{word} is no target; did you mean {near[0]}? Targets: {', '.join(NAMED_TARGETS)}, a paper or an exhibit"
                )


def planned(entry):
    """Input function of an exhibit that is not built: naming it ends with the part that it waits for."""
    return lambda wildcards: stop(
        f"{entry['id']} is not built yet: it waits for {entry['waits_for']}."
    )


def paper_figures(paper):
    """Pictures of one paper; a paper of which nothing is built yet ends with what its exhibits wait for."""
    entries = [entry for entry in EXHIBITS if entry["paper"] == paper]
    built = [
        f"{FIGURES}/{entry['id']}.svg"
        for entry in entries
        if entry["status"] == "built"
    ]
    parts = "; ".join(
        dict.fromkeys(
            entry["waits_for"] for entry in entries if entry["status"] == "planned"
        )
    )
    ids = [entry["id"] for entry in entries if entry["status"] == "built"]
    return (
        [*built, *all_records(ids)]
        if built
        else (
            lambda wildcards: stop(
                f"{PAPER_TARGETS.get(paper, paper)}: no exhibit is built yet; they wait for: {parts}."
            )
        )
    )


def list_planned(targets):
    """What `figures` could not draw yet: how many of each paper, and where the whole list is."""
    if targets and not {"figures", "artifact", *PAPERS} & set(targets):
        return
    lines = [
        f"{len(BUILT)} of {len(EXHIBITS)} exhibits are built. Not built yet (snakemake exhibits says what each waits for):"
    ]
    for paper in PAPERS:
        ids = [
            entry["id"]
            for entry in EXHIBITS
            if entry["paper"] == paper and entry["status"] == "planned"
        ]
        lines.append(f"  {' '.join(ids)}")
    print("\n".join(lines))


def files_of(*patterns):
    """Paths that match, sorted."""
    return sorted(
        {str(path) for pattern in patterns for path in Path(".").glob(pattern)}
    )


def model_code():
    """Files that the modelled lane is computed from."""
    return files_of(
        "memascend/planner/**/*.py",
        "memascend/planner/**/*.json",
        "memascend/memory/*.py",
        "hardware/**/*.yaml",
        "workflows/scripts/model_*.py",
    )


def plot_code():
    """Files that a picture is drawn by."""
    return files_of(
        "workflows/scripts/plot_exhibit.py",
        "workflows/scripts/tidy.py",
        "workflows/scripts/plots/*.py",
    )


SOURCES = Tree(Path.cwd())
checked(config, "config.schema.json", "config")
RAW, DERIVED, PUBLISHED, FIGURES = (
    config[key] for key in ("raw_dir", "derived_dir", "published_dir", "figures_dir")
)

for folder in (RAW, DERIVED, FIGURES):
    existing = next(p for p in [Path(folder), *Path(folder).parents] if p.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        stop(
            f"config: {folder} cannot be written; make {existing.absolute()} writable or name another folder"
        )

EXPERIMENTS = checked(
    read_yaml(config["experiments"]), "experiments.schema.json", config["experiments"]
)
EXHIBITS = checked(
    read_yaml(config["exhibits"]), "exhibits.schema.json", config["exhibits"]
)["exhibits"]
BUILT = [entry["id"] for entry in EXHIBITS if entry["status"] == "built"]
refuse_unknown_exhibits(sys.argv[1:])
PAPERS = list(dict.fromkeys(entry["paper"] for entry in EXHIBITS))

RUNS = training_runs(EXPERIMENTS, config["profile"])
BENCHES = {
    bench["run_id"]: bench
    for bench in EXPERIMENTS["profiles"][config["profile"]]["overflow"]
}
KERNELS = {
    bench["run_id"]: bench
    for bench in EXPERIMENTS["profiles"][config["profile"]].get("bench", [])
}
TIMES = {
    run["run_id"]: run
    for run in EXPERIMENTS["profiles"][config["profile"]].get("times", [])
}


def records_of(exhibit):
    """Records that one exhibit is drawn from; the probed machine is one of every exhibit's."""
    runs = {**BENCHES, **KERNELS, **RUNS, **TIMES}
    wanted = [run_id for run_id, run in runs.items() if exhibit in run["exhibits"]]
    return [f"{RAW}/{run_id}.json" for run_id in ["testbed-local", *wanted]]


def all_records(exhibits):
    """Records as targets of their own: Snakemake makes a deleted one again only where it is asked for by name."""
    return sorted({record for exhibit in exhibits for record in records_of(exhibit)})


def labels_of(exhibit):
    """Files that name the series of one exhibit: those of the systems that it is measured with."""
    runs = [
        run for run in [*RUNS.values(), *TIMES.values()] if exhibit in run["exhibits"]
    ]
    systems = {system for run in runs for system in systems_of(run)}
    return files_of(
        "memascend/arrangements.py",
        *(f"baselines/{system}/system.py" for system in systems),
    )


wildcard_constraints:
    exhibit="|".join(BUILT),
    train_id="train-[a-z0-9._-]+",
    bench_id="bench-[a-z0-9-]+",
    kernel_id="kernel-[a-z0-9-]+",
    times_id="times-[a-z0-9.-]+",
