"""Names that MemAscend's exhibits share: testbeds, models, axes, and the process memory included in printed totals."""

from __future__ import annotations

from functools import cache

from memascend.planner.footprint import GIB
from memascend.planner.machine import PROCESS_OVERHEAD
from workflows.cases import Planned, paper_plan
from workflows.paper_models import Paper
from workflows.tidy import DENSE_NAMES

C1, C2, C3 = "memascend-c1", "memascend-c2", "memascend-c3"
PAPER = Paper("memascend", testbed=C1)
DENSE = DENSE_NAMES
MOE = "qwen3-30b-a3b"
GPUS = 2
CONTEXT = 4096
AT_CONTEXT, AT_BATCH = "context (tokens)", "batch"
CAPS_GIB = {"128": 128.0, "119.21": 128e9 / GIB}  # as printed, and read as GB (erratum M7)
PROCESS_GIB = PROCESS_OVERHEAD.value  # Fig. 8; measured peaks lack one for each of the paper's processes
# Largest batch of a model that the paper names (Fig. 17 text, Table IV).
LARGEST_BATCH = {"llama3.1-8b": 96, "qwen2.5-7b": 64, "qwen2.5-14b": 64, "qwen2.5-32b": 48, MOE: 32}
CONTEXTS = range(CONTEXT, 131_072 + 1, CONTEXT)


@cache
def pair(model: str, testbed: str, dtype: str = "fp16", ranks: int = 1) -> tuple[Planned, Planned]:
    """Return the plans (as published, MemAscend) for one model."""
    systems = ("zero_infinity", "memascend")
    before, after = (paper_plan(model, system, testbed, dtype=dtype, ranks=ranks) for system in systems)
    return before, after


def batches(model: str) -> list[int]:
    """Return 1, 2 and every multiple of 4 up to the model's largest batch."""
    return [1, 2, *range(4, LARGEST_BATCH[model] + 1, 4)]
