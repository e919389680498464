"""A Hugging Face Trainer script, as users write it; it knows nothing of memascend."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ScriptArguments:
    model: str
    result: str
    initialise: str = ""  # a model type: initialise a model of that type, large enough that parameters are swapped


class Text(torch.utils.data.Dataset):
    def __init__(self, vocabulary):
        ids = torch.randint(0, vocabulary, (16, 24), generator=torch.Generator().manual_seed(3))
        self.rows = [{"input_ids": row, "labels": row} for row in ids]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class NotingTrainer(Trainer):
    losses: list[float] = []  # noqa: RUF012

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        if self.model.training:
            self.losses.append(loss.item())
        return loss


def main():
    if not torch.cuda.is_available():
        deepspeed.init_distributed(dist_backend="gloo")  # Accelerate does it for GPUs only
    script, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    if script.initialise:
        set_seed(0)
        sizes = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 2048, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "use_cache": False}
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(script.initialise, **sizes, **heads), dtype=torch.bfloat16
        )
    else:
        model = AutoModelForCausalLM.from_pretrained(script.model, torch_dtype=torch.bfloat16)
    data = Text(model.config.vocab_size)
    trainer = NotingTrainer(model=model, args=args, train_dataset=data, eval_dataset=data)
    trainer.train()
    evaluation = trainer.evaluate()["eval_loss"]
    checkpoint = getattr(model.model.layers[0], "_gradient_checkpointing_func", None)
    activations = sys.modules.get("memascend.activation.attach")
    cache = activations.cache_of(trainer.model) if activations is not None else None
    out = {
        "activations_written": cache.statistics.written if cache is not None else 0,
        "losses": trainer.losses,
        "evaluation": evaluation,
        "modules": [name for name in sys.modules if name.startswith("memascend")],
        "checkpoint": repr(checkpoint),
    }
    Path(f"{script.result}.{os.environ.get('RANK', '0')}").write_text(json.dumps(out))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # gloo's threads may abort a process that ends without it


if __name__ == "__main__":
    main()
