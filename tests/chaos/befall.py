"""Faults that are arranged inside a training process before it begins."""

from __future__ import annotations

import dis
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from memascend import _C
from memascend.storage.direct_engine import DirectEngine, DirectEngineConfig

PUTS_OFF = f"{os.sep}interrupts.py"  # This module defers KeyboardInterrupt, so no signal raises it in its code.
LIBRARY = f"{Path(__file__).resolve().parents[2] / 'memascend'}{os.sep}"
OPS = ("read", "write", "flush")
Faults = Any  # _C.FaultLayer


def _leaves_a_with(frame: FrameType) -> bool:
    """Return whether the frame is about to call `__exit__` at the end of a `with` block.

    Tracing reports a line there, but a signal cannot interrupt at that place: an exception would skip the call of
    `__exit__`.
    """
    code, place = frame.f_code.co_code, frame.f_lasti
    ops = [dis.opname[code[at]] for at in range(place, min(place + 6, len(code)), 2)]
    return ops == ["LOAD_CONST"] * 3


class Befallen:
    """The faults of one process: a fault layer below its engines, a line to be interrupted at, a moment in time.

    With `states_alone` the layer is below the store of states only, and not below files that do not outlive the
    process.
    """

    def __init__(self, *, states_alone: bool = False) -> None:
        self.layer: Faults = _C.FaultLayer()
        self.log: Path | None = None  # log of all writes to the states
        self.lines = 0
        stock = DirectEngine.__init__

        def opened(
            engine: DirectEngine, devices: Any, owner: str, config: DirectEngineConfig | None = None, faults: Any = None
        ) -> None:
            volatile = config is not None and config.volatile
            if self.log is not None and not volatile and not self.log.exists():
                before = Path(os.fspath(devices[0])).read_bytes()
                self.log.with_suffix(".before").write_bytes(before)
                self.layer.log_writes(str(self.log))
            stock(engine, devices, owner, config, faults or (None if states_alone and volatile else self.layer))

        DirectEngine.__init__ = opened

    def calls(self) -> dict[str, int]:
        return {op: self.layer.calls(op) for op in OPS}

    def transfers_fail(self, op: str, after: int, times: int, code: int) -> None:
        self.layer.add(op, after=after, times=times, error=code)

    def transfers_hang(self, op: str, after: int, times: int, seconds: float) -> None:
        self.layer.add(op, after=after, times=times, delay_us=int(seconds * 1e6))

    def killed_at(self, op: str, after: int) -> None:
        self.layer.add(op, after=after, times=1, signal=signal.SIGKILL)

    def cut_at(self, after: int, sectors: int) -> None:
        self.layer.add("write", after=after, times=1, at_most=512 * sectors, signal=signal.SIGKILL)

    def interrupted_at_line(self, number: int | None) -> None:
        """Raise KeyboardInterrupt when this thread is about to run that line
        of the library; with None, only count the lines."""

        def in_library(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line":
                self.lines += 1
                if number is not None and self.lines >= number and not _leaves_a_with(frame):
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return in_library

        def begins(frame: FrameType, event: str, argument: Any) -> Any:
            path = frame.f_code.co_filename
            return in_library if path.startswith(LIBRARY) and not path.endswith(PUTS_OFF) else None

        sys.settrace(begins)

    def interrupted_after(self, seconds: float, say: Callable[..., None]) -> None:
        """Press Ctrl-C as a user would, and again some seconds later."""
        main = os.getpid()

        def press() -> None:
            time.sleep(seconds)
            say("pressed")
            for _ in range(3):
                os.kill(main, signal.SIGINT)
                time.sleep(3)

        threading.Thread(target=press, daemon=True).start()

    def memory_eaten_after(self, seconds: float) -> None:
        def eat() -> None:
            time.sleep(seconds)
            eaten = []
            while True:
                eaten.append(b"x" * (4 << 20))

        threading.Thread(target=eat, daemon=True).start()

    def clock_jumps_after(self, seconds: float, by_s: float, folder: Path) -> None:
        """Let the clock jump for this process alone; files in `folder` are dated by the new clock."""
        begun, stock, stock_ns = time.monotonic(), time.time, time.time_ns

        def jumped() -> float:
            return by_s if time.monotonic() - begun >= seconds else 0.0

        time.time = lambda: stock() + jumped()
        time.time_ns = lambda: stock_ns() + int(jumped() * 1e9)

        def date() -> None:
            time.sleep(seconds)
            dated = max(0.0, stock() + by_s)
            for path in [folder, *folder.rglob("*")]:
                if path.exists():
                    os.utime(path, (dated, dated))

        threading.Thread(target=date, daemon=True).start()


CODES = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}
