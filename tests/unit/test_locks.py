"""The lock files have the versions of the constraint files, all requirements of an extra, and a hash for each file."""

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from workflows.release import lock

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"([\w.-]+)==(\S+)((?: \\\n +--hash=sha256:[0-9a-f]{64})+)\n")


def locked(name: str) -> dict[str, str]:
    """Return versions by canonical name; every line of the file is parsed."""
    text = (ROOT / lock.FOLDER / f"{name}.txt").read_text()
    blocks = BLOCK.findall(text)
    rest = BLOCK.sub("", text).splitlines()
    assert [line for line in rest if not line.startswith("#")] == []
    return {canonicalize_name(package): version for package, version, _ in blocks}


def versions(lines: list[str]) -> dict[str, str]:
    return {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines}


@pytest.mark.parametrize(("name", "file"), lock.WHOLE.items())
def test_lock_of_a_constraint_file_has_its_pins_without_torch(name, file):
    assert locked(name) == versions([line for each, line in lock.pins(ROOT / file).items() if each != "torch"])


@pytest.mark.parametrize("name", ["core", *lock.EXTRAS])
def test_lock_of_an_extra_has_all_its_pinned_requirements(name):
    pins = versions(list(lock.pins(ROOT / lock.USUAL).values()))
    found = locked(name)
    assert found
    assert "torch" not in found
    assert found == {package: pins[package] for package in found}
    try:
        assert found == versions(lock.needed_by(name))
    except ValueError as error:
        pytest.skip(str(error))


def test_every_extra_has_a_lock_and_no_lock_is_stale():
    names = {"core", *lock.EXTRAS, *lock.WHOLE}
    assert {path.stem for path in (ROOT / lock.FOLDER).iterdir()} == names
    # the later lines add cuda
    _, usual = re.findall(r"^EXTRAS \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(usual.split(",")) == set(lock.EXTRAS)


def test_closure_follows_packages_and_extras_and_leaves_out_torch(monkeypatch):
    needs = {
        "a": ["B.c[fast]>=1", "torch", "d; extra == 'more'", "e; python_version < '3'"],
        "b-c": ["f; extra == 'fast'", "a"],
        "f": None,
        "torch": ["nvidia"],
    }
    monkeypatch.setattr(metadata, "requires", lambda name: needs[name])
    assert lock.closure(["a", "torch==2.13.*"]) == {"a", "b-c", "f"}


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    with pytest.raises(ValueError, match="odd-package is not installed here: run make setup"):
        lock.closure(["Odd_Package"])


def test_a_package_without_a_pin_is_named(monkeypatch):
    monkeypatch.setattr(lock, "closure", lambda wanted: {"numpy", "left-pad"})
    with pytest.raises(ValueError, match=r"constraints\.txt does not pin left-pad, which core needs"):
        lock.needed_by("core")
