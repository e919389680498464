"""A training script as the README shows it, with the JSON that `memascend plan --write-config` wrote.

`python planned_script.py MODEL_CONFIG DS_CONFIG K CONTEXT RESULT`: three steps. RESULT gets the bytes moved in each,
the ledger of live buffers after the last, and the bytes that the swapped tensors take.
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
import torch._dynamo  # imported before zero.Init replaces torch.Tensor.new, which it inspects

import memascend
from memascend.integrations.huggingface import causal_lm


def main() -> None:
    model_config, ds_config = (json.loads(Path(name).read_text()) for name in sys.argv[1:3])
    k, context, result = int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5])
    torch.manual_seed(0)
    enabled = memascend.enable(ds_config, minimum_swap_bytes=max(1, (1 << 20) // k**2))
    with deepspeed.zero.Init(config_dict_or_path=ds_config, dtype=torch.bfloat16):
        model = causal_lm(model_config, checkpointing="reentrant")
    engine, *_ = deepspeed.initialize(model=model, config=ds_config, model_parameters=model.parameters())
    moved = []
    for step in range(3):
        enabled.io.reset()
        phases = []
        ids = torch.arange(step, step + context).repeat(ds_config["train_micro_batch_size_per_gpu"], 1)
        loss = engine(input_ids=ids, labels=ids).loss
        phases.append((enabled.io.bytes_read, enabled.io.bytes_written))
        engine.backward(loss)
        phases.append((enabled.io.bytes_read, enabled.io.bytes_written))
        engine.step()
        phases.append((enabled.io.bytes_read, enabled.io.bytes_written))
        moved.append(phases)
    stored = enabled.store.used_bytes
    ledger = [[entry.owner, entry.reserved_bytes] for entry in enabled.ledger.live("host")]
    result.write_text(json.dumps({"moved": moved, "ledger": ledger, "stored": stored, "loss": loss.item()}))


if __name__ == "__main__":
    main()
