"""Import rules between packages: which part may import or include which, checked by reading the sources."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = {"hardware", "memascend", "tests", "workflows"}
SYSTEMS = "memascend.baselines"  # this package is in baselines/, to which memascend/baselines is a link
# Words that would be paths of one person's machine; assembled here, so that this file does not contain them.
MACHINE_PATH = re.compile(r"(?<![\w.$}])/(?:" + "|".join(("home", "root", "work", "Users")) + r")/[\w.]")


def sources(pattern: str) -> list[Path]:
    return sorted(path for path in ROOT.glob(pattern) if "__pycache__" not in path.parts)


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted names that a Python file imports anywhere; relative ones are resolved against its package."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported_names(node, path)


def imported_names(statement: ast.Import | ast.ImportFrom, path: Path) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    place = package_parts(path)[:-1]
    base = place[: len(place) - statement.level + 1] if statement.level else ()
    module = ".".join([*base, *([statement.module] if statement.module else [])])
    # `from memascend import planner` is an import of memascend.planner.
    return [f"{module}.{alias.name}" for alias in statement.names]


def package_parts(path: Path) -> tuple[str, ...]:
    """Return (memascend, planner, plan) for memascend/planner/plan.py; modules
    in baselines/ are imported from memascend."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ("memascend", *parts) if parts[0] == "baselines" else parts


def top(name: str) -> str:
    return name.split(".")[0]


def of_systems(name: str) -> bool:
    return f"{name}.".startswith(f"{SYSTEMS}.")


def offences(paths: list[Path], forbidden) -> list[str]:
    return [f"{path.relative_to(ROOT)}: {name}" for path in paths for name in imports(path) if forbidden(path, name)]


