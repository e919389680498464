"""Models as transformers loads them: from a folder, from the hub, or initialised from a configuration."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from memascend.integrations.memory_options import AppliedOptions

_WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json")
_OTHERS = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")


def local_folder(name: str, *, weights: bool = True) -> Path:
    """Return the folder of a model: a local folder as it is, a hub name downloaded or from the cache.

    With `weights` false, a download leaves the weights out. Raises ValueError, in one line, if `name` is neither.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"the folder {path} holds no config.json; name a model's folder or a hub name")
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ValueError(f"there is no folder {name}; name a model's folder or a hub name such as Qwen/Qwen2.5-0.5B")
    return _from_hub(name, [*(_WEIGHTS if weights else ()), *_OTHERS])


def _from_hub(name: str, patterns: list[str]) -> Path:
    """Download the files of a model that match ``patterns``, or find them in the cache. Raises ValueError, in
    one line."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        with _quiet_hub():
            return Path(snapshot_download(name, allow_patterns=patterns))
    except GatedRepoError:
        raise ValueError(
            f"the model {name} is gated on the Hugging Face hub: accept its terms there, and log in with 'hf auth "
            "login'"
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise ValueError(
            f"the hub has no model {name}, or it is private; check the name, or name a local folder"
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
        raise ValueError(
            f"no folder {name}, and the hub cannot be reached for a model of that name; name a local folder with "
            "--model, or try with initialised weights: --random-weights"
        ) from None


@contextlib.contextmanager
def _quiet_hub() -> Iterator[None]:
    from huggingface_hub.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def has_weights(folder: Path) -> bool:
    """Return whether a folder has files of weights in a format that transformers loads."""
    return any(next(folder.glob(pattern), None) for pattern in _WEIGHTS)


def configuration(folder: Path) -> dict[str, Any]:
    """Return a model's configuration as a plain dict, with the defaults that transformers fills in.

    Raises ValueError, in one line, if transformers cannot read it.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder).to_dict()
    except (ValueError, OSError, KeyError) as error:
        raise ValueError(
            f"transformers cannot read {folder}/config.json: {' '.join(str(error).split())[:300]}"
        ) from None


def parameter_shapes(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of a causal LM's parameters (tied ones once) without allocating them.

    Raises ValueError, in one line, for a model that is not a causal LM.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    settings = _config(config)
    if type(settings) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"a model of type '{settings.model_type}' is not a causal language model known to transformers, and "
            "memascend train only fine-tunes those; name another model"
        )
    with torch.device("meta"), _quiet_transformers():
        model = AutoModelForCausalLM.from_config(settings)
    return [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]


