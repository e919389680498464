"""A model that train initialises has every weight drawn as transformers draws it, under zero.Init too."""

import json

import pytest

from tests import one_rank

pytestmark = pytest.mark.deepspeed

BUILD = """
import json
import sys

import deepspeed
import torch

from memascend.integrations import pretrained
from memascend.integrations.deepspeed.backend import DeepSpeedBackend

DeepSpeedBackend.start(1)
sizes = dict(hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, vocab_size=512, num_experts=8, num_local_experts=8,
             num_experts_per_tok=2)
ds_config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
found = {}
for kind in sys.argv[2:]:
    model = pretrained.partitioned_model(sizes | {"model_type": kind}, ds_config, torch.bfloat16)
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=None):
            found[f"{kind} {name}"] = [
                parameter.dim(), parameter.numel(), parameter.float().mean().item(), parameter.float().std().item()
            ]
open(sys.argv[1], "w").write(json.dumps(found))
"""


def test_fused_experts_and_routers_are_drawn_like_all_other_matrices(tmp_path):
    """They would be torch.empty or zeros if left to transformers, whose own
    initialisation comes after the partitioning."""
    one_rank.run(["-c", BUILD, tmp_path / "found.json", "qwen3_moe", "mixtral"])
    found = json.loads((tmp_path / "found.json").read_text())
    assert sum("experts" in name for name in found) >= 8
    for name, (dimensions, elements, mean, std) in found.items():
        if dimensions > 1:  # six standard errors of the mean and of the deviation: a router has only 512 elements
            assert std == pytest.approx(0.02, rel=6 / (2 * elements) ** 0.5), name
            assert abs(mean) < 6 * 0.02 / elements**0.5, name
        else:
            assert (mean, std) == (1.0, 0.0), name  # norms
