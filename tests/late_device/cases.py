"""Tests of the device and of the engine on it, which
tests/unit/test_streaming_on_a_device.py runs in a separate process."""

import copy
import gc

import pytest
import torch
from torch import nn

from memascend.engine.device import Copies, DeviceWeights, device_of
from memascend.engine.options import EngineOptions
from memascend.engine.runtime import StreamingEngine
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from tests.late_device import late_device
from tests.late_device.plugin import HostAdamW
from tests.unit import test_streaming_engine as on_the_cpu

LATE = late_device()


def streamed(of, folder, **options):
    allocator = PageAlignedPinnedAllocator(Ledger(), lock=False)
    groups = on_the_cpu.groups(of)
    return StreamingEngine.start(of, folder / "session", groups, EngineOptions(**options), allocator=allocator)


def batches(count):
    return [each.to(LATE) for each in on_the_cpu.batches(count)]


def test_copies_run_late_and_computation_waits_for_them():
    copies, host = Copies(LATE), torch.ones(8)
    target = torch.empty(8, device=LATE)
    with torch.late.stream(stream := torch.late.Stream()):
        target.copy_(host, non_blocking=True)
    event = stream.record_event()
    assert not event.query()
    assert target.cpu().isnan().all()
    host.fill_(2.0)  # too early: the device copies this value
    event.synchronize()
    assert event.query()
    assert target.cpu().eq(2.0).all()
    copied = copies.to_device(other := torch.full((8,), 3.0), target, copies.mark())
    assert target.add(0).cpu().eq(other).all()  # computation has waited for the copy
    assert copied.query()


def test_device_weights_of_all_blocks_reuse_two_slots(tmp_path):
    layout = on_the_cpu.ModelUnits(on_the_cpu.model(depth=6)).layout
    weights, blocks = DeviceWeights(layout, Copies(LATE)), [u for u in layout.units if u.kind.value == "block"]
    numel, addresses = layout.unit_numel(blocks[0]), set()
    for number, unit in enumerate(blocks):
        weights.bring(unit.key, host := torch.full((numel,), float(number)))
        addresses.add(weights.tensor(unit.key).data_ptr())
        assert weights.tensor(unit.key).cpu().equal(host)
        weights.give_back(unit.key)
    assert len(addresses) == 2


def test_device_memory_does_not_grow_with_model_depth(tmp_path):
    peaks = []
    for depth in (3, 12):
        ours = on_the_cpu.model(depth=depth).to(LATE)
        engine = streamed(ours, tmp_path / str(depth))
        on_the_cpu.train(ours, engine, batches(1))
        gc.collect()
        before = torch.late.core.allocated_bytes()
        torch.late.core.forget_peak()
        on_the_cpu.train(ours, engine, batches(2))
        peaks.append(torch.late.core.most_allocated_bytes() - before)
        waiting = engine.updates.most_waiting_bytes  # of gradients, by which the updates lag behind
        engine.close(destroy=True)
    # inputs of blocks are offloaded to the tier; weights and gradients are temporary
    assert peaks[1] <= peaks[0] + waiting


@pytest.mark.parametrize("elements", [1 << 14, 1 << 16])
def test_parameter_in_pieces_trains_to_same_bits_and_close_norm(tmp_path, elements):
    torch.manual_seed(0)
    ours = nn.Sequential(*(nn.Linear(300, 300) for _ in range(2))).to(LATE)  # 90,000 elements each
    theirs = copy.deepcopy(ours)
    optimizer = HostAdamW(theirs.parameters(), **on_the_cpu.SETTINGS)
    engine = streamed(ours, tmp_path, piece_elements=elements)
    for _ in range(2):
        x = torch.randn(4, 300).to(LATE)
        for each in (ours, theirs):
            each(x).square().mean().backward()
        norm = nn.utils.get_total_norm([p.grad.cpu() for p in theirs.parameters()])
        assert engine.finish_step() == pytest.approx(norm.item(), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    on_the_cpu.assert_equal(engine, theirs)
    engine.close()


@pytest.mark.parametrize("late", [0, 1000], ids=["soon", "late"])
def test_losses_stay_close_however_late_copies_end(tmp_path, late):
    torch.late.core.set_lateness(late)
    try:
        ours, theirs = on_the_cpu.model().to(LATE), on_the_cpu.model().to(LATE)
        engine = streamed(ours, tmp_path, clip=0.5)
        losses = on_the_cpu.train(ours, engine, batches(3))
        optimizer, expected = HostAdamW(theirs.parameters(), **on_the_cpu.SETTINGS), []
        for ids in batches(3):
            loss = theirs(ids)
            loss.backward()
            nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
            expected.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        assert losses == pytest.approx(expected, rel=1e-5)  # the norm is summed in another order there
        engine.close(destroy=True)
    finally:
        torch.late.core.set_lateness(3)


def test_store_started_on_a_device_resumes_on_the_cpu(tmp_path):
    ours = on_the_cpu.model().to(LATE)
    engine = streamed(ours, tmp_path)
    on_the_cpu.train(ours, engine, batches(2))
    kept = {name: values.clone() for name, values in engine.read_weights()}
    engine.close()
    there = on_the_cpu.model()
    again, _ = StreamingEngine.resume(there, tmp_path / "session", on_the_cpu.groups(there), EngineOptions())
    assert all(torch.equal(values, kept[name]) for name, values in again.read_weights())
    on_the_cpu.train(there, again, on_the_cpu.batches(1))
    again.close(destroy=True)


def test_model_on_two_devices_is_refused_unless_one_is_chosen():
    of = on_the_cpu.model()
    of.head.to(LATE)
    with pytest.raises(
        ValueError, match=r"the model is on several devices \(cpu, late:0\): specify the one that computes"
    ):
        device_of(of.parameters(), None)
    assert device_of(of.parameters(), "late") == LATE
