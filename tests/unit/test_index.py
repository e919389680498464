"""The location index against a simple model: two dictionaries, the committed state and this process's changes."""

import shutil
import tempfile
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from memascend import _C
from memascend.storage.direct_engine import DirectEngine, DirectEngineConfig

KEYS = st.sampled_from(["a", "b", "layer.0.weight", "ключ", "x" * 300])


class Index(RuleBasedStateMachine):
    """Two users of one store of two devices, with a log so small that it moves often."""

    spare = Bundle("spare")

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="index-"))
        self.paths = [str(self.folder / name) for name in ("one", "two")]
        for path in self.paths:
            with open(path, "wb") as file:
                file.truncate(2 << 20)
        _C.storage_format(self.paths, "tests", [], 4096, 8192)
        self.committed: dict[str, torch.Tensor] = {}
        self.pending: list[dict[str, torch.Tensor | None]] = [{}, {}]
        self.engines = [self.open(), self.open()]

    def open(self):
        config = DirectEngineConfig(control_folder=str(self.folder), depth=4, block_bytes=8192, stripe_bytes=8192)
        return DirectEngine(self.paths, "tests", config)

    def view(self, user):
        merged = {**self.committed, **self.pending[user]}
        return {key: tensor for key, tensor in merged.items() if tensor is not None}

    @rule(user=st.integers(0, 1), key=KEYS, length=st.integers(0, 30_000), fill=st.integers(0, 255))
    def write(self, user, key, length, fill):
        tensor = torch.full((length,), fill, dtype=torch.uint8)
        self.engines[user].write(key, tensor)
        self.engines[user].wait()
        self.pending[user][key] = tensor

    @rule(user=st.integers(0, 1), key=KEYS)
    def erase(self, user, key):
        assert self.engines[user].erase(key) == (key in self.view(user))
        if key in self.view(user):
            self.pending[user][key] = None

    @rule(user=st.integers(0, 1))
    def commit(self, user):
        assert self.engines[user].commit() == len(self.pending[user])
        self.committed = self.view(user)
        self.pending[user] = {}

    @rule(user=st.integers(0, 1))
    def collect(self, user):
        self.engines[user].collect()

    @rule(user=st.integers(0, 1), target=spare)
    def leave(self, user):
        """Forget what was not committed; the other user stays."""
        self.engines[user].close()
        self.engines[user] = self.open()
        self.pending[user] = {}

    @rule(_=consumes(spare))
    def all_leave(self, _):
        for engine in self.engines:
            engine.close()
        self.engines = [self.open(), self.open()]
        self.pending = [{}, {}]

    @invariant()
    def both_users_see_their_view(self):
        for user, engine in enumerate(self.engines):
            expected = self.view(user)
            assert [key for key, _ in engine.items()] == sorted(expected, key=str.encode)
            for key, tensor in expected.items():
                assert torch.equal(engine.read_new(key), tensor)

    @invariant()
    def no_space_is_lost_or_given_twice(self):
        places = [extent for _, tensor in self.engines[0].items() for extent in tensor.extents]
        begins = [(device, offset) for device, offset, _ in places]
        assert len(begins) == len(set(begins))
        space = self.engines[0].space()
        assert space.data_bytes - space.free_bytes - space.reserved_bytes == self.committed_bytes()

    def committed_bytes(self):
        return sum(-(-len(tensor) // 4096) * 4096 for tensor in self.committed.values())

    def teardown(self):
        for engine in self.engines:
            engine.close()
        shutil.rmtree(self.folder)


Index.TestCase.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestIndex = Index.TestCase
