"""The direct engine as Python sees it; faults and crashes are in tests/native and tests/faults."""

import csv
import random
import subprocess
import sys

import pytest
import torch

from memascend import _C
from memascend.storage.direct_engine import (
    TRACE_COLUMNS,
    DirectEngine,
    DirectEngineConfig,
    RequestCancelled,
    quantile_us,
)
from memascend.storage.errors import StorageError

BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(bool(_C.aio_missing(name)), reason=_C.aio_missing(name) or "-"))
    for name in ("io_uring", "libaio")
]


def make_files(folder, count=2, size=32 << 20, chunk=4096, log=0, owner="tests"):
    paths = [folder / f"device{number}" for number in range(count)]
    for path in paths:
        with path.open("wb") as file:
            file.truncate(size)
    _C.storage_format([str(path) for path in paths], owner, [], chunk, log)
    return paths


def open_engine(paths, folder, **options):
    options.setdefault("block_bytes", 1 << 16)
    return DirectEngine(paths, "tests", DirectEngineConfig(control_folder=str(folder), **options))


@pytest.fixture
def files(tmp_path):
    return make_files(tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_a_tensor_comes_back_with_its_type_and_shape(files, tmp_path, backend, dtype):
    tensor = torch.randint(0, 2, (37, 5, 11)).to(dtype)
    with open_engine(files, tmp_path, backend=backend, workers=2) as engine:
        engine.write("w", tensor)
        assert engine.wait() == 1
        found = engine.read_new("w")
    assert engine.config.backend == backend
    assert found.dtype == dtype
    assert torch.equal(found, tensor)


def test_scalar_and_empty_tensors_survive_a_reopen(files, tmp_path):
    with open_engine(files, tmp_path) as engine:
        engine.write("scalar", torch.tensor(3.5))
        engine.write("empty", torch.empty(0, 7))
        engine.wait()
        engine.commit()
    with open_engine(files, tmp_path) as engine:
        assert engine.read_new("scalar").item() == 3.5
        assert engine.read_new("empty").shape == (0, 7)
        assert engine.verify() == {}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("requests", [3_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(1800)
def test_mixed_requests_keep_every_byte(tmp_path, backend, workers, requests):
    """Random writes, overwrites, whole and partial reads, erasures, commits and cancellations; all are compared."""
    files = make_files(tmp_path, count=3, size=64 << 20)
    rng = random.Random(requests + workers)
    source = torch.randint(0, 256, (1 << 21,), dtype=torch.uint8)
    model: dict[str, torch.Tensor] = {}
    checked = 0
    with open_engine(files, tmp_path, backend=backend, workers=workers, depth=8) as engine:
        done = 0
        while done < requests:
            writes, reads = {}, []  # requests of a round, which are not ordered: no key is in both
            for _ in range(rng.randrange(1, 40)):
                key = f"t{rng.randrange(40)}"
                length = min(len(source) - 600, int(rng.lognormvariate(9, 2)))
                start = rng.randrange(len(source) - length)
                if rng.random() < 0.5 and key not in {name for name, _, _ in reads}:
                    tensor = source[start : start + length]
                    request = engine.write(key, tensor, priority=rng.randrange(3))
                    if rng.random() < 0.05 and engine.cancel(request):
                        with pytest.raises(RequestCancelled):
                            engine.wait(request)
                    else:
                        writes[key] = tensor
                elif key in model and key not in writes:
                    offset = rng.randrange(len(model[key]) + 1) if rng.random() < 0.5 else 0
                    out = torch.empty(len(model[key]) - offset, dtype=torch.uint8)
                    engine.read(key, out, offset=offset, priority=rng.randrange(3))
                    reads.append((key, offset, out))
                done += 1
            engine.wait()
            model.update(writes)
            for key, offset, out in reads:
                assert torch.equal(model[key][offset:], out)
                checked += 1
            if rng.random() < 0.1:
                engine.commit()
            if model and rng.random() < 0.1:
                gone = rng.choice(sorted(model))
                assert engine.erase(gone)
                del model[gone]
        assert {key for key, _ in engine.items()} == set(model)
        for key, tensor in model.items():
            assert torch.equal(engine.read_new(key), tensor)
        engine.commit()
        assert engine.verify() == {}
        assert engine.space().reserved_bytes == 0
    assert checked > requests // 10


def test_a_striped_tensor_is_spread_in_proportion_to_the_weights(tmp_path):
    paths = make_files(tmp_path, count=2)
    _C.storage_destroy([str(path) for path in paths])
    _C.storage_format([str(path) for path in paths], "tests", [3, 1], 4096, 0)
    with open_engine(paths, tmp_path, stripe_bytes=1 << 16) as engine:
        engine.write("large", torch.zeros(4 << 20, dtype=torch.uint8))
        engine.write("small", torch.zeros(4096, dtype=torch.uint8))
        engine.wait()
        share = {}
        for device, _, length in engine.info("large").extents:
            share[device] = share.get(device, 0) + length
        assert share == {0: 3 << 20, 1: 1 << 20}
        assert len(engine.info("small").extents) == 1


def test_bad_input_is_refused_with_the_fix(files, tmp_path):
    with open_engine(files, tmp_path) as engine:
        engine.write("w", torch.zeros(100))
        engine.wait()
        with pytest.raises(ValueError, match="contiguous CPU tensor"):
            engine.write("w", torch.zeros(10, 10).t())
        with pytest.raises(ValueError, match="buffer of the tensor's size"):
            engine.read("w", torch.zeros(101))
        with pytest.raises(ValueError, match="no such tensor"):
            engine.read("nothing", torch.zeros(1))
        with pytest.raises(ValueError, match="1 to 4096 bytes"):
            engine.write("", torch.zeros(1))
        with pytest.raises(KeyError):
            engine.info("nothing")
        with pytest.raises(ValueError, match="unknown"):
            engine.wait(10**6)
    for wrong in ({"depth": 0}, {"workers": 65}, {"block_bytes": 5000}, {"checksums": "md5"}, {"backend": "spdk"}):
        with pytest.raises(ValueError, match=r"use|multiple"):
            open_engine(files, tmp_path, **wrong)


def test_no_space_is_a_typed_error_fixed_by_a_commit(tmp_path):
    files = make_files(tmp_path, count=1, size=(1 << 20) + (128 << 10) + (256 << 10))
    with open_engine(files, tmp_path) as engine:
        half = torch.zeros(120 << 10, dtype=torch.uint8)
        engine.write("w", half)
        engine.wait()
        engine.commit()
        engine.write("w", half)
        engine.wait()
        with pytest.raises(StorageError, match="commit, which frees") as caught:
            engine.write("w", half)
        assert (caught.value.op, caught.value.expected) == ("reserve", 120 << 10)
        engine.commit()
        engine.write("w", half)
        assert engine.wait() == 1


def test_damaged_data_is_named_and_the_rest_is_served(files, tmp_path):
    with open_engine(files, tmp_path) as engine:
        for key in ("good", "bad"):
            engine.write(key, torch.arange(1000))
        engine.wait()
        engine.commit()
        device, offset, _ = engine.info("bad").extents[0]
        path = engine.paths[device]
        with open(path, "r+b") as file:
            file.seek(offset + 17)
            file.write(b"\xff")
        assert list(engine.verify()) == ["bad"]
        with pytest.raises(StorageError, match=r"'bad'.*checksum"):
            engine.read_new("bad")
        assert torch.equal(engine.read_new("good"), torch.arange(1000))


def test_statistics_and_trace_match_the_requests(files, tmp_path):
    with open_engine(files, tmp_path, trace=True, depth=4) as engine:
        engine.write("w", torch.zeros(1 << 20, dtype=torch.uint8))
        engine.wait()
        engine.wait(engine.read("w", torch.empty(1 << 20, dtype=torch.uint8), priority=7))
        counted = engine.statistics
        rows = engine.write_trace(tmp_path / "trace.csv")
    assert (counted.bytes_written, counted.bytes_read, counted.requests) == (1 << 20, 1 << 20, 2)
    assert counted.commands == 32
    assert 1 <= counted.mean_queue_depth <= counted.max_queue_depth <= 4
    assert sum(count for _, count in counted.read_latency_us) == 16
    assert quantile_us(counted.read_latency_us, 0.5) <= quantile_us(counted.read_latency_us, 0.99)
    with (tmp_path / "trace.csv").open() as file:
        table = list(csv.DictReader(file))
    assert rows == len(table) == 2
    assert tuple(table[0]) == TRACE_COLUMNS
    assert (table[1]["op"], table[1]["priority"], table[1]["status"]) == ("read", "7", "ok")
    assert int(table[1]["submitted_ns"]) <= int(table[1]["started_ns"]) <= int(table[1]["ended_ns"])


def test_unclosed_engine_does_not_hang_the_interpreter(files, tmp_path):
    program = (
        "import sys, torch\nfrom memascend.storage.direct_engine import *\n"
        "engine = DirectEngine(sys.argv[2:], 'tests', DirectEngineConfig(control_folder=sys.argv[1]))\n"
        "engine.write('w', torch.ones(1 << 20)); print('submitted')\n"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path), *map(str, files)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "submitted\n", "")
