"""The container recipes agree with each other and with the set-up, and an image's ops are for its CPU level."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPES = {"Containerfile": r"(?m)^ARG BASE=(\S+)$", "apptainer.def": r"(?m)^From: (\S+)$"}
SETUP = (ROOT / "workflows/setup/setup.sh").read_text()
sys.path.insert(0, str(ROOT / "workflows/setup"))
import build_ops  # noqa: E402

sys.path.pop(0)


def text(name: str) -> str:
    return (ROOT / name).read_text()


def debian_packages(name: str) -> list[str]:
    (words,) = re.findall(r"install -y --no-install-recommends \\\n((?:.*\\\n)*?.*?)\s*(?:\\\n\s*)?&& rm", text(name))
    return words.replace("\\", " ").split()


@pytest.mark.parametrize("name", RECIPES)
def test_the_base_is_named_by_its_digest(name):
    (base,) = re.findall(RECIPES[name], text(name))
    assert re.fullmatch(r"(docker\.io/library/)?debian@sha256:[0-9a-f]{64}", base)


def test_both_recipes_have_one_base_and_the_same_packages():
    bases = {re.findall(pattern, text(name))[0].removeprefix("docker.io/library/") for name, pattern in RECIPES.items()}
    assert len(bases) == 1
    assert debian_packages("Containerfile") == debian_packages("apptainer.def")


def test_image_has_every_system_package_the_setup_needs():
    """Except for file systems that only root can mount, since the image's user is not root."""
    asked = set(" ".join(re.findall(r"(?:needed|useful)\+=\((.*?)\)", SETUP)).split())
    assert {"g++", "libaio-dev", "python3-dev"} <= asked
    assert asked - {"btrfs-progs", "chromium", "xfsprogs"} <= set(debian_packages("Containerfile"))


def test_base_image_python_is_supported_by_the_project():
    """Debian bookworm has Python 3.11, which the recipes install as python3."""
    least = tomllib.loads(text("pyproject.toml"))["project"]["requires-python"]
    assert least.startswith(">=3.11,")
    assert all("bookworm" in text(name) for name in RECIPES)
    assert "python3" in debian_packages("Containerfile")


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_installs_packages_through_setup_for_a_stated_level(name):
    """Constraint files and hashes thus apply in it too, and no line of the recipe installs an unpinned package."""
    said = text(name)
    assert "make setup" in said
    assert not re.search(r"\bpip3? +install\b", said)
    (level,) = set(re.findall(r"x86-64-v\d", re.sub(r"(?m)^#.*$", "", said)))
    assert level in build_ops.LEVELS
    assert "MEMASCEND_CPU_LEVEL" in said
    assert "LOCKED=1" in said


def test_image_excludes_build_products_and_includes_history():
    ignored = text(".containerignore").split("\n")
    assert {".venv", ".cache", "results/raw", "results/derived", "nvme", "runs", "**/*.so"} <= set(ignored)
    assert not {".git", "results", "results/reference", "results/published"} & set(ignored)
    made = {line.strip("/") for line in text(".gitignore").split() if not line.startswith(("!", "*"))}
    of_tools = {"__pycache__"}
    assert {line for line in made if line not in of_tools and not line.endswith("*")} <= set(ignored)


def test_how_to_page_names_the_recipes_and_the_level():
    page = text("docs/how-to/run-in-a-container.md")
    (level,) = re.findall(r"^ARG CPU_LEVEL=(\S+)$", text("Containerfile"), re.M)
    assert level in page
    assert "Containerfile" in page
    assert "apptainer.def" in page
    assert "how-to/run-in-a-container.md" in text("mkdocs.yml")
    started = re.findall(r"^podman run .*", page, re.M)
    assert started
    assert all("--shm-size" in line for line in started), "DeepSpeed's ranks fill a container's own 64 MiB"


def macros(folder: Path, *words: str) -> str:
    """Return the macros that the compiler wrapper defines for these arguments."""
    compiler = build_ops.compiler_without_debug_information(folder)
    command = [str(compiler), *words, "-E", "-dM", "-x", "c++", "/dev/null"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="levels are of x86-64")
@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler")
@pytest.mark.parametrize(
    ("level", "there", "absent", "vectors"),
    [
        ("x86-64-v2", "__SSE4_2__", "__AVX2__", "__SCALAR__"),
        ("x86-64-v3", "__AVX2__", "__AVX512F__", "__AVX256__"),
        ("x86-64-v4", "__AVX512F__", "__AVX512VNNI__", "__AVX512__"),
    ],
)
def test_ops_are_compiled_for_the_level_whatever_processor_builds_them(
    tmp_path, monkeypatch, level, there, absent, vectors
):
    monkeypatch.setenv("MEMASCEND_CPU_LEVEL", level)
    for asked in build_ops.LEVELS.values():  # whatever DeepSpeed chose for this processor
        defined = macros(tmp_path, "-march=native", f"-D{asked}", "-DNAME=a b")
        assert f"#define {there} " in defined
        assert f"#define {absent} " not in defined
        assert f"#define {vectors} " in defined
        assert "#define NAME a b" in defined
        assert sum(f"#define {macro} " in defined for macro in build_ops.LEVELS.values()) == 1


@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler")
def test_without_a_level_compiler_arguments_are_unchanged(tmp_path, monkeypatch):
    monkeypatch.delenv("MEMASCEND_CPU_LEVEL", raising=False)
    assert "#define __AVX512__ " in macros(tmp_path, "-D__AVX512__")


def test_unknown_cpu_level_is_refused(monkeypatch):
    monkeypatch.setenv("MEMASCEND_CPU_LEVEL", "haswell")
    with pytest.raises(
        SystemExit, match=r"MEMASCEND_CPU_LEVEL=haswell: not a level .* x86-64-v2, x86-64-v3, x86-64-v4"
    ):
        build_ops.level()


def test_only_ops_of_another_level_are_rebuilt(tmp_path, monkeypatch):
    mark = tmp_path / "MARK"
    monkeypatch.setattr(build_ops, "mark", lambda: mark)
    monkeypatch.setattr(build_ops, "works", lambda: None)
    monkeypatch.delenv("MEMASCEND_CPU_LEVEL", raising=False)
    assert build_ops.installed("native")  # as set-ups left them before there were levels
    monkeypatch.setenv("MEMASCEND_CPU_LEVEL", "x86-64-v3")
    assert not build_ops.installed("v3")
    mark.write_text("v3")
    assert build_ops.installed("v3")
    monkeypatch.delenv("MEMASCEND_CPU_LEVEL")
    assert not build_ops.installed("native")
    mark.write_text("native")
    monkeypatch.setattr(build_ops, "works", lambda: "does not load")
    assert not build_ops.installed("native")
