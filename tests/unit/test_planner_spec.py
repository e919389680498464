"""Model specifications: the committed configurations, their tensors and twins, against the Hugging Face classes."""

import dataclasses
import json

import pytest
import torch

from memascend.planner import known_models, model_spec
from memascend.planner.layouts import LAYOUTS
from memascend.planner.tensors import named_tensors

# The models' published parameter counts.
COUNTS = {
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-30b-a3b": 30_532_122_624,
    "mistral-nemo-12b": 12_247_782_400,
}
DENSE = sorted(set(COUNTS) - {"qwen3-30b-a3b"})
# Small members of families that no committed model covers.
FAMILIES = {
    "llama-biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-wide-heads": {"model_type": "llama", "head_dim": 32},
    "llama-mha": {"model_type": "llama", "num_key_value_heads": 4},
    "mistral": {"model_type": "mistral"},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "gemma": {"model_type": "gemma", "head_dim": 32},
    "gemma2": {"model_type": "gemma2", "head_dim": 32, "tie_word_embeddings": True},
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
    "opt": {"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 64},
    "opt-norm-after": {
        "model_type": "opt",
        "ffn_dim": 96,
        "word_embed_proj_dim": 64,
        "do_layer_norm_before": False,
        "enable_bias": False,
    },
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 128}
LATENT = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
# Architectures without a rule of ours, which are read from their classes.
BY_CLASS = {
    "gpt_neox": {},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gpt_bigcode": {},
    "starcoder2": {},
    "olmo2": {"pad_token_id": 0},
    "granite": {},
    "stablelm": {},
    "phi": {},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def hf_parameters(config: dict) -> dict[str, tuple[int, ...]]:
    transformers = pytest.importorskip("transformers")
    config = dict(config)
    built = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(built)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def named(spec) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in spec.tensors()}


@pytest.fixture
def config_file(tmp_path):
    def write(name: str = "toy.json", **keys):
        path = tmp_path / name
        path.write_text(json.dumps({**SMALL, **keys}))
        return path

    return write


def test_every_committed_model_has_its_known_parameter_count():
    assert {name: model_spec(name).parameters for name in known_models()} == COUNTS


@pytest.mark.parametrize("name", DENSE)
def test_tensors_match_the_hugging_face_class(name):
    spec = model_spec(name)
    assert named(spec) == hf_parameters(spec.hf_config_dict())


@pytest.mark.parametrize("k", [2, 8, 16])
@pytest.mark.parametrize("name", DENSE)
def test_twin_tensors_match_the_hugging_face_class(name, k):
    twin = model_spec(name).twin(k)
    assert named(twin) == hf_parameters(twin.hf_config_dict())


@pytest.mark.parametrize("name", DENSE)
def test_tensors_with_fewer_layers_match_the_hugging_face_class(name):
    fewer = dataclasses.replace(model_spec(name).twin(16), layers=3)
    assert named(fewer) == hf_parameters(fewer.hf_config_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_of_other_dense_families_match_hugging_face(family, config_file):
    spec = model_spec(config_file(**FAMILIES[family]))
    assert named(spec) == hf_parameters(spec.hf_config_dict())


@pytest.mark.parametrize("more", [{}, {"n_inner": 96}, {"tie_word_embeddings": False}], ids=str)
def test_gpt2_tensors_match_hugging_face_under_their_own_names(more, tmp_path):
    path = tmp_path / "gpt2.json"
    path.write_text(json.dumps(GPT2 | more))
    spec = model_spec(path)
    assert named(spec) == hf_parameters(spec.hf_config_dict())
    assert named(spec.twin(2)) == hf_parameters(spec.twin(2).hf_config_dict())


@pytest.mark.parametrize("more", [{}, {"q_lora_rank": 24}], ids=str)
@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_deepseek_tensors_match_hugging_face_and_have_no_twin(model_type, more, config_file):
    keys = {"model_type": model_type, "q_lora_rank": None} | LATENT | more
    spec = model_spec(config_file(**keys))
    theirs = hf_parameters(spec.hf_config_dict())
    assert spec.parameters == sum(torch.Size(shape).numel() for shape in theirs.values())
    ours = named(spec)
    assert {n: s for n, s in ours.items() if ".experts." not in n} == {
        n: s for n, s in theirs.items() if ".experts." not in n
    }
    assert sum(".experts." in name for name in ours) == 3 * 4
    assert named(spec.fused()) == theirs
    with pytest.raises(ValueError, match="has no twin"):
        spec.twin(2)


@pytest.mark.parametrize("model_type", sorted(BY_CLASS))
def test_an_architecture_without_a_rule_is_read_from_its_class(model_type, config_file):
    spec = model_spec(config_file(model_type=model_type, **BY_CLASS[model_type]))
    theirs = hf_parameters(spec.hf_config_dict())
    assert named(spec) == theirs
    assert (spec.hidden, spec.layers, spec.heads) == (64, 2, 4)
    assert {tensor.block for tensor in spec.tensors() if tensor.block is not None} == {0, 1}


def test_missing_transformers_is_reported_with_how_to_install_it(config_file, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "memascend.integrations.meta_shapes", None)
    with pytest.raises(ValueError, match="pip install transformers"):
        model_spec(config_file(model_type="gpt_neox"))


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "mixtral", "num_local_experts": 4},
        {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 16},
        {
            "model_type": "qwen3_moe",
            "num_experts": 4,
            "moe_intermediate_size": 16,
            "head_dim": 16,
            "mlp_only_layers": [0],
        },
        {
            "model_type": "qwen2_moe",
            "num_experts": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 32,
        },
    ],
    ids=["mixtral", "qwen3_moe", "qwen3_moe-one-dense", "qwen2_moe"],
)
def test_mixtures_hold_as_many_parameters_as_the_hugging_face_class(keys, config_file):
    spec = model_spec(config_file(**keys))
    theirs = hf_parameters(spec.hf_config_dict())
    assert spec.parameters == sum(torch.Size(shape).numel() for shape in theirs.values())
    ours = named(spec)  # its experts are fused; everything else must agree name by name
    assert {n: s for n, s in ours.items() if "expert" not in n and "mlp.gate." not in n and "moe.gate." not in n} == {
        n: s for n, s in theirs.items() if "expert" not in n and "mlp.gate." not in n
    }
    in_order = [(tensor.name, tensor.shape) for tensor in spec.fused().tensors()]
    inside = [(name, shape) for name, shape in theirs.items() if ".mlp." in name]
    assert dict(in_order) == theirs
    assert [pair for pair in in_order if ".mlp." in pair[0]] == inside


