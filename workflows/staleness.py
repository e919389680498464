"""Digests that decide whether a record is stale: of the code that measured it, and of its systems' folders.

A module counts with everything that it imports, inside functions too (but not for types alone), and with every module
of ours whose whole name is a string in it, such as "memascend.cli" after `-m`. A package that is only a parent of an
imported module counts with what it imports at import time. C++ sources count where the extension is imported. Imports
under names that no string holds are listed in DYNAMIC. This module imports neither torch nor modules of ours, since the
rules import it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import os
import platform
import re
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OURS = ("hardware", "memascend", "workflows")
BASELINES = "memascend.baselines"  # found in baselines/ and in the folders that MEMASCEND_SYSTEMS names
EXTENSION = "memascend._C"
EXTENSION_SOURCES = ("memascend/csrc/**/*", "setup.py")
MODELS = "memascend/planner/models"
PACKAGES = ("torch", "deepspeed", "transformers", "tokenizers", "numpy")
# Module -> what it loads under a name that no string holds. An empty entry loads nothing of ours, or a system, whose
# folder the caller names.
DYNAMIC: dict[str, tuple[str, ...]] = {
    "memascend.baselines.protocol": (),
    "memascend.baselines.protocol.described": (),
    # These are names of a user's training loop; measuring programs import its modules themselves. The extension counts
    # where it is named.
    "memascend": ("memascend.extension",),
    "memascend.extension": (),
    "memascend.integrations.deepspeed.compat": (),
    "memascend.systems": ("memascend.baselines.protocol",),
    # The interpreter imports it at startup (memascend.pth), and it acts when DeepSpeed is imported.
    "workflows.run.child": ("memascend.auto", "memascend.integrations.drop_in"),
}
# Module that names far more modules than a measurement uses -> the ones that a measurement uses.
DISPATCHERS: dict[str, tuple[str, ...]] = {"memascend.cli": ("memascend.bench.command",), "workflows.staleness": ()}
_A_MODULE = re.compile(rf"({'|'.join(OURS)})(\.\w+)+(:\w+)?")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that a measurement depends on."""
    out = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            out[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return out


def digest(program: str, systems: Collection[str] = (), models: Collection[str] | None = ()) -> str:
    """Return `Tree.digest` for the repository that contains this module."""
    return _here().digest(program, systems, models)


@cache
def _here() -> Tree:
    return Tree(ROOT)


class Tree:
    """The sources under `root`, each read once; a tree that changes needs another object. Not thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        named = os.environ.get("MEMASCEND_SYSTEMS", "").split(":")
        self._systems = [root / "baselines", *map(Path, filter(None, named))]
        self._read: dict[tuple[str, bool], set[str]] = {}
        self._hashes: dict[Path, str] = {}

    def digest(self, program: str, systems: Collection[str] = (), models: Collection[str] | None = ()) -> str:
        """Return a SHA-256 over the names and contents of `files`."""
        whole = hashlib.sha256()
        for name, path in self.files(program, systems, models).items():
            if path not in self._hashes:
                self._hashes[path] = hashlib.sha256(path.read_bytes()).hexdigest()
            whole.update(f"{name} {self._hashes[path]}\n".encode())
        return whole.hexdigest()

    def files(
        self, program: str, systems: Collection[str] = (), models: Collection[str] | None = ()
    ) -> dict[str, Path]:
        """Return place -> file for everything that can change a record of the module `program` with these systems and
        models.

        `models` of None counts every model. Raises ValueError for a program, a system or a model that does not exist.
        """
        found = {}
        modules = self.closure(program, systems)
        for module in modules - {EXTENSION}:
            found[module.replace(".", "/")] = self._file(module)
        for system in systems:
            for path in self._folder(system):
                found[f"baselines/{system}/{path.name}"] = path
        if EXTENSION in modules:
            found |= {str(p.relative_to(self.root)): p for pattern in EXTENSION_SOURCES for p in self._glob(pattern)}
        names = [path.stem for path in self._glob(f"{MODELS}/*.json")] if models is None else models
        for name in names:
            path = self.root / MODELS / f"{name}.json"
            if not path.is_file():
                raise ValueError(f"there is no model {name!r} in {MODELS}")
            found[f"{MODELS}/{name}.json"] = path
        return dict(sorted(found.items()))

    def closure(self, program: str, systems: Collection[str] = ()) -> set[str]:
        """Return the modules of ours that the program can come to import, including itself and its systems' modules."""
        roots = [program]
        if systems:
            roots += [f"{BASELINES}.protocol.{path.stem}" for path in self._glob("baselines/protocol/*.py")]
        for system in systems:
            roots += [f"{BASELINES}.{system}.{path.stem}" for path in self._folder(system) if path.suffix == ".py"]
        roots = [name.removesuffix(".__init__") for name in roots]
        for name in roots:
            if self._file(name) is None:
                raise ValueError(f"there is no module {name!r} under {self.root}")
        waiting, seen = [(name, True) for name in roots], set()
        while waiting:
            module, named = waiting.pop()
            if (module, named) in seen:
                continue
            seen.add((module, named))
            parent = module.rpartition(".")[0]
            waiting += [(parent, False)] if parent else []
            waiting += [(found, True) for found in self._imports(module, named)]
        return {module for module, _ in seen if module == EXTENSION or self._file(module)}

    def _imports(self, module: str, named: bool) -> set[str]:
        """Return the modules of ours that a module imports; for a package that is only a parent, those imported with
        it."""
        key = module, named
        if key not in self._read:
            path = self._file(module)
            nodes = _nodes(path.read_text(encoding="utf-8"), named) if path else ()
            found = DISPATCHERS[module] if module in DISPATCHERS else self._names(nodes, module, path)
            self._read[key] = {*found, *DYNAMIC.get(module, ())}
        return self._read[key]

    def _names(self, nodes: Iterable[ast.AST], module: str, path: Path | None) -> Iterator[str]:
        """Yield the modules of ours that these nodes of a module import or name in a string."""
        package = module if path and path.name == "__init__.py" else module.rpartition(".")[0]
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:  # `import a.b` binds a too
                    yield from self._known(alias.name)
                    yield from self._known(alias.name.partition(".")[0] if alias.asname is None else "")
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                for alias in node.names:
                    yield from self._known(f"{base}.{alias.name}") or self._known(base)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _A_MODULE.fullmatch(node.value):
                yield from self._known(node.value.partition(":")[0])

    def _known(self, module: str) -> list[str]:
        """Return the module as a list, or an empty list if it is not ours."""
        return [module] if module == EXTENSION or self._file(module) else []

    def folder(self, system: str) -> Path:
        """Return the folder of a system, here or in MEMASCEND_SYSTEMS. Raises ValueError if there is none."""
        folder = next((place / system for place in self._systems if (place / system).is_dir()), None)
        if folder is None:
            raise ValueError(f"there is no system {system!r} in {', '.join(map(str, self._systems))}")
        return folder

    def _file(self, module: str) -> Path | None:
        """Return the source of a module of ours; None for any other name."""
        if f"{module}.".startswith(f"{BASELINES}."):
            places, rest = self._systems, module[len(BASELINES) + 1 :]
        else:
            top, _, rest = module.partition(".")
            places = [self.root / top] if top in OURS else []
        inside = rest.replace(".", "/")
        stems = [place / inside for place in places] if rest else places[:1]
        files = (path for stem in stems for path in (stem / "__init__.py", stem.with_suffix(".py")))
        return next((path for path in files if path.is_file()), None)

    def _folder(self, system: str) -> list[Path]:
        """Return the files of a system, without the Markdown, which only people read."""
        return sorted(path for path in self.folder(system).iterdir() if path.is_file() and path.suffix != ".md")

    def _glob(self, pattern: str) -> list[Path]:
        """Return the files below the root that match, sorted."""
        return sorted(path for path in self.root.glob(pattern) if path.is_file())


@cache
def _nodes(source: str, everywhere: bool) -> tuple[ast.AST, ...]:
    """Return the imports and strings of a source that can run; without `everywhere` only those outside functions.

    Code under TYPE_CHECKING is left out. The result is cached since trees of several folders share most of their files.
    """
    found, waiting = [], [*ast.parse(source).body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif everywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            if isinstance(node, ast.Import | ast.ImportFrom | ast.Constant):
                found.append(node)
            waiting += ast.iter_child_nodes(node)
    return tuple(found)
