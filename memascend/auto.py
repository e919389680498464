"""With this module loaded, the key "memascend" in a DeepSpeed configuration is enough.

It is loaded by `import memascend.auto`, or by nothing at all: torch loads the entry points of its group
`torch.backends` at the end of `import torch`, and ours names this module (TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns torch's
loading off). Nothing is imported and nothing changed until DeepSpeed has been imported, and DeepSpeed is left alone
until it is given a configuration with that key.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_WATCHED = "deepspeed"


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
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            _watch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _SpecInProgress(importlib.machinery.ModuleSpec):
    """Spec of a module that is being imported right now, as DeepSpeed is when it imports torch: Python clears
    ``_initializing`` at its end, and that is when we look at it.
    """

    @property
    def _initializing(self) -> bool:
        return self.__dict__.get("_initializing", False)

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        self.__dict__["_initializing"] = value
        module = sys.modules.get(self.name)
        if not value and hasattr(module, "initialize"):  # an import that failed leaves none
            _watch(module)


def _watch(deepspeed: Any) -> None:
    from memascend.integrations.drop_in import watch

    watch(deepspeed)


def install() -> None:
    """Wait for DeepSpeed. Calling it again changes nothing; torch calls it."""
    spec = getattr(sys.modules.get(_WATCHED), "__spec__", None)
    if getattr(spec, "_initializing", False):
        spec.__class__ = _SpecInProgress
    elif _WATCHED in sys.modules:
        _watch(sys.modules[_WATCHED])
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


install()
