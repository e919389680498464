"""An Accelerate script with a DeepSpeed plugin, as users write it; it knows nothing of memascend."""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim
from transformers import AutoModelForCausalLM


def main():
    parser = argparse.ArgumentParser()
    for name in ("--model", "--deepspeed", "--result"):
        parser.add_argument(name)
    args, _ = parser.parse_known_args()  # the deepspeed launcher adds --local_rank
    plugin = DeepSpeedPlugin(hf_ds_config=args.deepspeed)
    accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=plugin)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).train()
    ids = torch.randint(0, model.config.vocab_size, (6, 24), generator=torch.Generator().manual_seed(3))
    loader = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, DummyOptim(model.parameters(), lr=1e-3), loader)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    ours = [name for name in sys.modules if name.startswith("memascend")]
    Path(f"{args.result}.{os.environ.get('RANK', '0')}").write_text(json.dumps({"losses": losses, "modules": ours}))


if __name__ == "__main__":
    main()
