"""The key "memascend" in a DeepSpeed configuration, where nobody calls `memascend.enable`.

`deepspeed.zero.Init` and `deepspeed.initialize` look into the configuration that they are given: the first of them that
sees the key enables memascend for the process. The Hugging Face Trainer, Accelerate and plain scripts all come by here.
"""

from __future__ import annotations

import base64
import functools
import inspect
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONFIG_KEY = "memascend"  # the key in the DeepSpeed JSON

log = logging.getLogger("memascend")
_enabled_by_key: list[Any] = []  # what is enabled, then the section that asked for it and those that came too late
_CONFIG_ARGUMENTS = ("config", "config_dict_or_path", "config_params")


def watch(deepspeed: Any) -> None:
    """Look into every configuration that DeepSpeed is given from now on. Watching twice is once."""
    if getattr(deepspeed.initialize, "watched_by_memascend", False):
        return
    init = deepspeed.zero.Init
    stock_init, stock_initialize = init.__init__, deepspeed.initialize

    @functools.wraps(stock_init)
    def watched_init(*args: Any, **kwargs: Any) -> None:
        _enable_if_asked(stock_init, args, kwargs)
        stock_init(*args, **kwargs)

    @functools.wraps(stock_initialize)
    def watched_initialize(*args: Any, **kwargs: Any) -> Any:
        if _enable_if_asked(stock_initialize, args, kwargs):
            return deepspeed.initialize(*args, **kwargs)  # what enable made of it
        return stock_initialize(*args, **kwargs)

    watched_initialize.watched_by_memascend = True
    init.__init__, deepspeed.initialize = watched_init, watched_initialize


def _enable_if_asked(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    candidates = [given.get(name) for name in _CONFIG_ARGUMENTS]
    candidates.append(getattr(given.get("args"), "deepspeed_config", None))  # the launcher's --deepspeed_config
    config = next((found for value in candidates if (found := _as_dict(value)) is not None), {})
    if CONFIG_KEY not in config:
        return False
    # Only now: whoever does not use the key must not notice that memascend is installed.
    from memascend.integrations.deepspeed import active, enable
    from memascend.integrations.deepspeed.parts import switched_off

    if active() is not None:
        _warn_of_another_choice(active(), config[CONFIG_KEY])
        return False
    if switched_off(config):
        return False
    _enabled_by_key[:] = [enable(config), config[CONFIG_KEY]]
    return True


def speaks() -> bool:
    """Whether this process is the one of a job that logs what holds for all its ranks."""
    return os.environ.get("RANK", "0") == "0"


def _warn_of_another_choice(enabled: Any, section: Any) -> None:
    if not _enabled_by_key or _enabled_by_key[0] is not enabled or section in _enabled_by_key[1:]:
        return
    _enabled_by_key.append(section)  # said once
    if speaks():
        log.warning(
            'memascend: "%s": %r comes too late, this process runs with %r of its first configuration; call '
            "memascend.disable() between the two, or give both the same",
            CONFIG_KEY,
            section,
            _enabled_by_key[1],
        )


def _as_dict(config: Any) -> dict[str, Any] | None:
    """A configuration as DeepSpeed takes it: a dict, a path, or JSON in base64; None for what is none of these."""
    if isinstance(config, dict):
        return config
    if not isinstance(config, str | Path):
        return None
    try:
        text = Path(config).read_text() if _is_file(config) else base64.urlsafe_b64decode(str(config)).decode()
        found = json.loads(text)
    except (OSError, ValueError):
        return None  # DeepSpeed says what is wrong with it
    return found if isinstance(found, dict) else None


def _is_file(name: str | Path) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # too long for a name, as JSON in base64 is
        return False
