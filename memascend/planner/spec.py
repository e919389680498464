"""Model specifications from a configuration alone: names and shapes of all parameters, and the model's twins.

This module imports neither torch nor transformers: a plan must work on a machine that has neither a GPU nor the model's
weights. Shapes follow the Hugging Face classes (the tests compare them name by name). The experts of a mixture are
listed as separate matrices, as transformers stores them up to 4.57 and MemAscend counts them; `fused()` lists them as
transformers 5 does.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from memascend.planner.layouts import COVERED_KEYS, LAYOUTS, UNCLASSED_KEYS
from memascend.planner.tensors import TensorSpec, named_tensors
from memascend.suggestions import did_you_mean

# Sizes that a twin divides (DESIGN, Words: Twin). Layers, heads, experts, rope and context limits are unchanged.
_TWIN_SIZES = ("hidden", "intermediate", "vocab", "head_dim", "expert_intermediate", "shared_intermediate")
_HF_KEYS = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
    "head_dim": "head_dim",
    "expert_intermediate": "moe_intermediate_size",
    "shared_intermediate": "shared_expert_intermediate_size",
    "layers": "num_hidden_layers",
}
# Names of the same sizes in older architectures.
_ALIASES = {
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "num_experts": ("num_local_experts", "n_routed_experts"),
}
# Classes whose configuration ties the output matrix to the embedding unless it says otherwise.
_TIED_BY_DEFAULT = ("gemma", "gemma2", "gpt2", "opt")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Sizes of one decoder model. `intermediate` is the dense feed-forward size, 0 if no layer has one."""

    name: str  # the committed name, or the folder's name for a local configuration
    display: str  # the name as papers print it, such as Qwen2.5-7B
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
    fused_experts: bool = False  # as in transformers 5: two tensors per block instead of three per expert
    k: int = 1  # twin divisor: every matrix has 1/k^2 of the original's elements
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def label(self) -> str:
        """Name of the model, with -k<K> for a twin."""
        return self.name if self.k == 1 else f"{self.name}-k{self.k}"

    @cached_property
    def _tensors(self) -> tuple[TensorSpec, ...]:
        if self.model_type in LAYOUTS:
            return tuple(LAYOUTS[self.model_type](self))
        return tuple(named_tensors(_class_on_meta(self.name, self.hf_config_dict()).shapes))

    def tensors(self) -> list[TensorSpec]:
        """Return all parameters in the order of a forward pass; a tied output matrix is not listed twice."""
        return list(self._tensors)

    @cached_property
    def parameters(self) -> int:
        """Number of parameters; a tied output matrix is counted once."""
        return sum(tensor.numel for tensor in self._tensors)

    def largest(self) -> TensorSpec:
        """Return the largest tensor, which is the embedding in every model of the papers."""
        return max(self._tensors, key=lambda tensor: tensor.numel)

    def twin(self, k: int) -> ModelSpec:
        """Return the same model with widths divided by k, so that matrices shrink by k^2.

        The numbers of layers, heads, KV heads and experts stay. Raises ValueError if k is not a power of two
        (power-of-two rounding would waste a different fraction), if a size is not divisible by k, if head_dim / k is
        odd (rotary embedding needs pairs), or for latent attention.
        """
        if k < 1 or k & (k - 1):
            raise ValueError(f"twin divisor {k} of {self.label} is not a power of two: take 2, 4, 8, 16 ...")
        if "kv_lora_rank" in self.config and k > 1:
            raise ValueError(
                f"{self.label} has no twin: the ranks of its latent attention do not scale with its widths"
            )
        for field in _TWIN_SIZES:
            size = getattr(self, field)
            if size % k:
                key = _HF_KEYS[field]
                raise ValueError(
                    f"{self.label} has no twin at k = {k}: {key} {size} is not divisible by it; take a smaller k"
                )
        if (self.head_dim // k) % 2:
            raise ValueError(
                f"{self.label} has no twin at k = {k}: head_dim {self.head_dim} / {k} = {self.head_dim // k} is odd, "
                "and rotary embedding needs pairs; take a smaller k"
            )
        sizes = {field: getattr(self, field) // k for field in _TWIN_SIZES}
        return dataclasses.replace(self, **sizes, k=self.k * k)

    def fused(self, fused: bool = True) -> ModelSpec:
        """Return the same model with its experts stored as in transformers 5, or as separate matrices.

        Dense models are unchanged. If the shapes come from the real class (no layout rule), its experts stay as the
        installed transformers stores them.
        """
        return dataclasses.replace(self, fused_experts=fused and self.experts > 0)

    def hf_config_dict(self) -> dict[str, Any]:
        """Return the Hugging Face configuration, for `transformers.AutoConfig.for_model(**spec.hf_config_dict())`."""
        out = {key: value for key, value in self.config.items() if not key.startswith("_")}
        for field, key in _HF_KEYS.items():
            for name in (key, *_ALIASES.get(key, ())):
                if out.get(name) is not None:
                    out[name] = getattr(self, field)
        if out.get("layer_types"):
            out["layer_types"] = out["layer_types"][: self.layers]
        if "word_embed_proj_dim" in out:
            out["word_embed_proj_dim"] = self.hidden
        plain = self.head_dim * self.heads == self.hidden and "head_dim" not in out
        if not plain and "kv_lora_rank" not in out:  # with latent attention head_dim is that of the rotary part
            out["head_dim"] = self.head_dim
        return out


def known_models() -> list[str]:
    """Return the names of the committed configurations."""
    folder = resources.files("memascend.planner") / "models"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def fused_experts(experts: str) -> bool:
    """Return whether experts are fused: as requested, or for "auto" as the installed transformers stores them.

    Without transformers, "auto" means separate experts.
    """
    if experts != "auto":
        return experts == "fused"
    try:
        return int(metadata.version("transformers").partition(".")[0]) >= 5
    except (metadata.PackageNotFoundError, ValueError):
        return False


def model_spec(name_or_path: str | Path) -> ModelSpec:
    """Return the model of a committed name, a display or hub name (Qwen/Qwen2.5-7B), a config.json or its folder.

    Raises a one-line ValueError for an unknown name (with the nearest and all known names), an unreadable
    configuration, a missing or impossible size, or an architecture with a tensor that cannot be classified.
    """
    path = Path(name_or_path)
    if path.suffix == ".json" or (path / "config.json").is_file():
        return _from_file(path if path.suffix == ".json" else path / "config.json")
    wanted = _normalise(str(name_or_path))
    for name in known_models():
        config = _committed(name)
        extra = config["_memascend"]
        if wanted in {_normalise(name), _normalise(extra["display"]), _normalise(extra["hub"])}:
            return _committed_spec(name)
    if path.is_dir():
        raise ValueError(f"the folder {path} holds no config.json; name a model's folder, or a known model")
    if path.is_file():
        raise ValueError(f"{path} is no model configuration: name a config.json, a folder with one, or a known model")
    if str(name_or_path).startswith((".", "/", "~")):
        raise ValueError(f"there is no {name_or_path}: name a model's folder or its config.json, or a known model")
    raise ValueError(_unknown(str(name_or_path)))


@cache
def _committed_spec(name: str) -> ModelSpec:
    config = _committed(name)
    return spec_from_config(config, name=name, display=config["_memascend"]["display"])


def spec_from_config(config: Mapping[str, Any], *, name: str, display: str) -> ModelSpec:
    """Return a ModelSpec from the keys of a Hugging Face config.json.

    An architecture without a layout rule is read from its real class on the meta device, if transformers is installed.
    Raises a one-line ValueError for missing or impossible sizes and for tensors that cannot be classified.
    """
    model_type = str(config.get("model_type", ""))
    _refuse_unclassed(config, model_type, name)
    sizes = dict(config) if model_type in LAYOUTS else _class_on_meta(name, config).sizes | dict(config)
    size = _reader(sizes, name)
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    head_dim = size("head_dim", default=0)
    if "kv_lora_rank" in config:
        head_dim = size("qk_nope_head_dim") + size("qk_rope_head_dim")
    if not head_dim and hidden % heads:
        raise ValueError(f"{name}: hidden_size {hidden} is not divisible by num_attention_heads {heads}; set head_dim")
    experts = size("num_experts", default=0)
    inner = size("intermediate_size", default=0) or 4 * hidden if model_type == "gpt2" else size("intermediate_size")
    expert_inner = size("moe_intermediate_size", default=inner)
    kv_heads = size("num_key_value_heads", default=heads) or heads
    if heads % kv_heads:
        raise ValueError(f"{name}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    shared = size("shared_expert_intermediate_size", default=size("n_shared_experts", default=0) * expert_inner)
    spec = ModelSpec(
        name=name,
        display=display,
        model_type=model_type,
        hidden=hidden,
        intermediate=inner,
        vocab=size("vocab_size"),
        layers=size("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        tied=bool(sizes.get("tie_word_embeddings", model_type in _TIED_BY_DEFAULT)),
        experts=experts,
        expert_intermediate=expert_inner if experts else 0,
        shared_intermediate=shared if experts else 0,
        experts_per_token=size("num_experts_per_tok", default=2) if experts else 0,
        config=dict(config),
    )
    spec.tensors()  # raises here, not later, for a tensor that cannot be classified
    return spec


def _class_on_meta(name: str, config: Mapping[str, Any]) -> Any:
    """Return sizes and shapes of the real class (`memascend.integrations.meta_shapes`).

    Raises ValueError without transformers.
    """
    model_type = config.get("model_type") or "not given"
    try:
        from memascend.integrations.meta_shapes import meta_shapes
    except ImportError:
        known = ", ".join(sorted(LAYOUTS))
        raise ValueError(
            f"{name}: architecture '{model_type}' has no layout rule, and without transformers its class cannot be "
            f"read, so not one of its tensors can be classed; pip install transformers. Known without: {known}"
        ) from None
    return meta_shapes(name, config)


def _committed(name: str) -> dict[str, Any]:
    """Return a committed configuration, with its section `_memascend`."""
    file = resources.files("memascend.planner") / "models" / f"{name}.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return config


def _from_file(path: Path) -> ModelSpec:
    """Return the model of a config.json. Raises a one-line ValueError."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the model configuration {path}: {error.strerror}") from None
    except (RecursionError, ValueError) as error:
        raise ValueError(f"the model configuration {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"the model configuration {path} is not a JSON object")
    name = path.stem if path.name != "config.json" else path.resolve().parent.name
    return spec_from_config(config, name=name, display=name)


def _normalise(name: str) -> str:
    """Return a name without owner, case, hyphens and underscores, by which models are found."""
    return name.rsplit("/", 1)[-1].lower().replace("-", "").replace("_", "")


def _unknown(name: str) -> str:
    known = known_models()
    short = name.rsplit("/", 1)[-1].lower()
    hint = did_you_mean(short, known)
    return f"unknown model '{name}'{hint}. Known: {', '.join(known)}; or a config.json or a folder with one"


def _refuse_unclassed(config: Mapping[str, Any], model_type: str, name: str) -> None:
    """Raise ValueError for an architecture with tensors that no rule covers."""
    covered = COVERED_KEYS.get(model_type, ())
    for key, tensor in UNCLASSED_KEYS.items():
        if config.get(key) and key not in covered:
            raise ValueError(f"{name} ({model_type}): cannot class the tensor {tensor} that its key '{key}' implies")
    if not model_type:
        raise ValueError(
            f"{name}: architecture not given: the configuration has no model_type, so no tensor has a class"
        )


def _reader(config: Mapping[str, Any], name: str) -> Callable[..., int]:
    """Return a function that reads a size by its key or an alias of it. It raises ValueError if the size is missing
    (without a default) or not a positive integer."""

    def size(key: str, default: int | None = None) -> int:
        names = (key, *_ALIASES.get(key, ()))
        value = next((config[name] for name in names if config.get(name) is not None), default)
        if value is None and default is not None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < (1 if default is None else 0):
            raise ValueError(f"{name}: the configuration key '{key}' must be a positive integer, got {value!r}")
        return value

    return size
