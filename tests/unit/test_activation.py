"""Offloaded gradient checkpointing: the gradients of plain checkpointing, in host memory of the size of Eq. 1."""

import functools
import gc
import weakref

import pytest
import torch
import torch.utils.checkpoint

from memascend.activation import CheckpointStore, OffloadedCheckpoint, offload_checkpoints
from memascend.activation.saved import ActivationError
from memascend.activation.transfer import Arrival, PlainTransfer, StreamTransfer
from memascend.memory.ledger import Ledger, verify_by_address
from memascend.memory.pinned import CountingAllocator, PageAlignedPinnedAllocator, PowerOfTwoPinnedAllocator
from tests.unit.device_streams import Streams

BATCH, CONTEXT, LAYERS, HIDDEN, VOCABULARY = 2, 12, 4, 32, 64


def tiny_model(dtype=torch.float32, dropout=0.1):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (make setup)")
    config = transformers.Qwen2Config(
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        attention_dropout=dropout,
        use_cache=False,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()


def token_ids(batch=BATCH, context=CONTEXT, seed=1):
    return torch.randint(0, VOCABULARY, (batch, context), generator=torch.Generator().manual_seed(seed))


def plain_checkpointing(model, reentrant):
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


def is_checkpointing(model):
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def make_store(ledger=None, allocator=PageAlignedPinnedAllocator):
    return CheckpointStore(allocator(ledger or Ledger(), lock=False))


def gradients(model, batches):
    """Return the gradients accumulated over batches, under one stream of random numbers (dropout)."""
    model.zero_grad()
    torch.manual_seed(7)
    losses = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
    return losses, [parameter.grad.clone() for parameter in model.parameters()]


def assert_same(a, b):
    assert a[0] == b[0]
    assert all(torch.equal(x, y) for x, y in zip(a[1], b[1]))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_equal_those_without_and_with_plain_checkpointing(dtype, reentrant):
    batches = [token_ids(seed=1), token_ids(seed=2)]
    without = gradients(tiny_model(dtype), batches)
    plain_model = tiny_model(dtype)
    plain_checkpointing(plain_model, reentrant)
    plain = gradients(plain_model, batches)
    model, store = tiny_model(dtype), make_store()
    offload_checkpoints(model, store, use_reentrant=reentrant)
    offloaded = gradients(model, batches)
    assert store.requested_bytes == BATCH * CONTEXT * LAYERS * HIDDEN * dtype.itemsize
    assert store.leased == 0
    assert_same(offloaded, plain)
    # Dropout draws in the order of the blocks with or without recomputation, so `without` agrees too.
    assert_same(offloaded, without)


@pytest.mark.parametrize("reentrant", [False, True])
def test_every_block_input_leaves_the_device_until_backward(reentrant):
    model, store = tiny_model(), make_store()
    offload_checkpoints(model, store, use_reentrant=reentrant)
    inputs = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    loss = model(input_ids=token_ids(), labels=token_ids()).loss
    gc.collect()
    assert len(inputs) == LAYERS
    assert [ref() for ref in inputs] == [None] * LAYERS
    assert store.leased == LAYERS
    loss.backward()
    assert store.leased == 0


def test_ledger_holds_one_exact_reservation_confirmed_by_the_kernel():
    ledger = Ledger()
    model, store = tiny_model(), make_store(ledger)
    undo = offload_checkpoints(model, store)
    gradients(model, [token_ids()])
    (entry,) = ledger.live()
    assert (entry.owner, entry.role) == ("activation_checkpoints", "host")
    assert entry.requested_bytes == BATCH * CONTEXT * LAYERS * HIDDEN * 4
    assert all(check.agrees for check in verify_by_address([entry]))
    undo()
    del model
    gc.collect()
    assert ledger.live() == []


def test_the_power_of_two_baseline_rounds_the_whole_store_once():
    ledger = Ledger()
    model, store = tiny_model(), make_store(ledger, PowerOfTwoPinnedAllocator)
    offload_checkpoints(model, store)
    gradients(model, [token_ids(batch=3)])
    (entry,) = ledger.live()
    requested = 3 * CONTEXT * LAYERS * HIDDEN * 4
    assert (entry.requested_bytes, entry.reserved_bytes) == (requested, 1 << (requested - 1).bit_length())


def test_a_plan_makes_the_same_reservation_from_a_counting_allocator():
    # Qwen2.5-7B, batch 4 of 4,096 tokens: 28 blocks of hidden size 3,584.
    for policy, reserved in (("page_aligned", 3_288_334_336), ("power_of_two", 4 << 30)):
        ledger = Ledger()
        CheckpointStore(CountingAllocator(policy, ledger)).reserve(4, 4096, 28, 3584, torch.bfloat16)
        assert ledger.peak_bytes(measure="reserved_bytes") == reserved
    with pytest.raises(ValueError, match="must be positive"):
        CheckpointStore(CountingAllocator("page_aligned")).reserve(1, 0, 28, 3584, torch.bfloat16)


def test_a_reservation_made_beforehand_is_used():
    ledger = Ledger()
    model, store = tiny_model(), make_store(ledger)
    store.reserve(BATCH, CONTEXT, LAYERS, HIDDEN, torch.float32)
    offload_checkpoints(model, store)
    gradients(model, [token_ids()])
    assert len(ledger.entries()) == 1


def test_larger_batch_grows_the_store_and_smaller_one_reuses_it():
    ledger = Ledger()
    model, store = tiny_model(), make_store(ledger)
    offload_checkpoints(model, store)
    batches = [token_ids(), token_ids(batch=4), token_ids(context=7), token_ids(batch=3, context=9)]
    assert_same(gradients(model, batches), gradients(tiny_model(), batches))
    per_token = LAYERS * HIDDEN * 4
    assert [e.requested_bytes for e in ledger.entries()] == [
        BATCH * CONTEXT * per_token,
        4 * CONTEXT * per_token,
    ]
    assert len(ledger.live()) == 1


def test_several_forward_passes_may_precede_their_backward_passes():
    model, reference, store = tiny_model(dropout=0), tiny_model(dropout=0), make_store()
    offload_checkpoints(model, store)
    ids = [token_ids(seed=1), token_ids(seed=2, context=9), token_ids(seed=3)]
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        losses = [model(input_ids=i, labels=i).loss for i in ids]
        assert store.leased == 3 * LAYERS
        expected = [reference(input_ids=i, labels=i).loss for i in ids]
        for which in order:
            losses[which].backward()
            expected[which].backward()
    assert store.leased == 0
    for a, b in zip(model.parameters(), reference.parameters()):
        assert torch.equal(a.grad, b.grad)


def test_backward_may_run_twice_over_a_retained_graph():
    model, reference, store = tiny_model(dropout=0), tiny_model(dropout=0), make_store()
    offload_checkpoints(model, store)
    for candidate in (model, reference):
        loss = candidate(input_ids=token_ids(), labels=token_ids()).loss
        loss.backward(retain_graph=True)
        loss.backward()
    for a, b in zip(model.parameters(), reference.parameters()):
        assert torch.equal(a.grad, b.grad)


def test_evaluation_takes_no_host_memory():
    model, store = tiny_model(), make_store()
    offload_checkpoints(model, store)
    with torch.no_grad():
        model(input_ids=token_ids())
    model.eval()
    model(input_ids=token_ids())
    assert store.requested_bytes == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_slots_are_released_after_an_exception(reentrant):
    model, store = tiny_model(), make_store()
    offload_checkpoints(model, store, use_reentrant=reentrant)
    layer = model.model.layers[2].mlp
    stock = layer.forward

    def broken(x):
        raise RuntimeError("broken block")

    layer.forward = broken
    with pytest.raises(RuntimeError, match="broken block"):
        model(input_ids=token_ids(), labels=token_ids())
    layer.forward = stock
    loss = model(input_ids=token_ids(), labels=token_ids()).loss
    layer.forward = broken
    with pytest.raises(RuntimeError, match="broken block"):
        loss.backward()
    del loss
    layer.forward = stock
    gc.collect()
    assert store.leased == 0
    assert_same(gradients(model, [token_ids()]), gradients(tiny_model(), [token_ids()]))


def test_dropped_graph_releases_its_slots():
    model, store = tiny_model(), make_store()
    offload_checkpoints(model, store)
    loss = model(input_ids=token_ids(), labels=token_ids()).loss
    assert store.leased == LAYERS
    del loss
    assert store.leased == 0


def test_checkpointing_enabled_later_is_offloaded_until_undo():
    model, store = tiny_model(), make_store()
    plain_checkpointing(model, reentrant=True)
    before = model.model.layers[0].__dict__.get("_gradient_checkpointing_func")
    undo = offload_checkpoints(model, store)
    plain_checkpointing(model, reentrant=False)  # as the Trainer does
    loss = model(input_ids=token_ids(), labels=token_ids()).loss
    assert store.leased == LAYERS
    del loss
    undo()
    assert "_set_gradient_checkpointing" not in vars(model)
    assert store.requested_bytes == 0
    assert is_checkpointing(model)
    after = model.model.layers[0].__dict__.get("_gradient_checkpointing_func")
    assert not isinstance(after, OffloadedCheckpoint)
    assert before is None or after.func is before.func
    gradients(model, [token_ids()])
    assert store.requested_bytes == 0


def test_undo_switches_off_checkpointing_that_was_off_before():
    model = tiny_model()
    offload_checkpoints(model, make_store())()
    assert not is_checkpointing(model)


def test_offloading_twice_and_models_without_checkpointing_are_refused():
    model = tiny_model()
    offload_checkpoints(model, make_store())
    with pytest.raises(RuntimeError, match="already offloaded"):
        offload_checkpoints(model, make_store())
    with pytest.raises(ValueError, match="does not support transformers' gradient checkpointing"):
        offload_checkpoints(torch.nn.Linear(2, 2), make_store())


def test_a_second_offloader_is_refused():
    with pytest.raises(ValueError, match="remove the other checkpointing"):
        OffloadedCheckpoint(make_store(), functools.partial(lambda f, *a: f(*a)))


def test_hidden_states_passed_by_name_are_offloaded():
    store = CheckpointStore(PageAlignedPinnedAllocator(lock=False), blocks=1)
    x = torch.randn(3, 4, requires_grad=True)
    scale = torch.tensor(2.0)

    def block(hidden_states, factor):
        return torch.tanh(hidden_states * factor)

    y = OffloadedCheckpoint(store)(functools.partial(block, factor=scale, hidden_states=x))
    assert store.leased == 1
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(block(x, scale).sum(), x)[0])


