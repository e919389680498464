"""One line names the hook that a new DeepSpeed breaks; versions that have not been tried are warned about once."""

from __future__ import annotations

import importlib
import inspect
import os

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytestmark = pytest.mark.deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
}


# Hooks that are checked only if a part needs them: (list of hooks, the section "memascend" that needs it).
OF_PARTS = {
    "checkpoints": ("CHECKPOINT_HOOKS", {}),
    "first step": ("FIRST_STEP_HOOKS", {}),
    "bf16 states": ("BF16_HOOKS", {"optimizer_states": "bf16"}),
    "unused parameters": ("UNUSED_PARAMETER_HOOKS", {}),
    "host gradients": ("HOST_GRADIENT_HOOKS", {"gradients": "host"}),
    "fast numerics": ("FAST_HOOKS", {"numerics": "fast"}),
}


def hooks():
    from memascend.integrations.deepspeed.compat import CPU_HOOKS, HOOKS

    return HOOKS + CPU_HOOKS


def hooks_of(part):
    from memascend.integrations.deepspeed import compat

    name, section = OF_PARTS[part]
    return getattr(compat, name), section


@pytest.fixture
def has_every_part():
    from memascend.integrations.deepspeed.checkpoint import can_be_exact

    if not can_be_exact():
        pytest.skip("DeepSpeed 0.17 and later have checkpoints and bf16 states of ours")


def owner_and_name(hook):
    owner = importlib.import_module(hook.module)
    *outer, name = hook.path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name


def refusal(**section: str) -> str:
    import memascend

    zero = CONFIG["zero_optimization"] | ({"offload_optimizer": {"device": "cpu"}} if section else {})
    try:
        with pytest.raises(RuntimeError) as caught:
            memascend.enable(CONFIG | {"memascend": section, "zero_optimization": zero})
        return str(caught.value)
    finally:
        memascend.disable()


def test_this_deepspeed_has_every_hook():
    from memascend.integrations.deepspeed.compat import check_hooks

    check_hooks(hooks())


def test_every_missing_hook_is_named_in_one_line(monkeypatch):
    for hook in hooks():
        owner, name = owner_and_name(hook)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, None)
            line = refusal()
        assert f"breaks the {hook.part}: {hook.place} is not there" in line
        assert "\n" not in line
        assert "; use DeepSpeed " in line  # the fix


@pytest.mark.parametrize("part", OF_PARTS)
def test_every_missing_hook_of_a_part_is_named(monkeypatch, has_every_part, part):
    found, section = hooks_of(part)
    for hook in found:
        owner, name = owner_and_name(hook)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, None)
            line = refusal(**section)
        assert f": {hook.place} is not there; use DeepSpeed " in line
        assert "\n" not in line


def test_every_overridden_deepspeed_method_is_a_hook(has_every_part):
    """An override that a new DeepSpeed no longer calls would go unnoticed."""
    from deepspeed.runtime.swap_tensor import optimizer_utils
    from deepspeed.runtime.zero import partition_parameters, stage3

    import memascend
    from memascend.integrations.deepspeed import compat

    owners = (
        (partition_parameters, "AsyncPartitionedParameterSwapper"),
        (stage3, "DeepSpeedZeroOptimizer_Stage3"),
        (optimizer_utils, "SwapTensorContext"),
    )
    stock = [getattr(module, name) for module, name in owners]
    sections = [{"gradients": "host", "numerics": "fast"}, {"optimizer_states": "bf16"}]
    places = {hook.place for name in dir(compat) if name.endswith("HOOKS") for hook in getattr(compat, name)}
    overridden = set()
    for section in sections:
        zero = CONFIG["zero_optimization"] | {"offload_optimizer": {"device": "cpu"}}
        memascend.enable(CONFIG | {"memascend": section, "zero_optimization": zero})
        try:
            for theirs, (module, name) in zip(stock, owners, strict=True):
                ours = [c for c in getattr(module, name).__mro__ if c.__module__.startswith("memascend.")]
                methods = {n for c in ours for n, value in vars(c).items() if inspect.isfunction(value)}
                overridden |= {f"{theirs.__module__}.{theirs.__name__}.{n}" for n in methods if hasattr(theirs, n)}
        finally:
            memascend.disable()
    assert len(overridden) > 20
    assert overridden <= places


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


def test_missing_keyword_argument_of_a_hook_is_named(monkeypatch):
    from deepspeed.runtime.zero import stage3

    monkeypatch.setattr(stage3.DeepSpeedZeroOptimizer_Stage3, "__init__", lambda self, module, init_optimizer: None)
    assert "has no argument 'sub_group_size'" in refusal()


def test_untried_version_warns_once_and_says_what_was_checked(monkeypatch, caplog):
    import deepspeed

    import memascend
    from memascend.integrations.deepspeed.compat import HOOKS

    monkeypatch.setattr(deepspeed, "__version__", "0.99.0")
    for _ in range(2):
        try:
            assert "0.99.0" in memascend.enable(CONFIG).warnings[0]
        finally:
            memascend.disable()
    [warning] = [record.getMessage() for record in caplog.records if "0.99.0" in record.getMessage()]
    for part in {hook.part for hook in HOOKS}:
        assert part in warning


@pytest.mark.parametrize(("rank", "lines"), [(None, 2), ("0", 2), ("1", 0)])
def test_only_the_first_rank_of_a_job_warns(monkeypatch, caplog, tmp_path, rank, lines):
    import deepspeed

    import memascend
    from memascend.integrations.deepspeed import hooks as module

    monkeypatch.setattr(deepspeed, "__version__", "0.99.1")
    monkeypatch.setattr(module, "_warned_about", set())
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    offload = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 1e9}
    config = CONFIG | {"zero_optimization": CONFIG["zero_optimization"] | {"offload_param": offload}}
    try:
        assert len(memascend.enable(config).warnings) == 2
    finally:
        memascend.disable()
    assert len([record for record in caplog.records if record.name == "memascend"]) == lines


def test_a_tried_version_is_not_warned_about():
    import deepspeed

    import memascend
    from memascend.integrations.deepspeed.compat import TRIED_VERSIONS

    if deepspeed.__version__ not in TRIED_VERSIONS:
        pytest.skip(f"DeepSpeed {deepspeed.__version__} is not a tried version")
    try:
        assert memascend.enable(CONFIG).warnings == []
    finally:
        memascend.disable()
