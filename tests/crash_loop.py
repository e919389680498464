"""A training loop that is killed and restarted again and again: the steps that it resumed from, and what it reaches."""

import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

DIGEST = """
digest = hashlib.sha256()
for _, values in engine.read_weights():
    digest.update(values.view(torch.uint8).numpy().data)
print("digest", digest.hexdigest(), flush=True)
engine.close()
"""


class CrashLoop:
    """A program that prints `ready` and what it resumed from, then a line
    per step, then `digest` and the digest it reached."""

    def __init__(self, code: str, folder: Path, steps: int) -> None:
        self._command = [sys.executable, "-c", code + DIGEST, str(folder), str(steps)]

    def _started(self) -> tuple[subprocess.Popen, list[str]]:
        root = Path(__file__).parents[1]
        process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True, cwd=root)
        return process, process.stdout.readline().split()[1:]

    def digest(self) -> str:
        """Run the program to its end and return the digest that it reaches."""
        process, _ = self._started()
        found = process.communicate()[0].partition("digest")[2].strip()
        assert found
        return found

    def killed(self, times: int, most_steps: int) -> Sequence[list[str]]:
        """Kill the program `times` times, each after up to `most_steps` steps at a random instant of the next.

        Returns what it resumed from each time.
        """
        order, found, in_a_step = random.Random(0), [], 0.1
        while len(found) < times:
            process, ready = self._started()
            found.append(ready)
            for _ in range(order.randint(1, most_steps)):
                before = time.monotonic()
                process.stdout.readline()
                in_a_step = time.monotonic() - before
            time.sleep(order.uniform(0, in_a_step))
            process.kill()
            process.communicate()
        return found
