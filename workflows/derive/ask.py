"""Have a program of workflows.derive run by the server that has imported it; by this process where there is none."""

from __future__ import annotations

import contextlib
import os
import sys
import time


def main() -> int:
    module, *words = sys.argv[1:]
    address = os.environ.get("MEMASCEND_DRAW_SERVER")
    if address:
        from workflows.run.fork_server import ForkedRun

        log = f"{address}.{os.getpid()}.log"
        request = {"module": module, "words": words, "log": log, "folder": os.getcwd(), "environment": {}, "fds": []}
        for _ in range(50):  # the server may be starting
            if os.path.exists(address):
                break
            time.sleep(0.1)
        with contextlib.suppress(OSError):
            code = ForkedRun(address, request, ()).wait()
            with open(log) as said:
                sys.stdout.write(said.read())
            os.unlink(log)
            return code
    import importlib

    sys.argv = [module, *words]
    importlib.import_module(f"workflows.derive.{module}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
