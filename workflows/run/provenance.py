"""The origin of a record: host, versions, commit, code digest, and the key that they hash to."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from workflows.staleness import versions

_BEGAN = time.monotonic()  # each record is made by a process of its own
ROOT = Path(__file__).resolve().parents[2]
HOST = "MEMASCEND_HOST"  # the machine's name in records and tables
EXHIBITS = "MEMASCEND_EXHIBITS"  # {run id: exhibits drawn from it}, set by the rules


def cache_dir() -> Path:
    """Return the per-user cache (``MEMASCEND_CACHE``, else XDG) for tokenizers and their text."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("MEMASCEND_CACHE") or Path(base) / "memascend")


def record_key(record: dict[str, Any]) -> str:
    """Return a hash of the resolved configuration, versions, code digest and host; never of results, commit or date."""
    inputs = [
        *("run_id", "kind", "system", "arm", "parts", "model", "twin", "dtype", "ranks", "sequence", "batch"),
        *("steps", "seed", "mode", "device", "checkpointing", "stacks", "matmul", "evaluate_every", "gpus"),
        *("arms", "rounds", "config", "environment", "host", "versions", "code_digest", "points_requested"),
    ]
    return digest_of({k: record[k] for k in inputs if k in record})


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a value's JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=1)
def host() -> dict[str, Any]:
    """Return the properties of this machine that a record states."""
    named = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = named[0].split(":", 1)[1].strip() if named else platform.machine()
    memory = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal")]
    total = int(memory[0].split()[1]) * 1024
    return {
        "name": os.environ.get(HOST, "local"),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_bytes": total,
        "kernel": platform.release(),
        "system": platform.system(),
    }


def _git(*arguments: str) -> str:
    """Return git's output, or an empty string if it fails (an installation without a checkout)."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def checkout() -> str:
    """Return the commit of the checkout, ``-dirty`` and a digest if there are uncommitted changes; "" without git."""
    words = ["git", "-C", str(ROOT), "diff", "HEAD"]
    changes = subprocess.run(words, capture_output=True, check=False).stdout
    commit = _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return commit + (hashlib.sha256(changes).hexdigest()[:8] if changes else "")


def write_record(out: Path, run_id: str, kind: str, code_digest: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Write the record of a run atomically and return it; `fields` override the fields that every record has.

    `code_digest` is the digest of `workflows.staleness`.
    """
    record = {
        "schema_version": 1,
        "key": "",
        "run_id": run_id,
        "kind": kind,
        "exhibits": json.loads(os.environ.get(EXHIBITS, "{}")).get(run_id, []),
        "lane": "measured",
        "status": "ok",
        "host": host(),
        "versions": versions(),
        "code_digest": code_digest,
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "wall_s": time.monotonic() - _BEGAN,
        **fields,
    }
    record["key"] = record_key(record)
    atomically(out, lambda path: path.write_text(json.dumps(record, indent=1) + "\n"))
    return record


def atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Call ``write`` on a temporary file next to ``path``, then rename it, so that no reader sees a partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    try:
        write(Path(name))
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def program(name: str, run: Callable[[], int], *expected: type[Exception]) -> int:
    """Return the result of `run`; print one line and return 2 for an error in the inputs.

    SIGTERM ends the program in an orderly way.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that swap files, loop devices and processes go too
    try:
        return run()
    except (ValueError, OSError, *expected) as error:
        print(f"{name}: error: {str(error) or type(error).__name__}", file=sys.stderr)
        return 2
