"""memascend.auto runs inside `import torch` and `import deepspeed`: whatever is broken in it, both imports succeed.

Each case is a separate process with a tree of this auto.py, a DeepSpeed of a few lines, and the broken part.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEEPSPEED = """
class zero:
    class Init:
        def __init__(self, config_dict_or_path=None, config=None):
            pass

def initialize(args=None, model=None, config=None, config_params=None):
    return "stock"
"""
LOADER_WITHOUT_ATTRIBUTES = """
class Loader(importlib.machinery.SourceFileLoader):
    def __setattr__(self, name, value):
        if name == "exec_module":
            raise AttributeError(name)
        super().__setattr__(name, value)

class Finder:
    @staticmethod
    def find_spec(name, path, target=None):
        if name == "deepspeed":
            return importlib.machinery.ModuleSpec(name, Loader(name, "deepspeed.py"))

sys.meta_path.insert(1, Finder)
"""
WORKS = "import memascend.auto, deepspeed; assert deepspeed.initialize(model=1, config={}) == 'stock'"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "deepspeed.py").write_text(DEEPSPEED)
    package = tmp_path / "memascend"
    (package / "integrations").mkdir(parents=True)
    for name in ("__init__.py", "auto.py", "suggestions.py", "integrations/__init__.py"):
        shutil.copy(ROOT / "memascend" / name, package / name)
    for name in ("drop_in.py", "configuration.py", "conventions.py"):
        shutil.copy(ROOT / "memascend" / "integrations" / name, package / "integrations" / name)
    return tmp_path


def run(tree: Path, code: str, **environment: str) -> str:
    """Return the stderr of a process, which must end well."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_intact_installation_prints_nothing_and_watches_deepspeed(tree):
    assert run(tree, WORKS + "; assert deepspeed.initialize.watched_by_memascend") == ""


def _replace_folder(folder: Path) -> None:
    """Replace the folder by a module: an editable installation would find a missing folder in its checkout."""
    shutil.rmtree(folder)
    folder.with_suffix(".py").touch()


BROKEN = {
    "a module that is not there": lambda package: (package / "integrations" / "drop_in.py").unlink(),
    "a folder that is none": lambda package: _replace_folder(package / "integrations"),
    "a module that is no Python": lambda package: (package / "integrations" / "drop_in.py").write_text("def ("),
    "a module that raises": lambda package: (package / "integrations" / "conventions.py").write_text("1 / 0"),
    "a module that is not text": lambda package: (package / "integrations" / "drop_in.py").write_bytes(b"\xff\x00"),
    "a name that is gone": lambda package: (package / "integrations" / "drop_in.py").write_text(""),
    "another DeepSpeed": lambda package: (package.parent / "deepspeed.py").write_text(
        "def initialize(model, config):\n    return 'stock'\n"
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("order", [WORKS, WORKS.replace("memascend.auto, deepspeed", "deepspeed, memascend.auto")])
def test_broken_part_logs_one_line_and_deepspeed_works(tree, broken, order):
    BROKEN[broken](tree / "memascend")
    said = run(tree, order)
    assert said.count("\n") == 1, said
    assert said.startswith('memascend: the key "memascend" in DeepSpeed configurations will be ignored (')


def test_other_ranks_log_nothing_about_a_broken_part(tree):
    BROKEN["a name that is gone"](tree / "memascend")
    assert run(tree, WORKS, RANK="1") == ""


@pytest.mark.parametrize(
    "breaking",
    [
        "memascend.auto._install = None",
        "memascend.auto._watch = None",
        "sys.meta_path[0]._watch_after = None",
        "sys.meta_path[0]._done = None",
        "sys.modules['memascend.integrations.drop_in'] = None",
        "exec(LOADER_WITHOUT_ATTRIBUTES)",
    ],
)
def test_error_inside_the_import_hook_does_not_escape(tree, breaking):
    breaking = breaking.replace("LOADER_WITHOUT_ATTRIBUTES", repr(LOADER_WITHOUT_ATTRIBUTES))
    prepare = f"import sys, importlib.machinery, memascend.auto; {breaking}; memascend.auto.install(); "
    assert run(tree, prepare + WORKS).startswith("memascend: the key")


def test_failed_deepspeed_import_keeps_its_error_and_retry_is_watched(tree):
    text = "import os\nif os.environ.get('FAIL'): raise ImportError('its own')\n" + DEEPSPEED
    (tree / "deepspeed.py").write_text(text)
    code = (
        "import os, memascend.auto\nos.environ['FAIL'] = '1'\n"
        "try:\n    import deepspeed\nexcept ImportError as error:\n    assert str(error) == 'its own'\n"
        "del os.environ['FAIL']\nimport deepspeed\nassert deepspeed.initialize.watched_by_memascend"
    )
    assert run(tree, code) == ""


def test_broken_part_does_not_stop_a_deepspeed_import_in_progress(tree):
    (tree / "deepspeed.py").write_text("import memascend.auto\n" + DEEPSPEED)
    (tree / "memascend" / "integrations" / "drop_in.py").unlink()
    assert run(tree, "import deepspeed; assert deepspeed.initialize() == 'stock'").startswith("memascend: the key")


def test_torch_imports_with_a_broken_library(tree):
    """It is imported by the entry point of the installed package, which here names the broken tree's module."""
    _replace_folder(tree / "memascend" / "integrations")
    code = "import sys, torch; print('memascend.auto' in sys.modules, file=sys.stderr); import deepspeed"
    assert run(tree, code, TORCH_DEVICE_BACKEND_AUTOLOAD="1").splitlines()[0] == "True"


def test_unreadable_metadata_does_not_affect_torch(tree):
    """An unreadable entry_points.txt next to the package: importlib.metadata skips it."""
    broken = tree / "memascend-0.1.0.dist-info"
    (broken / "entry_points.txt").mkdir(parents=True)
    (broken / "METADATA").write_bytes(b"\xff\xfe not text")
    assert run(tree, "import torch", TORCH_DEVICE_BACKEND_AUTOLOAD="1") == ""


def test_unknown_arguments_raise_deepspeeds_own_error(tree):
    code = (
        "import memascend.auto, deepspeed\n"
        "try:\n    deepspeed.initialize(modelx=1)\nexcept TypeError as error:\n    assert 'initialize()' in str(error)"
    )
    assert run(tree, code) == ""
