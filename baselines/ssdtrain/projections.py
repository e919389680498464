"""The cases of the paper's projections: Table III, Fig. 5 and Fig. 8b; the formulas are the planner's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memascend.planner.endurance import Drives, Parallelism, Projection, Rates, Transformer, projection

# Values that the text does not state come from the authors' fork (github.com/K-Wu/llm-analysis at 44495f6): vocabulary,
# operations per second, GPUs per block, and for Fig. 5 the global batches and the throughputs of Narayanan et al. 2021,
# Table 2.
_VOCAB, _BATCH, _REACHED = 32_000, 16, 153e12
TABLE_III = {
    (8192, 4): Transformer(layers=4, hidden=8192, heads=64, context=1024, vocab=_VOCAB),
    (12288, 3): Transformer(layers=3, hidden=12288, heads=96, context=1024, vocab=_VOCAB),
    (16384, 2): Transformer(layers=2, hidden=16384, heads=128, context=1024, vocab=_VOCAB),
}
_GPT = {
    "175B": Transformer(layers=96, hidden=12288, heads=96, context=2048, vocab=51_200),
    "530B": Transformer(layers=105, hidden=20480, heads=128, context=2048, vocab=51_200),
}
_STAGES = {"175B": 12, "530B": 35}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One bar of Fig. 5."""

    framework: str
    size: str
    gpus: int
    global_batch: int
    flops_per_s: float

    @property
    def parallel(self) -> Parallelism:
        """Division of the model among the GPUs: tensor and pipeline parallelism for Megatron, none for ZeRO-3."""
        if self.framework == "ZeRO-3":
            return Parallelism()  # the throughput is measured, so it already includes the gathers
        return Parallelism(tensor=8, pipeline=_STAGES[self.size])

    @property
    def model(self) -> Transformer:
        return _GPT[self.size]

    @property
    def sequences(self) -> float:
        """Number of sequences that one replica processes in a step."""
        return self.global_batch * self.parallel.tensor * self.parallel.pipeline / self.gpus


def _cases(framework: str, size: str, rows: tuple[tuple[int, int, int], ...]) -> tuple[Case, ...]:
    return tuple(
        Case(framework=framework, size=size, gpus=gpus, global_batch=batch, flops_per_s=tera * 1e12)
        for gpus, batch, tera in rows
    )


FIG_5 = (
    *_cases("Megatron", "175B", ((384, 1536, 153), (768, 1536, 149), (1536, 1536, 141))),
    *_cases("Megatron", "530B", ((560, 2240, 171), (1120, 2240, 167), (2240, 2240, 159))),
    *_cases("ZeRO-3", "175B", ((384, 6144, 144), (768, 13824, 88), (1536, 29184, 44))),
    *_cases("ZeRO-3", "530B", ((640, 5120, 138), (1120, 11200, 98), (2240, 24640, 48))),
)


def table_iii() -> dict[tuple[int, int], Projection]:
    """Return the estimates of Table III by (hidden, layers), for two GPUs that share each block."""
    return {key: scaled(*key) for key in TABLE_III}


def fig_5(drives: Drives | None = None) -> Iterator[tuple[Case, Projection, float]]:
    """Yield each case of Fig. 5 with its projection for one sequence and the lifetime of the drives in years.

    One sequence suffices, since bytes and seconds both scale with the batch.
    """
    for case in FIG_5:
        made = projection(case.model, 1, Rates(flops_per_s=case.flops_per_s), case.parallel)
        yield case, made, made.years(drives)


def scaled(hidden: int, layers: int, *, tensor: int = 2, pipeline: int = 1) -> Projection:
    """Return a projection of Fig. 8b: a model of Table III with `pipeline` times the layers on tensor x pipeline GPUs.

    A stage holds what the two GPUs of the original hold; only the share of embedding and logits, and the all-reduces,
    change.
    """
    base = TABLE_III[hidden, layers]
    model = Transformer(
        layers=layers * pipeline, hidden=hidden, heads=base.heads, context=base.context, vocab=base.vocab
    )
    return projection(model, _BATCH, Rates(flops_per_s=_REACHED), Parallelism(tensor=tensor, pipeline=pipeline))
