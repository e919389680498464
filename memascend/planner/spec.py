"""What a model is made of, from its configuration alone: names and shapes of every parameter, and its twins.

No torch and no transformers here: a plan must work on a machine that has neither a GPU nor the model's weights.
Shapes follow the Hugging Face classes (checked name by name against them in the tests). Experts of a mixture are listed
one matrix each, as transformers stores them through 4.57 and MemAscend counts them; transformers 5 fuses them.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from memascend.planner.layouts import LAYOUTS, UNCLASSED_KEYS, TensorSpec, named_tensors

__all__ = ["ModelSpec", "TensorSpec", "known_models", "model_spec", "named_tensors"]

# Sizes that a twin divides (DESIGN, Words: Twin). Everything else stays: layers, heads, experts, rope, context limits.
_TWIN_SIZES = ("hidden", "intermediate", "vocab", "head_dim", "expert_intermediate", "shared_intermediate")
_HF_KEYS = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
    "head_dim": "head_dim",
    "expert_intermediate": "moe_intermediate_size",
    "shared_intermediate": "shared_expert_intermediate_size",
}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Sizes of one decoder model. `intermediate` is the dense feed-forward size, 0 where no layer has one."""

    name: str  # the committed name, or the folder's for a local configuration
    display: str  # as papers print it: Qwen2.5-7B
    model_type: str
    hidden: int
    intermediate: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    experts: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    experts_per_token: int = 0
    k: int = 1  # twin divisor: every matrix is 1/k^2 of the original's
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def label(self) -> str:
        return self.name if self.k == 1 else f"{self.name}-k{self.k}"

    @cached_property
    def _tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(LAYOUTS[self.model_type](self))

    def tensors(self) -> list[TensorSpec]:
        """Every parameter, in the order in which a forward pass meets it; a tied output matrix is not listed twice."""
        return list(self._tensors)

    @property
    def parameters(self) -> int:
        return sum(tensor.numel for tensor in self._tensors)

    def largest(self) -> TensorSpec:
        """The largest tensor: the embedding in every model of the papers."""
        return max(self._tensors, key=lambda tensor: tensor.numel)

    def twin(self, k: int) -> ModelSpec:
        """The same model with widths divided by k: layers, heads, KV heads and experts stay, matrices shrink by k^2.

        Raises ValueError where k is no power of two (power-of-two rounding would waste another fraction), where a size
        is not divisible, or where head_dim / k is odd (rotary embedding needs pairs).
        """
        if k < 1 or k & (k - 1):
            raise ValueError(f"twin divisor {k} of {self.label} is not a power of two: take 2, 4, 8, 16 ...")
        for field in _TWIN_SIZES:
            size = getattr(self, field)
            if size % k:
                key = _HF_KEYS[field]
                raise ValueError(f"{self.label} has no twin at k = {k}: {key} {size} is not divisible by it")
        if (self.head_dim // k) % 2:
            raise ValueError(
                f"{self.label} has no twin at k = {k}: head_dim {self.head_dim} / {k} = {self.head_dim // k} is odd, "
                "and rotary embedding needs pairs"
            )
        sizes = {field: getattr(self, field) // k for field in _TWIN_SIZES}
        return dataclasses.replace(self, **sizes, k=self.k * k)

    def hf_config_dict(self) -> dict[str, Any]:
        """The Hugging Face configuration, for `transformers.AutoConfig.for_model(**spec.hf_config_dict())`."""
        out = {key: value for key, value in self.config.items() if not key.startswith("_")}
        for field, key in _HF_KEYS.items():
            if key in out:
                out[key] = getattr(self, field)
        if self.head_dim * self.heads != self.hidden or "head_dim" in out:
            out["head_dim"] = self.head_dim
        return out


def known_models() -> list[str]:
    """Names of the committed configurations."""
    folder = resources.files("memascend.planner") / "models"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def model_spec(name_or_path: str | Path) -> ModelSpec:
    """The model of a committed name, a display or hub name (Qwen/Qwen2.5-7B), a config.json or a folder with one.

    Raises ValueError, in one line, for an unknown name (nearest and known names listed), an unreadable configuration,
    a missing or impossible size, or an architecture with a tensor that we cannot class.
    """
    path = Path(name_or_path)
    if path.suffix == ".json" or (path / "config.json").is_file():
        return _from_file(path if path.suffix == ".json" else path / "config.json")
    wanted = _normalise(str(name_or_path))
    for name in known_models():
        config = _committed(name)
        extra = config["_memascend"]
        if wanted in {_normalise(name), _normalise(extra["display"]), _normalise(extra["hub"])}:
            return spec_from_config(config, name=name, display=extra["display"])
    if path.is_dir():
        raise ValueError(f"the folder {path} holds no config.json")
    raise ValueError(_unknown(str(name_or_path)))


def spec_from_config(config: Mapping[str, Any], *, name: str, display: str) -> ModelSpec:
    """A ModelSpec from the keys of a Hugging Face config.json."""
    model_type = str(config.get("model_type", ""))
    _refuse_unclassed(config, model_type, name)
    size = _reader(config, name)
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    head_dim = size("head_dim", default=0)
    if not head_dim and hidden % heads:
        raise ValueError(f"{name}: hidden_size {hidden} is not divisible by num_attention_heads {heads}; set head_dim")
    experts = size("num_experts", default=0) or size("num_local_experts", default=0)
    kv_heads = size("num_key_value_heads", default=heads) or heads
    if heads % kv_heads:
        raise ValueError(f"{name}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return ModelSpec(
        name=name,
        display=display,
        model_type=model_type,
        hidden=hidden,
        intermediate=size("intermediate_size"),
        vocab=size("vocab_size"),
        layers=size("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        tied=bool(config.get("tie_word_embeddings", model_type in ("gemma", "gemma2"))),
        experts=experts,
        expert_intermediate=size("moe_intermediate_size", default=size("intermediate_size")) if experts else 0,
        shared_intermediate=size("shared_expert_intermediate_size", default=0) if experts else 0,
        experts_per_token=size("num_experts_per_tok", default=2) if experts else 0,
        config=dict(config),
    )


def _committed(name: str) -> dict[str, Any]:
    return json.loads((resources.files("memascend.planner") / "models" / f"{name}.json").read_text(encoding="utf-8"))


def _from_file(path: Path) -> ModelSpec:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the model configuration {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"the model configuration {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"the model configuration {path} is not a JSON object")
    name = path.stem if path.name != "config.json" else path.resolve().parent.name
    return spec_from_config(config, name=name, display=name)


def _normalise(name: str) -> str:
    return name.rsplit("/", 1)[-1].lower().replace("-", "").replace("_", "")


def _unknown(name: str) -> str:
    known = known_models()
    short = name.rsplit("/", 1)[-1].lower()
    near = difflib.get_close_matches(short, known, n=1, cutoff=0.6)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"unknown model '{name}'{hint}. Known: {', '.join(known)}; or a config.json or a folder with one"


def _refuse_unclassed(config: Mapping[str, Any], model_type: str, name: str) -> None:
    for key, tensor in UNCLASSED_KEYS.items():
        if config.get(key):
            raise ValueError(f"{name} ({model_type}): cannot class the tensor {tensor} that its key '{key}' implies")
    if model_type not in LAYOUTS:
        raise ValueError(
            f"{name}: architecture '{model_type or 'not given'}' has no layout rule, so not one of its tensors can be "
            f"classed (first: the embedding). Known: {', '.join(sorted(LAYOUTS))}"
        )


def _reader(config: Mapping[str, Any], name: str) -> Callable[..., int]:
    def size(key: str, default: int | None = None) -> int:
        value = config.get(key, default)
        if value is None and default is not None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < (1 if default is None else 0):
            raise ValueError(f"{name}: the configuration key '{key}' must be a positive integer, got {value!r}")
        return value

    return size
