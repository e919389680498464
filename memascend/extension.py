"""Loads the C++ extension, `memascend._C`, on first use, or refuses it with a one-line reason.

An extension works only with the release of torch (2.13, say) that it was compiled against. With another release the
linker may report a missing symbol, or loading may succeed and the process crash later. Therefore the release, which
the extension's file holds as text, is compared first.
"""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import re
from pathlib import Path
from types import ModuleType

BUILT_AGAINST = re.compile(rb"memascend extension built against torch (\d+\.\d+[\w.+]*)")


class NotLoadable(ImportError):
    """The extension is missing, cannot be loaded, or was built against another torch.

    `reason` and `fix` are the two parts of the message.
    """

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"{reason}; {fix}", name="memascend._C")
        self.reason, self.fix = reason, fix


def load(package: str) -> ModuleType:
    """Load and return the extension of `package`.

    Raises NotLoadable if it is missing, was built against another torch, or cannot be loaded.
    """
    try:
        import torch  # must come first: it loads the libraries that the extension is linked against
    except ImportError as error:
        reason = f"torch cannot be imported ({' '.join(str(error).split())})"
        raise NotLoadable(reason, "install it: pip install 'torch==2.13.*', or make setup in a checkout") from None
    name = f"{package}._C"
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise _missing(package, name)
    built = built_against(Path(spec.origin))
    if built is not None and _release(built) != _release(torch.__version__):
        raise NotLoadable(
            f"the C++ extension was built against torch {built}, and torch {torch.__version__} is installed",
            f"pip install 'torch=={_release(built)}.*', or build memascend with the torch that is here: "
            "pip install --no-deps --no-build-isolation . in a checkout",
        )
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotLoadable(
            f"the C++ extension {spec.origin} cannot be loaded ({' '.join(str(error).split())}); it was built against "
            f"torch {built or 'of an unknown release'}, and torch {torch.__version__} is installed",
            "reinstall memascend, or build it again: make setup in a checkout",
        ) from None


def built_against(file: Path) -> str | None:
    """Return the version of torch that an extension was compiled against, or None if the file does not say."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as text:
        found = BUILT_AGAINST.search(text)
        return found[1].decode() if found else None


def _release(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _missing(package: str, name: str) -> NotLoadable:
    places = getattr(importlib.import_module(package), "__path__", ())
    others = sorted(path.name for place in places for path in Path(place).glob("_C.*.so"))
    reason = f"the C++ extension {name} is not built"
    if others:
        reason = f"the C++ extension is built for another Python ({others[0]})"
    return NotLoadable(reason, "build it: make setup in a checkout, or install memascend again")
