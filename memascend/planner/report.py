"""The report of a plan: tables as text for people, and JSON for programs."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from memascend import systems
from memascend.planner.host_budget import what_fits
from memascend.planner.limits import SSD_SPACE
from memascend.planner.machine import REASONS, Calibrations
from memascend.planner.options import longest_context
from memascend.planner.plan_result import Need, PlanResult, Wear

GIB = 2**30
_WIDTH = 44


def as_text(result: PlanResult) -> str:
    """Return the whole report as text, section by section."""
    sections = [
        [_title(result), f"{result.work.stack}", *_beyond_the_model(result)],
        _table("host memory at the peak of a step", result.host.components(), result.work.spec.k),
        _gpu(result),
        _ssd(result),
        _paths(result),
        _nodes(result),
        _verdicts(result),
        _time(result),
        _choice(result),
        _others(result),
    ]
    return "\n".join("\n".join(lines) for lines in _separated(sections))


def _separated(sections: list[list[str]]) -> list[list[str]]:
    """Leave out empty sections and put a blank line before each but the first."""
    filled = [lines for lines in sections if lines]
    return [lines if index == 0 else ["", *lines] for index, lines in enumerate(filled)]


def _title(result: PlanResult) -> str:
    work, spec = result.work, result.work.spec
    gpus = f"{work.ranks} GPU{'s' if work.ranks > 1 else ''}"
    if work.on_cpu:
        gpus = "CPU" if work.ranks == 1 else f"CPU, {work.ranks} processes"
    each = "process" if work.on_cpu else "GPU"
    states = f", {work.kept_states} optimizer states" if work.kept_states != "fp32" else ""
    states += ", bf16 gradient buffer" if work.gradients == "bf16" else ""
    experts = ""
    if spec.experts:
        experts = ", experts fused as in transformers 5" if spec.fused_experts else ", experts one matrix each"
    twin = f" (twin, widths / {spec.k})" if spec.k > 1 else ""
    more = f" x {work.accumulation}" if work.accumulation > 1 else ""
    parameters = f"{spec.parameters / 1e9:.2f} B" if spec.parameters >= 1e9 else f"{spec.parameters / 1e6:.1f} M"
    return (
        f"{result.host.label}: {spec.display}{twin}, {parameters} parameters{experts}, {work.dtype}{states}, {gpus}, "
        f"batch {work.batch}{more} per {each}, context {work.context}"
    )


def _beyond_the_model(result: PlanResult) -> list[str]:
    """Return a note for a context longer than the model's maximum."""
    work, most = result.work, longest_context(result.work.spec.config)
    if most is None or work.context <= most:
        return []
    return [f"note: the model takes at most {most:,} tokens per sequence; memascend train refuses {work.context:,}"]


def _table(title: str, components: dict[str, int], k: int) -> list[str]:
    """Return rows of sizes and shares, in GiB, or in MiB for a twin with divisor `k` > 1."""
    total = sum(components.values())

    def cell(size: int) -> str:
        return gib(size) if k == 1 else gib(size * 1024)

    lines = [f"{title:<{_WIDTH}}{'GiB' if k == 1 else 'MiB':>10}{'share':>8}"]
    for name, size in sorted(components.items(), key=lambda item: -item[1]):
        if size:
            lines.append(f"  {name:<{_WIDTH - 2}}{cell(size):>10}{size / total:>8.1%}")
    return [*lines, f"  {'total':<{_WIDTH - 2}}{cell(total):>10}{1:>8.0%}"]


def _gpu(result: PlanResult) -> list[str]:
    if result.work.on_cpu:
        return ["no GPU: weights, activations and logits that are computed with are in host memory, counted above"]
    return _table("memory of each GPU at its peak", result.device.components(), result.work.spec.k)


def gib(size: float) -> str:
    """Return a size in GiB with two decimals, or "< 0.01" for a small one."""
    return f"{size / GIB:.2f}" if size >= GIB // 200 or not size else "< 0.01"


