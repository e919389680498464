"""The one line about what is enabled: rank 0 shows it however a script
configures logging, unless the script disables it."""

import subprocess
import sys

import pytest

LINE = "memascend is on"
CASES = {
    "nothing is configured": ("", 1),
    "the root logger is left at warnings": ("logging.basicConfig()", 1),
    "the root logger shows all": ("logging.basicConfig(level=logging.INFO)", 1),
    "other loggers alone have handlers": ("logging.getLogger('transformers').addHandler(logging.StreamHandler())", 1),
    "a handler of its own": ("logging.getLogger('memascend').addHandler(logging.StreamHandler())", 1),
    "its level says no": ("logging.getLogger('memascend').setLevel(logging.WARNING)", 0),
    "its level says no to handlers": ("logging.basicConfig(); logging.getLogger('memascend').setLevel('WARNING')", 0),
    "logging is disabled": ("logging.disable(logging.INFO)", 0),
    "a handler's level says no": (
        "h = logging.StreamHandler(); h.setLevel(logging.WARNING); logging.basicConfig(handlers=[h])",
        0,
    ),
    "another rank": ("import os; os.environ['RANK'] = '1'", 0),
}


@pytest.mark.parametrize("case", CASES)
def test_announcement_appears_once_on_rank_0_unless_logging_hides_it(case):
    prepare, times = CASES[case]
    code = f"import logging\n{prepare}\nfrom memascend.integrations.conventions import announce\nannounce({LINE!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stderr.count(LINE), done.stdout) == (times, "")
