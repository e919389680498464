"""What makes a record stale, on a small example tree, and on this repository's own sources."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memascend import systems
from memascend.training import backends
from workflows.staleness import BASELINES, DISPATCHERS, DYNAMIC, EXTENSION, OURS, ROOT, Tree

PROGRAM = "workflows.run.measure"
FILES = {
    "workflows/__init__.py": "",
    "workflows/run/__init__.py": "",
    "workflows/run/measure.py": (
        "from memascend.baselines.protocol import load_system\ncommand = ['-m', 'memascend.child']\n"
    ),
    "memascend/__init__.py": "from memascend import early\ndef enable():\n    import memascend.unused\n",
    "memascend/early.py": "",
    "memascend/unused.py": "",
    "memascend/child.py": "def f():\n    from .pools import pool\n    from memascend import _C\n",
    "memascend/pools.py": "if TYPE_CHECKING:\n    from memascend.only_a_type import T\n",
    "memascend/only_a_type.py": "",
    "memascend/by_name.py": "",
    "memascend/README.md": "",
    "memascend/csrc/core/a.cpp": "",
    "memascend/planner/models/small.json": "{}",
    "memascend/planner/models/large.json": "{}",
    "setup.py": "",
    "baselines/__init__.py": "",
    "baselines/protocol/__init__.py": "",
    "baselines/one/system.py": "PLACES = {'x': 'memascend.by_name:Class'}\n",
    "baselines/one/system.yaml": "",
    "baselines/one/README.md": "",
    "baselines/two/system.py": "",
    "docs/page.md": "",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def digest(root: Path) -> str:
    return Tree(root).digest(PROGRAM, ["one"], ["small"])


@pytest.mark.parametrize(
    "name",
    [
        "workflows/run/measure.py",
        "baselines/protocol/__init__.py",
        "baselines/one/system.py",
        "baselines/one/system.yaml",
        "memascend/__init__.py",  # imported with every module of the package
        "memascend/early.py",
        "memascend/child.py",  # runs in a separate process
        "memascend/pools.py",  # imported in a function
        "memascend/by_name.py",  # found by name
        "memascend/csrc/core/a.cpp",
        "setup.py",
        "memascend/planner/models/small.json",
    ],
)
def test_change_to_a_used_file_makes_a_record_stale(tree: Path, name: str) -> None:
    before = digest(tree)
    (tree / name).write_text(FILES[name] + "\n# changed\n")
    assert digest(tree) != before


@pytest.mark.parametrize(
    "name",
    [
        "baselines/two/system.py",
        "baselines/lohan/system.py",
        "baselines/lohan/system.yaml",
        "baselines/one/README.md",
        "memascend/README.md",
        "docs/page.md",
        "memascend/unused.py",  # imported by a function of a package that is only passed through
        "memascend/only_a_type.py",
        "memascend/new.py",
        "memascend/planner/models/large.json",
        "memascend/planner/models/new.json",
    ],
)
def test_any_other_change_keeps_a_record_current(tree: Path, name: str) -> None:
    before = digest(tree)
    (tree / name).parent.mkdir(exist_ok=True)
    (tree / name).write_text("changed = True\n")
    assert digest(tree) == before


def test_function_imports_count_when_the_package_itself_is_imported(tree: Path) -> None:
    (tree / "memascend/child.py").write_text("import memascend\nmemascend.enable()\n")
    assert "memascend.unused" in Tree(tree).closure(PROGRAM)


def test_cpp_counts_only_where_the_extension_is_imported(tree: Path) -> None:
    (tree / "memascend/child.py").write_text("")
    assert not [name for name in Tree(tree).files(PROGRAM) if "csrc" in name]


def test_a_system_outside_of_the_repository_counts(tree: Path, tmp_path: Path, monkeypatch) -> None:
    toy = tmp_path / "elsewhere" / "toy"
    toy.mkdir(parents=True)
    (toy / "system.py").write_text("from memascend import by_name\n")
    monkeypatch.setenv("MEMASCEND_SYSTEMS", str(toy.parent))
    files = Tree(tree).files(PROGRAM, ["toy"])
    assert files["baselines/toy/system.py"] == toy / "system.py"
    assert "memascend/by_name" in files


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("workflows.nothing",), "module 'workflows.nothing'"),
        ((PROGRAM, ["lohan"]), "system 'lohan'"),
        ((PROGRAM, [], ["huge"]), "model 'huge'"),
    ],
)
def test_missing_module_system_or_model_is_named(tree: Path, arguments: tuple, said: str) -> None:
    with pytest.raises(ValueError, match=f"there is no {said}"):
        Tree(tree).files(*arguments)


HERE = Tree(ROOT)


def program(name: str) -> str:
    return f"workflows.run.{name}"


def test_training_closure_contains_all_backends_and_only_its_system() -> None:
    loaded = {place.partition(":")[0] for place in backends._CLASSES.values()}
    for name in systems.names():
        closure = HERE.closure(program("training"), [name])
        assert loaded | {f"{BASELINES}.{name}.system", program("child"), EXTENSION} <= closure
        others = {f"{BASELINES}.{other}.system" for other in systems.names()} - {f"{BASELINES}.{name}.system"}
        assert not others & closure


def test_modules_that_import_by_computed_name_are_listed() -> None:
    """A new one belongs in DYNAMIC, or names what it loads in a string, as these do."""
    in_strings = {"memascend.training.backends", "memascend.bench.adamw", "memascend.bench.overflow"}
    not_measuring = {f"workflows.derive.{name}" for name in ("server", "table")}
    found = set()
    for path in (path for folder in (*OURS, "baselines") for path in ROOT.glob(f"{folder}/**/*.py")):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        loads = [call for call in calls if ast.unparse(call.func).endswith(("import_module", "entry_points"))]
        if any(not (call.args and isinstance(call.args[0], ast.Constant)) for call in loads):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found.add(f"memascend.{name}" if name.startswith("baselines.") else name)
    assert found == {*DYNAMIC, *in_strings, *not_measuring} - {program("child")}  # started by the interpreter
    assert "memascend.integrations.deepspeed.stock_ops" in HERE.closure(program("bench"))


def test_a_bench_does_not_depend_on_the_other_commands() -> None:
    assert set(DISPATCHERS) == {"memascend.cli", "workflows.staleness"}
    closure = HERE.closure(program("bench"))
    assert {"memascend.cli", "memascend.bench.nvme", "memascend.bench.overflow"} <= closure
    assert "memascend.training.launch" not in closure


@pytest.mark.slow
def test_modules_a_training_imports_are_in_its_closure() -> None:
    code = (
        "import sys, memascend, memascend.systems, memascend.training.backends as b\n"
        "from workflows.run import child, training\n"
        "child.import_everything()\n"
        "[b.load(name) for name in (b.IN_MEMORY, b.DEEPSPEED)]\n"
        "memascend.systems.load('memascend')\n"
        f"print(*(name for name in sys.modules if name.partition('.')[0] in {OURS}))\n"
    )
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.splitlines()[-1].split())
    assert len(imported) > 50
    assert imported <= HERE.closure(program("training"), ["memascend"])


def test_folder_of_a_system_may_be_outside_the_repository(tree: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "more" / "mine").mkdir(parents=True)
    monkeypatch.setenv("MEMASCEND_SYSTEMS", str(tmp_path / "more"))
    assert Tree(tree).folder("mine") == tmp_path / "more" / "mine"
    assert Tree(tree).folder("one") == tree / "baselines" / "one"
    with pytest.raises(ValueError, match="there is no system 'nowhere'"):
        Tree(tree).folder("nowhere")
