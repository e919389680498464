"""The simulator's validation: steps that last as simulated have no error, and rates come from no judged step."""

import json
from pathlib import Path

import pytest

from memascend.planner import Workload, model_spec
from memascend.planner.step_time import step_time
from memascend.simulator import Event, write_trace
from workflows.run import validation


def rates(own_s: float) -> dict:
    return {
        "memory_bytes_per_s": 20e9,
        "copy_bytes_per_s": 8e9,
        "ssd_read_bytes_per_s": 2e9,
        "ssd_write_bytes_per_s": 1e9,
        "adamw_bytes_per_s": 15e9,
        "own_s": {system: dict.fromkeys(validation.PHASES, own_s) for system in validation.SYSTEMS},
        "blocks": [
            {"k": k, "context": context, "batch": batch, "forward_s": 0.01, "both_s": 0.03, "flops": 1e9}
            for k, context, batch in validation.POINTS
        ],
    }


def traces(folder: Path, found: dict, slower: float) -> None:
    """As if each step had taken `slower` times what is simulated; LoHan's updates lie in its backward."""
    for block in found["blocks"]:
        for system, arm in validation.SYSTEMS.items():
            k, context, batch = block["k"], block["context"], block["batch"]
            spec = model_spec(validation.MODEL).twin(k)
            work = Workload(spec=spec, system=system, arm=arm, dtype="bf16", batch=batch, context=context)
            machine, costs = validation.local(found, block, system)
            at, events = 0.0, []
            made = step_time(work, machine, calibrations=costs)
            for phase in made.phases:
                end = at + slower * phase.seconds
                events.append(Event(name=phase.name, phase=phase.name, resource="main", begin_s=at, end_s=end))
                at = end
            path = validation.trace_of(folder, system, k, context, batch)
            write_trace(path, events, lane="measured", source="here", system=system, arm=arm)


@pytest.mark.parametrize(("slower", "error"), [(1.0, 0.0), (2.0, -50.0)])
def test_the_error_of_every_phase_is_simulated_over_measured(tmp_path, slower, error):
    found = rates(own_s=0.2)
    (tmp_path / "rates.json").write_text(json.dumps(found))
    traces(tmp_path, found, slower)
    record = validation.judge(tmp_path)
    assert {row["system"] for row in record["rows"]} == set(validation.SYSTEMS)
    assert [row["error_percent"] for row in record["rows"]] == pytest.approx([error] * len(record["rows"]), abs=1e-6)
    assert record["steps"]["count"] == len(validation.SYSTEMS) * len(validation.POINTS)
    assert record["phases"]["median_size_percent"] == pytest.approx(-error, abs=1e-6)
    assert f"median {error:.0f} %" in validation.as_text(record).replace("-0 %", "0 %")


def test_what_the_runtime_takes_for_itself_is_in_every_phase():
    """Its seconds come from a model whose bytes and products are negligible, and are added to each phase."""
    work = Workload(spec=model_spec("llama3.2-1b").twin(8), system="zero_offload", dtype="bf16", batch=1, context=32)
    seconds = []
    for own_s in (0.0, 0.5):
        found = rates(own_s)
        machine, costs = validation.local(found, found["blocks"][0], "zero_offload")
        seconds.append({phase.name: phase.seconds for phase in step_time(work, machine, calibrations=costs).phases})
    without, with_it = seconds
    for phase in validation.PHASES:
        assert with_it[phase] == pytest.approx(without[phase] + 0.5, rel=0.05)
