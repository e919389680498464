"""Run records as the derivation reads them: checked against their schema, with the names that tables use."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from memascend.baselines.protocol import load_system
from memascend.planner.footprint import OWNER_METRICS, PINNED_OVERHEAD
from workflows import tidy

# Owners whose buffers are components of Fig. 8; buffers of other owners are shown as other host buffers.
FIG08_OWNERS = ("parameter_pool", "gradient_flat_buffer", "optimizer_buffers", "swap_out_buffer", "overflow_check")
COMPONENTS = {owner: OWNER_METRICS[owner] for owner in FIG08_OWNERS}
FIG08_METRICS = (*dict.fromkeys(COMPONENTS.values()), PINNED_OVERHEAD, "other host buffers")

RUN_COLUMNS = [
    *("key", "run_id", "kind", "status", "series", "model", "k", "dtype", "ranks", "seed", "steps"),
    *("commit", "dirty", "started_at", "host", "cpu", "cores", "memory_gib", "locked", "explained_share"),
    *("loss_checksum", "last_loss", "master_weights_sha256", "seconds_per_step", "shims"),
]

# (system, arm) -> series, where the figures' name for an arm differs from its label. DeepSpeed is named with the
# version that ran.
SERIES = {
    ("zero_infinity", "aminmax"): "ZeRO-Infinity (aminmax)",
    ("zero_infinity", "today"): "ZeRO-Infinity (DeepSpeed {deepspeed})",
    ("zero_infinity", "today_016"): "ZeRO-Infinity (DeepSpeed {deepspeed})",
}


def series_of_arm(record: Mapping[str, Any], path: Path) -> str:
    """Return the name of a record's arm in tables and figures; raise TableError if the system or arm does not exist."""
    system, arm = record["system"], record["arm"]
    try:
        label = load_system(system, arm).arms[arm].label
    except ValueError as error:
        raise tidy.TableError(f"{path}: {error}; delete the record, or bring the system back") from None
    version = record["versions"].get("deepspeed", "version unknown")
    return SERIES.get((system, arm), label).format(deepspeed=version)


def measured_on(record: Mapping[str, Any]) -> str:
    """Return the name of the place of a run, so that only comparable runs are joined.

    It has the host and twin, the device and matmul where they are not the defaults, whether the paths are simplex or
    duplex, and the cell of a time twin.
    """
    device, matmul, ranks = record.get("device", "cpu"), record.get("matmul", "native"), record.get("ranks", 1)
    words = [record["model"], *([device] if device != "cpu" else []), *([matmul] if matmul != "native" else [])]
    if "duplex" in record:
        words.append("duplex" if record["duplex"] else "simplex")
    if twin := record.get("time_twin"):
        words += [twin["testbed"], f"batch{twin['cell']['batch']}"]
        words += [f"cpu{twin['cpu_share']:g}"] if twin.get("cpu_share") else []
    words += [f"k{record['twin']['k']}", *([f"r{ranks}"] if ranks > 1 else [])]
    return f"{record['host']['name']}/{'-'.join(words)}"


