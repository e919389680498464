"""Activation by the key "memascend" in a DeepSpeed configuration, without a call of `memascend.enable`.

`deepspeed.zero.Init` and `deepspeed.initialize` look into the configuration that they are given: the first of them that
sees the key enables memascend for the process. The Hugging Face Trainer, Accelerate and plain scripts all call one of
the two.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from memascend.integrations.configuration import read_configuration
from memascend.integrations.conventions import CONFIG_KEY, is_logging_rank
from memascend.suggestions import refuse_misspelled

log = logging.getLogger("memascend")
# The Enabled object, then the section that requested it and those that came too late.
_enabled_by_key: list[Any] = []
# Variables that deepspeed.comm.init_distributed requires, and those of environments that it recognises without them.
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
_NO_LAUNCHER = {"AZUREML_EXPERIMENT_ID", "SM_TRAINING_ENV"}
_CONFIG_ARGUMENTS = ("config", "config_dict_or_path", "config_params")


def watch(deepspeed: Any) -> None:
    """Look into every configuration that DeepSpeed is given from now on. Idempotent."""
    if getattr(deepspeed.initialize, "watched_by_memascend", False):
        return
    init = deepspeed.zero.Init
    stock_init, stock_initialize = init.__init__, deepspeed.initialize

    @functools.wraps(stock_init)
    def watched_init(*args: Any, **kwargs: Any) -> None:
        _enable_if_asked(stock_init, args, kwargs)
        if kwargs.get("enabled", True):
            _require_launcher()
        stock_init(*args, **kwargs)

    @functools.wraps(stock_initialize)
    def watched_initialize(*args: Any, **kwargs: Any) -> Any:
        asked = _enable_if_asked(stock_initialize, args, kwargs)
        if kwargs.get("dist_init_required") is not False:
            _require_launcher()
        if asked:
            return deepspeed.initialize(*args, **kwargs)  # enable may have replaced it
        return stock_initialize(*args, **kwargs)

    watched_initialize.watched_by_memascend = True
    init.__init__, deepspeed.initialize = watched_init, watched_initialize


def _enable_if_asked(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Enable memascend if the arguments of this call contain a configuration with the key; return whether it did."""
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return False  # DeepSpeed's own error names the unknown argument
    candidates = [given.get(name) for name in _CONFIG_ARGUMENTS]
    candidates.append(getattr(given.get("args"), "deepspeed_config", None))  # the launcher's --deepspeed_config
    config = next((found for value in candidates if (found := read_configuration(value)) is not None), {})
    refuse_misspelled(config, CONFIG_KEY)
    if CONFIG_KEY not in config:
        return False
    # Imported only here: a script that does not use the key must not be affected by an installed memascend.
    from memascend.integrations.deepspeed import active, enable
    from memascend.integrations.deepspeed.config import switched_off

    if active() is not None:
        _warn_of_another_choice(active(), config[CONFIG_KEY])
        return False
    if switched_off(config):
        return False
    _enabled_by_key[:] = [enable(config), config[CONFIG_KEY]]
    return True


def _require_launcher() -> None:
    """Raise RuntimeError if memascend is enabled and the process was started without a launcher.

    DeepSpeed would ask MPI for the missing variables and fail with "No module named 'mpi4py'".
    """
    hooks = sys.modules.get("memascend.integrations.deepspeed.hooks")
    if hooks is None or hooks.active() is None:
        return
    import torch

    if torch.distributed.is_initialized() or not _NO_LAUNCHER.isdisjoint(os.environ):
        return
    missing = [name for name in _LAUNCHED if name not in os.environ]
    if missing and importlib.util.find_spec("mpi4py") is None:
        script = sys.argv[0] if os.path.isfile(sys.argv[0]) else "SCRIPT"
        raise RuntimeError(
            f"memascend: this process was started without a launcher ({', '.join(missing)} not set), which DeepSpeed "
            f"needs even for one process; start it with: torchrun --nproc_per_node 1 {script}"
        )


def _warn_of_another_choice(enabled: Any, section: Any) -> None:
    """Warn, once per section, of a second configuration with other choices than the one in use."""
    if not _enabled_by_key or _enabled_by_key[0] is not enabled or section in _enabled_by_key[1:]:
        return
    _enabled_by_key.append(section)  # warn only once
    if is_logging_rank():
        log.warning(
            'memascend: "%s": %r is ignored: this process is already enabled with %r of its first configuration; call '
            "memascend.disable() in between, or use the same configuration",
            CONFIG_KEY,
            section,
            _enabled_by_key[1],
        )