def test_a_block_without_hidden_states_warns_once_and_works(caplog):
    checkpoint = OffloadedCheckpoint(make_store())
    weight = torch.randn(3, requires_grad=True)
    for _ in range(2):
        checkpoint(lambda: weight.exp().sum()).backward()
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
    assert "got nothing instead of hidden states" in caplog.text


def test_strides_of_hidden_states_are_preserved():
    store = CheckpointStore(PageAlignedPinnedAllocator(lock=False), blocks=3)
    seen = []

    def block(hidden):
        seen.append(hidden.stride())
        return hidden.exp()

    sources = [torch.randn(2, 3, 4), torch.randn(4, 3, 2).permute(2, 1, 0), torch.randn(2, 3, 8)[..., ::2]]
    for source in sources:
        source = source.requires_grad_()
        OffloadedCheckpoint(store)(block, source).sum().backward()
        assert torch.equal(source.grad, source.exp())
    assert seen == [(12, 4, 1), (12, 4, 1), (1, 2, 6), (1, 2, 6), (24, 8, 2), (12, 4, 1)]


def test_copies_run_on_their_own_stream_ordered_by_events():
    streams = Streams(torch.device("cuda", 3))
    log, transfer = streams.log, StreamTransfer(streams)
    store = CheckpointStore(PageAlignedPinnedAllocator(lock=False), blocks=1)
    source = torch.randn(5, 2)
    slot = store.lease(10, torch.float32)
    host = slot.view(source.size(), source.stride(), source.dtype)
    transfer.offload(source, host, slot)
    # The side stream waits until the source is computed; the source's memory is kept until it has been copied.
    assert log == [("record", "compute"), ("wait", "side", 1), ("copy", "side"), ("keep", "side"), ("record", "side")]
    log.clear()
    arrival = transfer.fetch(host, slot)
    assert log == [("copy", "side"), ("record", "side")]
    log.clear()
    assert torch.equal(transfer.finish(arrival), source)
    assert log == [("wait", "compute", 2), ("keep", "compute")]