def predicted_steps(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the simulator's predictions for the steps in a record of `memascend bench engine`."""
    return record["predicted"] if "predicted" in record else record["foretold"]  # name in older records


class Run:
    """A training record with the attribute names that tables use (those of `workflows.cases.Planned`)."""

    lane = "measured"

    def __init__(self, record: dict[str, Any], path: Path) -> None:
        self.record, self.path, self.source = record, path, record["key"]
        self.ok = record["status"] == "ok" and "memory" in record
        self.series, self.testbed = series_of_arm(record, path), measured_on(record)
        self.model = tidy.DISPLAY.get(record["model"], record["model"])
        self.k, self.dtype = record["twin"]["k"], record["dtype"]
        device = record.get("device", "cpu")
        # The label under which averages over twins are grouped: the host, and the device unless it is the CPU.
        self.place = f"{record['host']['name']}{'' if device == 'cpu' else f'/{device}'}/twins"
        self.is_sweep = bool(record.get("points_requested") or record.get("stacks"))
        self.is_curve = bool(record.get("evaluate_every"))

    @property
    def peak_bytes(self) -> int:
        """Host peak in bytes, net of the run's baseline."""
        return self.memory("host_peak_net_bytes")

    @property
    def check_bytes(self) -> int:
        """Bytes that the overflow check needs in addition to the gradient buffer."""
        return self.memory("overflow_spike_bytes")

    def memory(self, field: str) -> int:
        """Return the bytes in a field of the memory section."""
        return self.record["memory"][field]

    def components(self) -> dict[str, int]:
        """Return bytes at the ledger's peak by component of Fig. 8; one component is the allocator's surplus."""
        out = dict.fromkeys(FIG08_METRICS, 0)
        for entry in self.record["ledger"]:
            if entry["role"] == "host" and entry.get("at_peak", False):
                out[COMPONENTS.get(entry["owner"], "other host buffers")] += entry["requested_bytes"]
                out[PINNED_OVERHEAD] += entry["reserved_bytes"] - entry["requested_bytes"]
        return out

    def owned(self, owner: str) -> int:
        """Return the bytes requested by the owner's host buffers that are live at the peak."""
        at_peak = (e for e in self.record["ledger"] if e["role"] == "host" and e.get("at_peak", False))
        return sum(e["requested_bytes"] for e in at_peak if e["owner"] == owner)


def load(paths: list[Path]) -> list[dict[str, Any]]:
    """Read records and check them against the schema; each has its file's path under ``_path``."""
    records = []
    for path in paths:
        try:
            record = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise tidy.TableError(f"{path}: not a readable record: {error}; delete it and run again") from None
        tidy.check(record, "record.schema.json", str(path))
        records.append({**record, "_path": path})
    return records


def apart(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records unchanged if every host name stands for one machine.

    Raises TableError if two machines share a name, since tables would join their records.
    """
    machines: dict[str, tuple[str, Path]] = {}
    for record in records:
        host, path = record["host"], record["_path"]
        machine = f"{host['cpu']}, {host['cores']} cores"
        known, first = machines.setdefault(host["name"], (machine, path))
        if machine != known:
            raise tidy.TableError(
                f"{first} and {path} are of two machines ({known}; {machine}) under one name, {host['name']}: delete "
                "those of one, or give each machine a name and folders of its own (--config host=NAME)"
            )
    return records


def without_temporaries(trace: pd.DataFrame, seconds: float) -> tuple[float | None, float]:
    """Return the begin and end in seconds of an overflow check that allocates nothing.

    Such a check opens the optimizer phase of the last step; the begin is None if the trace has no optimizer phase.
    """
    phases = [p for p in trace["phase"] if p.endswith("-optimizer")]
    if not phases:
        return None, 0.0
    begin = float(trace.loc[trace["phase"] == phases[-1], "t_s"].iloc[0])
    return begin, begin + seconds


def read_trace(run: Run) -> pd.DataFrame:
    """Return the run's memory samples; an empty table if the run kept none."""
    path = run.path.with_suffix(".trace.csv")
    columns = list(tidy.validator("trace.schema.json").schema["properties"])
    if not path.exists():
        return pd.DataFrame(columns=columns)
    trace = pd.read_csv(path, keep_default_na=False)
    missing = [column for column in columns if column not in trace.columns]
    if missing:
        raise tidy.TableError(f"{path}: column {missing[0]} is missing (trace.schema.json)")
    if len(trace):
        tidy.check(trace.iloc[0].to_dict(), "trace.schema.json", str(path))
    return trace


def last_check(record: dict[str, Any]) -> list[tuple[float, int]]:
    """Return (second, change in bytes) of the temporaries of the last overflow check, in order of time."""
    entries = [e for e in record["ledger"] if e["owner"] == "overflow_check" and e["died_s"] is not None]
    if not entries:
        return []
    end, seconds = max(e["died_s"] for e in entries), (record.get("overflow_check_seconds") or [0.0])[-1]
    mine = [e for e in entries if e["born_s"] >= end - 1.05 * seconds - 1e-3]
    changes = [(e["born_s"], e["reserved_bytes"]) for e in mine]
    changes += [(e["died_s"], -e["reserved_bytes"]) for e in mine]
    return sorted(changes)


def run_summary(record: dict[str, Any]) -> dict[str, Any]:
    """Return the columns on a run that figure footers and the report show."""
    host = record["host"]
    out = {
        **{name: record.get(name, "") for name in RUN_COLUMNS},
        "host": host["name"],
        "cpu": host["cpu"],
        "cores": host["cores"],
        "memory_gib": f"{host['memory_bytes'] / tidy.GIB:.1f}",
        "dirty": str(record["dirty"]).lower(),
    }
    if record["kind"] == "step-times":
        return out | {"k": record["twin"]["k"]}
    if record["kind"] != "training":
        return out
    run = Run(record, record["_path"])
    steps = [p["seconds"] for p in record.get("phases", []) if re.fullmatch(r"step(?!1-)\d+-.*", p["name"])]
    out |= {
        "series": run.series,
        "model": run.model,
        "k": run.k,
        "shims": " ".join(record.get("shims", [])),
        "last_loss": (record.get("losses") or [""])[-1],
        "seconds_per_step": f"{sum(steps) / (record['steps'] - 1):.2f}" if steps and record["steps"] > 1 else "",
        "locked": str(any(e.get("locked") for e in record.get("ledger", []))).lower(),
    }
    if run.ok:
        out["explained_share"] = f"{run.memory('ledger_explained_share'):.4f}"
    return out
