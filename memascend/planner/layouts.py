"""Layout rules: the parameters of each architecture, with the names of its Hugging Face class.

There is one small function per family, and a rule covers exactly what the tests compare with the real classes. Tensors
without a rule are refused by name (`UNCLASSED_KEYS`, `LAYOUTS`), never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from memascend.planner.tensors import TensorSpec

Shapes = Iterator[tuple[str, tuple[int, ...]]]  # (name, shape) pairs

# Configuration keys that imply tensors without a rule below. They are refused by the tensor's name, except for the
# architectures in COVERED_KEYS, whose rule covers them or whose Hugging Face class leaves the tensor out.
UNCLASSED_KEYS = {
    "kv_lora_rank": "self_attn.kv_a_proj_with_mqa.weight (multi-head latent attention)",
    "ssm_cfg": "mixer.in_proj.weight (state-space block)",
    "state_size": "mixer.x_proj.weight (state-space block)",
    "vision_config": "the vision tower's weights",
    "num_nextn_predict_layers": "the multi-token-prediction head",
    "linear_num_value_heads": "linear_attn.in_proj_qkvz.weight (linear attention)",
}
COVERED_KEYS = {
    "deepseek_v2": ("kv_lora_rank",),
    "deepseek_v3": ("kv_lora_rank", "num_nextn_predict_layers"),
}


class Model(Protocol):
    """The attributes of a model that a rule reads: the sizes of `memascend.planner.spec.ModelSpec`."""

    @property
    def name(self) -> str: ...
    @property
    def hidden(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def tied(self) -> bool: ...
    @property
    def experts(self) -> int: ...
    @property
    def expert_intermediate(self) -> int: ...
    @property
    def shared_intermediate(self) -> int: ...
    @property
    def fused_experts(self) -> bool: ...
    @property
    def config(self) -> Mapping[str, Any]: ...


def _decoder(spec: Model, block: Callable[[Model, int], Shapes]) -> list[TensorSpec]:
    """Return embedding, blocks, last norm and, unless it is tied, output matrix of a decoder; `block` is its layout
    rule."""
    out = [TensorSpec("model.embed_tokens.weight", (spec.vocab, spec.hidden), None)]
    for index in range(spec.layers):
        out += [TensorSpec(f"model.layers.{index}.{name}", shape, index) for name, shape in block(spec, index)]
    out.append(TensorSpec("model.norm.weight", (spec.hidden,), None))
    if not spec.tied:
        out.append(TensorSpec("lm_head.weight", (spec.vocab, spec.hidden), None))
    return out


def _linear(name: str, rows: int, columns: int, bias: bool = False) -> Shapes:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _attention(spec: Model, *, qkv_bias: bool, o_bias: bool) -> Shapes:
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield from _linear("self_attn.q_proj", query, spec.hidden, qkv_bias)
    yield from _linear("self_attn.k_proj", key, spec.hidden, qkv_bias)
    yield from _linear("self_attn.v_proj", key, spec.hidden, qkv_bias)
    yield from _linear("self_attn.o_proj", spec.hidden, query, o_bias)


def _head_norms(spec: Model) -> Shapes:
    yield "self_attn.q_norm.weight", (spec.head_dim,)
    yield "self_attn.k_norm.weight", (spec.head_dim,)


def _gated(name: str, hidden: int, inner: int, bias: bool = False) -> Shapes:
    yield from _linear(f"{name}.gate_proj", inner, hidden, bias)
    yield from _linear(f"{name}.up_proj", inner, hidden, bias)
    yield from _linear(f"{name}.down_proj", hidden, inner, bias)


def _norms(spec: Model, *names: str) -> Shapes:
    for name in names or ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.weight", (spec.hidden,)


def _flag(spec: Model, key: str, default: bool = False) -> bool:
    return bool(spec.config.get(key, default))


def _llama(spec: Model, _: int) -> Shapes:
    bias = _flag(spec, "attention_bias")
    yield from _attention(spec, qkv_bias=bias, o_bias=bias)
    yield from _gated("mlp", spec.hidden, spec.intermediate, _flag(spec, "mlp_bias"))
    yield from _norms(spec)


def _mistral(spec: Model, _: int) -> Shapes:
    yield from _attention(spec, qkv_bias=False, o_bias=False)
    yield from _gated("mlp", spec.hidden, spec.intermediate)
    yield from _norms(spec)


def _qwen2(spec: Model, _: int) -> Shapes:
    yield from _attention(spec, qkv_bias=True, o_bias=False)
    yield from _gated("mlp", spec.hidden, spec.intermediate)
    yield from _norms(spec)


def _qwen3(spec: Model, _: int) -> Shapes:
    bias = _flag(spec, "attention_bias")
    yield from _attention(spec, qkv_bias=bias, o_bias=bias)
    yield from _head_norms(spec)
    yield from _gated("mlp", spec.hidden, spec.intermediate)
    yield from _norms(spec)


def _gemma(spec: Model, _: int) -> Shapes:
    bias = _flag(spec, "attention_bias")
    yield from _attention(spec, qkv_bias=bias, o_bias=bias)
    yield from _gated("mlp", spec.hidden, spec.intermediate)
    yield from _norms(spec)


def _gemma2(spec: Model, _: int) -> Shapes:
    bias = _flag(spec, "attention_bias")
    yield from _attention(spec, qkv_bias=bias, o_bias=bias)
    yield from _gated("mlp", spec.hidden, spec.intermediate)
    yield from _norms(
        spec, "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    )


def _phi3(spec: Model, _: int) -> Shapes:
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield from _linear("self_attn.o_proj", spec.hidden, query)
    yield from _linear("self_attn.qkv_proj", query + 2 * key, spec.hidden)
    yield from _linear("mlp.gate_up_proj", 2 * spec.intermediate, spec.hidden)
    yield from _linear("mlp.down_proj", spec.hidden, spec.intermediate)
    yield from _norms(spec)


def _sparse(spec: Model, index: int) -> bool:
    """Return whether a Qwen MoE block has experts, unless `mlp_only_layers` or `decoder_sparse_step` make it dense."""
    step = int(spec.config.get("decoder_sparse_step", 1))
    return spec.experts > 0 and index not in spec.config.get("mlp_only_layers", []) and (index + 1) % step == 0


def _experts(spec: Model, inner: int) -> Shapes:
    """Yield the experts of a block: two tensors as in transformers 5 (`fused_experts`), else one matrix each."""
    if spec.fused_experts:
        yield "mlp.experts.gate_up_proj", (spec.experts, 2 * inner, spec.hidden)
        yield "mlp.experts.down_proj", (spec.experts, spec.hidden, inner)
        return
    for expert in range(spec.experts):
        yield from _gated(f"mlp.experts.{expert}", spec.hidden, inner)


def _router(spec: Model) -> Shapes:
    yield "mlp.gate.weight", (spec.experts, spec.hidden)


def _qwen3_moe(spec: Model, index: int) -> Shapes:
    bias = _flag(spec, "attention_bias")
    yield from _attention(spec, qkv_bias=bias, o_bias=bias)
    yield from _head_norms(spec)
    if _sparse(spec, index):
        # The order within the module: transformers 5 lists fused experts before the router.
        parts = [_experts(spec, spec.expert_intermediate), _router(spec)]
        for part in parts if spec.fused_experts else reversed(parts):
            yield from part
    else:
        yield from _gated("mlp", spec.hidden, spec.intermediate)
    yield from _norms(spec)


def _qwen2_moe(spec: Model, index: int) -> Shapes:
    yield from _attention(spec, qkv_bias=_flag(spec, "qkv_bias", True), o_bias=False)
    if _sparse(spec, index):
        yield from _router(spec)
        yield from _experts(spec, spec.expert_intermediate)
        yield from _gated("mlp.shared_expert", spec.hidden, spec.shared_intermediate)
        yield "mlp.shared_expert_gate.weight", (1, spec.hidden)
    else:
        yield from _gated("mlp", spec.hidden, spec.intermediate)
    yield from _norms(spec)


def _mixtral(spec: Model, _: int) -> Shapes:
    yield from _attention(spec, qkv_bias=False, o_bias=False)
    if spec.fused_experts:
        yield from _router(spec)
        yield from _experts(spec, spec.intermediate)
        yield from _norms(spec)
        return
    yield "block_sparse_moe.gate.weight", (spec.experts, spec.hidden)
    for expert in range(spec.experts):
        name = f"block_sparse_moe.experts.{expert}"
        yield f"{name}.w1.weight", (spec.intermediate, spec.hidden)
        yield f"{name}.w2.weight", (spec.hidden, spec.intermediate)
        yield f"{name}.w3.weight", (spec.intermediate, spec.hidden)
    yield from _norms(spec)


def _latent_attention(spec: Model) -> Shapes:
    """Yield DeepSeek's multi-head latent attention.

    Queries and keys pass through low-rank projections; each head has a rotary part in addition to its plain part.
    """
    key = spec.config
    rope, plain, value = (int(key[name]) for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    rank, query_rank = int(key["kv_lora_rank"]), key.get("q_lora_rank")
    bias = _flag(spec, "attention_bias")
    if query_rank:
        yield from _linear("self_attn.q_a_proj", query_rank, spec.hidden, bias)
        yield "self_attn.q_a_layernorm.weight", (query_rank,)
        yield from _linear("self_attn.q_b_proj", spec.heads * (plain + rope), query_rank)
    else:
        yield from _linear("self_attn.q_proj", spec.heads * (plain + rope), spec.hidden)
    yield from _linear("self_attn.kv_a_proj_with_mqa", rank + rope, spec.hidden, bias)
    yield "self_attn.kv_a_layernorm.weight", (rank,)
    yield from _linear("self_attn.kv_b_proj", spec.heads * (plain + value), rank)
    yield from _linear("self_attn.o_proj", spec.hidden, spec.heads * value, bias)


def _deepseek(spec: Model, index: int) -> Shapes:
    yield from _latent_attention(spec)
    if spec.experts and index >= int(spec.config.get("first_k_dense_replace", 0)):
        parts = [_experts(spec, spec.expert_intermediate), _router(spec)]
        for part in parts if spec.fused_experts else reversed(parts):
            yield from part
        yield from _gated("mlp.shared_experts", spec.hidden, spec.shared_intermediate)
    else:
        yield from _gated("mlp", spec.hidden, spec.intermediate)
    yield from _norms(spec)


def _gpt2(spec: Model) -> list[TensorSpec]:
    """Return GPT-2's tensors: learned positions, fused queries, keys and values, weights as (in, out), with biases."""
    hidden, inner = spec.hidden, spec.intermediate
    positions = int(spec.config.get("n_positions", 1024))
    out = [
        TensorSpec("transformer.wte.weight", (spec.vocab, hidden), None),
        TensorSpec("transformer.wpe.weight", (positions, hidden), None),
    ]
    for index in range(spec.layers):
        for name, rows, columns in (
            ("ln_1", hidden, 0),
            ("attn.c_attn", hidden, 3 * hidden),
            ("attn.c_proj", hidden, hidden),
            ("ln_2", hidden, 0),
            ("mlp.c_fc", hidden, inner),
            ("mlp.c_proj", inner, hidden),
        ):
            weight = (rows, columns) if columns else (rows,)
            out.append(TensorSpec(f"transformer.h.{index}.{name}.weight", weight, index))
            out.append(TensorSpec(f"transformer.h.{index}.{name}.bias", weight[-1:], index))
    out += [TensorSpec(f"transformer.ln_f.{part}", (hidden,), None) for part in ("weight", "bias")]
    return out if spec.tied else [*out, TensorSpec("lm_head.weight", (spec.vocab, hidden), None)]


