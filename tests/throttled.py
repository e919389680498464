"""Throttled paths for tests, which are skipped where there can be none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hardware import throttled
from hardware.throttled import ThrottledPath


@contextlib.contextmanager
def throttled_paths(folder: Path, rates: Sequence[int]) -> Iterator[list[ThrottledPath]]:
    with contextlib.ExitStack() as stack:
        try:
            paths = stack.enter_context(throttled.throttled_paths(folder, rates))
        except throttled.CannotThrottleError as reason:
            pytest.skip(str(reason))
        yield paths
