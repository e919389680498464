"""Several processes on one store: no space is allocated twice, and each sees what the others have committed."""

import subprocess
import sys

import pytest

from memascend.storage.direct_engine import DirectEngine, DirectEngineConfig
from memascend.storage.native import _C

CHILD = r"""
import random, sys, torch
from memascend.storage.direct_engine import DirectEngine, DirectEngineConfig
folder, rank, rounds, *devices = sys.argv[1:]
rank, rng = int(rank), random.Random(int(rank))
config = DirectEngineConfig(control_folder=folder, workers=1 + rank % 2, depth=4, block_bytes=1 << 14,
                            backend=["auto", "libaio"][rank // 2 % 2])
own = {}
with DirectEngine(devices, "tests", config) as engine:
    for number in range(int(rounds)):
        for _ in range(rng.randrange(1, 6)):
            key = f"rank{rank}/{rng.randrange(8)}"
            own[key] = torch.randint(0, 256, (rng.randrange(1, 80_000),), dtype=torch.uint8)
            own[key][-1] = rank
            engine.write(key, own[key])
        engine.wait()
        if rng.random() < 0.5:
            engine.commit()
        for key, tensor in own.items():
            assert torch.equal(engine.read_new(key), tensor), f"own {key}"
        for key, _ in engine.items():  # of the others: some whole version
            if key not in own and rng.random() < 0.2:
                assert engine.read_new(key)[-1] == int(key[4 : key.index("/")]), f"torn {key}"
    engine.commit()
"""


def start(tmp_path, ranks, rounds, devices):
    return [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), str(rank), str(rounds), *devices],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("rounds", [10, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.timeout(1800)
def test_processes_on_one_store_allocate_separate_space(tmp_path, ranks, rounds):
    devices = [str(tmp_path / name) for name in ("one", "two")]
    for path in devices:
        with open(path, "wb") as file:
            file.truncate(24 << 20)
    _C.storage_format(devices, "tests", [], 4096, 16384)
    children = start(tmp_path, ranks, rounds, devices)
    errors = [child.communicate(timeout=1500)[1] for child in children]
    assert [child.returncode for child in children] == [0] * ranks, errors
    with DirectEngine(devices, "tests", DirectEngineConfig(control_folder=str(tmp_path))) as engine:
        assert {key[:5] for key, _ in engine.items()} == {f"rank{rank}" for rank in range(ranks)}
        assert engine.verify() == {}
        places = [extent[:2] for _, stored in engine.items() for extent in stored.extents]
        assert len(places) == len(set(places))
        assert engine.space().processes == 1
        assert engine.space().reserved_bytes == 0
