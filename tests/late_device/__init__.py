"""The device `late`, for tests of accelerator code on machines without one: see late_device.cpp."""

from __future__ import annotations

import contextlib
import fcntl
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

NAME = "memascend_late_device"


def compiled() -> Any:
    """Compile and load the extension.

    torch waits forever for the lock of a compilation that was killed. The one process that may compile removes it
    first.
    """
    folder = Path(cpp_extension._get_build_directory(NAME, verbose=False))
    with (folder / "one-at-a-time").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        return cpp_extension.load(NAME, [str(Path(__file__).with_name("late_device.cpp"))], extra_cflags=["-O1"])


@cache
def late_device() -> torch.device:
    """Return `late:0`, which torch then knows as `torch.late`; it is compiled once and kept in the user's cache."""
    core = compiled()

    class Event:
        def __init__(self, number: int) -> None:
            self.number = number

        def query(self) -> bool:
            return core.query_event(self.number)

        def synchronize(self) -> None:
            core.synchronize_event(self.number)

    class Stream:
        def __init__(self, device: Any = None, *, number: int | None = None) -> None:
            self.number = core.new_stream() if number is None else number

        def record_event(self) -> Event:
            return Event(core.record_event(self.number))

        def wait_event(self, event: Event) -> None:
            core.wait_event(self.number, event.number)

    @contextlib.contextmanager
    def stream(given: Stream) -> Iterator[None]:
        before = core.use_stream(given.number)
        try:
            yield
        finally:
            core.use_stream(before)

    module = types.ModuleType("torch.late")
    module.Stream, module.Event, module.stream = Stream, Event, stream
    module.current_stream = lambda device=None: Stream(number=core.current_stream())
    module.synchronize = lambda device=None: core.synchronize()
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.get_rng_state = lambda device=None: torch.get_rng_state()  # its operators run on the CPU
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module._is_in_bad_fork, module.manual_seed_all = lambda: False, lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.core = core
    torch.utils.rename_privateuse1_backend("late")
    torch._register_device_module("late", module)
    return torch.device("late", 0)
