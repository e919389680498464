"""LoRA through `peft` over a streamed model: equal to training in memory
bit by bit, and a step writes only what it trains."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from memascend import NotStreamable, streaming
from memascend.engine.options import EngineOptions
from memascend.ops.adamw import AdamW
from tests import loops
from tests.loops import assert_equal

peft = pytest.importorskip("peft", reason="needs peft: pip install -c constraints.txt '.[test]'")
# peft uses the old name of a transformers function.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def adapted(dtype=torch.float32, **options):
    torch.manual_seed(0)
    lora = peft.LoraConfig(
        r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(LlamaForCausalLM(CONFIG).to(dtype), lora, **options)


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def batch(step):
    return torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(step))


def train(model, optimizer, steps):
    def loss_of(step):
        torch.manual_seed(step)
        return model(input_ids=batch(step), labels=batch(step)).loss

    return loops.train(loss_of, optimizer, steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_adapters_train_save_and_resume_as_in_memory(tmp_path, dtype):
    ours, theirs, again = (adapted(dtype, autocast_adapter_dtype=False) for _ in range(3))
    optimizer = AdamW(trained(theirs), lr=1e-2)
    expected = train(theirs, optimizer, range(3))
    with streaming(tmp_path / "states") as session:
        session.hook(ours)
        assert train(ours, session.optimizer(torch.optim.AdamW, trained(ours), lr=1e-2), range(3)) == expected
        assert_equal(peft.get_peft_model_state_dict(ours), peft.get_peft_model_state_dict(theirs))
        assert_equal(ours.state_dict(), theirs.state_dict())
        ours.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(
        theirs.unload(), tmp_path / "adapter", autocast_adapter_dtype=False, is_trainable=True
    )
    with streaming(tmp_path / "states", resume=True) as session:
        session.hook(again)
        found = train(again, session.optimizer(torch.optim.AdamW, trained(again), lr=1e-2), range(3, 5))
        settled = AdamW(trained(loaded), lr=1e-2)
        settled.load_state_dict(optimizer.state_dict())
        assert found == train(loaded, settled, range(3, 5))
        assert_equal(peft.get_peft_model_state_dict(again), peft.get_peft_model_state_dict(loaded))


def test_step_with_adapters_writes_only_what_it_trains(tmp_path):
    ours = adapted()
    with streaming(tmp_path / "states") as session:
        session.hook(ours)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2, options=EngineOptions(checkpoints="device"))
        train(ours, optimizer, range(2))
        before = session.engine.transferred[1]
        train(ours, optimizer, [2])
        weight_and_moments = 3 * 4 * sum(parameter.numel() for parameter in trained(ours))
        # Each block's weights and states are whole direct-I/O units of 4 KiB;
        # a record of the step is written in addition.
        assert session.engine.transferred[1] - before <= weight_and_moments + 3 * 3 * 4096 + (64 << 10)
        assert session.engine.transferred[1] - before < sum(p.numel() for p in ours.parameters()) * 4 / 8


def test_adapters_of_another_dtype_are_refused_before_anything_moves(tmp_path):
    ours = adapted(torch.bfloat16)  # as is peft's default: the adapters of a 16-bit model are fp32
    session = streaming(tmp_path / "states")
    session.hook(ours)
    with pytest.raises(NotStreamable, match="autocast_adapter_dtype=False"):
        session.optimizer(torch.optim.AdamW, lr=1e-2)
    assert not (tmp_path / "states").exists()
