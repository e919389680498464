"""Derives the memory section of a run record from samples, allocation events and idle readings (DESIGN, Words).

* host resident = RssAnon + RssFile: device-role blocks are shared mappings, which the kernel counts as RssShmem.
* baseline = host resident when idle after the warm-up (two steps), minus the host buffers in the ledger at that time.
* host peak = largest sample of host resident over the steady steps, or the kernel's high-water mark of a host phase
  without the device's share, if that is larger.
* host peak net = host peak minus the baseline. The peak is from the steady steps, which come later, so growth that is
  in no ledger entry reduces the explained share.
* start-up and training peak = largest host resident sample, plus the device's allocated blocks, before the first step,
  and from there on (warm-up included).
* ledger peak = largest sum of host entries alive at one instant in the same window, from allocation events alone.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from itertools import accumulate
from typing import Any

Sample = tuple[Any, ...]  # time in seconds, then bytes by kind
TORCH_OWNERS_OF_DEVICE = {"reduce_bucket", "persistent_parameters"}


def thin(samples: list[Sample], window_s: float) -> list[Sample]:
    """Return the largest sample (by resident size) of each window of `window_s` seconds."""
    out: list[Sample] = []
    for row in samples:
        if out and row[0] - out[-1][0] < window_s and int(row[0] / window_s) == int(out[-1][0] / window_s):
            if row[1] > out[-1][1]:
                out[-1] = row
        else:
            out.append(row)
    return out


def account(results: list[dict[str, Any]], samples: list[Sample]) -> dict[str, Any]:
    """Return ``memory`` and ``ledger`` of a record, summed over ranks (samples are already summed)."""
    ledgers = [_rank_ledger(r) for r in results]
    begin = max(_first_steady(r) for r in results)
    end = max(r["phases"][-1]["end_s"] for r in results)
    memory, at = _memory(results, samples, ledgers, begin, end)
    start = samples[0][0] if samples else 0.0
    entries = [e for ledger in ledgers for e in ledger if e["reserved_bytes"] >= 4096]
    return {"memory": memory, "ledger": [_relative(e, start, at) for e in entries]}


def points(results: list[dict[str, Any]], samples: list[Sample]) -> list[dict[str, Any]]:
    """Return the points of a sweep, each with the memory of its own steady steps and its checkpoint store's bytes."""
    ledgers = [_rank_ledger(r) for r in results]
    entries = [e for ledger in ledgers for e in ledger]
    out = []
    for point in results[0]["points"]:
        first = max(point["first_step"], results[0]["warm_up_steps"] + 1)
        begin = max(_phase(r, f"step{first}-forward")["begin_s"] for r in results)
        end = max(_phase(r, f"step{point['last_step']}-optimizer")["end_s"] for r in results)
        memory, at = _memory(results, samples, ledgers, begin, end)
        stores = [e for e in entries if e["owner"] == "activation_checkpoints" and _alive(e, at)]
        sizes = {f"checkpoint_store_{n}_bytes": sum(e[f"{n}_bytes"] for e in stores) for n in ("requested", "reserved")}
        out.append({**point, "memory": memory, **sizes})
    return out


