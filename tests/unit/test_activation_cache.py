"""The activation cache: gradients equal to the last bit, memory released, faults that name the tensor."""

import gc
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from memascend.activation.cache import ActivationCache, ActivationError
from memascend.activation.options import CacheOptions
from memascend.activation.record import Record, next_plan
from memascend.activation.staged import StagedTier
from memascend.storage.tier import Transferred


class _Done:
    def __init__(self, future):
        self._future = future

    def done(self):
        return self._future.done()

    def wait(self, timeout_s=None):
        return self._future.result(timeout_s)

    def add_done_callback(self, function):
        self._future.add_done_callback(lambda _: function(self))


class MemoryTier:
    """A tier in a dict, with a thread per direction; `gate` delays transfers, `fail` says which of them fail."""

    def __init__(self, fail=lambda op, number: False, free=1 << 40):
        self.kept, self.sizes = {}, []
        self._pools = {op: ThreadPoolExecutor(1) for op in ("write", "read")}
        self._written, self._fail, self._number = {}, fail, 0
        self.gates = {op: threading.Event() for op in ("write", "read")}
        for gate in self.gates.values():
            gate.set()
        self.free_bytes, self.closed, self.ops = free, False, []

    def _submit(self, op, key, work):
        number, self._number = self._number, self._number + 1
        self.ops.append((op, key))

        def run():
            assert self.gates[op].wait(20)
            if self._fail(op, number):
                raise OSError(5, f"{op} {number} failed")
            work()

        return _Done(self._pools[op].submit(run))

    def write(self, key, tensor):
        self.sizes.append(tensor.nbytes)
        done = self._submit("write", key, lambda: self.kept.__setitem__(key, tensor.clone()))
        self._written[key] = done
        return done

    def read(self, key, tensor):
        return self._submit("read", key, lambda: tensor.copy_(self.kept[key]))

    def erase(self, key):
        if self.closed:
            raise RuntimeError("the tier is closed")
        self.kept.pop(key, None)

    @property
    def transferred(self):
        return Transferred(0, sum(self.sizes), 0.0, 1.0)

    def close(self):
        self.closed = True
        for pool in self._pools.values():
            pool.shutdown()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=64, layers=4):
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def net(**sizes):
    torch.manual_seed(0)
    return Net(**sizes)


def batch(seed=0, rows=512):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def offloading(tier=None, **options):
    given = {"amount": "all", "minimum_bytes": 1 << 12, "reserve_bytes": 0, "device": "cpu"} | options
    return ActivationCache(tier or MemoryTier(), CacheOptions(**given))


def reference(steps=1, **sizes):
    model = net(**sizes)
    for step in range(steps):
        model(batch(step)).backward()
    return gradients(model)


def drained(cache, tier):
    """Check that nothing is live, and return whether no extent is left once writes in flight have ended."""
    end = time.monotonic() + 20
    while cache.statistics.live_tensors and time.monotonic() < end:
        gc.collect()  # a failed backward leaves cycles, and a tensor is freed shortly after its write
    assert cache.statistics.live_tensors == 0
    cache.close()
    return tier.kept == {}


@pytest.mark.parametrize("prefetch", [1, 1 << 30])
def test_offloading_keeps_gradients_equal_and_releases_all_extents(prefetch):
    tier, model = MemoryTier(), net()
    cache = offloading(tier, prefetch_bytes=prefetch)
    with cache.active():
        for step in range(3):
            model(batch(step)).backward()
    assert equal(gradients(model), reference(3))
    counts = cache.statistics
    assert counts.written > 3 * 4 * 512 * 64 * 4 * 4
    assert counts.read > 0
    assert drained(cache, tier)


def test_tensor_saved_repeatedly_or_through_views_is_written_once():
    tier = MemoryTier()
    cache = offloading(tier)
    x = torch.randn(64, 64, requires_grad=True)
    with cache.active():
        h = x * 2.0
        y = h.exp() + (h.t() @ h) + h.view(-1).sin().view(64, 64)
        y.sum().backward()
    assert tier.sizes.count(64 * 64 * 4) == len([1 for op, _ in tier.ops if op == "write"])
    assert cache.statistics.deduplicated >= 2 * 64 * 64 * 4
    expected = torch.zeros_like(x).requires_grad_()
    expected.data.copy_(x.data)
    h = expected * 2.0
    (h.exp() + (h.t() @ h) + h.view(-1).sin().view(64, 64)).sum().backward()
    assert torch.equal(x.grad, expected.grad)
    assert drained(cache, tier)