def test_experts_are_listed_as_separate_matrices():
    spec = model_spec("qwen3-30b-a3b")
    assert sum(tensor.shape == (768, 2048) for tensor in spec.tensors()) == 2 * 128 * 48
    assert sum(tensor.shape == (2048, 768) for tensor in spec.tensors()) == 128 * 48


def test_fusing_changes_only_mixtures():
    dense, mixture = model_spec("qwen2.5-7b"), model_spec("qwen3-30b-a3b")
    assert dense.fused() == dense
    assert mixture.fused().parameters == mixture.parameters
    assert mixture.fused().fused(False) == mixture
    assert len(mixture.fused().tensors()) == 531  # counted in transformers 5


@pytest.mark.parametrize("k", [2, 4, 8, 16])
@pytest.mark.parametrize("name", sorted(COUNTS))
def test_twin_matrices_have_one_k_squared_of_the_elements(name, k):
    spec = model_spec(name)
    twin = spec.twin(k)
    for ours, original in zip(twin.tensors(), spec.tensors(), strict=True):
        assert (ours.name, ours.block) == (original.name, original.block)
        router = original.name.endswith("mlp.gate.weight")
        share = k * k if original.is_matrix and not router else k
        assert ours.numel * share == original.numel
    assert (twin.layers, twin.heads, twin.kv_heads, twin.experts) == (
        spec.layers, spec.heads, spec.kv_heads, spec.experts)  # fmt: skip