def _config(config: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    settings = json.loads(json.dumps(config))
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


_alive: list[Any] = []  # transformers keeps only a weak reference


def partitioned_model(source: Path | dict[str, Any], ds_config: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return a causal LM under ZeRO-3's zero.Init: the weights of a folder, or initialised from a configuration dict.

    Call after memascend.enable and before deepspeed.initialize. Both ways compute the model's buffers alike, so that a
    run that began with initialised weights resumes bit-identically from a checkpoint's folder.
    """
    from transformers.integrations import HfDeepSpeedConfig

    if isinstance(source, dict):
        return _to_train(_initialised(source, ds_config, dtype))
    _alive[:] = [HfDeepSpeedConfig(ds_config)]
    model = _loaded(source, dtype)
    _alive.clear()
    return _to_train(model)


def in_memory_model(
    source: Path | dict[str, Any], dtype: torch.dtype, filled: Callable[[torch.nn.Module], None] | None = None
) -> Any:
    """Return the model of `partitioned_model` whole and in memory, without DeepSpeed, with bit-identical weights.

    An initialised model gets its values from the same random draws in the same order: as soon as a module is registered
    in its parent, and not, as in transformers, once the whole model exists. `filled` is called for each module as soon
    as it has its values, before later modules exist (for a folder: after all have been loaded).
    """
    if isinstance(source, dict):
        return _to_train(_initialised_in_memory(source, dtype, filled))
    model = _loaded(source, dtype)
    for module in model.modules() if filled is not None else ():
        filled(module)
    return _to_train(model)


def _loaded(source: Path, dtype: torch.dtype) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )


def _to_train(model: Any) -> Any:
    model.config.use_cache = False
    model.train()
    return model


def _initialised_in_memory(
    config: dict[str, Any], dtype: torch.dtype, filled: Callable[[torch.nn.Module], None] | None
) -> Any:
    """Return an initialised model that fills each module as it is registered (see `in_memory_model`)."""
    from transformers import PreTrainedModel

    from memascend.integrations.huggingface import causal_lm

    shell, stock = _shell(config), PreTrainedModel.init_weights

    def fill(parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
        if module is not None and _is_filled_by_transformers(module):
            shell._init_weights(module)
        if module is not None and filled is not None:
            filled(module)

    PreTrainedModel.init_weights = lambda model: model.tie_weights(recompute_mapping=False)
    hook = torch.nn.modules.module.register_module_module_registration_hook(fill)
    try:
        return causal_lm({**config, "dtype": str(dtype).removeprefix("torch.")}, checkpointing="none")
    finally:
        hook.remove()
        PreTrainedModel.init_weights = stock


def _is_filled_by_transformers(module: torch.nn.Module) -> bool:
    """Return whether a module has own parameters and no `reset_parameters`: norms, a mixture's experts and routers."""
    return not hasattr(module, "reset_parameters") and next(module.parameters(recurse=False), None) is not None


def _initialised(config: dict[str, Any], ds_config: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return an initialised model under zero.Init; each module is filled before it is partitioned."""
    from deepspeed.runtime.zero.partition_parameters import Init
    from transformers.integrations.deepspeed import prevent_arange_dtype_change

    from memascend.integrations.huggingface import causal_lm

    shell = _shell(config)

    class FillingInit(Init):
        """A zero.Init that fills a module's own parameters before they are partitioned.

        transformers fills a model after constructing it, but under zero.Init the parameters are then partitioned and
        empty. Linear and embedding layers fill themselves (see causal_lm); without this class a mixture's fused experts
        and routers would stay torch.empty or zeros.
        """

        def _post_init_method(self, module: torch.nn.Module) -> None:
            if _is_filled_by_transformers(module):
                shell._init_weights(module)
            super()._post_init_method(module)

    with prevent_arange_dtype_change(), FillingInit(config_dict_or_path=ds_config, dtype=dtype):
        return causal_lm(config, checkpointing="none")


def _shell(config: dict[str, Any]) -> Any:
    """Return an instance of the model's class with its configuration but no modules, for its `_init_weights`.

    Must be made before zero.Init, under which the class must not be imported for the first time.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    settings = _config(config)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
    shell = model_class.__new__(model_class)
    torch.nn.Module.__init__(shell)
    shell.config = settings
    return shell


def apply_options(model: Any, config: Any, allocator: Any, folder: str | None) -> AppliedOptions:
    """Apply attention, loss and checkpointing as the run's `config` names them.

    `allocator` allocates offloaded checkpoints; `folder` receives the activations with checkpointing `ssd`.
    """
    from memascend.activation.options import MINIMUM_BYTES
    from memascend.integrations.memory_options import MemoryOptions, apply_memory_options

    section = config.activation_section()
    if section is not None and config.twin > 1:  # a twin's tensors are smaller, so the size limit is scaled with them
        section["minimum_bytes"] = max(1, MINIMUM_BYTES // config.twin**2)
    options = MemoryOptions(
        attention=config.attention,
        loss=config.loss,
        checkpointing=config.checkpointing,
        activations=section,
    )
    return apply_memory_options(model, options, allocator=allocator, use_reentrant=True, folder=folder)


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, buffer) for every buffer that a model saves in addition to its parameters."""
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def save_configuration(model: Any, folder: Path, tokenizer: Path) -> None:
    """Write config.json and generation_config.json as save_pretrained does, and copy the tokenizer's files."""
    import shutil

    model.config.architectures = [type(model).__name__]
    used = model.config.use_cache
    model.config.use_cache = True
    model.config.save_pretrained(folder)
    model.config.use_cache = used
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    for path in sorted(tokenizer.iterdir()):
        shutil.copy(path, folder / path.name)