def _number(value: float, digits: int = 3) -> str:
    """Format a number with `digits` significant digits; large numbers never use exponents."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def _gb(size: float) -> str:
    """Return a size in GB or MB, as drives are rated."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def _ssd(result: PlanResult) -> list[str]:
    volume, wear = result.volume, result.wear
    if volume.uncounted:
        return [f"SSD: its traffic and space are not counted; {volume.uncounted}"]
    if not wear.bytes_per_step:
        return ["SSD: not used"]
    lines = [
        f"SSD: {gib(result.swap_bytes)} GiB ({_gb(result.swap_bytes)}) of swap files; a step reads "
        f"{_gb(volume.total_read_bytes)} and writes {_gb(volume.total_write_bytes)}"
    ]
    tell = getattr(systems.load(result.work.system), "storage_notes", None)
    space_bytes = next((need.limit_bytes for need in result.needs if need.name == SSD_SPACE), None)
    lines += [f"  {line}" for line in (tell(result.work, space_bytes) if tell is not None else ())]
    if wear.activation_bytes:
        lines += _activations(wear)
    if wear.tb_per_day is not None:
        lines.append(f"  running without a pause writes {wear.tb_per_day:,.2f} TB per day")
    if result.paths:
        return lines
    if wear.endurance_tb is None:
        lines.append("  drive lifetime: needs the rated endurance (--ssd-endurance, TB written)")
    elif wear.days_of_life is not None:
        lines.append(
            f"  rated for {_rating(wear)} written: {wear.steps_of_life:,.0f} steps, "
            f"{wear.days_of_life:,.1f} days without a pause"
        )
    else:
        lines.append(f"  rated for {_rating(wear)} written: {wear.steps_of_life:,.0f} steps")
    return lines


def _paths(result: PlanResult) -> list[str]:
    """Return a table of the paths: bytes stored and written per step, seconds of a step without it, and lifetime."""
    if not result.paths:
        return []
    head = f"paths of {result.rated.name}, side by side without RAID"
    lines = [f"{head:<{_WIDTH}}{'share':>8}{'GiB':>11}{'written/step':>17}{'s without it':>15}{'days of life':>15}"]
    for path in result.paths:
        without = "-" if path.seconds_without is None else f"{_number(path.seconds_without)}"
        life = "-" if path.days_of_life is None else f"{path.days_of_life:,.1f}"
        cells = f"{path.share:>8.1%}{gib(path.stored_bytes):>11}{_gb(path.write_bytes_per_step):>17}"
        lines.append(f"  {path.name:<{_WIDTH - 2}}{cells}{without:>15}{life:>15}")
    wear = result.wear
    rated = "needs their rated endurance (--ssd-endurance)"
    return [
        *lines,
        f"  lifetime of each drive: {rated if wear.endurance_tb is None else f'rated for {_rating(wear)} written'}",
    ]


def _nodes(result: PlanResult) -> list[str]:
    """Return a table of the memory nodes: bytes by class, used and total."""
    made = result.nodes
    if made is None:
        return []
    heading = f"memory nodes of {result.rated.name}, {made.policy.replace('_', ' ')} (GiB)"
    if made.refused:
        return [heading, f"  cannot be followed: {made.refused}"]
    lines = [f"{heading:<{_WIDTH}}" + "".join(f"{made.names[node]:>10}" for node in made.capacity)]
    for name, shares in made.placed.items():
        cells = "".join(f"{gib(shares[node]) if node in shares else '-':>10}" for node in made.capacity)
        lines.append(f"  {name.replace('_', ' '):<{_WIDTH - 2}}{cells}")
    for title, size in (("used", made.used), ("of", made.capacity.__getitem__)):
        lines.append(f"  {title:<{_WIDTH - 2}}" + "".join(f"{gib(size(node)):>10}" for node in made.capacity))
    for node, more in made.overfull.items():
        lines.append(f"  {made.names[node]} is given {gib(more)} GiB more than it has: name another --placement")
    return lines