def test_checkpoint_changed_in_place_during_its_copy_is_refused(monkeypatch):
    streams = Streams()
    monkeypatch.setattr("memascend.activation.checkpointing.transfer_for", lambda device: StreamTransfer(streams))
    store = CheckpointStore(PageAlignedPinnedAllocator(lock=False), blocks=1)
    for change in (False, True):
        hidden = torch.randn(5, 2, requires_grad=True) * 1
        result = OffloadedCheckpoint(store)(torch.exp, hidden)
        if change:
            with torch.no_grad():
                hidden.add_(1)
            with pytest.raises(ActivationError, match=r"the checkpoint of a block, \(5, 2\) .* modified in place"):
                result.sum().backward()
        else:
            result.sum().backward()


def test_copies_wait_across_devices_and_close_waits_for_all():
    devices = [Streams(torch.device("cuda", number)) for number in (0, 1)]
    first, second = (each.log for each in devices)
    store = CheckpointStore(PageAlignedPinnedAllocator(lock=False), blocks=1)
    slot = store.lease(4, torch.float32)
    host = slot.view(torch.Size([4]), (1,), torch.float32)
    for each in devices:
        StreamTransfer(each).offload(torch.ones(4), host, slot)
    assert ("wait", "side", len(first)) in second
    del slot
    store.close()
    assert first[-1][0] == second[-1][0] == "synchronize"


