"""Machines, models and constants that the modules of LoHan's rows share."""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import cache

from memascend.arrangements import Arrangement
from memascend.baselines.lohan.equations import GIB, Net, Rates
from memascend.planner.machine import MachineSpec
from memascend.planner.options import Stack
from memascend.planner.step_time import StepTime
from memascend.systems import arrangement
from workflows.paper_models import Paper, machine
from workflows.registry import ROOT

T4090, T3090, T4080, T4X = "lohan-4090", "lohan-3090", "lohan-4080", "lohan-4x4090"
PAPER = Paper("lohan", testbed=T4090)
shown = PAPER.shown
LOHAN, ZERO, OFFLOAD = "LoHan", "ZeRO-Infinity", "ZeRO-Offload"
COLOSSAL, FLASHNEURON = "Colossal-AI", "FlashNeuron"
BY_EQUATIONS, G10 = "LoHan (Eqs. 1 to 5)", "G10 (simulated)"
PASSES = ("forward", "backward")  # passes over the weights
SSDS, MEMORY_GB = 12, 768  # the server of Table III
ARMS = {
    LOHAN: ("lohan", "released"),
    "LoHan Optimized": ("lohan", "optimized"),
    "LoHan Naive": ("lohan", "naive"),
    "LoHan+ZeRO": ("lohan", "none"),
    ZERO: ("zero_infinity", "as_published"),
    OFFLOAD: ("zero_offload", "today"),
    COLOSSAL: ("colossal_ai", "as_published"),
    FLASHNEURON: ("flashneuron", "as_published"),
}
# Table VI: name -> layers, width.
DITS = {
    "0.67B": (28, 1152),
    "0.90B": (30, 1280),
    "1.4B": (32, 1536),
    "10B": (28, 4096),
    "20B": (40, 5120),
    "40B": (48, 7168),
}
TABLE_IV = ("6B", "13B", "30B", "70B", "135B", "175B", "276B", "412B")
EQUATIONS, SIMULATED = "Eqs. 1 to 5", "memascend.planner.step_time"


@cache
def published(exhibit: str, metric: str) -> dict[tuple[str, str], str]:
    """Return (series, x) -> value as printed, in the order of the paper."""
    with (ROOT / "results/published/lohan.csv").open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if (line["exhibit_id"], line["metric"]) == (exhibit, metric)]
    return {(line["series"], line["x_value"]): line["value"] for line in lines}


def billions(model: str | None) -> float:
    """Return the size of a model of Table IV in billions of parameters; 0 for None."""
    return float(model.removesuffix("B")) if model else 0.0


@cache
def bed(testbed: str, ssds: int = SSDS) -> MachineSpec:
    """Return a testbed with the SSD rates that Fig. 1c implies for twelve drives, scaled to `ssds` drives.

    A byte passes the drives at the rate of their data sheet, and then the host, which takes the rest of the time that a
    byte takes with twelve drives.
    """
    rates = {}
    for way in ("read", "write"):
        whole, one = PAPER.value(f"ssd_{way}_gb_per_s"), PAPER.value(f"one_ssd_{way}_gb_per_s")
        host = 1 / whole - 1 / (SSDS * one)  # seconds for 1 GB
        rates[f"ssd_{way}_bytes_per_s"] = 1e9 / (1 / (ssds * one) + host)
    return replace(machine(testbed), **rates)


@cache
def step(
    series: str, model: str, batch: int, testbed: str = T4090, ssds: int = SSDS, gpus: int = 1, swap: str = ""
) -> StepTime:
    """Simulate a step at context 1024 in bf16.

    `swap` is a rule of `memascend.swapping` that an arm of LoHan uses in place of its own.
    """
    system, arm = ARMS[series]
    work = {"context": 1024, "batch": batch, "ranks": gpus, "parts": swapping(system, arm, swap) if swap else None}
    if series == COLOSSAL:
        work["stack"] = Stack(checkpointing="plain")
    costs = PAPER.costs(own_s=dict.fromkeys(PASSES, runtime_s(series, model)))
    return PAPER.step(system, arm, model, bed(testbed, ssds), costs, **work)


def swapping(system: str, arm: str, rule: str) -> Arrangement:
    """Return an arm's arrangement with another rule of swapping."""
    own = arrangement(system, arm)
    return replace(own, parts={**own.parts, "swap": rule})


def runtime_s(series: str, model: str) -> float:
    """Return the seconds of DeepSpeed's runtime in one pass over the weights, during which the GPU
    waits; 0 if unknown."""
    per_parameter = PAPER.value("runtime_seconds_per_parameter") if series == ZERO else 0.0
    return per_parameter * PAPER.spec(model).parameters


@cache
def net(model: str, batch: int) -> Net:
    """Return a model of Table IV at a batch, as the equations take it."""
    spec = PAPER.spec(model)
    return Net(layers=spec.layers, hidden=spec.hidden, batch=batch)


@cache
def rates(ssds: int = SSDS, host_bytes: float = 0.0) -> Rates:
    """Return the rates of an RTX 4090; `host_bytes` is the bytes of main memory for activations."""
    drives = bed(T4090, ssds)
    ways = {"read": drives.ssd_read_bytes_per_s, "write": drives.ssd_write_bytes_per_s}
    return Rates(gpu=PAPER.value("gpu_throughput"), link=drives.pcie_bytes_per_s, host_bytes=host_bytes, **ways)


def on_gpu(model: str, batch: int, gpu_gib: float, series: str = LOHAN) -> bool:
    """Return whether a few blocks and the activations of one block fit the GPU (a rule found after the fact).

    For Colossal-AI, the inputs of all blocks must fit too, since it keeps them on the GPU (V-A).
    """
    n = net(model, batch)
    blocks = PAPER.value("blocks_on_gpu") * 24 * n.hidden**2
    kept = n.between_blocks if series == COLOSSAL else 0.0
    return blocks + 34 * n.tokens * n.hidden + kept < gpu_gib * GIB


def most_on_gpu(model: str, gpu_gib: float, among: tuple[int, ...]) -> int | None:
    """Return the largest of some batches that fits the GPU; None if none does."""
    return max((batch for batch in among if on_gpu(model, batch, gpu_gib)), default=None)