def _rating(wear: Wear) -> str:
    """Return the drives' endurance, with the assumed gain if there is one."""
    if wear.endurance_gain == 1:
        return f"{wear.endurance_tb:,g} TB"
    return f"{wear.endurance_tb:,g} TB, times {wear.endurance_gain:,g} (--ssd-endurance-gain),"


def _activations(wear: Wear) -> list[str]:
    """Return lines about the activations on the SSD."""
    size = _gb(wear.activation_bytes)
    said = (
        f"  activations: a step writes {size} more" if wear.untimed_bytes else f"  {size} of the writes are activations"
    )
    said += " and reads them back" if wear.untimed_bytes else ", read back in the same step"
    if wear.activation_bytes_per_s is None:
        return [said]
    rate = wear.activation_bytes_per_s / 1e9
    lines = [f"{said}; writing them within half of the step takes {rate:,.2f} GB/s"]
    return [*lines, "  (the seconds of a step are those without this I/O)"] if wear.untimed_bytes else lines


def _verdicts(result: PlanResult) -> list[str]:
    """Return lines that compare needs with limits, with remedies and the largest sizes that fit."""
    checked = [need for need in result.needs if need.fits is not None]
    if not checked:
        return ["to check whether it fits, give --gpu-memory, --ram and --ssd-space (GiB), or --testbed"]
    lines = [line for need in checked for line in (_verdict(need, result), *_remedy(need, result))]
    return [*lines, *_largest(result)]


def _remedy(need: Need, result: PlanResult) -> list[str]:
    """Return a line with changes that would make the run fit into host memory, if it does not."""
    if need.name != "host memory" or need.fits or need.limit_bytes is None:
        return []
    fits = what_fits(result.work, round(need.limit_bytes))
    return [f"  fits with {'; or '.join(change.text() for change in fits)}"] if fits else []


def _verdict(need: Need, result: PlanResult) -> str:
    """Return one line that says whether a need with a limit fits, and by how much."""
    assert need.limit_bytes is not None
    spare = need.limit_bytes - need.needed_bytes
    limit = f"{need.limit_bytes / GIB:.2f}".removesuffix(".00") + " GiB"
    if spare >= 0:
        purpose = " for the page cache and other processes" if need.name == "host memory" else ""
        return f"{need.name}: fits {limit}, with {gib(spare)} GiB to spare{purpose}"
    parts = {"host memory": result.host.components(), "GPU memory": result.device.components()}.get(need.name)
    part = ""
    if parts:
        name, size = max(parts.items(), key=lambda item: item[1])
        part = f"; largest part: {name}, {gib(size)} GiB"
    return f"{need.name}: does not fit {limit}: {gib(-spare)} GiB short{part}"


def _largest(result: PlanResult) -> list[str]:
    found, work = result.largest, result.work
    if found is None:
        return []
    model = found.model or "none of the committed models"
    at_both = f"largest model at batch {work.batch} and context {work.context}: {model}"
    if found.unbounded:
        return ["the given limits bound neither context nor batch", at_both]
    context = f"{found.context:,} tokens" if found.context else "none"
    trained = work.spec.config.get("max_position_embeddings")
    if found.context and isinstance(trained, int) and found.context > trained:
        context += f" (the model is trained for {trained:,})"
    batch = f"{found.batch:,}" if found.batch else "none"
    return [
        f"largest context at batch {work.batch}: {context}",
        f"largest batch at context {work.context}: {batch}",
        at_both,
    ]


