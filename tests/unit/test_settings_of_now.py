"""An optimizer's settings are looked up when they are used, whatever has happened to `param_groups` meanwhile."""

import pytest
import torch

from memascend.ops.adamw import AdamW
from tests.unit.test_streaming_engine import SETTINGS, batches, model
from tests.unit.test_streaming_loop import assert_equal, begin, loop


def load_own_state(optimizer):
    optimizer.load_state_dict(optimizer.state_dict())
    return optimizer, None


def schedule_after_load(optimizer):
    load_own_state(optimizer)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 4)


def replace_groups(optimizer):
    optimizer.param_groups = [{**group, "lr": 0.3, "mine": 1} for group in reversed(optimizer.param_groups)]
    return optimizer, None


def replace_an_entry(optimizer):
    optimizer.param_groups[1] = {**optimizer.param_groups[1], "weight_decay": 0.5, "betas": [0.5, 0.9]}
    return optimizer, None


def move_a_parameter(optimizer):
    first, second = optimizer.param_groups
    first["params"].append(second["params"].pop())
    return optimizer, None


def prepare(optimizer):
    accelerate = pytest.importorskip("accelerate")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 4)
    return accelerate.Accelerator(cpu=True).prepare(optimizer, scheduler)


def in_groups(of):
    first, *others = of.parameters()
    return [{"params": [first], "lr": 0.02}, {"params": others, "eps": 1e-6}]


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize(
    "change", [load_own_state, schedule_after_load, replace_groups, replace_an_entry, move_a_parameter, prepare]
)
def test_changed_optimizer_settings_take_effect_as_in_memory(tmp_path, change, wait):
    torch.manual_seed(0)
    ours, theirs = model(), model()
    session, optimizer = begin(ours, tmp_path / "run", params=in_groups(ours), wait=wait)
    other = AdamW(in_groups(theirs), **SETTINGS)
    changed, changed_other = change(optimizer), change(other)
    for number, lr in enumerate((None, 0.2)):
        if lr is not None:
            optimizer.param_groups[0]["lr"] = other.param_groups[0]["lr"] = lr
        data = batches(2, seed=number)
        assert loop(ours, changed[0], data, changed[1]) == loop(theirs, changed_other[0], data, changed_other[1])
    assert_equal(session, theirs)
    session.remove()


def test_lr_change_before_step_is_refused_after_load_state_dict(tmp_path):
    ours = model()
    session, optimizer = begin(ours, tmp_path / "run")
    optimizer.load_state_dict(optimizer.state_dict())
    ours(batches(1)[0]).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match="were changed between backward"):
        optimizer.step()
    session.remove()


def test_parameter_removed_from_its_group_gives_one_line_error(tmp_path):
    ours = model()
    session, optimizer = begin(ours, tmp_path / "run", wait=True)
    optimizer.param_groups[0]["params"].pop()
    ours(batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match="no longer in any param group of the optimizer: put it back") as error:
        optimizer.step()
    assert "\n" not in str(error.value)
    session.remove()


def test_schedule_of_transformers_trainer_is_followed(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "use_cache": False}
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(64).view(8, 8)]
    arguments = {"max_steps": 3, "per_device_train_batch_size": 2, "lr_scheduler_type": "linear", "max_grad_norm": 0.0}
    quiet = {"report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "logging_steps": 10}

    def train(of, optimizer):
        args = transformers.TrainingArguments(str(tmp_path / "out"), **arguments, **quiet)
        trainer = transformers.Trainer(model=of, args=args, train_dataset=rows, optimizers=(optimizer, None))
        trainer.train()

    def made():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**sizes, **heads))

    ours, theirs = made(), made()
    session, optimizer = begin(ours, tmp_path / "run", wait=True)
    train(ours, optimizer)
    train(theirs, AdamW(theirs.parameters(), **SETTINGS))
    assert optimizer.param_groups[0]["lr"] == 0
    assert_equal(session, theirs)
    session.remove()
