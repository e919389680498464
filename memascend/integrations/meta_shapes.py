"""Sizes and parameter shapes of any Hugging Face causal language model, from its class on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "tie_word_embeddings",
)


@dataclass(frozen=True)
class MetaShapes:
    """`sizes`: those sizes that the class has, under the names of a Llama configuration; `shapes`: in module order."""

    sizes: dict[str, Any]
    shapes: list[tuple[str, tuple[int, ...]]]


def meta_shapes(name: str, config: Mapping[str, Any]) -> MetaShapes:
    """Build the class of `config` without storage and return its sizes and shapes.

    Raises ValueError, in one line, if transformers cannot build it as a causal language model.
    """
    settings = {key: value for key, value in config.items() if not key.startswith("_") and key != "architectures"}
    model_type = str(settings.pop("model_type", ""))
    try:
        built = transformers.AutoConfig.for_model(model_type, **settings)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(built)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError) as error:
        reason = " ".join(str(error).split()).partition(" Model type should be one of")[0][:200]
        version = transformers.__version__
        raise ValueError(
            f"{name}: architecture '{model_type}' has no layout rule, and transformers {version} cannot build it as a "
            f"causal language model, so its tensors cannot be classed: {reason}"
        ) from None
    sizes = {key: getattr(built, key, None) for key in _SIZES}
    shapes = [(parameter, tuple(tensor.shape)) for parameter, tensor in model.named_parameters()]
    return MetaShapes({key: value for key, value in sizes.items() if value is not None}, shapes)
