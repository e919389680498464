"""The folder that a person names for swap files: one rule for `nvme_path` in a DeepSpeed JSON and for `--nvme`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import NamedTuple


class DirectLimits(NamedTuple):
    """What a file system, or a device, says of O_DIRECT: whether it serves it, and from memory at multiples of what."""

    served: bool
    alignment_bytes: int


def swap_folder(folder: str | os.PathLike[str], named_by: str) -> Path:
    """The absolute path of ``folder``, in which a file can be written; made where only its last part is missing.

    DeepSpeed makes every folder on the way, so that a typo, or an SSD that is not mounted, fills the root disk. Here
    the parent must exist, and be another than /. Several processes may call this at once. ``named_by``: the key or
    option, for the message.

    Raises ValueError, in one line, where the parent is missing or /, or the folder is a file or cannot be written.
    """
    path = Path(folder).absolute()
    if not path.exists() and not path.parent.is_dir():
        missing = next(part for part in reversed([path, *path.parents]) if not part.is_dir())
        what = "is not a folder" if missing.exists() else "does not exist"
        raise ValueError(
            f"{named_by}: {path} cannot be created, since {missing} {what}; check the spelling and that the SSD is "
            f"mounted, or make it: mkdir -p {path}"
        )
    if not os.path.lexists(path) and path.parent.samefile("/"):  # nobody's mount
        raise ValueError(
            f"{named_by}: {path} does not exist, and would be created on the system disk; check the spelling and that "
            f"the SSD is mounted, or make it: mkdir {path}"
        )
    try:
        path.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"{named_by}: {path} cannot be written ({error.strerror}); name a folder on the SSD") from None
    return path


def direct_limits(place: str | os.PathLike[str]) -> DirectLimits:
    """Of a folder that can be written, by a file that is removed at once, or of a device. Raises OSError."""
    from memascend.storage.native import _C

    if not os.path.isdir(place):
        return DirectLimits(*_C.direct_limits(os.fspath(place)))
    with tempfile.NamedTemporaryFile(dir=place) as file:
        return DirectLimits(*_C.direct_limits(file.name))
