"""Adding a system means adding a folder: no change of the library or the harness is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).parents[2]
TOY = """
from memascend.baselines.protocol import PlannedSystem
from memascend.arrangements import Arrangement
from memascend.memory.ledger import HOST
from memascend.training.backends import IN_MEMORY, Setup


def buffers(build):
    build.pageable("toy buffer", "in_memory_optimizer", 8 * build.work.spec.parameters, role=HOST)


def tasks(step):
    # Weights come over PCIe once per step, in 32 bits; the CPU then plays with each of them for a nanosecond.
    numel = step.work.spec.parameters
    for phase, needs in (("fetch", {"pcie0.down": 4 * numel}), ("play", {"cpu": 1e-9 * numel})):
        step.add(phase, phase, needs, after=[task.name for task in step.tasks])


class Toy(PlannedSystem):
    def refuse(self, config):
        if config.ranks > 1:
            raise ValueError("a toy has one rank")

    def trainer(self, config, prepared, run_id, swap):
        return Setup(backend=IN_MEMORY, settings={"update": "torch", "group_elements": None}, swaps=False)


ARMS = {"wooden": Arrangement(label="Toy (wooden)", states_on="host")}
SYSTEM = Toy(name="toy", arms=ARMS, buffers=buffers, tasks=tasks)
"""
YAML = """
name: toy
label: Toy
colour: '#123456'
paper: none
runs: plain PyTorch
arms:
  wooden: Eight bytes per parameter.
"""


@pytest.fixture
def toys(tmp_path):
    """Return the environment of a process that is given a folder with one system."""
    folder = tmp_path / "systems" / "toy"
    folder.mkdir(parents=True)
    (folder / "system.yaml").write_text(YAML)
    (folder / "system.py").write_text(TOY)
    return {**os.environ, "MEMASCEND_SYSTEMS": str(folder.parent), "PYTHONPATH": str(ROOT)}


def python(environment, code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_system_in_user_folder_is_planned_and_compared(toys):
    command = [sys.executable, "-m", "memascend.cli", "plan", "--model", "llama3.2-1b", "--json"]
    made = forked.run([*command, "--system", "toy"], env=toys)
    plan = json.loads(made.stdout)
    assert plan["system"] == "toy"
    assert plan["arm"] == "wooden"
    assert plan["host_bytes"] == plan["components_bytes"]["process overhead"] + 8 * plan["parameters"]
    ours = json.loads(forked.run(command, env=toys).stdout)
    assert ours["others"]["toy"] == plan["host_bytes"]
    assert ours["arms"]["toy/wooden"] == plan["host_bytes"]


def test_custom_buffer_class_appears_by_name_in_the_plan(toys):
    program = Path(toys["MEMASCEND_SYSTEMS"]) / "toy/system.py"
    program.write_text(TOY.replace('"in_memory_optimizer"', '"wooden_blocks"'))
    command = [sys.executable, "-m", "memascend.cli", "plan", "--model", "llama3.2-1b", "--json", "--system", "toy"]
    plan = json.loads(forked.run(command, env=toys).stdout)
    assert plan["components_bytes"]["wooden blocks"] == 8 * plan["parameters"]


def test_system_in_user_folder_is_simulated(toys):
    command = [sys.executable, "-m", "memascend.cli", "plan", "--model", "llama3.2-1b", "--json"]
    command += ["--system", "toy", "--testbed", "memascend-c1"]
    made = forked.run(command, env=toys)
    plan = json.loads(made.stdout)
    phases = {phase["name"]: phase["seconds"] for phase in plan["time"]["phases"]}
    assert phases == pytest.approx({"fetch": 4 * plan["parameters"] / 64e9, "play": 1e-9 * plan["parameters"]})
    assert plan["time"]["seconds"] == pytest.approx(sum(phases.values()))


def test_misspelt_resource_message_lists_resources_of_the_machine(toys):
    (Path(toys["MEMASCEND_SYSTEMS"]) / "toy/system.py").write_text(TOY.replace('"cpu"', '"gpu"'))
    command = [sys.executable, "-m", "memascend.cli", "plan", "--model", "llama3.2-1b", "--json"]
    plan = json.loads(forked.run([*command, "--system", "toy", "--testbed", "memascend-c1"], env=toys).stdout)
    assert "a task needs 'gpu', which memascend-c1 does not have; it has cpu, dram, gpu0, " in plan["time"]["reason"]


FIGURE = """
import sys
import pandas as pd
from memascend.planner import Workload, model_spec, plan
from workflows import tidy
from workflows.derive import figure

made = [plan(Workload(spec=model_spec("llama3.2-1b"), system=name, context=0)) for name in ("toy", "memascend")]
rows = [
    {"series": each.label, "model": "M", "metric": "peak", "value": str(each.host_bytes), "lane": "modelled"}
    for each in made
]
table = pd.DataFrame(rows).reindex(columns=tidy.COLUMNS).fillna("").astype(str)
spec = {"panels": [{"kind": "bars", "metric": "peak", "order": ["M"]}]}
figure.draw(spec, table, "").savefig(sys.argv[1])
"""


def test_figure_shows_colour_and_name_of_system_in_user_folder(toys, tmp_path):
    command = [sys.executable, "-c", FIGURE, str(tmp_path / "drawn.svg")]
    done = subprocess.run(command, env=toys, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    drawn = (tmp_path / "drawn.svg").read_text()
    assert "#123456" in drawn
    assert "Toy (wooden)" in drawn


def test_system_in_user_folder_sets_up_training(toys):
    done = python(
        toys,
        "from memascend.training import systems; from memascend.training.config import TrainConfig; "
        "config = TrainConfig(model='m', data=['d'], system='toy'); systems.check(config); "
        "print(systems.setup(config, {}, 'run', '').backend)",
    )
    assert done.stdout.strip() == "in_memory", done.stderr


def test_system_can_refuse_a_training_configuration(toys):
    done = python(
        toys,
        "from memascend.training import systems; from memascend.training.config import TrainConfig; "
        "systems.check(TrainConfig(model='m', data=['d'], system='toy', ranks=2))",
    )
    assert "a toy has one rank" in done.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("name: toy", "name: ball"), "the folder is called 'toy'"),
        (("colour: '#123456'\n", ""), "the key 'colour' is missing"),
    ],
)
def test_wrong_system_description_is_refused_with_the_reason(toys, change, said):
    path = Path(toys["MEMASCEND_SYSTEMS"]) / "toy" / "system.yaml"
    path.write_text(path.read_text().replace(*change))
    assert said in python(toys, "from memascend import systems; systems.load('toy').label").stderr


def test_duplicate_system_names_and_missing_folders_are_refused(toys, tmp_path):
    twice = toys | {"MEMASCEND_SYSTEMS": f"{toys['MEMASCEND_SYSTEMS']}:{toys['MEMASCEND_SYSTEMS']}"}
    assert "two systems are called 'toy'" in python(twice, "from memascend import systems; systems.names()").stderr
    nowhere = toys | {"MEMASCEND_SYSTEMS": str(tmp_path / "nowhere")}
    assert "which is no folder" in python(nowhere, "from memascend import systems; systems.names()").stderr


def test_systems_import_no_torch():
    load = "from memascend import systems; [systems.load(name) for name in systems.names()]"
    code = f"import sys; {load}; print('torch' in sys.modules)"
    assert python({**os.environ, "PYTHONPATH": str(ROOT)}, code).stdout.strip() == "False"
