"""Enable MemAscend automatically when a DeepSpeed configuration has the key "memascend".

The module is loaded by `import memascend.auto`, or without any import: at the end of `import torch`, torch loads the
entry points of the group `torch.backends`, and ours names this module (TORCH_DEVICE_BACKEND_AUTOLOAD=0 disables that).
Nothing is imported or changed until DeepSpeed has been imported, and DeepSpeed stays unchanged until it is given a
configuration with that key.

Since all this happens inside `import torch` and `import deepspeed`, errors are logged here and never raised.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_WATCHED = "deepspeed"

log = logging.getLogger("memascend")


def _logged(action: Callable[..., Any], *args: Any) -> Any:
    """Return the result of ``action``; if it fails, log a warning and return None."""
    try:
        return action(*args)
    except Exception as error:
        if os.environ.get("RANK", "0") == "0":  # is_logging_rank() may not be importable here
            log.warning(
                'memascend: the key "memascend" in DeepSpeed configurations will be ignored (%s: %s); call '
                "memascend.enable(ds_config) before deepspeed.initialize, or reinstall memascend",
                type(error).__name__,
                error,
            )
        return None


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finder that wraps the loader which the other finders return for DeepSpeed, to be notified after the import.

    It finds no module itself. It is called whenever a library checks whether DeepSpeed is installed, as transformers
    and Accelerate do, even if DeepSpeed is never imported.
    """

    _asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _WATCHED or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)  # raises the errors that the import itself would raise
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            _logged(self._watch_after, spec.loader)
        return spec

    def _watch_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _logged(self._done, module)

        loader.exec_module = exec_module

    def _done(self, module: ModuleType) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        _watch(module)


class _SpecInProgress(importlib.machinery.ModuleSpec):
    """Spec of a module whose import is in progress, as DeepSpeed's is when it imports torch.

    Python clears ``_initializing`` at the end of the import; the setter uses this to start watching.
    """

    @property
    def _initializing(self) -> bool:
        return bool(self.__dict__.get("_initializing", False))

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        self.__dict__["_initializing"] = value
        module = sys.modules.get(self.name)
        if not value and hasattr(module, "initialize"):  # missing after a failed import
            _logged(_watch, module)


def _watch(deepspeed: Any) -> None:
    from memascend.integrations.drop_in import watch

    watch(deepspeed)


def install() -> None:
    """Install the hook that waits for the import of DeepSpeed. Repeated calls have no effect; torch calls it too."""
    _logged(_install)


def _install() -> None:
    spec = getattr(sys.modules.get(_WATCHED), "__spec__", None)
    if getattr(spec, "_initializing", False):
        spec.__class__ = _SpecInProgress
    elif _WATCHED in sys.modules:
        _watch(sys.modules[_WATCHED])
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


install()
