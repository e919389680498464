"""MemAscend Fig. 1: the simulated path of parameters and gradients in ZeRO-Infinity's backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memascend.planner import Workload, model_spec
from memascend.planner.step_time import step_time
from memascend.planner.workload import papers
from memascend.simulator.trace import Event
from workflows.cases import Row
from workflows.paper_models import block_of, machine, spans
from workflows.papers.memascend.rows.settings import C1, CONTEXT, PAPER

BLOCKS, RANKS = 4, 3  # the paper draws three ranks and leaves n open
LINES = {
    "ssd.read": "SSD, read",
    "pcie0.down": "PCIe to GPU 0",
    "gpu0": "GPU 0",
    "pcie0.up": "PCIe to the host",
    "ssd.write": "SSD, written",
    "cpu": "CPU (optimizer)",
}


def rows() -> Iterator[Row]:
    """Yield a bar per block and resource of rank 0, from the beginning of the backward pass."""
    spec = replace(model_spec("llama3.1-8b"), layers=BLOCKS)
    work = Workload(spec=spec, system="zero_infinity", dtype="fp16", ranks=RANKS, batch=1, context=CONTEXT)
    simulated = step_time(papers(work), machine(C1)).simulated
    begun = dict(simulated.phases())["backward"][0]

    def named(event: Event) -> tuple[str, str] | None:
        block = block_of(event)
        if event.phase != "backward" or not block or event.resource not in LINES:
            return None
        return LINES[event.resource], f"B{block}"

    found = {bar: [at - begun for at in span] for bar, span in spans(simulated.events, named).items()}
    yield from PAPER.bars("memascend-fig01", found, model=f"{BLOCKS} blocks of Llama3.1-8B")
