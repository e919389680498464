"""Throttled paths for tests, which are skipped where paths cannot be throttled."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest

from hardware import throttled
from hardware.throttled import ThrottledPath
from tests import forked


@contextlib.contextmanager
def throttled_paths(folder: Path, rates: Sequence[int]) -> Iterator[list[ThrottledPath]]:
    """Throttle paths to `rates`.

    Programs are started by subprocess meanwhile, since forks of the tests' server would not be limited to the rates.
    """
    with contextlib.ExitStack() as stack:
        try:
            paths = stack.enter_context(throttled.throttled_paths(folder, rates))
        except throttled.CannotThrottleError as reason:
            pytest.skip(str(reason))
        stack.enter_context(mock.patch.dict(os.environ))
        os.environ.pop(forked.ADDRESS, None)
        yield paths
