"""Properties of every tier (memascend/storage/tier.py). A new kind is tested by an entry in KINDS."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from memascend import _C
from memascend.storage.completion import Promise, RequestCancelled, all_of, when
from memascend.storage.direct_engine import DirectEngineConfig
from memascend.storage.engine_tiers import DirectTier, FileTier
from memascend.storage.errors import StorageError
from memascend.storage.multi_path import MultiPathTier, StoragePath
from memascend.storage.scratch import collect_scratch_files
from memascend.storage.tensor_file import TensorFileWriter, TensorLayout
from memascend.storage.tier import Tier
from tests import reflinks
from tests.loop_devices import loop_device, store

MAX_S = 60  # limit for an end that must come; nothing is timed


def _config(folder: Path, **options) -> DirectEngineConfig:
    return DirectEngineConfig(control_folder=str(folder), block_bytes=1 << 16, **options)


def _in_file(folder: Path, faults) -> DirectTier:
    return DirectTier.in_file(folder, "tests", _config(folder), faults)


def _durable(folder: Path, faults) -> DirectTier:
    return DirectTier.on_devices([store(folder)], "tests", _config(folder), faults)


def _files(folder: Path, faults) -> FileTier:
    return FileTier(folder, "tests", block_bytes=1 << 16, faults=faults)


def _two_paths(folder: Path, faults) -> MultiPathTier:
    """Make a file of the direct engine and a folder of files, as one tier."""
    return MultiPathTier([StoragePath("a", _in_file(folder, faults)), StoragePath("b", _files(folder, faults))])


KINDS: dict[str, Callable[[Path, _C.FaultLayer | None], Tier]] = {
    "direct, volatile file": _in_file,
    "direct, durable store": _durable,
    "files": _files,
    "two paths": _two_paths,
}


@pytest.fixture
def faults():
    return _C.FaultLayer()


@pytest.fixture(params=[*KINDS, "direct, volatile loop device"])
def tier(request, tmp_path, faults):
    with contextlib.ExitStack() as stack:
        if request.param in KINDS:
            made = KINDS[request.param](tmp_path, faults)
        else:
            device = stack.enter_context(loop_device(tmp_path))
            made = DirectTier.on_devices([device], "tests", _config(tmp_path, volatile=True), faults)
        stack.callback(made.close)
        yield made


def tensor(value: float, numel: int = 50_000) -> torch.Tensor:
    return torch.full((numel,), float(value))


def test_every_kind_implements_the_tier_protocol(tier):
    assert isinstance(tier, Tier)


def test_data_reads_back_from_unaligned_addresses_and_in_parts(tier):
    data = torch.randint(0, 256, (300_001,), dtype=torch.uint8)
    tier.write("a/b c", data[3:]).wait(MAX_S)
    out = torch.empty(data.numel(), dtype=torch.uint8)
    tier.read("a/b c", out[3:]).wait(MAX_S)
    assert torch.equal(out[3:], data[3:])
    tier.read("a/b c", out[:100], offset=4097).wait(MAX_S)
    assert torch.equal(out[:100], data[4100:4200])
    assert tier.size_of("a/b c") == data.numel() - 3
    assert tier.size_of("other") is None


def test_transfers_of_a_key_run_in_submission_order(tier):
    outs = [torch.empty(50_000) for _ in range(5)]
    last = []
    for value, out in enumerate(outs):
        tier.write("w", tensor(value))
        last.append(tier.read("w", out))
    for completion in reversed(last):
        assert completion.wait(MAX_S) is None
    assert [int(out[0]) for out in outs] == [0, 1, 2, 3, 4]
    assert all(bool((out == out[0]).all()) for out in outs)


def test_tensor_of_different_size_replaces_the_old_one(tier):
    for numel in (10_000, 100, 70_000, 1):
        tier.write("w", tensor(numel, numel))
        tier.read("w", out := torch.empty(numel)).wait(MAX_S)
        assert torch.equal(out, tensor(numel, numel))
        with pytest.raises(ValueError, match="give a buffer of the tensor's size"):
            tier.read("w", torch.empty(numel + 1))


def test_part_of_a_tensor_is_overwritten(tier):
    if isinstance(tier, DirectTier) and not tier.engine.config.volatile:
        pytest.skip("a durable store takes whole tensors")
    tier.write("w", tensor(1, 5000))
    tier.write("w", tensor(2, 1024), offset=4096)
    tier.read("w", out := torch.empty(5000)).wait(MAX_S)
    assert out.eq(2).nonzero().flatten().tolist() == list(range(1024, 2048))
    with pytest.raises(ValueError, match="start and end at multiples of 4096"):
        tier.write("w", tensor(2, 10), offset=4)
    with pytest.raises(ValueError, match="write all of it first"):
        tier.write("v", tensor(2, 1024), offset=4096)


def test_invalid_requests_are_refused_at_submission(tier):
    with pytest.raises(ValueError, match="no such tensor"):
        tier.read("w", torch.empty(10))
    with pytest.raises(ValueError, match="contiguous CPU tensor"):
        tier.write("w", torch.ones(10, 10).t()[1:])
    with pytest.raises(ValueError, match="on meta"):
        tier.write("w", torch.ones(10, device="meta"))
    assert tier.size_of("w") is None
    tier.wait(MAX_S)


def test_erased_tensor_is_gone_and_can_be_written_again(tier):
    tier.write("w", tensor(1)).wait(MAX_S)
    free = tier.free_bytes
    assert tier.erase("w")
    assert not tier.erase("w")
    tier.wait(MAX_S)
    assert tier.size_of("w") is None
    with pytest.raises(ValueError, match="no such tensor"):
        tier.read("w", torch.empty(10))
    tier.write("w", tensor(2))
    tier.erase("w")  # while it is being written
    tier.write("w", tensor(3))
    tier.read("w", out := torch.empty(50_000)).wait(MAX_S)
    assert torch.equal(out, tensor(3))
    assert free > 0


def test_space_is_reserved_or_refused(tier):
    if isinstance(tier, DirectTier) and tier.engine._scratch is None:
        pytest.skip("room on devices is what it is")
    tier.reserve(1 << 20)
    with pytest.raises(StorageError, match="has not that much free"):
        tier.reserve(1 << 50)
    tier.write("w", tensor(1)).wait(MAX_S)


def test_open_tier_keeps_working_after_its_folder_is_removed(tmp_path):
    (tmp_path / "removed").mkdir()
    with DirectTier.in_file(tmp_path / "removed", owner="tests") as tier:
        tier.write("w", tensor(1)).wait(MAX_S)
        shutil.rmtree(tmp_path / "removed")
        assert tier.free_bytes > 0
        tier.write("v", tensor(2)).wait(MAX_S)
        for key, values in (("w", tensor(1)), ("v", tensor(2))):
            tier.read(key, out := torch.empty(50_000)).wait(MAX_S)
            assert torch.equal(out, values)


def test_bytes_and_seconds_of_each_direction_are_measured(tier):
    before = tier.transferred
    assert before.read_bytes_per_s is None
    tier.write("w", tensor(1)).wait(MAX_S)
    written = tier.transferred - before
    assert written.bytes_written >= 200_000  # whole sectors
    assert written.write_bytes_per_s == written.bytes_written / written.writing_s > 0
    assert written.read_bytes_per_s is None
    tier.read("w", torch.empty(50_000)).wait(MAX_S)
    both = tier.transferred - before
    assert both.bytes_read >= 200_000
    assert both.read_bytes_per_s > 0
    assert both.writing_s == written.writing_s
    assert (tier.transferred - before).reading_s == both.reading_s  # idle time does not count


# -- completions -------------------------------------------------------------------------------------------------------


def test_completion_is_done_without_being_waited_for(tier):
    write = tier.write("w", tensor(1))
    for _ in range(10**6):
        if write.done():
            break
    assert write.done()
    assert write.error() is None


def test_chains_of_three_stages_carry_values_and_errors(tier, faults):
    on_device = torch.zeros(50_000)
    for key in "ab":
        tier.write(key, tensor(1))
    tier.wait(MAX_S)
    buffers = {key: torch.empty(50_000) for key in "ab"}
    threads = []

    def copied(key):
        threads.append(threading.current_thread().name)
        on_device.copy_(buffers[key])
        return when(lambda: True)

    def updated(_event):
        on_device.add_(1)
        return tier.write("b", on_device)

    tier.read("a", buffers["a"]).then(lambda _: copied("a")).then(updated).wait(MAX_S)
    tier.read("b", out := torch.empty(50_000)).wait(MAX_S)
    assert torch.equal(out, tensor(2))
    assert threads == ["memascend-dispatch"]
    faults.add("read", error=5)  # EIO
    chain = tier.read("b", buffers["b"]).then(lambda _: copied("b")).then(updated)
    with pytest.raises(StorageError, match=r"read.*[Ii]nput/output error"):
        chain.wait(MAX_S)
    assert threads == ["memascend-dispatch"]
    faults.clear()
    faults.add("write", error=28)  # ENOSPC
    chain = tier.read("a", buffers["a"]).then(lambda _: copied("a")).then(updated)
    with pytest.raises(StorageError, match=r"write.*No space left"):
        chain.wait(MAX_S)
    faults.clear()


def test_no_wrong_data_is_read_after_a_failed_write(tier, faults):
    tier.write("w", tensor(1)).wait(MAX_S)
    faults.add("write", error=5)
    with pytest.raises(StorageError, match="write"):
        tier.write("w", tensor(2)).wait(MAX_S)
    faults.clear()
    out = torch.empty(50_000)
    if isinstance(tier, DirectTier) and not tier.engine.config.volatile:
        tier.read("w", out).wait(MAX_S)
        assert torch.equal(out, tensor(1))
    else:
        with pytest.raises(StorageError, match="write all of it again"):
            tier.read("w", out).wait(MAX_S)
    tier.write("w", tensor(3))
    tier.read("w", out).wait(MAX_S)
    assert torch.equal(out, tensor(3))


def test_a_written_part_does_not_make_a_tensor_readable_whose_write_failed(tier, faults):
    if isinstance(tier, DirectTier) and not tier.engine.config.volatile:
        pytest.skip("a durable store takes whole tensors")
    tier.write("w", tensor(1)).wait(MAX_S)
    faults.add("write", error=5)
    with pytest.raises(StorageError, match="write"):
        tier.write("w", tensor(2)).wait(MAX_S)
    faults.clear()
    with contextlib.suppress(StorageError):  # it may be refused
        tier.write("w", tensor(3, 1024), offset=4096).wait(MAX_S)
    with pytest.raises(StorageError, match="write all of it again"):
        tier.read("w", torch.empty(50_000)).wait(MAX_S)


@pytest.mark.parametrize("key", ["..", "memascend-scratch-owner", "a/b", "x" * 300])
def test_keys_that_are_names_of_other_files_are_tensors(tier, key, tmp_path):
    before = {path: path.read_bytes() for path in tmp_path.rglob("memascend-scratch-owner")}
    tier.write(key, tensor(1)).wait(MAX_S)
    tier.read(key, out := torch.empty(50_000)).wait(MAX_S)
    assert torch.equal(out, tensor(1))
    assert tier.erase(key)
    assert {path: path.read_bytes() for path in tmp_path.rglob("memascend-scratch-owner")} == before


def bytes_of(value: float, numel: int = 50_000) -> bytes:
    return tensor(value, numel).numpy().tobytes()


def test_a_staged_file_outlives_later_writes_and_the_tier(tier, tmp_path):
    sizes = {"a": 50_000, "b": 7_001}
    for key, numel in sizes.items():
        tier.write(key, tensor(1, numel)).wait(MAX_S)
    staged = {key: tier.stage(key, tmp_path / f"staged-{key}") for key in sizes}
    for key, numel in sizes.items():
        assert (staged[key] is not None) == (tmp_path / f"staged-{key}").exists()
        tier.write(key, tensor(2, numel)).wait(MAX_S)
        tier.read(key, out := torch.empty(numel)).wait(MAX_S)
        assert torch.equal(out, tensor(2, numel))
    assert tier.stage("unknown", tmp_path / "unknown") is None
    tier.close()
    for key in (key for key in sizes if staged[key]):
        assert (tmp_path / f"staged-{key}").read_bytes() == bytes_of(1, sizes[key])
    if isinstance(tier, FileTier):
        assert set(staged.values()) == {"link"}


def test_partial_write_leaves_the_staged_file_unchanged(tmp_path):
    with FileTier(tmp_path, "tests") as tier:
        tier.write("a", tensor(1)).wait(MAX_S)
        tier.stage("a", tmp_path / "staged")
        tier.write("a", tensor(3, 1024), offset=4096).wait(MAX_S)
        tier.read("a", out := torch.empty(50_000)).wait(MAX_S)
        assert torch.equal(out, torch.cat([tensor(1, 1024), tensor(3, 1024), tensor(1, 47_952)]))
        assert (tmp_path / "staged").read_bytes() == bytes_of(1)


def test_a_tensor_whose_write_failed_is_not_staged(tier, faults, tmp_path):
    tier.write("w", tensor(1)).wait(MAX_S)
    faults.add("write", error=5)
    with pytest.raises(StorageError, match="write"):
        tier.write("w", tensor(2)).wait(MAX_S)
    faults.clear()
    assert tier.stage("w", tmp_path / "staged") is None
    assert not (tmp_path / "staged").exists()


@pytest.mark.parametrize("file_system", reflinks.KINDS)
@pytest.mark.parametrize("kind", ["direct, volatile file", "files", "two paths"])
def test_reflink_file_system_stages_every_tensor_and_shares_its_blocks(tmp_path, kind, file_system):
    with reflinks.file_system_with_reflinks(tmp_path, file_system) as folder, KINDS[kind](folder, None) as tier:
        numel = 1_000_001
        for key in "abcd":
            tier.write(key, tensor(1, numel)).wait(MAX_S)
        os.sync()  # Btrfs counts allocated space when it commits
        free = os.statvfs(folder).f_bfree
        assert {tier.stage(key, folder / key) for key in "abcd"} <= {"reflink", "link"}
        assert (free - os.statvfs(folder).f_bfree) * 4096 < 2e6  # of 16 MB
        assert tier.stage("a", tmp_path / "elsewhere") is None
        for key in "abcd":
            tier.write(key, tensor(2, numel)).wait(MAX_S)
        for key in "abcd":
            assert (folder / key).read_bytes() == bytes_of(1, numel)
            tier.read(key, out := torch.empty(numel)).wait(MAX_S)
            assert torch.equal(out, tensor(2, numel))


@pytest.mark.parametrize("file_system", reflinks.KINDS)
@pytest.mark.parametrize("kind", ["direct, volatile file", "files", "two paths"])
def test_states_in_a_safetensors_file_share_blocks_with_the_tier(tmp_path, kind, file_system):
    numel = 1_000_001
    layouts = [TensorLayout(key, torch.float32, (numel,)) for key in "abc"]
    with reflinks.file_system_with_reflinks(tmp_path, file_system) as folder, KINDS[kind](folder, None) as tier:
        for key in "ab":
            tier.write(key, tensor(1, numel)).wait(MAX_S)
        os.sync()
        free = os.statvfs(folder).f_bfree
        with TensorFileWriter(folder / "states", layouts, aligned=True) as writer:
            assert all(writer.share(key, partial(tier.share, key)) for key in "ab")
            assert not writer.share("c", partial(tier.share, "c"))  # it does not have that tensor
            writer.write("c", tensor(3, numel))
        os.sync()
        assert (free - os.statvfs(folder).f_bfree) * 4096 < 6e6  # of 12 MB
        assert (writer.checksum, writer.shared_bytes) == (None, 8 * numel)
        with TensorFileWriter(tmp_path / "elsewhere", layouts[:1], aligned=True) as other:
            assert not other.share("a", partial(tier.share, "a"))
            other.write("a", tensor(1, numel))
        for key in "ab":
            tier.write(key, tensor(2, numel)).wait(MAX_S)
        found = load_file(folder / "states")
        assert [torch.equal(found[key], tensor(n, numel)) for key, n in (("a", 1), ("b", 1), ("c", 3))] == [True] * 3
        assert load_file(tmp_path / "elsewhere")["a"].equal(tensor(1, numel))


def test_unretrieved_error_is_logged_and_raised_error_is_not(tier, faults, caplog):
    tier.write("w", tensor(1)).wait(MAX_S)
    faults.add("read", error=5)
    with caplog.at_level(logging.ERROR, "memascend"):
        with pytest.raises(StorageError):
            tier.read("w", torch.empty(50_000)).wait(MAX_S)
        gc.collect()
        assert not caplog.records
        read = tier.read("w", torch.empty(50_000)).then(lambda _: None)
        with contextlib.suppress(StorageError):
            tier.wait(MAX_S)  # for the read; nothing waits for the stage after it
        while not read.done():
            pass
        del read
        deadline = time.monotonic() + MAX_S  # the thread that ended the read may still be about to let go of the stage
        while not any("its exception was never retrieved" in each for each in caplog.messages):
            assert time.monotonic() < deadline
            gc.collect()
            time.sleep(0.001)


def test_callbacks_that_raise_are_logged_and_stop_nothing(tier, caplog):
    done = threading.Event()
    with caplog.at_level(logging.ERROR, "memascend"):
        write = tier.write("w", tensor(1))
        write.add_done_callback(lambda _: 1 / 0)
        write.add_done_callback(lambda completion: done.set() if completion.error() is None else None)
        assert done.wait(MAX_S)
        with pytest.raises(ZeroDivisionError):
            write.then(lambda _: 1 / 0).then(lambda _: pytest.fail("after an error")).wait(MAX_S)
    assert ["a callback of" in record.getMessage() for record in caplog.records] == [True]


def test_a_callback_must_not_wait(tier):
    tier.write("w", tensor(1)).wait(MAX_S)
    never = Promise("something else")
    with pytest.raises(RuntimeError, match="must not wait"):
        tier.read("w", torch.empty(50_000)).then(lambda _: never.wait(MAX_S)).wait(MAX_S)


def test_a_long_step_runs_in_an_executor(tier):
    with ThreadPoolExecutor(1, thread_name_prefix="optimizer") as executor:
        tier.write("w", tensor(1))
        out = torch.empty(50_000)
        name = (
            tier.read("w", out)
            .then(lambda _: (out.add_(1), threading.current_thread().name)[1], on=executor)
            .then(lambda name: tier.write("w", out).then(lambda _: name))
            .wait(MAX_S)
        )
    assert name.startswith("optimizer")
    tier.read("w", out).wait(MAX_S)
    assert torch.equal(out, tensor(2))
    with pytest.raises(RuntimeError, match="shutdown"):
        tier.read("w", out).then(lambda _: None, on=executor).wait(MAX_S)


def test_thousand_chains_share_a_few_buffers(tier):
    keys, buffers = 8, [torch.empty(4096) for _ in range(4)]
    for key in range(keys):
        tier.write(f"k{key}", tensor(key, 4096))
    ends: list = [None] * len(buffers)
    for number in range(1000):
        buffer, key = buffers[number % 4], f"k{number % keys}"
        if ends[number % 4] is not None:
            ends[number % 4].wait(MAX_S)
        update = lambda _, buffer=buffer: buffer.add_(1)  # noqa: E731
        write = lambda _, buffer=buffer, key=key: tier.write(key, buffer)  # noqa: E731
        ends[number % 4] = tier.read(key, buffer).then(update).then(write)
    all_of(ends).wait(MAX_S)
    for key in range(keys):
        tier.read(f"k{key}", out := torch.empty(4096)).wait(MAX_S)
        assert torch.equal(out, tensor(key + 1000 // keys, 4096))


def test_all_of_waits_for_all_requests_and_raises_an_error(tier, faults):
    for key in "abc":
        tier.write(key, tensor(1)).wait(MAX_S)
    faults.add("read", times=-1 if isinstance(tier, MultiPathTier) else 1, error=5)  # a MultiPathTier reads again, once
    reads = [tier.read(key, torch.empty(50_000)) for key in "abc"]
    with pytest.raises(StorageError):
        all_of(reads).wait(MAX_S)
    assert all(read.done() for read in reads)
    faults.clear()
    assert all_of([tier.read("a", torch.empty(10)), all_of([])]).wait(MAX_S) == [None, []]


def test_pending_stage_can_be_cancelled_and_finished_read_cannot(tier, faults):
    tier.write("w", tensor(1)).wait(MAX_S)
    faults.add("read", delay_us=20_000)
    reads = [tier.read("w", torch.empty(50_000)) for _ in range(50)]
    stage = reads[-1].then(lambda _: pytest.fail("cancelled"))
    assert stage.cancel()
    with pytest.raises(RequestCancelled):
        stage.wait(MAX_S)
    assert not reads[0].wait(MAX_S)
    assert not reads[0].cancel()
    faults.clear()
    tier.wait(MAX_S)


def test_wait_times_out_and_may_be_repeated(tier, faults):
    tier.write("w", tensor(1)).wait(MAX_S)
    faults.add("read", times=1, delay_us=200_000)
    read = tier.read("w", torch.empty(50_000))
    with pytest.raises(TimeoutError, match="read of 'w'"):
        read.wait(0.0)
    read.wait(MAX_S)


def test_many_threads_wait_and_chain_concurrently(tier):
    for key in range(4):
        tier.write(f"k{key}", tensor(key))

    def work(key):
        for _ in range(20):
            read = tier.read(f"k{key}", out := torch.empty(50_000))
            chained = read.then(lambda _, out=out: int(out[0]))
            read.wait(MAX_S)
            assert chained.wait(MAX_S) == key
        return key

    with ThreadPoolExecutor(4) as executor:
        assert sorted(executor.map(work, range(4), timeout=MAX_S)) == [0, 1, 2, 3]


# -- the end -----------------------------------------------------------------------------------------------------------


def test_close_finishes_pending_requests_and_refuses_later_ones(tier, faults):
    faults.add("write", delay_us=5_000)
    kept = tensor(1)
    writes = [tier.write(f"k{number % 3}", kept) for number in range(12)]
    refused = writes[-1].then(lambda _: tier.write("late", kept))
    tier.close()
    assert all(write.done() and write.error() is None for write in writes)
    with contextlib.suppress(RuntimeError):  # it may have been read before the end
        refused.wait(MAX_S)
    tier.close()
    for call in (
        lambda: tier.write("w", kept),
        lambda: tier.read("k0", kept),
        lambda: tier.erase("k0"),
        lambda: tier.reserve(1),
        lambda: tier.free_bytes,
        lambda: tier.transferred,
    ):
        with pytest.raises(RuntimeError, match="is closed"):
            call()


def test_callback_may_close_the_tier(tier):
    tier.write("w", tensor(1)).then(lambda _: tier.close()).wait(MAX_S)
    with pytest.raises(RuntimeError, match="is closed"):
        tier.write("w", tensor(1))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("kind", KINDS)
def test_closed_tier_leaves_no_files_threads_or_descriptors(kind, tmp_path):
    def use(folder):
        folder.mkdir()
        tier = KINDS[kind](folder, None)
        tier.write("w", tensor(1)).then(lambda _: tier.read("w", torch.empty(10))).wait(MAX_S)
        tier.register(tensor(1))
        tier.close()
        assert [path.name for path in folder.iterdir() if path.name != "store"] == []

    def left():
        dispatchers = sum(thread.name == "memascend-dispatch" for thread in threading.enumerate())
        return descriptors(), threads(), dispatchers

    def settled(before):  # the kernel takes a ring's descriptors and threads down a little later
        return any(all(now < then + uses for now, then in zip(left(), before, strict=True)) for _ in range(10**5))

    use(tmp_path / "warm")
    before, uses = left(), 4  # an earlier test of this process may have left some, or be starting a thread now
    for number in range(uses):
        use(tmp_path / str(number))
    assert settled(before), (before, left())


PROGRAM = """
import os, sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.unit.test_tier import KINDS
from memascend.storage.completion import all_of, when
tiers, ends, buffer = [], [], torch.ones(1 << 20)
for number, kind in enumerate(KINDS):
    folder = Path(sys.argv[1], str(number))
    folder.mkdir()
    tier = KINDS[kind](folder, None)
    tier.write("w", buffer).wait()
    tiers.append(tier)
    ends.append(tier.read("w", buffer).then(lambda _: print("followed", flush=True)))