def test_weights_transposed_or_cast_by_autocast_are_not_offloaded():
    tier, model = MemoryTier(), net(width=128)
    cache = offloading(tier)
    with cache.active(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(batch(rows=300)).backward()
    weights = {p.numel() * size for p in model.parameters() if p.dim() > 1 for size in (2, 4)}
    assert weights.isdisjoint(tier.sizes)
    assert drained(cache, tier)


def test_tensor_still_being_written_is_taken_from_memory():
    tier, model = MemoryTier(), net()
    cache = offloading(tier)
    tier.gates["write"].clear()
    with cache.active():
        model(batch()).backward()
    tier.gates["write"].set()
    assert equal(gradients(model), reference())
    assert cache.statistics.forwarded > 0
    assert cache.statistics.read == 0
    assert drained(cache, tier)


def test_backward_reads_ahead_in_the_reverse_order_of_forward():
    tier, model = MemoryTier(), net()
    cache = offloading(tier, prefetch_bytes=1 << 30)
    with cache.active():
        loss = model(batch())
        for pool in tier._pools.values():
            pool.submit(lambda: None).result()
        loss.backward()
    reads = [int(key.split("-")[1]) for op, key in tier.ops if op == "read"]
    assert reads == sorted(reads, reverse=True)
    assert drained(cache, tier)


def test_read_ahead_stays_within_twice_its_budget():
    tier, model = MemoryTier(), net(layers=8)
    one = 512 * 256 * 4
    cache = offloading(tier, prefetch_bytes=one)
    most = 0
    read = tier.read

    def counted(key, tensor):
        nonlocal most
        most = max(most, cache._read_ahead_bytes + tensor.nbytes)
        return read(key, tensor)

    tier.read = counted
    with cache.active():
        loss = model(batch())
        tier._pools["write"].submit(lambda: None).result()
        loss.backward()
    assert 0 < most <= 2 * one
    assert drained(cache, tier)


def test_second_step_keeps_some_tensors_in_memory():
    tier, model = MemoryTier(), net()
    cache = offloading(tier)
    with cache.active():
        for step in range(2):
            before = len(tier.ops)
            model(batch(step)).backward()
    second = [key for op, key in tier.ops[before:] if op == "write"]
    assert cache.record.last_module_bytes >= 512 * 256 * 4
    assert 0 < len(second) < len(cache.record.tensors)
    assert drained(cache, tier)


def test_interleaved_micro_batches_keep_gradients_equal():
    tier, model = MemoryTier(), net()
    cache = offloading(tier)
    with cache.active():
        first, second = model(batch(0)), model(batch(1))
        first.backward()
        third = model(batch(2))
        second.backward()
        third.backward()
    assert equal(gradients(model), reference(3))
    assert drained(cache, tier)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_recompute_without_writing_and_keep_gradients_equal(reentrant):
    def run(model, x):
        x = model.embed(x)
        for number, block in enumerate(model.blocks):
            x = checkpoint(block, x, use_reentrant=reentrant) if number % 2 else block(x)
        return x.square().mean()

    plain, model, tier = net(), net(), MemoryTier()
    run(plain, batch()).backward()
    cache = offloading(tier)
    with cache.active():
        loss = run(model, batch())
        written = cache.statistics.written
        loss.backward()
    assert cache.statistics.written == written  # the recomputation writes nothing
    assert equal(gradients(model), gradients(plain))
    assert drained(cache, tier)


def test_retained_graph_is_read_in_each_backward_pass():
    tier, model = MemoryTier(), net()
    cache = offloading(tier)
    with cache.active():
        loss = model(batch())
        tier._pools["write"].submit(lambda: None).result()
        loss.backward(retain_graph=True)
        read = cache.statistics.read
        loss.backward()
    assert cache.statistics.read == 2 * read
    twice = {name: 2 * gradient for name, gradient in reference().items()}
    assert equal(gradients(model), twice)
    del loss
    assert drained(cache, tier)


def test_an_exception_in_forward_or_backward_releases_everything():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ZeroDivisionError("in backward")

    tier, model = MemoryTier(), net()
    cache = offloading(tier)
    with cache.active():
        with pytest.raises(RuntimeError):
            model(torch.randn(4, 9))
        with pytest.raises(ZeroDivisionError):
            Broken.apply(model.blocks[0](model.embed(batch()))).sum().backward()
        model.zero_grad()
        model(batch()).backward()
    assert equal(gradients(model), reference())
    assert drained(cache, tier)


def test_tensor_changed_in_place_during_its_write_is_refused():
    tier = MemoryTier()
    cache = offloading(tier)
    tier.gates["write"].clear()
    x = torch.randn(64, 64, requires_grad=True)
    with cache.active():
        y = (x * 2.0).exp()
        loss = y.sin().sum()
        y.add_(1.0)
        tier.gates["write"].set()
        with pytest.raises(ActivationError, match="modified in place"):
            loss.backward()
    del loss, y
    assert drained(cache, tier)


def test_in_place_change_of_tensor_kept_in_memory_is_refused():
    cache = offloading(minimum_bytes=1 << 30)
    x = torch.randn(8, requires_grad=True)
    with cache.active():
        y = x.exp()
        loss = y.sum()
        y.add_(1.0)
        with pytest.raises(
            ActivationError, match=r"saved in no module \(\(8,\), torch.float32\) was modified in place"
        ):
            loss.backward()
    cache.close()


def test_contexts_nest_and_the_inner_cache_gets_the_tensors():
    outer_tier, inner_tier, model = MemoryTier(), MemoryTier(), net()
    outer, inner = offloading(outer_tier), offloading(inner_tier)
    with outer.active():
        x = model.blocks[0](model.embed(batch()))
        with inner.active():
            x = model.blocks[1](x)
        model.blocks[3](model.blocks[2](x)).square().mean().backward()
    assert equal(gradients(model), reference())
    assert outer.statistics.written > inner.statistics.written > 0
    assert drained(outer, outer_tier)
    assert drained(inner, inner_tier)


def test_threads_train_side_by_side():
    tier = MemoryTier()
    cache, models = offloading(tier), [net() for _ in range(3)]

    def train(model):
        with cache.active():
            for step in range(3):
                model(batch(step)).backward()

    threads = [threading.Thread(target=train, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(equal(gradients(model), reference(3)) for model in models)
    assert drained(cache, tier)


def test_other_threads_and_models_without_saved_tensors_are_unaffected():
    tier, model = MemoryTier(), net()
    cache = offloading(tier)
    with cache.active(), torch.no_grad():
        model(batch())
    with cache.active():
        thread = threading.Thread(target=lambda: model(batch()).backward())
        thread.start()
        thread.join()
        nn.Identity()(batch())
    assert tier.ops == []
    assert drained(cache, tier)


def small_gradients():
    model = net(width=16)
    model(batch(rows=32)).backward()
    return gradients(model)


def test_random_faults_raise_named_errors_and_are_never_silent():
    expected, silent, raised = small_gradients(), 0, 0
    for seed in range(50):
        rng = random.Random(seed)
        broken = rng.randrange(40)
        failed = []

        def fail(op, number, broken=broken, failed=failed):
            if number == broken:
                failed.append(op)
            return number == broken

        tier, model = MemoryTier(fail), net(width=16)
        cache = offloading(tier, minimum_bytes=1 << 10)
        with cache.active():
            loss = model(batch(rows=32))
            tier._pools["write"].submit(lambda: None).result()
            try:
                loss.backward()
            except ActivationError as error:
                raised += "activation " in str(error) and "Errno 5" in str(error)
            else:
                silent += bool(failed) or not equal(gradients(model), expected)
        del loss
        assert drained(cache, tier)
    assert silent == 0
    assert raised >= 25


def test_error_names_the_module_whose_tensor_is_lost():
    tier, model = MemoryTier(lambda op, number: op == "read" and number > 20), net()
    cache = offloading(tier, prefetch_bytes=1)
    with cache.active():
        loss = model(batch())
        tier._pools["write"].submit(lambda: None).result()
        with pytest.raises(ActivationError, match=r"activation blocks\.\d\.\w+\[\d+\] \(\d+ bytes\) is lost: .*read"):
            loss.backward()
    del loss
    assert drained(cache, tier)


@pytest.mark.parametrize(
    ("options", "free", "said"),
    [
        ({"reserve_bytes": 100}, 100, "less than reserve_bytes=100 would be left free"),
        ({"write_budget_bytes": 600_000}, 1 << 40, "write budget of 600000 bytes is used up"),
    ],
)
def test_space_and_write_budgets_limit_offloading_and_log_once(options, free, said, caplog):
    tier, model = MemoryTier(free=free), net()
    cache = offloading(tier, **options)
    with cache.active():
        for step in range(2):
            model(batch(step)).backward()
    assert equal(gradients(model), reference(2))
    assert cache.statistics.written <= options.get("write_budget_bytes", 0)
    assert [record.message.count(said) for record in caplog.records] == [1]
    assert drained(cache, tier)


def test_torch_compile_is_refused():
    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self._orig_mod = nn.Identity()

        def forward(self, x):
            return self._orig_mod(x)

    cache = offloading()
    with cache.active(), pytest.raises(RuntimeError, match=r"leave out torch\.compile or the offloading"):
        Compiled()(batch())
    cache.close()


def test_closed_cache_refuses_backward_and_reentry():
    model, cache = net(), offloading()
    with cache.active():
        loss = model(batch())
    cache.close()
    cache.close()
    with pytest.raises(ActivationError, match="closed before backward"):
        loss.backward()
    with pytest.raises(RuntimeError, match="closed"), cache.active():
        pass


def test_tensor_freed_during_close_gives_the_closed_cache_error():
    """A write notifies its waiters before its last action, so close may come in between."""
    model, cache = net(), offloading()
    with cache.active():
        loss = model(batch())
    saved = next(iter(cache._live))
    cache.close()
    with cache._lock:
        saved.error = saved.memory = None
    with pytest.raises(ActivationError, match=r"closed before backward: call backward\(\) inside of"):
        loss.backward()


def test_writes_ending_after_an_interrupted_close_log_nothing(monkeypatch, caplog):
    tier, model = MemoryTier(), net()
    cache = offloading(tier)
    tier.gates["write"].clear()
    with cache.active():
        dropped, alive = model(batch(0)), model(batch(1))
    del dropped
    assert cache.statistics.live_tensors  # the dropped graph waits for its writes, and `alive` has tensors too
    with monkeypatch.context() as patched:
        patched.setattr(_Done, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.close()
    tier.closed = True
    tier.gates["write"].set()
    tier.close()  # waits for the threads
    assert alive.requires_grad
    assert caplog.messages == []


def interrupted(*_):
    raise KeyboardInterrupt


def record(sizes, seconds=1.0, offloaded=0):
    made = Record()
    made.tensors = [(f"model.layers.{i}.mlp[{i}]", size, i) for i, size in enumerate(sizes)]
    made.forward_s, made.offloaded_bytes = seconds, offloaded
    return made


def test_amount_follows_drive_rate_and_is_zero_if_memory_suffices():
    made = record([100] * 10, seconds=2.0)
    assert made.last_module_bytes == 100
    assert next_plan(made, "all", 1.0, 1 << 40).offload_bytes == 900
    assert next_plan(made, 123, 1.0, 1 << 40).offload_bytes == 123
    assert next_plan(made, "auto", 100.0, 500).offload_bytes == 180  # 0.9 * 100 bytes per second for two seconds
    assert next_plan(made, "auto", 1e9, 500).offload_bytes == 900
    declined = next_plan(made, "auto", 1e9, 1500)
    assert declined.offload_bytes == 0
    assert "nothing is offloaded" in declined.reason


@pytest.mark.parametrize("wrong", [{"amount": "some"}, {"amount": -1}, {"minimum_bytes": 0}, {"prefetch_bytes": 0}])
def test_wrong_options_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=f"activations: {next(iter(wrong))}"):
        CacheOptions(**wrong)


def test_amount_takes_bytes_as_text():
    assert CacheOptions(amount="2GiB").amount == 2 << 30


def test_xpu_is_refused_and_cuda_gets_a_staged_tier(monkeypatch):
    with pytest.raises(ValueError, match=r"activations on xpu cannot be offloaded yet: .* checkpointing 'offloaded'"):
        offloading(device="xpu:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert isinstance(offloading(device="cuda:0").tier, StagedTier)


class Interrupted(nn.Module):
    """Three layers; if `now`, Ctrl-C comes in the second."""

    def __init__(self):
        super().__init__()
        self.layers, self.now = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)), False

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if self.now and number == 1:
                raise KeyboardInterrupt
            x = layer(x).tanh()
        return x.sum()


def test_pass_interrupted_by_ctrl_c_does_not_affect_later_passes():
    cache, written = offloading(tier := MemoryTier(), minimum_bytes=512, amount=40_000), []
    model, x = Interrupted(), torch.randn(64, 64)
    with cache.active():
        for step in range(5):
            before = cache.statistics.written
            model.now = step == 1
            try:
                model(x).backward()
            except KeyboardInterrupt:
                assert step == 1
            written.append(cache.statistics.written - before)
    assert written[0] == written[2] == written[3] == written[4] > 0
    assert drained(cache, tier)


class Tree(nn.Module):
    """A module that calls itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x, depth=2):
        x = self.layer(x).tanh()
        return self(x, depth - 1).tanh() if depth else x


def test_recursive_module_is_recorded_in_one_pass():
    cache = offloading(tier := MemoryTier(), minimum_bytes=512, amount="all")
    with cache.active():
        Tree()(torch.randn(64, 64)).sum().backward()
    assert len(cache.record.tensors) >= 3
    assert drained(cache, tier)
