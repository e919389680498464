"""Trainings of a user who adds `"memascend": {}` to a DeepSpeed JSON and calls nothing else of ours.

`python drop_in_script.py DS_CONFIG CONTEXT RESULT MODEL_CONFIG...`: two steps of each model in turn. RESULT gets the
host buffers that are live after the last step, by model configuration.
"""

import gc
import json
import sys
from pathlib import Path

import deepspeed
import torch
import torch._dynamo  # imported before zero.Init replaces torch.Tensor.new, which it inspects

import memascend
from memascend.integrations.deepspeed import active
from memascend.integrations.huggingface import causal_lm


def train(ds_config: str, model_config: dict, context: int) -> list[list]:
    """Train two steps; return the ledger of host buffers: owner, name, bytes reserved."""
    with deepspeed.zero.Init(config_dict_or_path=ds_config, dtype=torch.bfloat16):
        model = causal_lm(model_config, checkpointing="none")
    engine, *_ = deepspeed.initialize(model=model, config=ds_config, model_parameters=model.parameters())
    for step in range(2):
        ids = torch.arange(step, step + context).repeat(engine.train_micro_batch_size_per_gpu(), 1)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    live = [[entry.owner, entry.name, entry.reserved_bytes] for entry in active().ledger.live("host")]
    engine.destroy()
    memascend.disable()
    return live


def main() -> None:
    ds_config, context, result = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.manual_seed(0)
    ledgers = {}
    for name in sys.argv[4:]:
        ledgers[name] = train(ds_config, json.loads(Path(name).read_text()), context)
        gc.collect()
    result.write_text(json.dumps(ledgers))


if __name__ == "__main__":
    main()
