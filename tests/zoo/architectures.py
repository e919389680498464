"""Every architecture of transformers that has a language model, built with small sizes.

A configuration is the default one of its class with the usual names of widths, depths and counts set to small values,
in nested configurations, too. An architecture that cannot be built that way, or not small, is reported with the reason.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import configuration_auto, modeling_auto

WORDS, LENGTH, MOST_PARAMETERS = 96, 12, 5_000_000
KINDS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "encoder": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}
# The twenty architectures with the most models on the hub, by family.
MOST_USED = (
    ("causal", "llama"), ("causal", "mistral"), ("causal", "qwen2"), ("causal", "qwen3"), ("causal", "gemma2"),
    ("causal", "gemma3_text"), ("causal", "phi3"), ("causal", "gpt2"), ("causal", "gpt_neox"), ("causal", "opt"),
    ("causal", "bloom"), ("causal", "falcon"), ("causal", "mixtral"), ("causal", "qwen3_moe"), ("causal", "olmo2"),
    ("causal", "starcoder2"), ("seq2seq", "t5"), ("seq2seq", "bart"), ("encoder", "bert"), ("encoder", "roberta"),
)  # fmt: skip

_SIZES: list[tuple[str, int]] = [
    (r"(moe|expert|shared)\w*_(intermediate|ffn\w*|hidden)_size|expert_\w*dim|\w*_expert_dim", 16),
    (r"hidden_size|d_model|n_embd|dim|model_dim|embed_dim|emb_dim|d_embed|embedding_size|encoder_embed_dim", 32),
    (r"decoder_embed_dim|hidden_dim|decoder_hidden_size|adapter_dim|input_embedding_size", 32),
    (r"\w*intermediate_size\w*|\w*ffn_dim|d_ff|n_inner|ffn_hidden_size|mlp_dim|ffn_size|feed_forward\w*", 64),
    (r"(encoder|decoder|num_encoder|num_decoder)_layers", 2),
    (r"num_hidden_layers|n_layers?|num_layers|num_blocks|num_mem_blocks", 4),
    (r"num_attention_heads|n_heads?|num_heads|\w*(en|de)coder_attention_heads|attention_heads", 4),
    (r"num_key_value_heads|num_kv_heads|multi_query_group_num|num_attention_groups", 2),
    (r"head_dim|attention_head_size|d_kv|kv_channels|attention_head_dim", 8),
    (r"vocab_size|\w*_vocab_size|vocab_size_per_layer_input", WORDS),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_\w*positions|max_sequence_length", 64),
    (r"num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_routed_experts", 4),
    (r"num_experts_per_tok\w*|top_k|moe_top_?k|moe_k|num_selected_experts|router_top_k|experts_per_token", 2),
    (r"n_group|topk_group|n_shared_experts|num_expert_groups?|num_shared_experts|first_k_dense_replace", 1),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank|laurel_rank|hidden_size_per_layer_input|dt_rank|rank", 8),
    (r"qk_nope_head_dim|v_head_dim|qk_head_dim|index_head_dim|linear_\w*head_dim|global_head_dim", 8),
    (r"qk_rope_head_dim|rotary_dim|partial_rotary_dim", 8),
    (r"linear_num_(key|value)_heads|index_n_heads|num_global_key_value_heads", 2),
    (r"index_topk|sliding_window|attention_chunk_size|local_attention|window_size|block_size", 8),
    (r"state_size|mamba_d_state|ssm_state_size|mamba_headdim|mamba_d_head|mamba_head_dim", 8),
    (r"mamba_n_heads|n_mamba_heads|mamba_num_heads", 8),
    (r"mamba_n_groups|n_groups", 1),
    (r"image_size", 16),
    (r"patch_size", 8),
]
_RULES = [(re.compile(pattern), value) for pattern, value in _SIZES]

# Values that those sizes do not determine.
_HEADS = ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash")
_ROPE_BY_KIND = {
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")
    }
}
_MORE: dict[str, dict[str, Any]] = {
    **{name: {"decoder_start_token_id": 0} for name in ("t5", "mt5", "umt5", "longt5", "switch_transformers")},
    **{name: {"use_cache": False} for name in ("bamba", "jamba", "granitemoehybrid", "kimi_linear", "bailing_hybrid")},
    **{name: {"num_key_value_heads": 4} for name in (*_HEADS, "minicpm3", "nemotron", "youtu")},
    **{name: {"head_dim": 8} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "dots3_note_text": {"num_key_value_heads": 4, "use_sliding_window": False},
    "esmc": {"num_key_value_heads": 4},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "big_bird": {"attention_type": "original_full"},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, **_ROPE_BY_KIND},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "esm": {"vocab_size": WORDS},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "intermediate_size": [64] * 4,
        "activation_sparsity_pattern": [0.95, 0.0] * 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"num_key_value_heads": 4, "qk_head_dim": 16},
    "mamba2": {"num_heads": 8},
    "neomme": {"head_dim": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
        "ngram_vocab_size_base": 64,
    },
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX", "de_DE"]},
}


class NotBuilt(Exception):
    """The reason why an architecture is not among those that are tested."""


@dataclass(frozen=True)
class Architecture:
    kind: str
    name: str  # transformers' model_type

    @property
    def id(self) -> str:
        return f"{self.kind}-{self.name}"

    def make(self, seed: int = 0) -> Wrapped:
        """Build a small model with random weights of that seed, in training mode. Raises NotBuilt."""
        chosen = KINDS[self.kind][self.name]
        name = chosen if isinstance(chosen, str) else chosen[0]
        with _quiet():
            try:
                of = getattr(transformers, name)
                config = configuration_auto.CONFIG_MAPPING[self.name]
                # A model of images or sounds may also have a causal one of its text alone.
                config = small(config if issubclass(config, of.config_class) else of.config_class)
                with torch.device("meta"):
                    numel = sum(p.numel() for p in of(config).parameters())
                if numel <= MOST_PARAMETERS:
                    torch.manual_seed(seed)
                    return Wrapped(of(config).train())
            except Exception as error:
                raise NotBuilt(f"{type(error).__name__}: {_first_line(error)}") from error
        raise NotBuilt(f"{numel / 1e6:.0f} million parameters")

    def try_in_memory(self) -> None:
        """Raise NotBuilt if token numbers alone do not give a loss that can be trained on and that is reproducible."""
        model = self.make()
        losses = []
        with _quiet():
            try:
                for _ in range(2):
                    torch.manual_seed(0)
                    losses.append(model(batch(0)))
                losses[0].backward()
            except Exception as error:
                raise NotBuilt(f"in memory: {type(error).__name__}: {_first_line(error)}") from error
        if losses[0] != losses[1] and not losses[0].isnan():
            raise NotBuilt("in memory: two passes from one seed give different losses")


ARCHITECTURES = [Architecture(kind, name) for kind, names in KINDS.items() for name in names]


class Wrapped(nn.Module):
    """Maps token numbers to a loss, as a loop would."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out = self.model(input_ids=ids, labels=ids)
        if getattr(out, "loss", None) is not None:
            return out.loss
        return nn.functional.cross_entropy(out.logits.flatten(0, -2).float(), ids.flatten())


def batch(number: int) -> torch.Tensor:
    """Return token numbers of shape (2, LENGTH), without the lowest, which are special."""
    return torch.randint(5, WORDS - 4, (2, LENGTH), generator=torch.Generator().manual_seed(number))


def small(of: type) -> Any:
    """Return a small configuration of that class."""
    with _quiet():
        default = of()
    return of(**_overrides(default))


def _overrides(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, transformers.PretrainedConfig):
            nested = small_dict(value)
            found[name] = nested
        elif isinstance(value, int) and not isinstance(value, bool):
            if (size := next((v for rule, v in _RULES if rule.fullmatch(name)), None)) is not None:
                found[name] = size
            elif name.endswith("_token_id") and value >= WORDS:
                found[name] = 1
        elif value is None and name in ("pad_token_id",):
            found[name] = 0
        elif name.endswith("_token_id") and isinstance(value, list):
            found[name] = [min(each, 1) for each in value]
    return {**found, **_MORE.get(config.model_type, {})}


def small_dict(config: Any) -> dict[str, Any]:
    """Return a small nested configuration as a dict."""
    return {"model_type": config.model_type, **_overrides(config)}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:160]


@contextlib.contextmanager
def _quiet():
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)
