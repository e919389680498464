"""Validation of a user-given folder for swap files, shared by `nvme_path` in a DeepSpeed JSON and by `--nvme`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import NamedTuple


class DirectLimits(NamedTuple):
    """Whether a file system or device supports O_DIRECT, and the memory alignment that it requires, in bytes."""

    served: bool
    alignment_bytes: int


def swap_folder(folder: str | os.PathLike[str], named_by: str) -> Path:
    """Return the absolute path of a writable ``folder``; create it if only its last component is missing.

    Several processes may call this at once. Raises ValueError, with a one-line message, as `check_swap_folder` does,
    and if the folder is not writable.
    """
    path = check_swap_folder(folder, named_by)
    try:
        path.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"{named_by}: {path} cannot be written ({error.strerror}); name a folder on the SSD") from None
    return path


def check_swap_folder(folder: str | os.PathLike[str], named_by: str) -> Path:
    """Return the absolute path of ``folder``, which exists or only lacks its last component; nothing is created.

    DeepSpeed creates all missing parents, so that a typo, or an SSD that is not mounted, fills the root disk. Here
    the parent must exist, and must not be /. ``named_by`` is the key or option that named the folder, for the message.

    Raises ValueError, with a one-line message, if the parent is missing or is /, or if something else than a folder
    has this name.
    """
    path = Path(folder).absolute()
    if os.path.lexists(path) and not path.is_dir():
        what = "a link to nowhere" if not path.exists() else "a file" if path.is_file() else "not a folder"
        raise ValueError(f"{named_by}: {path} is {what}; name a folder on the SSD")
    if not path.exists() and not path.parent.is_dir():
        missing = next(part for part in reversed([path, *path.parents]) if not part.is_dir())
        what = "is not a folder" if missing.exists() else "does not exist"
        raise ValueError(
            f"{named_by}: {path} cannot be created, since {missing} {what}; check the spelling and that the SSD is "
            f"mounted, or make it: mkdir -p {path}"
        )
    if not os.path.lexists(path) and path.parent.samefile("/"):  # a missing folder directly under / is no mount point
        raise ValueError(
            f"{named_by}: {path} does not exist, and would be created on the system disk; check the spelling and that "
            f"the SSD is mounted, or make it: mkdir {path}"
        )
    return path


def direct_limits(place: str | os.PathLike[str]) -> DirectLimits:
    """Return the O_DIRECT limits of a device or of a writable folder, probed with a temporary file. Raises OSError."""
    from memascend.storage.native import _C

    if not os.path.isdir(place):
        return DirectLimits(*_C.direct_limits(os.fspath(place)))
    with tempfile.NamedTemporaryFile(dir=place) as file:
        return DirectLimits(*_C.direct_limits(file.name))