"""


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-c", PROGRAM + program, str(folder), root]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=120)


def left_in(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*/*") if path.name != "store"]


def test_process_exit_closes_tiers_and_lets_chains_run(tmp_path):
    done = run("sys.modules['kept'] = [sys, tiers]", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "followed\n" * len(KINDS), "")
    assert left_in(tmp_path) == []


def test_forked_child_is_refused_and_removes_nothing_of_its_parent(tmp_path):
    done = run(
        """
all_of(ends).wait()
pending = [tier.read("w", buffer) for tier in tiers]
child = os.fork()
if child == 0:
    running = [each for each in pending if not each.done()]  # one that had ended at the fork has its value here too
    for call in [each.wait for each in running] + [lambda tier=tier: tier.read("w", buffer) for tier in tiers]:
        try:
            call()
        except RuntimeError as error:
            assert "fork" in str(error), error
        else:
            os._exit(1)
    when(lambda: True).then(lambda _: None).wait(30)  # in its own dispatcher
    for tier in tiers:
        tier.close()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
for each, tier in zip(pending, tiers):
    each.wait()
    tier.read("w", buffer).then(lambda _: print("after", flush=True)).wait()
""",
        tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "followed\n" * len(KINDS) + "after\n" * len(KINDS), "")
    assert left_in(tmp_path) == []


def test_only_folders_of_killed_processes_are_collected(tmp_path):
    (tmp_path / "memascend-scratch-notes").mkdir()
    (tmp_path / "memascend-scratch-notes" / "mine").write_text("keep")
    with FileTier(tmp_path, "the living") as tier:
        tier.write("w", tensor(1)).wait(MAX_S)
        done = run("all_of(ends).wait(); os.kill(os.getpid(), 9)", tmp_path)
        assert done.returncode == -9
        folder = tmp_path / str(list(KINDS).index("files"))
        left = collect_scratch_files(folder, str(folder))  # the next tier would collect them, too
        assert [each.owner for each in left] == ["tests"]
        assert left[0].bytes >= 4 << 20
        assert "process" in str(left[0])
        tier.read("w", out := torch.empty(50_000)).wait(MAX_S)
        assert torch.equal(out, tensor(1))
        assert Path(tier.paths[0]).is_dir()
    assert list(folder.iterdir()) == []
    assert [path.name for path in tmp_path.glob("memascend*")] == ["memascend-scratch-notes"]


@pytest.mark.parametrize(("error", "attempts"), [(errno.ENOSPC, 2), (errno.EIO, 1)])
def test_failed_growth_is_retried_smaller_only_if_space_is_missing(error, attempts, tmp_path, monkeypatch):
    with _in_file(tmp_path, None) as tier:
        asked = []

        def refuse(size_bytes: int) -> None:
            asked.append(size_bytes)
            raise StorageError("grow", str(tmp_path), 0, size_bytes, 0, error, os.strerror(error))

        monkeypatch.setattr(tier.engine, "grow", refuse)
        with pytest.raises(StorageError, match=os.strerror(error)):
            tier.write("a", torch.zeros(1 << 16))
        assert len(asked) == attempts
        assert asked == sorted(asked, reverse=True)


def test_refused_write_keeps_the_stored_tensor(tier, monkeypatch):
    if not isinstance(tier, DirectTier):
        pytest.skip("a folder of files refuses no write for its size")
    tier.write("w", tensor(1)).wait(MAX_S)
    used = tier._used_bytes
    if tier.engine._scratch is not None:
        monkeypatch.setattr(tier.engine, "grow", lambda size_bytes: None)
    for key in "wv":
        with pytest.raises(StorageError) as caught:
            tier.write(key, torch.empty(1 << 25))
        assert caught.value.errno == errno.ENOSPC
    assert (tier.size_of("w"), tier.size_of("v"), tier._used_bytes) == (200_000, None, used)
    tier.read("w", out := torch.empty(50_000)).wait(MAX_S)
    assert torch.equal(out, tensor(1))
    assert tier.erase("w")
    assert tier._used_bytes == 0


def test_file_that_a_refused_write_may_have_shortened_is_not_read(tmp_path, monkeypatch):
    def refuse(*_args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with FileTier(tmp_path, "tests") as tier:
        tier.write("w", tensor(1)).wait(MAX_S)
        with monkeypatch.context() as patched:
            patched.setattr(tier._writing, "async_write", refuse)
            for key in "wv":
                with pytest.raises(OSError, match="Input/output error"):
                    tier.write(key, tensor(2, 100))
        assert (tier.size_of("w"), tier.size_of("v")) == (200_000, None)
        with pytest.raises(StorageError, match="write all of it again"):
            tier.read("w", torch.empty(50_000)).wait(MAX_S)
        tier.write("w", tensor(3))
        tier.read("w", out := torch.empty(50_000)).wait(MAX_S)
        assert torch.equal(out, tensor(3))


def test_file_grows_for_a_tensor_whose_old_version_is_still_read(tmp_path, faults):
    with _in_file(tmp_path, faults) as tier:
        tier.write("w", tensor(1, 1 << 20)).wait(MAX_S)
        faults.add("read", times=1, delay_us=500_000)
        read = tier.read("w", old := torch.empty(1 << 20))
        tier.write("w", tensor(2, 3 << 20))
        tier.read("w", new := torch.empty(3 << 20)).wait(MAX_S)
        read.wait(MAX_S)
        assert bool((old == 1).all())
        assert bool((new == 2).all())


@pytest.mark.parametrize("kind", KINDS)
def test_dropped_tier_ends_once_its_requests_have_finished(kind, tmp_path, faults):
    """Requests in flight end, their callbacks run, and descriptors are closed, without a reference to the tier."""
    before, ended = len(os.listdir("/proc/self/fd")), threading.Event()
    faults.add("write", delay_us=300_000, times=1)
    made = KINDS[kind](tmp_path, faults)
    written = made.write("a", tensor(1.0))
    written.then(lambda _: ended.set())
    del made, written
    gc.collect()
    assert ended.wait(MAX_S)
    deadline = time.monotonic() + MAX_S
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before
