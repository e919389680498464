"""Peak of saved activations of a GPT or Llama twin, kept and offloaded: one process, the kernel's high-water mark.

usage: activation_peak.py gpt|llama FOLDER     prints a JSON list, an entry a step
"""

import gc
import json
import sys
from pathlib import Path

import torch
import transformers as hf

import memascend
from memascend.activation.peak import predicted_peak
from memascend.activation.record import Plan

kind, folder = sys.argv[1:]
torch.manual_seed(0)
if kind == "gpt":
    model = hf.GPT2LMHeadModel(
        hf.GPT2Config(n_embd=128, n_layer=6, n_head=4, vocab_size=512, attn_implementation="sdpa")
    )
else:
    model = hf.LlamaForCausalLM(
        hf.LlamaConfig(
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=512,
            max_position_embeddings=1024,
        )
    )
ids = torch.randint(0, 512, (8, 256 if kind == "gpt" else 512))
PREFETCH = 8 << 20


def memory(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(name)


def step():
    """Return the bytes of the step's peak above what was resident before it."""
    model.zero_grad(set_to_none=False)
    gc.collect()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    del loss
    return memory("VmHWM") - before


def offloaded_step(cache, kept):
    """Return one step's measured and predicted reduction; the prediction
    uses the rates and the record of this same step."""
    begun = cache.tier.transferred
    peak = step()
    cache.tier.wait()
    moved = cache.tier.transferred - begun
    record = cache.record
    prediction = predicted_peak(
        record,
        Plan(offload_bytes=record.bytes - record.last_module_bytes),
        write_bytes_per_s=moved.write_bytes_per_s,
        read_bytes_per_s=moved.read_bytes_per_s or 1e9,
        prefetch_bytes=PREFETCH,
    )
    return {
        "saved_bytes": record.bytes,
        "measured_reduction": 1 - peak / kept,
        "predicted_reduction": (record.bytes - prediction.peak_bytes) / kept,
        "write_bytes_per_s": moved.write_bytes_per_s,
        "forward_s": record.forward_s,
    }


step()
kept = min(step() for _ in range(2))
options = {"amount": "all", "minimum_bytes": 1 << 18, "reserve_bytes": 0, "device": "cpu", "prefetch_bytes": PREFETCH}
with memascend.offload_activations(folder, **options) as cache:
    step()
    steps = [offloaded_step(cache, kept) for _ in range(3)]
print(json.dumps(steps))
