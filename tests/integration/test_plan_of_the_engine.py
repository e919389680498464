"""`plan --system lohan` and a run of it by `train` agree on bytes read and written per step, disk and host buffers."""

import itertools

import pytest
import torch

from memascend import systems
from memascend.baselines.lohan.run import run_of
from memascend.engine.buffers import SAVED_BYTES
from memascend.memory.ledger import Ledger
from memascend.planner.footprint import plan
from memascend.planner.limits import stored_within
from memascend.planner.spec import model_spec
from memascend.planner.step import io_volume
from memascend.storage.tensor_parts import TensorPartsWriter
from memascend.training import random_state
from memascend.training.backends.streaming import StreamingBackend
from memascend.training.config import TrainConfig
from memascend.training.prepare import workload_of_run

CONTEXT, BATCH = 64, 2
NOT_REACHED = 1e6  # a norm that no step here reaches
TIED, UNTIED = model_spec("qwen2.5-0.5b").twin(16), model_spec("llama3.1-8b").twin(64)


def config_of(folder, **options):
    """Return the configuration of a run of `train` with its defaults
    except for the options; it saves only at its end."""
    options = {"save_every": 0, **options}
    return TrainConfig(
        model="m", data=["d"], system="lohan", batch=BATCH, nvme=str(folder), output=str(folder), **options
    )


def planned(config, spec):
    work = workload_of_run(config, spec, CONTEXT)
    volume = io_volume(work)
    return {
        "read": volume.total_read_bytes,
        "written": volume.total_write_bytes,
        "disk": stored_within(work, None),
        "host": plan(work, process_overhead=False).host_bytes,
    }


def measured(config, spec, steps=2, clipped=0.0):
    """Return the bytes of the last step, which knows the order of the blocks, and the disk and host bytes after it.

    Trains as `train` does. `clipped`: the share of clipped steps among the recent ones, as if more steps had come
    before.
    """
    ledger = Ledger()
    settings = systems.load("lohan").trainer(config, {}, "run", "").settings
    backend = StreamingBackend(config, settings, ledger)
    torch.manual_seed(0)
    backend.build(spec.hf_config_dict())
    try:
        for step in range(1, steps + 1):
            batches = [torch.randint(0, spec.vocab, (BATCH, CONTEXT)) for _ in range(config.accumulate)]
            before = backend.engine.transferred
            assert backend.step(batches, 1e-4)[1] is not None
            backend.keep({"step": step, "random": random_state.as_json()})
            read, written = (now - then for now, then in zip(backend.engine.transferred, before, strict=True))
            backend.engine.speculation.take_over({"steps": 16, "clipped": 16 * clipped})
            if config.saves_meanwhile:
                save(backend, folder=backend.engine.state_store.folder.parent)
        files = [path for path in backend.engine.state_store.folder.rglob("*") if path.is_file()]
        disk = sum(path.stat().st_blocks * 512 for path in files)
        host = ledger.peak("host", "reserved_bytes").bytes_
    finally:
        backend.close()
    return {"read": read, "written": written, "disk": disk, "host": host}


def save(backend, folder):
    """Save as `train` does, weights alone."""
    file = TensorPartsWriter(folder / "weights", backend.weight_layouts())
    backend.save_meanwhile(file, None, file.close, lambda error: error).wait()


def assert_the_plan_is_the_run(folder, spec, **options):
    config = config_of(folder, **options)
    made = measured(config, spec)
    assert planned(config, spec) == {name: pytest.approx(size, rel=0.01) for name, size in made.items()}, options


def slow(spec, options):
    return pytest.param(spec, options, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (TIED, {"clip": NOT_REACHED}),
        slow(UNTIED, {"clip": 0.0, "checkpointing": "plain"}),
        (UNTIED, {"states": "bf16", "gradients": "bf16", "accumulate": 2, "state_versions": "one"}),
        slow(TIED, {"clip": 0.0, "accumulate": 2, "dtype": "fp16", "state_versions": "checkpoint"}),
        (UNTIED, {"states": "int8", "state_versions": "one"}),
        slow(UNTIED, {"clip": NOT_REACHED, "accumulate": 2, "state_versions": "checkpoint"}),
        (TIED, {"clip": NOT_REACHED, "accumulate": 3, "accumulation": "vertical"}),
        slow(UNTIED, {"clip": 0.0, "accumulate": 4, "accumulation": "auto", "state_versions": "one"}),
    ],
    ids=["defaults", "used as they come", "one version", "torn", "8 bits", "torn and clipped", "vertical", "auto"],
)
def test_plan_is_within_one_percent_of_the_run(tmp_path, spec, options):
    assert_the_plan_is_the_run(tmp_path, spec, **options)


def test_plan_counts_the_memory_of_background_saves(tmp_path):
    (tmp_path / "saves").mkdir()
    assert_the_plan_is_the_run(tmp_path / "saves", UNTIED, save_every=1, clip=NOT_REACHED)
    plans = {
        every: planned(config_of(tmp_path, save_every=every, save_in_foreground=waits), UNTIED)
        for every, waits in ((0, False), (1, False), (2, True))
    }
    more = plans[1]["host"] - plans[0]["host"]
    largest = max(run_of(workload_of_run(config_of(tmp_path), UNTIED, CONTEXT)).layout.nbytes)
    assert more == min(SAVED_BYTES, largest)
    assert {**plans[1], "host": plans[0]["host"]} == plans[0] == plans[2]


@pytest.mark.parametrize("accumulate", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("clip", "clipped"), [(1e-6, 0.0), (NOT_REACHED, 1.0)], ids=["done again", "waiting"])
def test_planned_traffic_of_clipped_steps_is_within_one_percent(tmp_path, clip, clipped, accumulate):
    config = config_of(tmp_path, clip=clip, accumulate=accumulate)
    run = run_of(workload_of_run(config, TIED, CONTEXT))
    steps = [run.traffic(waiting=True), *([] if clipped else [run.traffic()])]
    made = measured(config, TIED, clipped=clipped)
    assert sum(step.total_read for step in steps) == pytest.approx(made["read"], rel=0.01)
    assert sum(step.total_written for step in steps) == pytest.approx(made["written"], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["offloaded", "plain"])
@pytest.mark.parametrize("state_versions", ["two", "one", "checkpoint"])
@pytest.mark.parametrize(
    "types",
    [
        {"dtype": "bf16", "states": "fp32"},
        {"dtype": "bf16", "states": "bf16"},
        {"dtype": "bf16", "states": "bf16", "gradients": "bf16"},
        {"dtype": "fp16", "states": "fp32"},
        {"dtype": "bf16", "states": "int8"},
    ],
    ids=lambda types: " ".join(types.values()),
)
def test_every_plan_is_within_one_percent_of_the_run(tmp_path, types, state_versions, checkpointing):
    for spec, clip, accumulate in itertools.product((TIED, UNTIED), (0.0, NOT_REACHED), (1, 2, 4)):
        folder = tmp_path / f"{spec.label}-{clip:g}-{accumulate}"
        folder.mkdir()
        more = {"clip": clip, "accumulate": accumulate, "state_versions": state_versions}
        assert_the_plan_is_the_run(folder, spec, checkpointing=checkpointing, **types, **more)
