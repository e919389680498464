"""A plugin for the guest's pytest that writes every report as a line of JSON, which the host reads."""

import json
import os
from typing import Any

import pytest

from tests.numa_vm.in_guest import REPORTS

_config: Any = None


def pytest_configure(config: pytest.Config) -> None:
    global _config
    _config = config


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    data = _config.hook.pytest_report_to_serializable(config=_config, report=report)
    with open(os.environ[REPORTS], "a", encoding="utf-8") as file:
        file.write(json.dumps(data, default=str) + "\n")
