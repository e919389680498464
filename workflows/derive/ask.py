"""Have a program of workflows.derive run by the server that has imported it; in this process where there is none.

Called for every table and picture, so it starts without the site's packages and imports next to nothing:
python -IS workflows/derive/ask.py MODULE WORDS ...
"""

import os
import socket
import sys
import time


def answer(address: str, request: bytes) -> int:
    """The exit status of what the server was asked for. Raises OSError where nobody serves."""
    for _ in range(50):  # the server may be starting
        if os.path.exists(address):
            break
        time.sleep(0.1)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        connection.sendall(len(request).to_bytes(8, "big") + request)
        said = connection.recv(16)
    if not said:
        raise ConnectionError("the server ended")
    return int(said)


def main() -> int:
    module, *words = sys.argv[1:]
    address = os.environ.get("MEMASCEND_DRAW_SERVER")
    if address:
        import contextlib
        import json

        log = f"{address}.{os.getpid()}.log"
        request = {"module": module, "words": words, "log": log, "folder": os.getcwd()}
        with contextlib.suppress(OSError):
            code = answer(address, json.dumps(request).encode())
            with open(log) as said:
                sys.stdout.write(said.read())
            os.unlink(log)
            return code
    os.execv(sys.executable, [sys.executable, "-m", f"workflows.derive.{module}", *words])


if __name__ == "__main__":
    sys.exit(main())
