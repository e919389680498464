"""The AdamW optimizer with its own memory for states, against torch.optim.AdamW."""

import pytest
import torch

from memascend.memory.budget import HostBudget, HostBudgetExceeded
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator, is_pinned
from memascend.memory.placement import nodes_of, on_node
from memascend.ops.adamw import AdamW

SHAPES = [(33, 17), (129,), (), (4, 5, 6)]


def parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def give_gradients(*lists, seed):
    generator = torch.Generator().manual_seed(seed)
    for together in zip(*lists, strict=True):
        gradient = torch.randn(together[0].shape, generator=generator)
        for parameter in together:
            parameter.grad = gradient.to(parameter.dtype)


def groups(params):
    return [
        {"params": params[:2], "lr": 3e-3, "betas": (0.8, 0.95)},
        {"params": params[2:], "weight_decay": 0.1, "eps": 1e-6},
    ]


def allocator(**options):
    return PageAlignedPinnedAllocator(Ledger(**options), lock=False)


def assert_close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), atol=1e-6, rtol=1e-6)


def test_matches_torch_adamw_with_groups_schedules_and_missing_gradients():
    ours, theirs = parameters(), parameters()
    optimizers = [AdamW(groups(ours), lr=1e-2, allocator=allocator()), torch.optim.AdamW(groups(theirs), lr=1e-2)]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
    for step in range(12):
        give_gradients(ours, theirs, seed=step)
        if step % 3 == 0:
            ours[1].grad = theirs[1].grad = None
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_are_rounded_copies_of_fp32_masters(dtype):
    ours = parameters(dtype)
    masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in ours]
    optimizer, reference = AdamW(ours, allocator=allocator()), torch.optim.AdamW(masters)
    for step in range(5):
        give_gradients(ours, seed=step)
        for master, parameter in zip(masters, ours, strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        reference.step()
    assert_close([optimizer.state[parameter]["master"] for parameter in ours], masters)
    for parameter in ours:
        assert torch.equal(parameter.detach(), optimizer.state[parameter]["master"].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_from_saved_state_gives_the_same_bits(dtype, tmp_path):
    whole = parameters(dtype)
    optimizer = AdamW(groups(whole), allocator=allocator())
    for step in range(3):
        give_gradients(whole, seed=step)
        optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    resumed = [torch.nn.Parameter(parameter.detach().clone()) for parameter in whole]
    second = AdamW(groups(resumed), allocator=allocator())
    second.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert second.state[resumed[0]]["exp_avg"].dtype == torch.float32
    assert is_pinned(second.state[resumed[0]]["exp_avg"])
    for step in range(3, 6):
        give_gradients(whole, resumed, seed=step)
        optimizer.step()
        second.step()
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))


@pytest.mark.parametrize(("first", "second"), [(AdamW, torch.optim.AdamW), (torch.optim.AdamW, AdamW)])
def test_fp32_states_load_into_torch_adamw_and_back(first, second):
    params, reference = parameters(), parameters()
    optimizer, whole = first(groups(params)), torch.optim.AdamW(groups(reference))
    for step in range(6):
        if step == 3:
            state, optimizer = optimizer.state_dict(), second(groups(params))
            optimizer.load_state_dict(state)
        give_gradients(params, reference, seed=step)
        optimizer.step()
        whole.step()
    assert_close(params, reference)


def test_states_are_recorded_with_name_owner_and_placement():
    model = torch.nn.Linear(64, 32).to(torch.bfloat16)
    memory = allocator()
    optimizer = AdamW(model.named_parameters(), allocator=memory, placements={"exp_avg": on_node(0)})
    optimizer.allocate_states()
    entries = {(entry.name, entry.owner): entry for entry in memory.ledger.live()}
    assert sorted(entries) == sorted(
        (f"{name} {key}", owner)
        for name in ("weight", "bias")
        for key, owner in {"master": "master_weights", "exp_avg": "momentum", "exp_avg_sq": "variance"}.items()
    )
    assert entries["weight exp_avg", "momentum"].nodes == (0,)
    assert entries["weight exp_avg_sq", "variance"].nodes is None
    assert entries["weight master", "master_weights"].requested_bytes == 64 * 32 * 4
    assert nodes_of(optimizer.state[model.weight]["exp_avg"]) == {0: 2}
    optimizer.allocate_states()
    assert len(memory.ledger.entries()) == 6


def test_states_beyond_the_budget_are_refused_with_their_owner():
    optimizer = AdamW(
        [torch.nn.Parameter(torch.ones(1 << 18))], allocator=allocator(budget=HostBudget(limit_bytes=1 << 20))
    )
    with pytest.raises(HostBudgetExceeded, match=r"variance asks for 1\.00 MiB .*in use: momentum 1\.00 MiB"):
        optimizer.allocate_states()


def test_step_handles_frozen_and_empty_parameters_and_closures():
    frozen = torch.nn.Parameter(torch.ones(5), requires_grad=False)
    empty, trained = torch.nn.Parameter(torch.ones(0)), torch.nn.Parameter(torch.ones(5))
    optimizer = AdamW([frozen, empty, trained], allocator=allocator())
    optimizer.allocate_states()

    def closure():
        loss = (trained**2).sum() + empty.sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 5
    assert frozen not in optimizer.state
    assert bool((trained < 1).all())


def test_bad_options_and_parameters_are_refused():
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    for options, words in [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"betas": (0.9, 1.0)}, "a beta is 1.0"),
        ({"placements": {"moments": on_node(0)}}, "unknown state 'moments' in placements: use master"),
    ]:
        with pytest.raises(ValueError, match=words):
            AdamW([parameter], **options)
    for bad in (torch.ones(3, dtype=torch.float64), torch.ones(4, 4).t()[:2], torch.ones(2, device="meta")):
        with pytest.raises(ValueError, match="contiguous CPU tensors of float32, float16 or bfloat16 are needed"):
            AdamW([torch.nn.Parameter(bad)])
    with pytest.raises(ValueError, match="saved with amsgrad"):
        AdamW([parameter]).load_state_dict(torch.optim.AdamW([parameter], amsgrad=True).state_dict())
