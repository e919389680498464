"""Forked children (DataLoader workers) get no copy of memory that a ring or a device has pinned."""

import sys

import pytest

from tests import forked

PRELUDE = """
import os, signal, sys, tempfile, torch
from memascend.memory.pinned import PageAlignedPinnedAllocator as Exact
from memascend.storage.direct_engine import DirectEngine, DirectEngineConfig

torch.set_num_threads(1)  # OpenMP's threads are not there in a child, and torch would wait for them

def private_mib():
    with open("/proc/self/smaps_rollup") as rollup:
        fields = dict(line.split(":", 1) for line in rollup.read().splitlines()[1:])
    return int(fields["Private_Dirty"].split()[0]) >> 10

def in_child(body):
    "What body() returns in a forked child, or minus the signal that ended it."
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that waits for ever ends by this signal
        os._exit(body())
    status = os.waitpid(child, 0)[1]
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

def pinned(mib):
    return Exact(lock=False).allocate(mib << 20, torch.uint8, name="x", owner="test").fill_(7)

folder = tempfile.TemporaryDirectory()
engine = DirectEngine.create_file_store(folder.name, 1 << 20, "test", DirectEngineConfig(workers=1, volatile=True))
if engine.backend != "io_uring":
    print("no io_uring")
    sys.exit(0)
"""


STREAMED = """
from torch.utils.data import DataLoader, Dataset
from memascend import NotStreamable, streaming
from tests.unit.test_streaming_engine import batches, model

ours = model()
session = streaming(folder.name + "/run")
session.hook(ours)
optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
one, two = batches(2)

def is_refused(parameter):
    try:
        parameter.sum()
    except NotStreamable:
        return True
    return False

class Asks(Dataset):
    "What a worker gets that looks at the model, and what it is told when it computes."
    def __len__(self): return 1
    def __getitem__(self, _):
        values = [is_refused(p) for p in ours.parameters()]
        told = []
        for use in (lambda: ours(one), lambda: ours.layers[0](torch.ones(1, 32), scale=torch.tensor(1.0)),
                    optimizer.step, optimizer.state_dict, ours.state_dict):
            try:
                use()
            except RuntimeError as error:
                told.append(str(error))
        session.remove()
        return values, told

def assert_refused():
    ((values, told),) = DataLoader(Asks(), num_workers=1, batch_size=None, multiprocessing_context="fork", timeout=30)
    assert all(values), "a parameter of the model has values in a child"
    assert len(told) == 5 and all("is a fork of it, such as a DataLoader worker" in line for line in told), told
"""


def run_python(code: str) -> str:
    done = forked.run([sys.executable, "-c", PRELUDE + code], timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    if done.stdout.strip() == "no io_uring":
        pytest.skip("io_uring is not to be had here")
    return done.stdout


def test_child_does_not_copy_memory_registered_with_io_uring():
    out = run_python("""
tensor = pinned(64)
before = in_child(private_mib)
assert engine.register_buffer(tensor)
print(before, in_child(private_mib))
""")
    before, registered = map(int, out.split())
    assert before < 32, "an unregistered tensor is shared until somebody writes"
    assert registered < 32, "each child took its own copy of 64 MiB"


def test_child_gets_sigsegv_only_on_registered_memory():
    run_python("""
registered, other = pinned(1), pinned(1)
assert engine.register_buffer(registered)
assert in_child(lambda: int(registered[5])) == -signal.SIGSEGV
assert in_child(lambda: int(other[5])) == 7
def write():
    other.fill_(1)
    return int(other[5])
assert in_child(write) == 1 and int(other[5]) == int(registered[5]) == 7
""")


def test_child_that_drops_registered_memory_keeps_its_own_data():
    run_python("""
registered = [pinned(4)]
address = registered[0].data_ptr()
assert engine.register_buffer(registered[0])
engine.close = lambda: None
def drop():
    own = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(64)]
    registered.clear()
    return sum(int(tensor.sum() != 1 << 20) for tensor in own)
assert in_child(drop) == 0
""")


def test_children_can_read_memory_again_after_engine_close():
    run_python("""
tensor = pinned(1)
assert engine.register_buffer(tensor)
assert in_child(lambda: int(tensor[5])) == -signal.SIGSEGV
engine.close()
assert in_child(lambda: int(tensor[5])) == 7
""")


def test_registered_heap_tensor_leaves_the_heap_usable_in_children():
    run_python("""
tensor = torch.full((3 << 20,), 7, dtype=torch.uint8)[100:]
assert engine.register_buffer(tensor)
def allocate():
    return int(sum(len(bytes(1000)) for _ in range(1000)) == 1_000_000)
assert in_child(allocate) == 1
""")


def test_memory_registered_with_cuda_is_kept_from_children():
    run_python("""
from memascend.memory import cuda
class Driver:
    def cudaHostRegister(self, *_): return 0
    def cudaHostUnregister(self, _): return 0
cuda.available = lambda: True
torch.cuda.cudart = lambda: Driver()
tensor = pinned(1)
view = tensor[10:]
assert in_child(lambda: int(view[5])) == -signal.SIGSEGV
del tensor, view
assert int(pinned(1)[5]) == 7
""")


def test_each_read_of_streamed_weights_checks_once_for_a_fork():
    """The check also applies if the process forks while weights are read."""
    run_python(
        STREAMED
        + """
ours(one).backward()
optimizer.step()
weights, checks = session.engine.weights, []
check = weights.require_own_process
weights.require_own_process = lambda: (checks.append(0), check())

def count(use):
    checks.clear()
    use()
    return len(checks)

parameters = len(list(ours.parameters()))
assert count(lambda: list(session.engine.read_weights())) == parameters
assert count(ours.state_dict) == parameters
assert count(lambda: session.engine.read_states("head.weight")) == 1
unit = session.engine.layout.units[0]
assert count(lambda: weights.take(unit)) == 1
weights.give_back(unit)

def read_on():
    try:
        next(reading)
    except RuntimeError as error:
        return 7 * ("is a fork of it" in str(error))

reading = session.engine.read_weights()
assert in_child(read_on) == 7
next(reading)
assert in_child(read_on) == 7
reading.close()
session.remove()
"""
    )


def test_dataloader_worker_is_refused_streamed_weights_and_training_continues():
    """Between steps, and in the middle of one, when buffer slots are in use."""
    run_python(
        STREAMED
        + """
ours(one).backward()
optimizer.step()
assert_refused()
loss = ours(two)
assert_refused()
loss.backward()
optimizer.step()
found = {name: values.clone() for name, values in session.engine.read_weights()}
session.remove()
theirs = model()
with streaming(folder.name + "/alone") as session:
    session.hook(theirs)
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    for ids in (one, two):
        theirs(ids).backward()
        optimizer.step()
    assert all(torch.equal(found[name], values) for name, values in session.engine.read_weights())
"""
    )