def test_the_scan_sees_imports_of_every_form(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "baselines" / "one" / "system.py"
    file.parent.mkdir(parents=True)
    file.write_text("import torch.nn as n\ndef f():\n    from memascend import planner\n    from ..two import x\n")
    assert list(imports(file)) == ["torch.nn", "memascend.planner", "memascend.baselines.two.x"]


def test_library_imports_no_package_above_it():
    def forbidden(_: Path, name: str) -> bool:
        return top(name) in OURS - {"memascend"} or of_systems(name)

    files = sources("memascend/**/*.py")
    assert offences(files, forbidden) == []
    assert not [path for path in files if "baselines" in path.parts]


def test_systems_are_imported_only_as_memascend_baselines():
    # An installed library has the files that it reads: these are the links for that.
    links = {path.relative_to(ROOT).as_posix(): str(path.readlink()) for path in committed_links()}
    assert links == {"memascend/baselines": "../baselines", "memascend/planner/testbeds": "../../hardware/testbeds"}
    assert not (ROOT / "baselines").is_symlink()
    names = "|".join(sorted(path.parent.name for path in sources("baselines/*/__init__.py")))
    assert "lohan" in names
    # As `baselines` the same modules would be loaded twice, and in a wheel they would be missing.
    alone = re.compile(rf"^\s*(?:from|import)\s+baselines\b|(?<![\w.])baselines\.(?:{names})\b", re.MULTILINE)
    assert alone.search("x = 1\n    from baselines import lohan")
    assert alone.search("named 'baselines.protocol'")
    assert not alone.search("import memascend.baselines.lohan")
    texts = [path for path in committed_files() if path.suffix in {".md", ".py", ".sh", ".smk", ".toml", ".yaml"}]
    reference = ROOT / "results"
    found = {path: alone.search(path.read_text()) for path in texts if not path.is_relative_to(reference)}
    here = Path(__file__).resolve()
    assert [path.relative_to(ROOT).as_posix() for path, hit in found.items() if hit and path != here] == []


def test_only_integrations_import_deepspeed_and_transformers():
    outside = [path for path in sources("memascend/**/*.py") if "integrations" not in path.relative_to(ROOT).parts]
    assert outside
    guests = {"accelerate", "datasets", "deepspeed", "tokenizers", "transformers"}
    assert offences(outside, lambda _, name: top(name) in guests) == []


def test_engine_imports_only_its_allowed_packages():
    allowed = "activation|activation_policy|deprecation|engine|memory|ops|storage|swapping"

    def forbidden(_: Path, name: str) -> bool:
        return top(name) == "memascend" and not re.match(rf"memascend\.({allowed})(\.|$)", name)

    files = sources("memascend/engine/**/*.py")
    assert files
    assert offences(files, forbidden) == []


def test_importing_the_library_imports_no_integration():
    """memascend.enable() imports DeepSpeed when it is called, not when the library is imported."""
    for path in sources("memascend/*.py"):
        tree = ast.parse(path.read_text())
        at_import = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert "integrations" not in " ".join(ast.unparse(node) for node in at_import), path


def test_the_simulator_imports_no_torch():
    command = "import sys, memascend.simulator; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], cwd=ROOT, check=False).returncode == 0


def test_baseline_imports_only_library_protocol_and_itself():
    def forbidden(path: Path, name: str) -> bool:
        if not of_systems(name):
            return top(name) in OURS - {"memascend"}
        folder = path.relative_to(ROOT).parts[1]
        return not re.match(rf"{re.escape(SYSTEMS)}\.(protocol|{re.escape(folder)})(\.|$)", name)

    files = sources("baselines/*/**/*.py")
    assert files
    assert offences(files, forbidden) == []


def test_the_protocol_imports_no_system():
    systems = {path.parent.name for path in sources("baselines/*/system.yaml")}
    assert systems

    def forbidden(_: Path, name: str) -> bool:
        return top(name) in OURS - {"memascend"} or (of_systems(name) and systems.intersection(name.split(".")[2:3]))

    assert offences(sources("baselines/*.py") + sources("baselines/protocol/*.py"), forbidden) == []


Graph = dict[str, set[str]]


def statements(tree: ast.Module, everywhere: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield import statements that run when the module is imported; with
    ``everywhere`` also those in functions and for types."""
    nodes: list[ast.AST] = [*tree.body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif everywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.If):
            nodes += ast.iter_child_nodes(node)
        elif isinstance(node, ast.If):
            nodes += node.orelse if "TYPE_CHECKING" in ast.unparse(node.test) else [*node.body, *node.orelse]


def module_graph(everywhere: bool) -> Graph:
    """Return, for each module of ours, the modules that it names; a package
    that is imported with its module does not count."""
    files = {path: package_parts(path) for folder in FOLDERS for path in sources(f"{folder}/**/*.py")}
    names = {path: ".".join(parts[:-1] if parts[-1] == "__init__" else parts) for path, parts in files.items()}
    known = {*names.values(), "memascend._C"}
    graph: Graph = {name: set() for name in known}
    for path, name in names.items():
        for statement in statements(ast.parse(path.read_text(), str(path)), everywhere):
            for found in imported_names(statement, path):
                while found and found not in known:
                    found = found.rpartition(".")[0]
                graph[name] |= {found} - {"", name}
    return graph


def package_graph(modules: Graph) -> Graph:
    """Return the graph between memascend's folders and the other top-level folders, without the facade `memascend`."""

    def package(module: str) -> str:
        return ".".join(module.split(".")[: 2 if module.startswith("memascend.") else 1])

    graph: Graph = {package(module): set() for module in modules}
    for module, found in modules.items():
        graph[package(module)] |= {package(other) for other in found} - {package(module), "memascend"}
    graph["memascend"] = set()
    return graph


def circles(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components with more than one member (Tarjan 1972)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_nodes: list[str] = []
    found = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        open_nodes.append(node)
        for other in sorted(graph[node]):
            if other not in order:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in open_nodes:
                lowest[node] = min(lowest[node], order[other])
        if lowest[node] == order[node]:
            at = open_nodes.index(node)
            found.append(sorted(open_nodes[at:]))
            del open_nodes[at:]

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return sorted(component for component in found if len(component) > 1)


FOLDERS = ("baselines", "hardware", "memascend")
# Known import cycles that are to be removed; a list that is out of date fails too.
CIRCLES_IN_FUNCTIONS: list[list[str]] = []
CIRCLES_OF_PACKAGES_IN_FUNCTIONS = [["memascend.integrations", "memascend.planner"]]


def test_cycle_is_found_between_modules_and_between_packages(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    files = {
        "memascend/__init__.py": "def enable():\n    from memascend.a.one import f\n",
        "memascend/a/__init__.py": "from .one import f\n",
        "memascend/a/one.py": "import memascend\ntry:\n    from ..b import two\nexcept ImportError:\n    two = None\n",
        "memascend/b/__init__.py": "",
        "memascend/b/two.py": "from memascend.b.three import x\nfrom memascend import _C\n",
        "memascend/b/three.py": "if TYPE_CHECKING:\n    from .two import y\ndef f():\n    import memascend.a.one\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert circles(module_graph(everywhere=False)) == []
    inside = ["memascend", "memascend.a.one", "memascend.b.three", "memascend.b.two"]
    assert [name for name in circles(module_graph(everywhere=True))[0] if name != "memascend.a"] == inside
    assert circles(package_graph(module_graph(everywhere=True))) == [["memascend.a", "memascend.b"]]


def test_no_module_cycle_at_import_time():
    assert circles(module_graph(everywhere=False)) == []


def test_no_module_cycle_in_deferred_or_type_checking_imports():
    assert circles(module_graph(everywhere=True)) == CIRCLES_IN_FUNCTIONS


def test_no_package_cycle_at_import_time():
    assert circles(package_graph(module_graph(everywhere=False))) == []


def test_package_cycles_in_deferred_imports_are_the_known_ones():
    assert circles(package_graph(module_graph(everywhere=True))) == CIRCLES_OF_PACKAGES_IN_FUNCTIONS


def test_hardware_imports_no_torch():
    above = {"torch", "deepspeed", "transformers", "workflows"}
    assert offences(sources("hardware/**/*.py"), lambda _, name: top(name) in above or of_systems(name)) == []


def test_workflow_rules_import_only_plain_configuration_modules():
    files = [ROOT / "Snakefile", *sources("workflows/rules/*.smk")]
    ours = re.compile(rf"^\s*(?:from|import)\s+(?:{'|'.join(sorted(OURS))})\b")
    found = [line.split(" import ")[0] for path in files for line in path.read_text().splitlines() if ours.match(line)]
    assert len(files) > 1
    assert found == ["from workflows.configuration", "from workflows.console"]
    names = ("configuration", "console", "experiments", "refusals", "registry", "staleness")
    names += ("run/children", "run/no_result", "run/provenance")
    plain = [ROOT / "workflows" / f"{name}.py" for name in names]
    allowed = {*sys.stdlib_module_names, "workflows", "yaml", "jsonschema"}

    def forbidden(_: Path, name: str) -> bool:
        return top(name) not in allowed and not name.startswith("memascend.suggestions.")  # imports only difflib

    assert offences(plain, forbidden) == []
    ours_of_plain = {name for path in plain for name in imports(path) if top(name) == "workflows"}
    modules = [f"workflows.{name.replace('/', '.')}" for name in (*names, "run/fork_server")]  # the server's client
    assert [name for name in ours_of_plain if not f"{name}.".startswith(tuple(f"{each}." for each in modules))] == []


def test_plots_read_only_derived_and_published_results():
    files = [*sources("workflows/derive/figure.py"), *sources("workflows/panels/*.py")]
    assert files
    labels = {"memascend", "memascend.systems"}  # their folders define the colours
    assert offences(files, lambda _, name: top(name) in OURS - {"workflows"} and name not in labels) == []
    folder = re.compile(r"results/(?!derived\b|published\b)\w+|hardware/|baselines/")
    for path in files:
        strings = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        found = [node.value for node in strings if isinstance(node.value, str) and folder.search(node.value)]
        assert found == [], f"{path.relative_to(ROOT)} reads {found}"


def test_only_the_binding_files_include_torch():
    torch_header = re.compile(r'^\s*#\s*include\s*[<"](?:torch|ATen|c10|pybind11)\b', re.MULTILINE)
    files = [path for path in ROOT.glob("memascend/csrc/**/*") if path.suffix in {".cpp", ".h", ".hpp", ".cc", ".cu"}]
    with_torch = {path.relative_to(ROOT).as_posix() for path in files if torch_header.search(path.read_text())}
    assert with_torch
    assert [name for name in with_torch if not name.startswith("memascend/csrc/bindings/")] == []


def test_the_core_has_no_iostreams():
    """They crash if a toolchain links libstdc++ into the extension (memascend/csrc/core/text_file.h)."""
    streams = re.compile(r"^\s*#\s*include\s*<(?:\w*stream|iomanip|locale|regex)>", re.MULTILINE)
    files = [path for path in ROOT.glob("memascend/csrc/**/*") if path.suffix in {".cpp", ".h"}]
    assert files
    assert [path.name for path in files if streams.search(path.read_text())] == []


def committed() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a git checkout: what is committed cannot be told")
    return [ROOT / name for name in done.stdout.split("\0") if name]


def committed_files() -> list[Path]:
    return [path for path in committed() if path.is_file()]


def committed_links() -> list[Path]:
    return [path for path in committed() if path.is_symlink()]


def test_no_committed_file_contains_a_machine_path():
    found = []
    for path in committed_files():
        text = path.read_bytes().decode("utf-8", "ignore")
        found += [f"{path.relative_to(ROOT)}: {hit.group(0)}…" for hit in MACHINE_PATH.finditer(text)]
        if f"{ROOT}/" in text:
            found.append(f"{path.relative_to(ROOT)}: the path of this checkout")
    assert found == []


def test_no_generated_file_is_committed():
    made = re.compile(r"^(results/(raw|derived)/|figures/(?!gallery/)|\.venv/|build/|.*\.(so|o|pyc)$)")
    names = [path.relative_to(ROOT).as_posix() for path in committed_files()]
    assert [name for name in names if made.match(name)] == []
