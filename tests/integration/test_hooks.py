"""Which hook a new DeepSpeed breaks is said in one line; versions that nobody tried are warned about once."""

from __future__ import annotations

import importlib
import os

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytestmark = pytest.mark.deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
}


def hooks():
    from memascend.integrations.deepspeed.signatures import CPU_HOOKS, HOOKS

    return HOOKS + CPU_HOOKS


def owner_and_name(hook):
    owner = importlib.import_module(hook.module)
    *outer, name = hook.path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name


def refusal() -> str:
    import memascend

    try:
        with pytest.raises(RuntimeError) as caught:
            memascend.enable(CONFIG)
        return str(caught.value)
    finally:
        memascend.disable()


def test_this_deepspeed_has_every_hook():
    from memascend.integrations.deepspeed.signatures import check_hooks

    check_hooks(hooks())


def test_every_hook_that_is_gone_is_named_in_one_line(monkeypatch):
    for hook in hooks():
        owner, name = owner_and_name(hook)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, None)
            line = refusal()
        assert f"breaks the {hook.part}: {hook.place} is gone" in line
        assert "\n" not in line
        assert "0.19.8" in line  # the mend


def test_every_hook_whose_arguments_change_is_named_in_one_line(monkeypatch):
    for hook in hooks():
        if hook.leading is None:
            continue
        owner, name = owner_and_name(hook)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda quite, other, *, arguments: None)
            line = refusal()
        assert f"{hook.place} has the arguments (quite, other, arguments)" in line
        assert ", ".join(hook.leading) in line


def test_an_argument_that_we_pass_by_name_is_missed(monkeypatch):
    from deepspeed.runtime.zero import stage3

    monkeypatch.setattr(stage3.DeepSpeedZeroOptimizer_Stage3, "__init__", lambda self, module, init_optimizer: None)
    assert "has no argument 'sub_group_size' any more" in refusal()


def test_a_version_that_nobody_tried_is_warned_about_once_and_says_what_was_checked(monkeypatch, caplog):
    import deepspeed

    import memascend

    monkeypatch.setattr(deepspeed, "__version__", "0.99.0")
    try:
        memascend.enable(CONFIG)
    finally:
        memascend.disable()
    [warning] = [record.getMessage() for record in caplog.records if "0.99.0" in record.getMessage()]
    for part in {hook.part for hook in hooks()} - {"gather on the CPU"}:
        assert part in warning


def test_a_tried_version_is_not_warned_about():
    import deepspeed

    import memascend
    from memascend.integrations.deepspeed.signatures import TRIED_VERSIONS

    if deepspeed.__version__ not in TRIED_VERSIONS:
        pytest.skip(f"DeepSpeed {deepspeed.__version__} is not a tried version")
    try:
        assert memascend.enable(CONFIG).warnings == []
    finally:
        memascend.disable()
