"""The walls between the rooms: which part may import or include which, held by reading the sources."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = {"baselines", "hardware", "memascend", "tests", "workflows"}
# Words that would point into one person's machine; put together here, so that this file does not hold them.
MACHINE_PATH = re.compile(r"(?<![\w.$}])/(?:" + "|".join(("home", "root", "work", "Users")) + r")/\w")


def sources(pattern: str) -> list[Path]:
    return sorted(path for path in ROOT.glob(pattern) if "__pycache__" not in path.parts)


def imports(path: Path, package: str | None = None) -> Iterator[str]:
    """Dotted names that a Python file imports, anywhere in it; relative ones are resolved against its own place."""
    place = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = place[: len(place) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from memascend import planner` is an import of memascend.planner.
            yield from (f"{module}.{alias.name}" for alias in node.names)


def top(name: str) -> str:
    return name.split(".")[0]


def offences(paths: list[Path], forbidden) -> list[str]:
    return [f"{path.relative_to(ROOT)}: {name}" for path in paths for name in imports(path) if forbidden(path, name)]


def test_the_scan_sees_imports_of_every_form(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "baselines" / "one" / "system.py"
    file.parent.mkdir(parents=True)
    file.write_text("import torch.nn as n\ndef f():\n    from memascend import planner\n    from ..two import x\n")
    assert list(imports(file)) == ["torch.nn", "memascend.planner", "baselines.two.x"]


def test_the_library_imports_nothing_of_ours_above_it():
    assert offences(sources("memascend/**/*.py"), lambda _, name: top(name) in OURS - {"memascend"}) == []


def test_only_integrations_import_deepspeed_and_transformers():
    outside = [path for path in sources("memascend/**/*.py") if "integrations" not in path.relative_to(ROOT).parts]
    assert outside
    guests = {"accelerate", "datasets", "deepspeed", "tokenizers", "transformers"}
    assert offences(outside, lambda _, name: top(name) in guests) == []


def test_importing_the_library_imports_no_integration():
    """memascend.enable() imports DeepSpeed when it is called, not when the library is imported."""
    for path in sources("memascend/*.py"):
        tree = ast.parse(path.read_text())
        at_import = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert "integrations" not in " ".join(ast.unparse(node) for node in at_import), path


def test_a_baseline_imports_the_library_the_protocol_and_itself():
    def forbidden(path: Path, name: str) -> bool:
        if top(name) not in OURS or top(name) == "memascend":
            return False
        folder = path.relative_to(ROOT).parts[1]
        return not re.match(rf"baselines\.(protocol|{re.escape(folder)})(\.|$)", name)

    files = sources("baselines/*/**/*.py")
    assert files
    assert offences(files, forbidden) == []


def test_the_protocol_imports_no_system():
    systems = {path.parent.name for path in sources("baselines/*/system.yaml")}
    assert systems
    inside = OURS - {"memascend", "baselines"}

    def forbidden(_: Path, name: str) -> bool:
        return top(name) in inside or (name.startswith("baselines.") and name.split(".")[1] in systems)

    assert offences(sources("baselines/*.py"), forbidden) == []


def test_hardware_imports_no_torch():
    above = {"torch", "deepspeed", "transformers", "workflows", "baselines"}
    assert offences(sources("hardware/**/*.py"), lambda _, name: top(name) in above) == []


def test_rules_import_nothing_of_ours():
    files = [ROOT / "Snakefile", *sources("workflows/rules/*.smk")]
    line = re.compile(rf"^\s*(?:from|import)\s+(?:{'|'.join(sorted(OURS))})\b", re.MULTILINE)
    assert len(files) > 1
    assert [str(path.relative_to(ROOT)) for path in files if line.search(path.read_text())] == []


def test_plots_read_only_derived_and_published_results():
    files = [*sources("workflows/scripts/plot_exhibit.py"), *sources("workflows/scripts/plots/**/*.py")]
    assert files
    assert offences(files, lambda _, name: top(name) in OURS - {"workflows"}) == []
    folder = re.compile(r"results/(?!derived\b|published\b)\w+|hardware/|baselines/")
    for path in files:
        strings = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        found = [node.value for node in strings if isinstance(node.value, str) and folder.search(node.value)]
        assert found == [], f"{path.relative_to(ROOT)} reads {found}"


def test_only_the_binding_file_includes_torch():
    torch_header = re.compile(r'^\s*#\s*include\s*[<"](?:torch|ATen|c10|pybind11)\b', re.MULTILINE)
    files = [path for path in ROOT.glob("memascend/csrc/**/*") if path.suffix in {".cpp", ".h", ".hpp", ".cc", ".cu"}]
    with_torch = {path.relative_to(ROOT).as_posix() for path in files if torch_header.search(path.read_text())}
    assert with_torch == {"memascend/csrc/bindings.cpp"}


def committed_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a git checkout: what is committed cannot be told")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_committed_file_holds_a_path_of_one_machine():
    found = []
    for path in committed_files():
        text = path.read_bytes().decode("utf-8", "ignore")
        found += [f"{path.relative_to(ROOT)}: {hit.group(0)}…" for hit in MACHINE_PATH.finditer(text)]
        if f"{ROOT}/" in text:
            found.append(f"{path.relative_to(ROOT)}: the path of this checkout")
    assert found == []


def test_no_committed_file_is_made_by_a_run():
    made = re.compile(r"^(results/(raw|derived)/|figures/(?!gallery/)|\.venv/|build/|.*\.(so|o|pyc)$)")
    names = [path.relative_to(ROOT).as_posix() for path in committed_files()]
    assert [name for name in names if made.match(name)] == []
