"""Our I/O and pin handles accept every call that the compiled ones of this DeepSpeed accept, with the same names."""

from __future__ import annotations

import inspect
import os
import re

import pytest
import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytestmark = pytest.mark.deepspeed

# Names that cannot be passed by keyword, or that DeepSpeed spells in two ways.
OUR_NAME = {"async": "asynchronous", "example_tenosr": "example_tensor", "locked_tensor": "tensor"}
# Called only by DeepSpeed's NativePinnedMemory, which our accelerator replaces.
NOT_CALLED = {"free_cpu_locked_tensor_by_ptr"}


def calls_of(compiled: type) -> list[tuple[str, list[str]]]:
    """Return (method, names of its arguments) of each overload, as pybind11 wrote them into the docstring."""
    found = []
    for method in (name for name in vars(compiled) if not name.startswith("_") and name not in NOT_CALLED):
        for arguments in re.findall(rf"\b{method}\(self: [\w.]+(.*?)\) ->", getattr(compiled, method).__doc__):
            found.append((method, re.findall(r"(\w+): ", arguments)))
    return found


def refused(compiled: type, ours: type) -> list[str]:
    problems = []
    for method, names in calls_of(compiled):
        try:
            inspect.signature(getattr(ours, method)).bind("self", **{OUR_NAME.get(n, n): None for n in names})
        except (AttributeError, TypeError) as error:
            problems.append(f"{method}({', '.join(names)}): {error}")
    return problems


def test_io_handle_accepts_every_call_of_deepspeeds_handle():
    from deepspeed.ops.op_builder import AsyncIOBuilder

    from memascend.integrations.deepspeed.aio import AioHandle

    compiled = AsyncIOBuilder().load(verbose=False).aio_handle
    assert ("async_pwrite", ["buffer", "filename", "file_offset"]) in calls_of(compiled)
    assert not refused(compiled, AioHandle)


def test_pin_handle_accepts_every_call_of_deepspeeds_handle():
    op_builder = pytest.importorskip("deepspeed.ops.op_builder")
    if not hasattr(op_builder, "PinMemoryBuilder"):
        pytest.skip("this DeepSpeed has no pin_memory op (0.19.4 and later have)")
    from memascend.integrations.deepspeed.aio import PinHandle

    compiled = op_builder.PinMemoryBuilder().load(verbose=False).pin_handle
    assert ("new_cpu_locked_tensor", ["num_elem", "example_tensor"]) in calls_of(compiled)
    assert not refused(compiled, PinHandle)


def test_an_open_file_is_written_by_its_descriptor(tmp_path):
    from memascend.integrations.deepspeed.aio import AioModule, IoCounters
    from memascend.memory.pinned import PageAlignedPinnedAllocator
    from memascend.planner.derived_sizes import IoSettings

    io = IoSettings(block_bytes=1 << 20, queue_depth=8, workers=2)
    handle = AioModule(PageAlignedPinnedAllocator(), IoCounters(), io).aio_handle()
    data = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    path = tmp_path / "data"
    for begin, by_name in ((0, True), (4096, False)):
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
        part = data[begin : begin + 4096].contiguous()
        words = {"fd": descriptor} if by_name else {"filename": descriptor}
        assert handle.async_pwrite(buffer=part, file_offset=begin, **words) == 0
        assert handle.wait() == 1
        os.close(descriptor)
    assert path.read_bytes() == data.numpy().tobytes()
    with pytest.raises(TypeError, match="one of filename and fd"):
        handle.async_pwrite(data)