def _time(result: PlanResult) -> list[str]:
    if result.time is None:
        return [f"step time: not predicted; {result.no_time}"]
    made, name = result.time, result.rated.name
    lines = [
        f"{_number(made.seconds)} s per step, {_number(made.tokens_per_second, 4)} tokens/s on {name} (modelled); "
        f"bottleneck: {made.bottleneck}",
        f"  {'phase':<18}{'seconds':>9}   waits for",
    ]
    for phase in made.phases:
        waits = sorted(phase.by_resource.items(), key=lambda item: -item[1])
        shares = ", ".join(f"{resource} {_number(seconds)} s" for resource, seconds in waits if seconds)
        lines.append(f"  {phase.name:<18}{_number(phase.seconds):>9}   {shares}")
    known = Calibrations()
    lines.append("  calibrated, not derived:")
    for field in ("gpu_efficiency", "host_seconds_per_parameter", "adam_memory_efficiency"):
        text = f"{field} = {getattr(known, field):.4g}: {REASONS[field]}"
        lines += textwrap.wrap(text, width=100, initial_indent="    ", subsequent_indent="      ")
    return lines


def _choice(result: PlanResult) -> list[str]:
    """Return a table of the fastest fitting policies for activations, next to one policy for all blocks."""
    made = result.choice
    if made is None:
        return []
    left = gib(max(0.0, made.room_bytes))
    heading = f"activations of {result.work.spec.layers} blocks, {left} GiB left for them"
    rows = {"fastest that fits": made.fastest, "all kept": made.all_kept, "all recomputed": made.all_recomputed}
    rows["all to the SSD"] = made.all_offloaded
    lines = [f"{heading:<{_WIDTH + 14}}{'s/step':>10}{'GiB':>9}{'written':>12}"]
    for name, mix in rows.items():
        if mix is None:
            lines.append(f"  {name}: none; a smaller batch or context needs less")
            continue
        words = f"{name}: {mix}" if name.startswith("fastest") else name
        words += "" if mix.peak_bytes <= made.room_bytes else " (does not fit)"
        lines.append(
            f"  {words:<{_WIDTH + 12}}{_number(mix.seconds):>10}{gib(mix.peak_bytes):>9}{_gb(mix.written_bytes):>12}"
        )
    if made.fastest is not None:
        lines.append(f"  to run the fastest: memascend train --checkpointing ssd --activations {made.fastest.policy}")
    return [*lines, "  modelled"]


def _others(result: PlanResult) -> list[str]:
    """Return a table of the same run with the other systems: host memory, and seconds per step if known."""
    if not result.others:
        return []
    limit = next(need.limit_bytes for need in result.needs if need.name == "host memory")
    timed = result.time is not None or any(peer.seconds is not None for peer in result.others)
    labels = {peer.plan.label: peer.plan.label for peer in result.others}
    for peer in result.others:
        if peer.plan.work.kept_states != result.work.kept_states:  # it does not support the requested states
            labels[peer.plan.label] += f", {peer.plan.work.kept_states} states"
    width = max(_WIDTH, *(len(label) + 4 for label in labels.values()))
    head = f"{'host memory with another system (modelled)':<{width}}{'GiB':>10}{'ratio':>8}"
    head += f"{'s per step':>13}" if timed else ""
    lines = [head if limit is None else f"{head}   in {f'{limit / GIB:.2f}'.removesuffix('.00')} GiB"]
    for peer in result.others:
        size = peer.plan.host_bytes
        line = f"  {labels[peer.plan.label]:<{width - 2}}{gib(size):>10}{size / result.host.host_bytes:>7.2f}x"
        if timed:
            line += f"{'-' if peer.seconds is None else _number(peer.seconds):>13}"
        lines.append(line if limit is None else f"{line}   {'fits' if size <= limit else 'does not fit'}")
    flags = dict.fromkeys(peer.plan.work.system for peer in result.others)  # each once, in order
    return [*lines, f"  to plan one of them: --system {', '.join(flags)}"]