def test_twin_of_a_twin_equals_twin_of_the_product():
    spec = model_spec("qwen2.5-7b")
    assert spec.twin(2).twin(4) == spec.twin(8)
    assert spec.twin(8).label == "qwen2.5-7b-k8"


@pytest.mark.parametrize(
    ("name", "k", "words"),
    [
        ("qwen2.5-7b", 3, "not a power of two"),
        ("qwen2.5-7b", 0, "not a power of two"),
        ("qwen2.5-7b", 128, "head_dim 128 / 128 = 1 is odd"),
        ("qwen2.5-0.5b", 64, "head_dim 64 / 64 = 1 is odd"),
        ("llama3.1-8b", 512, "vocab_size 128256 is not divisible"),
        ("qwen2.5-7b", 1024, "hidden_size 3584 is not divisible"),
    ],
)
def test_impossible_twin_is_refused_in_one_line(name, k, words):
    with pytest.raises(ValueError, match=words) as caught:
        model_spec(name).twin(k)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("alias", ["qwen2.5-7b", "Qwen2.5-7B", "Qwen/Qwen2.5-7B", "qwen2.5_7b", "QWEN/QWEN2.5-7B"])
def test_display_and_hub_names_find_the_model(alias):
    assert model_spec(alias).name == "qwen2.5-7b"


def test_hub_names_with_another_spelling_find_the_model():
    assert model_spec("meta-llama/Llama-3.1-8B").display == "Llama3.1-8B"


def test_a_folder_with_a_configuration_is_a_model(config_file):
    path = config_file("config.json", model_type="qwen2")
    spec = model_spec(path.parent)
    assert spec.name == path.parent.name
    assert spec == model_spec(path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen2.5-7", "did you mean qwen2.5-7b"),
        ("Qwen/Qwen2.5-13B", "Known: llama3.1-8b"),
        ("no/such/config.json", "cannot read"),
    ],
)
def test_unknown_model_is_refused_in_one_line(name, words):
    with pytest.raises(ValueError, match=words) as caught:
        model_spec(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model_type": "minicpm3", "kv_lora_rank": 512}, "kv_a_proj_with_mqa"),
        ({"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 32}, r"project_in\.weight"),
        ({"model_type": "bert"}, "cannot class the tensor|cannot build it"),
        ({"model_type": "hal9000"}, "'hal9000' has no layout rule"),
        ({"model_type": "mamba", "state_size": 16}, "mixer.x_proj"),
        ({}, "not given"),
        ({"model_type": "qwen2", "hidden_size": None}, "hidden_size"),
        ({"model_type": "qwen2", "hidden_size": 66}, "num_attention_heads"),
        ({"model_type": "qwen2", "num_key_value_heads": 3}, "num_key_value_heads"),
        ({"model_type": "qwen2", "vocab_size": "many"}, "vocab_size"),
    ],
)
def test_unclassifiable_configuration_is_refused_by_name(keys, words, config_file):
    with pytest.raises(ValueError, match=words) as caught:
        model_spec(config_file(**keys))
    assert "\n" not in str(caught.value)


def test_broken_configuration_file_is_refused(tmp_path):
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        model_spec(path)


def test_parameters_of_a_built_model_are_assigned_to_blocks():
    shapes = [("model.embed_tokens.weight", (8, 4)), ("transformer.h.3.attn.c_attn.weight", (4, 12))]
    assert [tensor.block for tensor in named_tensors(shapes)] == [None, 3]


def test_unknown_parameter_is_named_in_the_error():
    with pytest.raises(ValueError, match=r"cannot class the tensor router_bank\.weight"):
        list(named_tensors([("router_bank.weight", (4, 4))]))


def test_every_layout_is_compared_with_a_real_class():
    compared = {config["model_type"] for config in FAMILIES.values()}
    compared |= {"mixtral", "qwen3_moe", "qwen2_moe", "gpt2", "deepseek_v2", "deepseek_v3"}
    assert set(LAYOUTS) == compared
