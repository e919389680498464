"""The set-up: the requirements of pyproject.toml are pinned, the pins agree, and setup.sh does what its steps say."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import memascend

ROOT = Path(__file__).resolve().parents[2]
SETUP = ROOT / "workflows/setup/setup.sh"
CONSTRAINTS = ["constraints.txt", "constraints-deepspeed-0.16.txt", "constraints-cuda.txt"]
# Pins in which the other environments differ from the usual one, and the reasons.
OVERRIDES = {
    "constraints-deepspeed-0.16.txt": {"accelerate", "deepspeed", "huggingface-hub", "tokenizers", "transformers"},
    "constraints-cuda.txt": {"datasets", "fsspec", "huggingface-hub", "transformers"},
}
# Import names of distributions with a different name.
DISTRIBUTIONS = {"cpuinfo": "py-cpuinfo", "op_builder": "deepspeed", "unsloth_zoo": "unsloth", "yaml": "pyyaml"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: str) -> dict[str, str]:
    """Return {canonical name: version} of a constraint file in which every line is an exact pin."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    parts = [line.split("==") for line in lines]
    assert all(len(part) == 2 and part[1].strip() == part[1] != "" for part in parts), f"{file}: not an exact pin"
    names = [canonical(name) for name, _ in parts]
    assert len(set(names)) == len(names), f"{file}: a package is pinned twice"
    return dict(zip(names, (version for _, version in parts), strict=True))


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def asked_for(*extras: str) -> set[str]:
    """Return the canonical names that pyproject.toml requires with these extras."""
    metadata = project()["project"]
    words = list(metadata["dependencies"])
    for extra in extras:
        words += metadata["optional-dependencies"][extra]
    return {canonical(re.match(r"[\w.-]+", word).group(0)) for word in words}


@pytest.mark.parametrize(
    ("file", "extras"),
    [
        ("constraints.txt", ("deepspeed", "huggingface", "lint", "test", "workflow")),
        ("constraints-deepspeed-0.16.txt", ("papers",)),
        ("constraints-cuda.txt", ("cuda", "deepspeed", "huggingface", "lint", "test", "workflow")),
    ],
)
def test_every_dependency_is_pinned(file, extras):
    assert asked_for(*extras) - set(pins(file)) == set()


def test_cluster_dependencies_are_pinned_separately_and_required_nowhere_else():
    usual, cluster = pins("constraints.txt"), pins("constraints-cluster.txt")
    assert asked_for("slurm", "kubernetes") - set(usual) - set(cluster) == set()
    assert usual.keys().isdisjoint(cluster)
    assert asked_for("deepspeed", "huggingface", "lint", "test", "workflow").isdisjoint(cluster)


@pytest.mark.parametrize("file", CONSTRAINTS)
def test_torch_is_pinned_without_a_local_suffix(file):
    assert re.fullmatch(r"[0-9.]+", pins(file)["torch"])


@pytest.mark.parametrize(("file", "differ"), OVERRIDES.items())
def test_other_environments_differ_only_in_listed_pins(file, differ):
    usual, other = pins("constraints.txt"), pins(file)
    assert {name for name in usual.keys() & other.keys() if other[name] != usual[name]} == differ


def test_build_and_package_require_the_pinned_torch():
    (torch,) = [word for word in project()["build-system"]["requires"] if word.startswith("torch")]
    assert torch in project()["project"]["dependencies"]
    assert pins("constraints.txt")["torch"].startswith(torch.removeprefix("torch==").removesuffix(".*"))


def test_the_library_declares_what_it_imports():
    # matplotlib (plan --picture) comes with the workflow; without it the command says so in one line.
    declared = asked_for("deepspeed", "huggingface", "cuda", "workflow")
    imported = set()
    for path in (ROOT / "memascend").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.split(".")[0])
    outside = imported - set(sys.stdlib_module_names) - {"memascend"}
    assert {canonical(DISTRIBUTIONS.get(name, name)) for name in outside} - declared == set()


def test_cuda_extras_are_not_required_elsewhere():
    cuda = {canonical(name) for name in project()["project"]["optional-dependencies"]["cuda"]}
    assert cuda.isdisjoint(asked_for("deepspeed", "huggingface", "lint", "test", "workflow"))
    assert cuda.isdisjoint(pins("constraints.txt"))