def _opt(spec: Model) -> list[TensorSpec]:
    """Return OPT's tensors: learned positions with two extra rows, LayerNorm with bias, a feed-forward without gate."""
    hidden, decoder = spec.hidden, "model.decoder"
    if int(spec.config.get("word_embed_proj_dim", hidden)) != hidden:
        raise ValueError(f"{spec.name} (opt): cannot class the tensor {decoder}.project_in.weight: no rule covers it")
    positions = int(spec.config.get("max_position_embeddings", 2048)) + 2
    bias = _flag(spec, "enable_bias", True)

    def norm(name: str, block: int | None) -> list[TensorSpec]:
        return [TensorSpec(f"{name}.{part}", (hidden,), block) for part in ("weight", "bias")]

    out = [
        TensorSpec(f"{decoder}.embed_tokens.weight", (spec.vocab, hidden), None),
        TensorSpec(f"{decoder}.embed_positions.weight", (positions, hidden), None),
    ]
    for index in range(spec.layers):
        layer = f"{decoder}.layers.{index}"
        shapes: list[tuple[str, tuple[int, ...]]] = []
        for projection in ("k_proj", "v_proj", "q_proj", "out_proj"):
            shapes += _linear(f"self_attn.{projection}", hidden, hidden, bias)
        shapes += _linear("fc1", spec.intermediate, hidden, bias)
        shapes += _linear("fc2", hidden, spec.intermediate, bias)
        out += [TensorSpec(f"{layer}.{name}", shape, index) for name, shape in shapes]
        out += norm(f"{layer}.self_attn_layer_norm", index) + norm(f"{layer}.final_layer_norm", index)
    if _flag(spec, "do_layer_norm_before", True):
        out += norm(f"{decoder}.final_layer_norm", None)
    return out if spec.tied else [*out, TensorSpec("lm_head.weight", (spec.vocab, hidden), None)]


def _layout(block: Callable[[Model, int], Shapes]) -> Callable[[Model], list[TensorSpec]]:
    """Return a rule for a whole model from the rule of its blocks."""
    return lambda spec: _decoder(spec, block)


LAYOUTS: dict[str, Callable[[Model], list[TensorSpec]]] = {
    "llama": _layout(_llama),
    "mistral": _layout(_mistral),
    "qwen2": _layout(_qwen2),
    "qwen3": _layout(_qwen3),
    "gemma": _layout(_gemma),
    "gemma2": _layout(_gemma2),
    "phi3": _layout(_phi3),
    "mixtral": _layout(_mixtral),
    "qwen2_moe": _layout(_qwen2_moe),
    "qwen3_moe": _layout(_qwen3_moe),
    "deepseek_v2": _layout(_deepseek),
    "deepseek_v3": _layout(_deepseek),
    "gpt2": _gpt2,
    "opt": _opt,
}