def test_backward_prefetches_the_preceding_block_before_recomputing_one(monkeypatch):
    order = []

    class Watched(PlainTransfer):
        prefetches = True

        def fetch(self, source, slot):
            order.append(("fetch", source.flatten()[0].item()))
            return super().fetch(source, slot)

        def finish(self, arrival: Arrival):
            order.append(("use", arrival.tensor.flatten()[0].item()))
            return super().finish(arrival)

    monkeypatch.setattr("memascend.activation.checkpointing.transfer_for", lambda device: Watched())
    store = CheckpointStore(PageAlignedPinnedAllocator(lock=False), blocks=3)
    checkpoint = OffloadedCheckpoint(store)
    x = torch.zeros(4, requires_grad=True)
    for _ in range(3):
        x = checkpoint(lambda h: torch.sinh(h) + 1, x)
    x.sum().backward()
    a, b, c = 0.0, 1.0, pytest.approx(2.1752, abs=1e-3)
    assert order == [("fetch", c), ("fetch", b), ("use", c), ("fetch", a), ("use", b), ("use", a)]


@pytest.mark.gpu
def test_gpu_gradients_match_plain_checkpointing_with_a_lower_peak():
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    results, peaks = [], []
    ids = token_ids(batch=8, context=512).to(device)
    for offloaded in (False, True):
        model = tiny_model(torch.bfloat16).to(device)
        if offloaded:
            offload_checkpoints(model, CheckpointStore(PageAlignedPinnedAllocator()))
        else:
            plain_checkpointing(model, reentrant=False)
        model(input_ids=ids, labels=ids).loss.backward()  # allocates workspaces and the reservation
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        results.append(gradients(model, [ids, ids]))
        peaks.append(torch.cuda.max_memory_allocated(device))
    assert_same(results[0], results[1])
    assert peaks[1] < peaks[0]