def run_setup(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run setup.sh in a temporary folder; system packages are never installed from a test."""
    env = {**os.environ, "NO_SYSTEM_PACKAGES": "1", **environment}
    return subprocess.run([SETUP, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=60)


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.strip().splitlines()
    assert done.returncode != 0
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_a_missing_constraint_file_is_named(tmp_path):
    assert "nothing-here.txt" in one_line(run_setup(tmp_path, ".venv", "nothing-here.txt", "test"))


def test_missing_python_gives_one_line_error(tmp_path):
    (tmp_path / "pins.txt").touch()
    line = one_line(run_setup(tmp_path, ".venv", "pins.txt", "test", PYTHON="/nowhere/python2"))
    assert "python3-venv" in line or "Python 3.11" in line
    assert not (tmp_path / ".venv").exists()


def test_missing_compiler_error_shows_the_install_command(tmp_path):
    (tmp_path / "pins.txt").touch()
    line = one_line(run_setup(tmp_path, ".venv", "pins.txt", "test", CXX="no-such-compiler"))
    assert "apt-get install" in line
    assert "g++" in line


def test_a_failed_step_shows_its_error_and_leaves_no_stamp(tmp_path):
    """A torch version that does not exist: pip's own message is shown, and the next call tries again."""
    (tmp_path / "pins.txt").write_text("torch==0.0.0\n")
    (tmp_path / "environment/bin").mkdir(parents=True)
    (tmp_path / "environment/bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "environment/bin/python").chmod(0o755)
    done = run_setup(tmp_path, "environment", "pins.txt", "test", PIP_NO_INDEX="1", PIP_FIND_LINKS="", PIP_DRY_RUN="1")
    assert done.returncode != 0
    assert "torch" in done.stderr
    assert "torch failed; the whole output is in .cache/setup.log" in done.stderr
    assert not list((tmp_path / "environment/.memascend-stamps").iterdir())


@pytest.mark.skipif(not os.path.exists("/proc/version"), reason="needs procfs, where root cannot write either")
def test_read_only_checkout_gives_one_line_error(tmp_path):
    (tmp_path / "pins.txt").touch()
    assert "not writable (/proc)" in one_line(run_setup(Path("/proc"), ".venv", str(tmp_path / "pins.txt"), "test"))


def test_the_commands_run_as_a_module():
    done = subprocess.run([sys.executable, "-m", "memascend", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["memascend", memascend.__version__]


def test_parent_folder_of_checkout_does_not_hide_the_package(tmp_path):
    """In that folder "import memascend" also finds the checkout, a folder of that name without an __init__.py."""
    (tmp_path / "memascend").symlink_to(ROOT)
    said = "import memascend; print(memascend.__version__)"
    done = subprocess.run([sys.executable, "-c", said], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [memascend.__version__], done.stderr


@pytest.mark.parametrize("locked", ["", "1"])
def test_locked_requirements_are_installed_before_the_package(tmp_path, locked):
    """Each lock is installed once, by hash and without its dependencies; without LOCKED, none."""
    python, said = tmp_path / "environment/bin/python", tmp_path / "said"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\ncase "$*" in *"pip install"*) echo "$*" >> {said} ;; esac\n')
    python.chmod(0o755)
    (tmp_path / "locks").mkdir()
    for name in ("pins.txt", "pyproject.toml", "locks/core.txt", "locks/test.txt"):
        (tmp_path / name).touch()
    done = run_setup(tmp_path, "environment", "pins.txt", "test", LOCKED=locked)
    assert done.returncode == 0, done.stderr
    calls = said.read_text().splitlines()
    hashed = [call for call in calls if "--require-hashes" in call]
    assert len(hashed) == bool(locked)
    if locked:
        assert hashed[0].endswith("--require-hashes --no-deps -r locks/core.txt -r locks/test.txt")
        (last,) = [number for number, call in enumerate(calls) if ".[test]" in call]
        assert calls.index(hashed[0]) < last
        (tmp_path / "pyproject.toml").write_text("# changed")
        (tmp_path / "locks/test.txt").unlink()
        assert "there is no locks/test.txt" in one_line(
            run_setup(tmp_path, "environment", "pins.txt", "test", LOCKED="1")
        )


def test_supported_python_versions_agree_across_files():
    """The hosted release builds a wheel for each of them."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    least, most = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", asked).groups()
    wanted = [f"3.{minor}" for minor in range(int(least), int(most))]
    script = (ROOT / "workflows/setup/setup.sh").read_text()
    assert re.findall(r"\bpython(3\.\d+)", re.search(r"\$\{PYTHON:-(.*)\}", script)[1]) == wanted
    assert f"(3, {least}) <= sys.version_info[:2] <= (3, {int(most) - 1})" in script
    matrix = re.search(r"python: (\[.*\])", (ROOT / ".github/workflows/release.yml").read_text())[1]
    assert json.loads(matrix) == wanted
    named = f"Python {wanted[0]} to {wanted[-1]}"
    for page in ("README.md", "CONTRIBUTING.md", "Makefile", "docs/ARTIFACT.md", "workflows/setup/setup.sh"):
        assert named in (ROOT / page).read_text(), page