def as_json(result: PlanResult) -> dict[str, Any]:
    """Return the plan as JSON types, in bytes and seconds. Later versions only add keys."""
    work, made = result.work, result.host
    limits = {need.name: need for need in result.needs}
    others = [(peer.plan.work, peer.plan.host_bytes) for peer in result.others]
    defaults = {name: systems.default_arm(name) for name in systems.names()}
    ram = limits["host memory"].limit_bytes
    return {
        "model": work.spec.label,
        "parameters": work.spec.parameters,
        "system": work.system,
        "arm": work.arm_name,
        "dtype": work.dtype,
        "fused_experts": work.spec.fused_experts,
        "states": work.kept_states,
        "gradients": work.gradients,
        "attention": work.stack.attention,
        "loss": work.stack.loss,
        "checkpointing": work.stack.checkpointing,
        "gpus": work.ranks,
        "device": work.device,
        "batch": work.batch,
        "context": work.context,
        "accumulate": work.accumulation,
        "clip": work.clip,
        "host_bytes": made.host_bytes,
        "device_bytes": result.device.device_bytes,
        "ssd_bytes": None if result.volume.uncounted else result.swap_bytes,
        "components_bytes": made.components(),
        "device_components_bytes": result.device.components(),
        "ram_gib": None if ram is None else ram / GIB,
        "fits": result.fits,
        "needs": [
            {"name": n.name, "needed_bytes": n.needed_bytes, "limit_bytes": n.limit_bytes, "fits": n.fits}
            for n in result.needs
        ],
        "largest": None if result.largest is None else dataclasses.asdict(result.largest),
        "io_bytes": None
        if result.volume.uncounted
        else {"read": result.volume.read_bytes, "write": result.volume.write_bytes},
        "wear": {
            "bytes_per_step": result.wear.bytes_per_step,
            "tb_per_day": result.wear.tb_per_day,
            "endurance_tb": result.wear.endurance_tb,
            "endurance_gain": result.wear.endurance_gain,
            "activation_bytes_per_step": result.wear.activation_bytes,
            "activation_write_bytes_per_s": result.wear.activation_bytes_per_s,
            "steps_of_life": result.wear.steps_of_life,
            "days_of_life": result.wear.days_of_life,
        },
        "time": _time_json(result),
        "activations": None if result.choice is None else dataclasses.asdict(result.choice),
        "paths": [dataclasses.asdict(path) for path in result.paths],
        "memory_nodes": _nodes_json(result),
        "others": {peer.system: size for peer, size in others if peer.arm_name == defaults[peer.system]},
        "others_seconds": {f"{p.plan.work.system}/{p.plan.work.arm_name}": p.seconds for p in result.others},
        "arms": {f"{peer.system}/{peer.arm_name}": size for peer, size in others},
        "ledger": [dataclasses.asdict(entry) for entry in (*made.entries, *result.device.entries)],
    }


def _nodes_json(result: PlanResult) -> dict[str, Any] | None:
    made = result.nodes
    if made is None:
        return None
    return {
        "placement": made.policy,
        "fits": made.fits,
        "refused": made.refused or None,
        "nodes": [
            {
                "name": made.names[node],
                "capacity_bytes": capacity,
                "used_bytes": made.used(node),
                "bytes": {name: shares[node] for name, shares in made.placed.items() if node in shares},
            }
            for node, capacity in made.capacity.items()
        ],
    }


def _time_json(result: PlanResult) -> dict[str, Any]:
    if result.time is None:
        return {"reason": result.no_time}
    made = result.time
    return {
        "lane": "modelled",
        "testbed": result.rated.name,
        "seconds": made.seconds,
        "tokens_per_second": made.tokens_per_second,
        "bottleneck": made.bottleneck,
        "phases": [dataclasses.asdict(phase) | {"bottleneck": phase.bottleneck} for phase in made.phases],
        "rates": dataclasses.asdict(result.rated),
        "calibrations": dataclasses.asdict(Calibrations()),
        "reasons": REASONS,
    }
