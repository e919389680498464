"""Loading of a model whose weights stay in the files of its folder until the streaming engine takes them one by one.

    model = lazy_model("Qwen2.5-7B", torch.bfloat16)     # a second, and no memory
    with streaming("states") as session: session.hook(model) ...   # the weights go from those files into the states

Until then the parameters have a shape and a dtype, and all their elements are views of a single NaN. Dtypes are
converted during the copy.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memascend.engine.mmap_parameters import wait_in
from memascend.integrations.pretrained import configuration, persistent_buffers
from memascend.storage.tensor_folder import StoredTensor, TensorFolder, has_tensor_files

log = logging.getLogger("memascend")


class NotAsStored(ValueError):
    """Raised when the model's tensors differ from those in the files, so that transformers must load it."""


def model_without_values(config: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return a causal LM in training mode, with buffers but no weights: a parameter's elements are one shared NaN."""
    from transformers import PreTrainedModel

    from memascend.integrations.huggingface import causal_lm

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:  # a tied parameter is registered again
            return parameter
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    stock = PreTrainedModel.init_weights
    PreTrainedModel.init_weights = lambda model: model.tie_weights(recompute_mapping=False)
    hook = nn.modules.module.register_module_parameter_registration_hook(without_memory)
    try:
        model = causal_lm({**config, "dtype": str(dtype).removeprefix("torch.")}, checkpointing="none")
    finally:
        hook.remove()
        PreTrainedModel.init_weights = stock
    _on_cpu(model, dtype)
    model.config.use_cache = False
    return model.train()


def _on_cpu(model: nn.Module, dtype: torch.dtype) -> None:
    """Move a model from the meta device to the CPU, with parameters whose elements are all one NaN; tied ones stay
    tied."""
    nothing, made = torch.full((1,), torch.nan, dtype=dtype), {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in made:
                made[parameter] = nn.Parameter(nothing.expand(parameter.shape), parameter.requires_grad)
            module._parameters[name] = made[parameter]


def lazy_model(folder: str | Path, dtype: torch.dtype) -> Any:
    """Return the causal LM in `folder`, in training mode; its weights stay in the files until an engine takes them.

    Raises NotAsStored if transformers would convert the tensors of the files as it loads them (fused experts), if tied
    tensors differ, or if the folder has no safetensors. Raises ValueError, in one line, for a file or tensor that is
    missing, truncated or of another shape.
    """
    folder = Path(folder)
    if not has_tensor_files(folder):
        raise NotAsStored(f"{folder} holds no safetensors")
    model, files = model_without_values(configuration(folder), dtype), TensorFolder(folder)
    if _is_converted(model):
        raise NotAsStored(f"transformers converts the tensors of {type(model).__name__} as it loads them")
    names: dict[nn.Parameter, list[str]] = {}
    used: set[str] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for parameter, known in names.items():
        found = [each for each in (_stored(files, model, name) for name in known) if each is not None]
        if not found:
            raise ValueError(
                f"{folder} has no tensor {known[0]} {tuple(parameter.shape)}, which its config.json requires: copy or "
                "download the folder again"
            )
        for each in found:
            _require_shape(each, tuple(parameter.shape))
        used |= {each.name for each in found}
        if len(found) > 1 and not _equal(found):
            raise NotAsStored(f"{' and '.join(known)} are tied, and have different values in {folder}")
        wait_in(parameter, found[0])
    for name, buffer in persistent_buffers(model):
        if (stored := _stored(files, model, name)) is not None:
            _require_shape(stored, tuple(buffer.shape))
            used.add(stored.name)
            buffer.copy_(stored.flat().view(buffer.shape))
            stored.let_go()
    _warn_of_unused(model, sorted(files.tensors.keys() - used), folder)
    _take_generation_settings(model, folder)
    return model


def _warn_of_unused(model: Any, names: list[str], folder: Path) -> None:
    """Warn of unused tensors, as transformers does: a config.json with fewer layers would otherwise go unnoticed."""
    expected = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    left = [name for name in names if not any(re.search(pattern, name) for pattern in expected)]
    if left:
        log.warning(
            "memascend: %d tensors in %s are not part of the model that its config.json describes, and are skipped "
            "(%s%s): if that is unexpected, copy or download the folder again",
            len(left),
            folder,
            left[0],
            " and others" if len(left) > 1 else "",
        )


def _is_converted(model: Any) -> bool:
    """Return whether transformers has rules that convert the tensors of this model's files as it loads them."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # transformers 4 keeps the names
        return False
    return bool(get_model_conversion_mapping(model, add_legacy=False))


def _stored(files: TensorFolder, model: Any, name: str) -> StoredTensor | None:
    """Return a stored tensor by its name in the model, or by its name without the prefix, as saved without the head."""
    bare = name.removeprefix(f"{model.base_model_prefix}.")
    return files.tensors.get(name) or files.tensors.get(bare)


def _require_shape(stored: StoredTensor, shape: tuple[int, ...]) -> None:
    if stored.shape != shape:
        raise ValueError(
            f"{stored.name} in {stored.path} is {stored.shape}, but its config.json requires {shape}: the two belong "
            "to different models"
        )


def _equal(found: list[StoredTensor]) -> bool:
    """Return whether stored tensors have the same values, and release their pages."""
    same = all(torch.equal(found[0].flat(), other.flat()) for other in found[1:])
    for each in found:
        each.let_go()
    return same


def _take_generation_settings(model: Any, folder: Path) -> None:
    """Give the model the folder's generation_config.json, if it has one."""
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
