"""An unusable extension is refused in one line before it is loaded, with the torch version that it needs."""

import importlib.machinery
import sys
from pathlib import Path

import pytest
import torch

import memascend
from memascend import _C, extension
from memascend.doctor.packages import check_extension

SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
MARK = "memascend extension built against torch "


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Make the folder of an importable package without an extension."""
    (tmp_path / "toypackage").mkdir()
    (tmp_path / "toypackage/__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "toypackage"
    sys.modules.pop("toypackage", None)


def refused() -> str:
    with pytest.raises(extension.NotLoadable) as caught:
        extension.load("toypackage")
    assert "\n" not in str(caught.value)
    assert str(caught.value) == f"{caught.value.reason}; {caught.value.fix}"
    return str(caught.value)


def test_extension_records_the_torch_version_it_was_built_against():
    assert extension.built_against(Path(_C.__file__)) == torch.__version__.partition("+")[0]
    assert extension.load("memascend") is _C


def test_extension_for_another_torch_release_is_not_loaded(toy):
    (toy / f"_C{SUFFIX}").write_bytes(b"\x7fELF" + f"{MARK}2.4.1\0".encode())
    said = refused()
    assert f"built against torch 2.4.1, and torch {torch.__version__} is installed" in said
    assert "pip install 'torch==2.4.*'" in said


def test_extension_for_another_torch_patch_release_is_tried(toy):
    release = ".".join(torch.__version__.split(".")[:2])
    (toy / f"_C{SUFFIX}").write_bytes(f"no library {MARK}{release}.99\0".encode())
    said = refused()
    assert "cannot be loaded" in said
    assert f"it was built against torch {release}.99" in said


def test_missing_extension_is_refused_with_its_build_command(toy):
    assert refused() == (
        "the C++ extension toypackage._C is not built; build it: make setup in a checkout, or install memascend again"
    )


def test_an_extension_for_another_python_is_named(toy):
    (toy / "_C.cpython-38-x86_64-linux-gnu.so").write_bytes(b"")
    assert "is built for another Python (_C.cpython-38-x86_64-linux-gnu.so)" in refused()


def test_doctor_shows_why_it_cannot_be_loaded_and_the_fix(toy, monkeypatch):
    monkeypatch.delattr(memascend, "_C")
    real = extension.load
    monkeypatch.setattr(extension, "load", lambda package: real("toypackage"))
    check = check_extension()
    assert (check.status, check.found) == ("fail", "the C++ extension toypackage._C is not built")
    assert check.fix == "build it: make setup in a checkout, or install memascend again"
