"""With this module loaded, the key "memascend" in a DeepSpeed configuration is enough.

It is loaded by `import memascend.auto`, or by nothing at all: torch loads the entry points of its group
`torch.backends` at the end of `import torch`, and ours names this module (TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns torch's
loading off). Nothing is imported and nothing changed until DeepSpeed has been imported, and DeepSpeed is left alone
until it is given a configuration with that key.

Since all this happens inside `import torch` and `import deepspeed`, an error here is logged and never raised.
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
    """What ``action`` returns; None, and a line in the log, where it fails."""
    try:
        return action(*args)
    except Exception as error:
        if os.environ.get("RANK", "0") == "0":  # is_logging_rank() may be in what cannot be imported
            log.warning(
                'memascend: the key "memascend" in DeepSpeed configurations will be ignored (%s: %s); call '
                "memascend.enable(ds_config) before deepspeed.initialize, or reinstall memascend",
                type(error).__name__,
                error,
            )
        return None


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing itself; the loader that the others find for DeepSpeed tells us when it is done.

    Asked as often as somebody looks whether DeepSpeed is there (transformers and Accelerate do), imported or not.
    """

    _asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _WATCHED or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)  # its errors are those of the import itself
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
    """Spec of a module that is being imported right now, as DeepSpeed is when it imports torch: Python clears
    ``_initializing`` at its end, and that is when we look at it.
    """

    @property
    def _initializing(self) -> bool:
        return bool(self.__dict__.get("_initializing", False))

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        self.__dict__["_initializing"] = value
        module = sys.modules.get(self.name)
        if not value and hasattr(module, "initialize"):  # an import that failed leaves none
            _logged(_watch, module)


def _watch(deepspeed: Any) -> None:
    from memascend.integrations.drop_in import watch

    watch(deepspeed)


def install() -> None:
    """Wait for DeepSpeed. Calling it again changes nothing; torch calls it."""
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
