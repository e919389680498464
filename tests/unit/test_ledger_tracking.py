"""The allocator that distinguishes what a GPU would store from what the host stores."""

import ctypes
import threading

import pytest
import torch

from memascend.memory import tracking

MIB = 1 << 20


def resident(kind: str) -> int:
    """Return RssAnon or RssShmem of this process in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{kind}:"))


@pytest.fixture(autouse=True)
def installed():
    tracking.install()
    tracking.events()
    yield
    tracking.set_role("host")
    tracking.uninstall()


def test_install_and_uninstall():
    assert tracking.installed()
    tracking.install()
    tensor = torch.ones(100_000)
    tracking.uninstall()
    assert not tracking.installed()
    before = tracking.live_bytes()["host"]
    del tensor  # allocated by ours, freed after the stock allocator is restored
    assert before - tracking.live_bytes()["host"] == 400_000


def test_blocks_allocated_before_install_are_not_tracked():
    tracking.uninstall()
    stock = torch.ones(100_000)
    tracking.install()
    tracking.events()
    del stock
    assert tracking.events() == []


def test_kernel_counts_distinguish_device_and_host_roles():
    size = 64 * MIB
    ctypes.CDLL(None).malloc_trim(0)  # memory that earlier tests freed must not be used for the tensors below
    shared, private = resident("RssShmem"), resident("RssAnon")
    with tracking.role("device"):
        device = torch.ones(size, dtype=torch.uint8)
    assert resident("RssShmem") - shared == size
    assert abs(resident("RssAnon") - private) < 4 * MIB
    host = torch.ones(size, dtype=torch.uint8)
    assert resident("RssShmem") - shared == size
    assert abs(resident("RssAnon") - private - size) < 4 * MIB
    del device  # returned at once, whatever the role is now
    assert resident("RssShmem") == shared
    assert int(host[-1]) == 1


def test_events_name_block_role_and_time():
    with tracking.role("device"):
        tensor = torch.empty(100_000)
    address = tensor.data_ptr()
    del tensor
    allocated, freed = tracking.events()
    assert (allocated.kind, allocated.role, allocated.bytes_, allocated.address) == (
        "alloc",
        "device",
        400_000,
        address,
    )
    assert (freed.kind, freed.id, freed.address) == ("free", allocated.id, address)
    assert freed.t_ns >= allocated.t_ns
    assert tracking.events() == []
    assert tracking.dropped_events() == 0


def test_small_blocks_and_views_are_not_logged():
    small = torch.empty(tracking.TRACKED_FROM_BYTES - 1, dtype=torch.uint8)
    assert tracking.events() == []
    large = torch.empty(tracking.TRACKED_FROM_BYTES, dtype=torch.uint8)
    assert len(tracking.events()) == 1
    view = large[5:]
    assert tracking.events() == []
    assert small.data_ptr() != view.data_ptr()


def test_without_events_only_totals_are_kept():
    tracking.install(events=False)
    before = tracking.live_bytes()["host"]
    tensor = torch.empty(MIB, dtype=torch.uint8)
    assert tracking.live_bytes()["host"] - before == MIB
    del tensor
    assert tracking.events() == []


def test_totals_and_peaks_are_counted_by_role():
    start = tracking.live_bytes()
    tracking.reset_peaks()
    first = torch.empty(MIB, dtype=torch.uint8)
    with tracking.role("device"):
        second = torch.empty(2 * MIB, dtype=torch.uint8)
    del first, second
    assert tracking.live_bytes() == start
    peak = tracking.peak_bytes()
    assert {role: peak[role] - start[role] for role in peak} == {"host": MIB, "device": 2 * MIB}
    tracking.reset_peaks()
    assert tracking.peak_bytes() == start


def test_role_is_restored_after_error_and_unknown_role_refused():
    with pytest.raises(KeyError), tracking.role("device"):
        raise KeyError
    assert tracking.current_role() == "host"
    with pytest.raises(ValueError, match="unknown role 'gpu': use 'host' or 'device'"):
        tracking.set_role("gpu")


def test_role_applies_to_autograd_threads():
    weight = torch.ones(100_000, requires_grad=True)
    loss = (weight * 2).sum()
    tracking.events()
    with tracking.role("device"):
        loss.backward()
    assert weight.grad is not None
    assert {event.role for event in tracking.events() if event.kind == "alloc"} == {"device"}


def test_training_gives_the_same_bits_in_either_role():
    def train():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(64, 256)).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    plain = train()
    with tracking.role("device"):
        shared = train()
    tracking.uninstall()
    assert torch.equal(plain, shared)
    assert torch.equal(plain, train())


def test_tensors_grow_and_survive_conversion_to_numpy():
    with tracking.role("device"):
        tensor = torch.arange(100_000)
        tensor.resize_(200_000)
        array = tensor.numpy()
        tensor = None
        again = torch.from_numpy(array).clone()
    assert int(again[99_999]) == 99_999


def test_impossible_size_is_one_clear_error():
    with tracking.role("device"), pytest.raises(RuntimeError, match="cannot allocate a tensor of"):
        torch.empty(2**55)


def test_threads_allocate_while_the_role_changes():
    start = tracking.live_bytes()

    def work():
        for step in range(100):
            tracking.set_role("device" if step % 2 else "host")
            assert torch.full((20_000,), step).sum() == step * 20_000

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tracking.live_bytes() == start