def _phase(result: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the phase called `name` of a rank's result."""
    return next(p for p in result["phases"] if p["name"] == name)


def _memory(
    results: list[dict[str, Any]], samples: list[Sample], ledgers: list[list[dict[str, Any]]], begin: float, end: float
) -> tuple[dict[str, int | float], float]:
    """Return the ``memory`` section of the steps from ``begin`` to ``end``, and the time of the ledger's peak."""
    entries = [e for ledger in ledgers for e in ledger]
    trains = min(map(_training_begin, results))
    steady = [s for s in samples if begin <= s[0] <= end]
    startup, training = ([s for s in samples if (s[0] >= trains) is later] for later in (False, True))
    idle, end_idle = [r["idle"][0] for r in results], [r["idle"][-1] for r in results]
    live_when_idle = sum(_live(ledger, reading["at_s"]) for ledger, reading in zip(ledgers, idle, strict=True))
    idle_host = sum(_host(i["status"]) for i in idle)
    device = _device_over_time(results)

    def raw_peak(during: list[Sample]) -> int:
        """Largest host plus device bytes; the device counts allocated blocks, without freed ones kept for reuse."""
        return max((s[2] + s[3] + device(s[0]) for s in during), default=0)

    baseline = idle_host - live_when_idle
    sampled = max((s[2] + s[3] for s in steady), default=0)
    host_peak = max(sampled, *(_host_high_water_mark(r, begin, end) for r in results)) if len(results) == 1 else sampled
    ledger_peak, at = _peak([e for e in entries if e["role"] == "host"], begin, end)
    net = host_peak - baseline

    def high_water(word: str) -> int:
        return sum(max(p["hwm_bytes"] for p in r["phases"] if p["name"].startswith(word)) for r in results)

    memory = {
        "floor_bytes": sum(_host(r["floor"]) for r in results),
        "baseline_bytes": baseline,
        "idle_bytes": idle_host,
        "idle_end_bytes": sum(_host(i["status"]) for i in end_idle),
        "idle_end_trimmed_bytes": sum(_host(i["trimmed"]) for i in end_idle),
        "locked_bytes": max((s[5] for s in steady), default=0),
        "raw_peak_bytes": raw_peak(steady),
        "kernel_hwm_training_bytes": high_water("step"),
        "kernel_hwm_startup_bytes": high_water("init"),
        "startup_peak_bytes": raw_peak(startup),
        "training_peak_bytes": raw_peak(training),
        "startup_host_peak_bytes": max((s[2] + s[3] for s in startup), default=0),
        "warm_up_host_peak_bytes": max((s[2] + s[3] for s in training if s[0] < begin), default=0),
        "host_peak_bytes": host_peak,
        "host_peak_sampled_bytes": sampled,
        "host_peak_net_bytes": net,
        "device_peak_bytes": sum(_device_peak(r, begin, end) for r in results),
        "ledger_peak_bytes": ledger_peak,
        "ledger_explained_share": ledger_peak / net if net > 0 else 0.0,
        "ledger_live_idle_bytes": live_when_idle,
        "overflow_spike_bytes": _spike(ledgers, results),
        "locked_buffers_bytes": sum(e["reserved_bytes"] for e in entries if e["locked"] and _alive(e, idle[0]["at_s"])),
    }
    return memory, at


def _device_peak(result: dict[str, Any], begin: float, end: float) -> int:
    """Return the peak of device-role bytes alive at once, from allocation events, which no sampling gap hides."""
    return _peak(_of_device(result), begin, end, "bytes")[0]


def _of_device(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the blocks with the device role of one rank."""
    return [block for block in _blocks(result["tracked_events"]) if block["role"] == "device"]


def _device_over_time(results: list[dict[str, Any]]) -> Callable[[float], int]:
    """Return a function from time to device-role bytes alive, from the allocation events of all ranks."""
    changes = []
    for block in (block for result in results for block in _of_device(result)):
        changes.append((block["born_s"], block["bytes"]))
        if block["died_s"] is not None:
            changes.append((block["died_s"], -block["bytes"]))
    changes.sort()
    times = [t for t, _ in changes]
    totals = [0, *accumulate(delta for _, delta in changes)]
    return lambda t: totals[bisect.bisect_right(times, t)]


def _host(status: dict[str, int]) -> int:
    """Return the resident bytes that do not have the device role."""
    return status["RssAnon"] + status["RssFile"]


def _training_begin(result: dict[str, Any]) -> float:
    """Return the time in seconds at which the first step begins."""
    begin: float = next(p["begin_s"] for p in result["phases"] if p["name"] == "step1-forward")
    return begin


def _first_steady(result: dict[str, Any]) -> float:
    """Return the begin of the first step after the warm-up, or of the first step if there is none after it."""
    begins: dict[str, float] = {p["name"]: p["begin_s"] for p in result["phases"]}
    return begins.get(f"step{result['warm_up_steps'] + 1}-forward", begins["step1-forward"])


def _host_high_water_mark(result: dict[str, Any], begin: float, end: float) -> int:
    """Return the largest kernel high-water mark of a steady host phase minus the phase's peak of device-role bytes.

    That is a lower bound of the host peak that sampling cannot miss, however busy the machine: a spike may be shorter
    than the sampling interval.
    """
    pages = [b | {"bytes": -(-b["bytes"] // 4096) * 4096} for b in _of_device(result)]
    best = 0
    for phase in result["phases"]:
        if phase["role"] != "host" or phase["begin_s"] < begin or phase["end_s"] > end:
            continue
        device, _ = _peak(pages, phase["begin_s"], phase["end_s"], "bytes")
        best = max(best, phase["hwm_bytes"] - device)
    return best


def _rank_ledger(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one rank's entries: those of our allocators, and torch's own blocks from the allocation events."""
    entries = [dict(e) for e in result["ledger"]]
    known = {e["address"] for e in entries if e["allocator"].startswith("torch")}
    named: dict[str, str] = {}
    for reading in result["idle"]:
        named |= reading["named"]
    for block in _blocks(result["tracked_events"]):
        if block["role"] != "host" or block["address"] in known:
            continue
        owner = _owner(block, named, result)
        role = "device" if owner in TORCH_OWNERS_OF_DEVICE else "host"
        entry = {"name": owner, "owner": owner, "role": role, "allocator": "torch (pageable)", "touched_bytes": None}
        entry |= {f"{what}_bytes": block["bytes"] for what in ("requested", "reserved")} | {"locked": False}
        entries.append(entry | {name: block[name] for name in ("address", "born_s", "died_s")})
    return _closed_by_block(entries, result["tracked_events"])


def _blocks(events: list[list[Any]]) -> list[dict[str, Any]]:
    """Pair (kind, id, address, bytes, role, t_ns) events into blocks with times of birth and death."""
    alive: dict[int, dict[str, Any]] = {}
    out = []
    for kind, block_id, address, nbytes, role, t_ns in events:
        if kind == "alloc":
            block = {"address": address, "bytes": nbytes, "role": role, "born_s": t_ns / 1e9, "died_s": None}
            alive[block_id] = block
            out.append(block)
        elif block_id in alive:
            alive.pop(block_id)["died_s"] = t_ns / 1e9
    return out


def _closed_by_block(entries: list[dict[str, Any]], events: list[list[Any]]) -> list[dict[str, Any]]:
    """Set the death of pageable torch entries, which a hook recorded, to that of their blocks."""
    deaths = {b["address"]: b["died_s"] for b in _blocks(events) if b["died_s"] is not None}
    for e in (e for e in entries if e["allocator"].startswith("torch") and e["died_s"] is None):
        if deaths.get(e["address"], 0.0) > e["born_s"]:
            e["died_s"] = deaths[e["address"]]
    return entries


def _owner(block: dict[str, Any], named: dict[str, str], result: dict[str, Any]) -> str:
    """Return the ledger owner of a torch block: that of a named tensor that is still alive, the overflow check, or
    temporaries of the phase in which it was born."""
    if block["died_s"] is None and str(block["address"]) in named:
        return named[str(block["address"])]
    if any(c["begin_s"] <= block["born_s"] <= c["end_s"] for c in result["overflow_checks"]):
        return "overflow_check"
    phases = result["phases"]
    position = bisect.bisect_right(phases, block["born_s"], key=lambda phase: phase["begin_s"]) - 1
    if position >= 0 and block["born_s"] <= phases[position]["end_s"]:
        name = phases[position]["name"]
        return "optimizer_step_temporaries" if name.endswith("optimizer") else f"{name.split('-')[-1]}_temporaries"
    return "between_phases"


def _alive(entry: dict[str, Any], t: float) -> bool:
    """Return whether an entry is alive at time `t`, in seconds."""
    return entry["born_s"] <= t and (entry["died_s"] is None or entry["died_s"] > t)


def _live(entries: list[dict[str, Any]], t: float) -> int:
    """Return the reserved bytes of the host entries that are alive at time `t`, in seconds."""
    return sum(e["reserved_bytes"] for e in entries if e["role"] == "host" and _alive(e, t))


def _peak(entries: list[dict[str, Any]], begin: float, end: float, size: str = "reserved_bytes") -> tuple[int, float]:
    """Return the largest sum of entries alive in the window, and its time."""
    changes = []
    for e in entries:
        if e["born_s"] > end or (e["died_s"] is not None and e["died_s"] < begin):
            continue
        changes.append((max(e["born_s"], begin), 1, e[size]))
        if e["died_s"] is not None and e["died_s"] <= end:
            changes.append((e["died_s"], 0, -e[size]))
    total = best = 0
    at = begin
    for t, _, delta in sorted(changes):
        total += delta
        if total > best:
            best, at = total, t
    return best, at


def _spike(ledgers: list[list[dict[str, Any]]], results: list[dict[str, Any]]) -> int:
    """Return the peak of the overflow check's temporaries alive at once, summed over ranks."""
    total = 0
    for ledger, result in zip(ledgers, results, strict=True):
        temporaries = [e for e in ledger if (e["owner"], e["role"]) == ("overflow_check", "host")]
        checks = result["overflow_checks"]
        total += _peak(temporaries, checks[0]["begin_s"], checks[-1]["end_s"])[0] if checks else 0
    return total


def _relative(entry: dict[str, Any], start: float, peak_at: float) -> dict[str, Any]:
    """Return an entry for the record, with times relative to `start` and whether it was alive at the peak."""
    out = dict(entry)
    out["at_peak"] = entry["role"] == "host" and _alive(entry, peak_at)
    out["born_s"] = round(entry["born_s"] - start, 6)
    out["died_s"] = None if entry["died_s"] is None else round(entry["died_s"] - start, 6)
    return out
