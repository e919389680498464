"""A plain DeepSpeed loop under ZeRO stages 0 to 2, with and without `memascend.offload_activations` around it.

usage: activation_stages.py FOLDER     prints a JSON list, an entry a stage
"""

import json
import sys

import deepspeed
import torch
import transformers as hf

import memascend

SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "vocab_size": 128}
deepspeed.init_distributed("gloo")


def train(stage):
    """Return the losses of three steps, and the sum of each tensor at the end."""
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2))
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
        },
    )
    losses = []
    for number in range(6):
        ids = torch.randint(0, 128, (4, 64), generator=torch.Generator().manual_seed(number))
        loss = engine(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    sums = [parameter.double().sum().item() for parameter in engine.module.parameters()]
    engine.destroy()
    return [losses, sums]


found = []
for stage in (0, 1, 2):
    kept = train(stage)
    options = {"amount": "all", "minimum_bytes": 4096, "reserve_bytes": 0}
    with memascend.offload_activations(sys.argv[1], **options) as cache:
        offloaded = train(stage)
        read = cache.statistics.read
    found.append({"stage": stage, "kept": kept, "offloaded": offloaded, "read": read})
print(json.dumps(found))
