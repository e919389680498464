"""The DeepSpeed JSON of a plan, which is the one that `memascend train` uses: ready for `memascend.enable`."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from memascend import systems
from memascend.planner.workload import Workload


def deepspeed_config(work: Workload, nvme_path: str) -> dict[str, Any]:
    """Return the DeepSpeed configuration with which `train` runs what is planned, as a dict.

    The section "memascend" selects the parts. Raises ValueError for a system that does not run on DeepSpeed, and for an
    arm that is only planned or that a configuration cannot describe.
    """
    system = systems.load(work.system, work.arm)
    if not hasattr(system, "planned_config"):
        raise ValueError(
            f"{work.system} needs no DeepSpeed configuration: name another --system, or leave --write-config out"
        )
    if not work.arrangement.runs:
        raise ValueError(
            f"arm {work.arm_name!r} of system {work.system!r} can only be planned and simulated: name another --arm, "
            "or leave --write-config out"
        )
    config: dict[str, Any] = system.planned_config(work, nvme_path)
    return config


def write_config(config: dict[str, Any], path: Path, *, force: bool) -> None:
    """Write the configuration as JSON, atomically.

    Raises ValueError if the file cannot be written, or exists and `force` is off.
    """
    if path.exists() and not force:
        raise ValueError(f"{path} exists: --force replaces it, or name another file")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file")
    try:
        handle, partial = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(config, indent=2) + "\n")
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except OSError as error:
        raise ValueError(
            f"cannot write the configuration {path}: {error.strerror}; name a file in another folder"
        ) from None
