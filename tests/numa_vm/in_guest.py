"""Runs tests marked numa_vm in a guest if the machine has one node, and reports them as if they ran here.

The guest's pytest writes each report as a line (`write_reports`). The host boots the guest before the first test and
passes its reports on, so `pytest -m numa_vm` reads as on a machine that has the nodes.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.numa_vm.images import MAKE, images
from tests.numa_vm.machine import CARDS, NODES, TWO_PROCESSORS, boot

GUESTS = {"test_two_processors.py": TWO_PROCESSORS, "test_cards.py": CARDS}  # files with a separate guest
REPORTS = "MEMASCEND_GUEST_REPORTS"  # in the guest: the file that reports are written to
TIMEOUT_S = 900.0  # emulation is slow on a busy machine; on an idle one it takes about a minute and a half
# The guest has its own file systems here, so the host's files below them are not visible.
_HIDDEN = tuple(map(Path, ("/tmp", "/proc", "/sys", "/dev", "/out")))
_KEPT = ("PYTHONPATH", "LANG", "TORCHDYNAMO_DISABLE", "HF_HUB_OFFLINE")


def missing(config: pytest.Config) -> str | None:
    """Return why no guest can run the tests of this session, or None."""
    if hasattr(config, "workerinput"):
        return "one NUMA node here, and one guest a session: run without -n (make numa-test)"
    if "numa_vm" not in (config.option.markexpr or ""):
        return "one NUMA node here; the guest is booted by pytest -m numa_vm (make numa-test)"
    needed = {"the checkout": config.rootpath, "its Python": Path(sys.prefix)}
    for what, path in needed.items():
        for hidden in _HIDDEN:
            if path.resolve().is_relative_to(hidden):
                return f"{what}, {path}, lies below {hidden}, which is the guest's own: clone elsewhere, as into /root"
    return None if images() is not None else f"one NUMA node here, and no images of a guest: {MAKE}"


class Guest:
    """The guests in which `items` run, all at once."""

    def __init__(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self._config = config
        self._wanted = [item.nodeid for item in items]
        self._reports: dict[str, list[Any]] = {}
        self._console = ""

    def __contains__(self, item: pytest.Item) -> bool:
        return item.nodeid in self._wanted

    def reports(self, item: pytest.Item) -> list[pytest.TestReport]:
        """Return the reports of set-up, call and tear-down, or a failed one if the guest did not get to the test."""
        found = self._reports.get(item.nodeid)
        if found is None:
            words = f"the guest ended before this test; its last words:\n{self._console[-3000:]}"
            return [pytest.TestReport(item.nodeid, item.location, {}, "failed", words, "call")]
        made = [self._config.hook.pytest_report_from_serializable(config=self._config, data=data) for data in found]
        for report in made:
            if isinstance(report.longrepr, list):  # where and why it was skipped: JSON turned the tuple into a list
                report.longrepr = tuple(report.longrepr)
        return made

    def run(self) -> None:
        """Boot one guest of each kind that is needed, and read what its tests reported.

        They run one after the other: side by side, a guest's second processor would have to wait for the other guest.
        """
        start = time.monotonic()
        groups: dict[str, list[str]] = {}
        for name in self._wanted:
            groups.setdefault(GUESTS.get(Path(name.split("::")[0]).name, NODES), []).append(name)
        for kind, wanted in groups.items():
            self._boot(wanted, kind)
        seconds = time.monotonic() - start
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.write_line(f"\nguest: {len(self._reports)} of {len(self._wanted)} tests ran, {seconds:.0f} s")

    def _boot(self, wanted: list[str], kind: str) -> None:
        made = images()
        assert made is not None
        self._console += f"\n{kind}:\n"
        with tempfile.TemporaryDirectory(prefix="memascend-guest-") as name:
            out = Path(name)
            environment = {key: os.environ[key] for key in _KEPT if key in os.environ} | {
                "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "HOME": "/tmp",
                "OMP_NUM_THREADS": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                "MALLOC_MMAP_THRESHOLD_": "65536",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # their imports take seconds each
                REPORTS: "/out/reports",
            }
            options = ["-m", "numa_vm", "--run-slow", "-q", "--timeout", "0", "-p", "no:cacheprovider"]
            options += ["-p", "pytest_timeout", "-p", "tests.numa_vm.reports"]
            command = [sys.executable, "-m", "pytest", *options, *wanted]
            settings = {"cwd": self._config.rootpath, "environment": environment, "timeout_s": TIMEOUT_S}
            try:
                self._console += boot(made, command, out, **settings, kind=kind).console
            except TimeoutError as error:
                self._console += str(error)
            self._read(out / "reports")

    def _read(self, path: Path) -> None:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in lines:
            data = json.loads(line)
            self._reports.setdefault(data["nodeid"], []).append(data)


def replay(guest: Guest, item: pytest.Item) -> None:
    """Report one test of the session from the guest's reports."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in guest.reports(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
