"""Reasons why tests of memory nodes find no guest, each in one line."""

from pathlib import Path
from types import SimpleNamespace

from tests.numa_vm import in_guest


def reason(markers="numa_vm", root=Path("/opt/memascend"), **more):
    option = SimpleNamespace(markexpr=markers)
    return in_guest.missing(SimpleNamespace(option=option, rootpath=root, **more))


def test_checkout_hidden_from_the_guest_is_reported_with_a_fix(tmp_path, monkeypatch):
    monkeypatch.setattr(in_guest, "_HIDDEN", (tmp_path,))
    monkeypatch.setattr(in_guest.sys, "prefix", "/usr")
    place = tmp_path / "clone"
    fix = "which is the guest's own: clone elsewhere, as into /root"
    assert reason(root=place) == f"the checkout, {place}, lies below {tmp_path}, {fix}"
    monkeypatch.setattr(in_guest.sys, "prefix", str(tmp_path / "venv"))
    assert reason().startswith(f"its Python, {tmp_path / 'venv'}, lies below {tmp_path}")


def test_missing_images_workers_or_other_markers_give_a_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMASCEND_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(in_guest.sys, "prefix", "/usr")
    assert "no images of a guest: make numa-guest" in reason()
    assert "run without -n" in reason(workerinput={})
    assert "pytest -m numa_vm" in reason(markers="")
