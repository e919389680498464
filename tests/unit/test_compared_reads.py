"""Data of an earlier process are compared with their checksums when first read, and not in every step."""

import pytest
import torch

from memascend.engine.state_files import StoreSpace
from memascend.engine.state_store import StateStore
from memascend.storage.errors import StorageError
from tests.unit.test_in_place_update import begin, contents, model, resume, train


def test_corrupted_tensor_is_named_on_its_first_read(tmp_path):
    store = StateStore.create(tmp_path / "states", "test", StoreSpace([4096, 4096]))
    values = torch.arange(1024, dtype=torch.float32)
    for key in ("good", "rotten"):
        store.write(key, values).wait()
    store.commit({})
    (_, offset, _), *_ = store._tier.engine.info("rotten").extents
    store.close()
    with (tmp_path / "states" / "states").open("r+b") as file:
        file.seek(offset + 100)
        file.write(b"rot")
    store = StateStore.open(tmp_path / "states", "test")
    found = torch.empty(1024)
    store.read("good", found).wait()
    assert torch.equal(found, values)
    assert not store.all_compared
    with pytest.raises(StorageError, match=r"'rotten'.*checksum"):
        store.read("rotten", found).wait()
    store.close()


def test_comparison_ends_after_a_full_read_and_bits_stay_equal(tmp_path):
    whole, ours = model(), model()
    first, other = begin(whole, tmp_path / "whole", versions=2), begin(ours, tmp_path / "ours", versions=2)
    assert first.state_store._tier.engine.config.checksums == "write"
    train(whole, first, range(4))
    train(ours, other, range(1))
    other.close()
    again = model()
    other, _ = resume(again, tmp_path / "ours", versions=2)
    assert other.state_store._tier.engine.config.checksums == "auto"
    train(again, other, range(1, 3))
    assert other.state_store._tier.engine.config.checksums == "write"
    moved = other.transferred
    train(again, other, range(3, 4))
    assert min(b - a for a, b in zip(moved, other.transferred, strict=True)) > 0
    found, expected = contents(other), contents(first)
    assert all(torch.equal(found[0][name], values) for name, values in expected[0].items())
    assert found[2] == expected[2]
    assert all(stored.checksum is not None for _, stored in other.state_store._tier.engine.items())
    first.close()
    other.close()
