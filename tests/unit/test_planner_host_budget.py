"""A hard budget for host memory, checked by the plan before anything is allocated."""

from dataclasses import replace

import pytest

from memascend.cli import main
from memascend.planner import HostMemoryTooSmall, Workload, model_spec, plan, require_host_memory
from memascend.planner.host_budget import KEYS, what_fits
from memascend.planner.options import Stack

GIB = 2**30
WORK = Workload(spec=model_spec("qwen2.5-7b"), dtype="bf16", batch=8)


def needed(work):
    return plan(work).host_bytes


def test_plan_within_the_budget_is_returned():
    assert require_host_memory(WORK, needed(WORK)).host_bytes == needed(WORK)
    assert require_host_memory(WORK).host_bytes == needed(WORK)  # no budget
    assert require_host_memory(replace(WORK, host_memory=64 * GIB)).work.host_memory == 64 * GIB


def test_exceeded_budget_is_refused_with_the_shortfall_and_what_fits():
    with pytest.raises(HostMemoryTooSmall) as caught:
        require_host_memory(WORK, needed(WORK) - GIB // 2)
    line = str(caught.value)
    assert "\n" not in line
    assert (
        f"this run needs {needed(WORK) / GIB:.2f} GiB of host memory, 0.50 GiB more than the --host-memory of" in line
    )
    assert "largest part: gradient flat buffer, 28.37 GiB; what fits: --batch 7 (" in line
    for words in ("--context ", "--checkpointing plain (", "--states bf16 (", "--gradients bf16 ("):
        assert words in line


def applied(work, settings):
    fields = dict(settings)
    if "checkpointing" in fields:
        fields["stack"] = Stack(checkpointing=fields.pop("checkpointing"))
    return replace(work, **fields)


@pytest.mark.parametrize("budget_gib", [44, 38, 30, 24])
@pytest.mark.parametrize("work", [WORK, replace(WORK, system="zero_infinity"), replace(WORK, ranks=2)], ids=str)
def test_suggested_changes_fit_and_need_the_stated_memory(work, budget_gib):
    changes = what_fits(work, budget_gib * GIB)
    for change in changes:
        assert needed(applied(work, change.settings)) == change.host_bytes <= budget_gib * GIB
    if not changes:
        least = {"system": "memascend", "states": "bf16", "gradients": "bf16", "checkpointing": "plain"}
        assert needed(applied(work, least)) > budget_gib * GIB


def test_suggested_batch_is_the_largest_that_fits():
    (change,) = (c for c in what_fits(WORK, 44 * GIB) if "batch" in c.settings)
    assert needed(replace(WORK, batch=change.settings["batch"] + 1)) > 44 * GIB


def test_several_changes_are_suggested_together_when_one_is_not_enough():
    change, leanest = what_fits(WORK, 24 * GIB)
    assert leanest.settings == {"system": "lohan"}
    assert change.settings == {"checkpointing": "plain", "states": "bf16", "gradients": "bf16"}


def test_refusal_suggests_a_smaller_model_when_no_setting_fits():
    with pytest.raises(HostMemoryTooSmall) as caught:
        require_host_memory(WORK, 20 * GIB, words=KEYS)  # a DeepSpeed configuration has no other system
    assert 'no setting brings it under that: raise "host_memory", or take a smaller model (Llama' in str(caught.value)
    with pytest.raises(HostMemoryTooSmall) as caught:
        require_host_memory(WORK, GIB)
    assert str(caught.value).endswith("or take a smaller model")
    assert caught.value.fits == []


def test_refusal_for_a_configuration_uses_its_keys():
    with pytest.raises(HostMemoryTooSmall) as caught:
        require_host_memory(WORK, 44 * GIB, words=KEYS)
    assert '"memascend": {"checkpointing": "plain"}' in str(caught.value)
    assert '"data_types": {"grad_accum_dtype": "bf16"}' in str(caught.value)


def test_command_over_budget_exits_with_status_2(capsys):
    arguments = ("plan", "--model", "qwen2.5-7b", "--batch", "8", "--host-memory")
    assert main([*arguments, "44GiB"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("memascend: error: this run needs ")
    assert error.count("\n") == 1
    assert main([*arguments, "64GiB"]) == 0
    capsys.readouterr()
    assert main([*arguments, "much"]) == 2
    assert "--host-memory" in capsys.readouterr().err
