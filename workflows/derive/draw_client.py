"""Run a program of workflows.derive in the server that has already imported it, or in this process without a server.

Called for every table and picture, so it starts without the site's packages and imports next to nothing:
python -IS workflows/derive/draw_client.py MODULE WORDS ...
"""

import contextlib
import os
import sys
import time


def request(address: str, module: str, words: list[str]) -> int:
    """Have the server run a program and return its exit status; raise OSError if no server answers."""
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from workflows.run.fork_server import ForkedRun

    for _ in range(50):  # the server may be starting
        if os.path.exists(address):
            break
        time.sleep(0.1)
    log = f"{address}.{os.getpid()}.log"
    request = {"module": module, "words": words, "log": log, "folder": os.getcwd(), "environment": {}, "fds": []}
    code = ForkedRun(address, request, ()).wait()
    with open(log) as said:
        sys.stdout.write(said.read())
    os.unlink(log)
    return code


def main() -> int:
    module, *words = sys.argv[1:]
    address = os.environ.get("MEMASCEND_DRAW_SERVER")
    if address:
        with contextlib.suppress(OSError):
            return request(address, module, words)
    os.execv(sys.executable, [sys.executable, "-m", f"workflows.derive.{module}", *words])


if __name__ == "__main__":
    sys.exit(main())
