"""DeepSpeed is watched whichever is imported first: DeepSpeed imports torch, which loads our entry point.

Memory options reach a model however the script has imported DeepSpeed's functions.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import one_rank

pytestmark = pytest.mark.deepspeed


@pytest.mark.parametrize("imports", ["import deepspeed", "import torch, deepspeed", "import deepspeed, memascend.auto"])
def test_deepspeed_is_watched_in_any_order_of_imports(imports):
    code = f"{imports}; import deepspeed; assert deepspeed.initialize.watched_by_memascend"
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


IMPORTED_EARLIER = """
from deepspeed import initialize
import deepspeed, torch
from transformers import LlamaConfig, LlamaForCausalLM
import memascend
from memascend.integrations import memory_options

sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "zero_optimization": {"stage": 3}}
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
stock, applied = memory_options.apply_memory_options, []
memory_options.apply_memory_options = lambda model, *args, **more: applied.append(stock(model, *args, **more))
memascend.enable(config, loss="chunked", checkpointing="offloaded")
for function in (initialize, deepspeed.initialize):
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **sizes))
    engine = function(model=model, model_parameters=model.parameters(), config=config)[0]
    ids = torch.arange(8)[None]
    out = engine(input_ids=ids, labels=ids)
    assert out.loss.isfinite() and out.logits is None
print(*applied, sep="; ")
"""


def test_memory_options_reach_an_engine_whose_initialize_was_imported_earlier():
    done = one_rank.run(["-c", IMPORTED_EARLIER])
    assert done.stdout.splitlines()[-1] == "; ".join(["loss chunked, checkpointing offloaded"] * 2)
