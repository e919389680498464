"""A loop over a streamed model of transformers: both stacks are
streamed, and saved models and generated text are right."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from memascend import streaming
from memascend.ops.adamw import AdamW

WORDS = 64
SETTINGS = {"lr": 1e-3}


def bart():
    config = BartConfig(
        vocab_size=WORDS,
        d_model=32,
        encoder_layers=3,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=32,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
    )
    return BartForConditionalGeneration(config)


def t5():
    """Build a T5 model without a cache: stock training fills one, whose keys have
    another memory layout, and so another order of sums."""
    config = T5Config(
        vocab_size=WORDS,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


def llama():
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


def made(kind):
    torch.manual_seed(0)
    return kind().train()


def data(count=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, WORDS, (2, 8), generator=generator) for _ in range(count)]


def train(of, optimizer, batches):
    torch.manual_seed(2)
    for ids in batches:
        optimizer.zero_grad()
        of(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


@pytest.mark.parametrize(("kind", "blocks"), [(bart, 5), (t5, 6), (llama, 3)], ids=["bart", "t5", "llama"])
def test_all_layers_stream_and_saved_weights_and_text_are_exact(tmp_path, kind, blocks):
    ours = made(kind)
    theirs = copy.deepcopy(ours)
    with streaming(tmp_path / "run") as session:
        session.hook(ours)
        optimizer = session.optimizer(torch.optim.AdamW, **SETTINGS)
        assert len(session.engine.units.blocks) == blocks
        train(ours, optimizer, data())
        train(theirs, AdamW(theirs.parameters(), **SETTINGS), data())
        whole, part = tmp_path / "whole", tmp_path / "part"
        ours.save_pretrained(whole)
        ours.base_model.save_pretrained(part)
        for of in (ours, theirs):
            of.eval()
        short = {"max_new_tokens": 3, "do_sample": False}
        assert torch.equal(ours.generate(data()[0][:, :4], **short), theirs.generate(data()[0][:, :4], **short))
        expected = theirs.state_dict()
        for name, values in load_file(whole / "model.safetensors").items():
            assert torch.equal(values, expected[name]), name
        expected = theirs.base_model.state_dict()
        for name, values in load_file(part / "model.safetensors").items():
            assert torch.equal(values, expected[name]), name


def test_generate_and_save_pretrained_are_refused_before_the_step(tmp_path):
    ours, ids = made(llama), data(1)[0]
    with streaming(tmp_path / "run") as session:
        session.hook(ours)
        optimizer = session.optimizer(torch.optim.AdamW, **SETTINGS)
        ours(input_ids=ids, labels=ids).loss.backward()
        for use in (lambda: ours.generate(ids[:, :4], max_new_tokens=2), lambda: ours.save_pretrained(tmp_path / "no")):
            with pytest.raises(RuntimeError, match=r"call optimizer\.step\(\) first"):
                use()
        assert not list(tmp_path.glob("no/*.safetensors"))
        optimizer.step()
        assert ours.generate(ids[:, :4], max_new_tokens=2).shape == (2, 6)
        assert session.steps == 1


def trained_by_trainer(of, optimizer, folder, **options):
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        num_train_epochs=1,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        seed=3,
        **options,
    )
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    examples = [{"input_ids": ids[0], "labels": ids[0]} for ids in data(8)]
    trainer = Trainer(of, arguments, train_dataset=examples, eval_dataset=examples, optimizers=(optimizer, schedule))
    trainer.train()
    logged = [(each["loss"], each["grad_norm"]) for each in trainer.state.log_history if "loss" in each]
    return [number for each in logged for number in each] + [trainer.evaluate()["eval_loss"]]


@pytest.mark.parametrize(
    ("options", "arguments"),
    [({}, {"eval_strategy": "steps", "eval_steps": 2}), ({"accumulate": 2}, {"gradient_accumulation_steps": 2})],
    ids=["evaluation", "accumulation"],
)
def test_trainer_clips_logs_and_evaluates_as_in_memory(tmp_path, options, arguments):
    ours, theirs = made(llama), made(llama)
    with streaming(tmp_path / "run") as session:
        session.hook(ours)
        optimizer = session.optimizer(torch.optim.AdamW, wait=True, **SETTINGS, **options)
        found = trained_by_trainer(ours, optimizer, tmp_path / "ours", **arguments)
        other = AdamW(theirs.parameters(), **SETTINGS)
        expected = trained_by_trainer(theirs, other, tmp_path / "theirs", **arguments)
        assert session.steps == 4 // options.get("accumulate", 1)
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [({}, {}, "wait=True"), ({"wait": True}, {"gradient_accumulation_steps": 2}, "accumulate=")],
    ids=["clipping", "accumulation"],
)
def test_trainer_settings_that_were_not_announced_are_refused(tmp_path, options, arguments, message):
    ours = made(llama)
    with streaming(tmp_path / "run") as session:
        session.hook(ours)
        optimizer = session.optimizer(torch.optim.AdamW, **SETTINGS, **options)
        with pytest.raises(RuntimeError, match=message) as refusal:
            trained_by_trainer(ours, optimizer, tmp_path / "ours", **arguments)
        assert "\n" not in str(refusal.value)
        assert session.steps == 0
