"""`memascend plan` and `memascend train` mean the same by the same options, given or omitted."""

import dataclasses
import json
import re
from dataclasses import replace

import pytest
import torch

from memascend import systems as found
from memascend.cli import main
from memascend.integrations.deepspeed.config import Parts, enable_options
from memascend.planner import Workload, model_spec, plan
from memascend.planner.ds_config import deepspeed_config
from memascend.planner.from_config import workload_of
from memascend.planner.limits import CONTEXT_STEP
from memascend.planner.pool import streamed
from memascend.training import systems
from memascend.training.config import TrainConfig
from memascend.training.prepare import _plan

MODEL = "qwen2.5-7b"


def planned(capsys, *options, config=None):
    """Return the JSON of a plan for this machine's kind of device.

    `config`: the file to which it writes the DeepSpeed configuration.
    """
    if "--gpu-memory" not in options:
        options = ("--device", "cuda" if torch.cuda.is_available() else "cpu", *options)
    more = ["--write-config", str(config), "--nvme", str(config.parent)] if config else []
    assert main(["plan", "--model", MODEL, "--json", *options, *more]) in (0, 1)
    return json.loads(capsys.readouterr().out)


def as_train_option(name):
    return {"gpus": "ranks"}.get(name, name)


def test_plan_and_train_have_the_same_defaults(capsys):
    made, default = planned(capsys), TrainConfig(model=MODEL)
    names = (
        "dtype",
        "states",
        "gradients",
        "attention",
        "loss",
        "checkpointing",
        "gpus",
        "batch",
        "accumulate",
        "clip",
    )
    for name in names:
        assert made[name] == getattr(default, as_train_option(name)), name
    assert made["system"] == default.system
    spec = model_spec(MODEL)
    assert made["host_bytes"] == _plan(default, spec.hf_config_dict(), made["context"], [])["planned_host_bytes"]


@pytest.mark.parametrize(
    "options",
    [
        {"checkpointing": "plain", "batch": 4},
        {"checkpointing": "none", "loss": "plain", "attention": "eager", "ranks": 2},
        {"states": "bf16", "gradients": "bf16", "accumulate": 8},
        {"arm": "memascend_bf16"},
        {"arm": "direct_only", "dtype": "fp16"},
        {"system": "zero_infinity", "dtype": "fp16"},
        {"system": "zero_offload", "context": 1024},
    ],
    ids=str,
)
def test_same_options_need_the_same_memory_in_plan_and_train(capsys, options):
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    made = planned(capsys, *words)
    config = TrainConfig(model=MODEL, **options)
    host = _plan(config, model_spec(MODEL).hf_config_dict(), made["context"], [])
    assert host["planned_host_bytes"] == made["host_bytes"]
    assert host["planned_components"] == made["components_bytes"]
    assert host["planned_swap_bytes"] == made["ssd_bytes"]


@pytest.mark.parametrize(("system", "arm"), [("all_in_gpu", None), ("zero_infinity", "as_published_round_threshold")])
def test_train_refuses_systems_and_arms_that_can_only_be_planned(system, arm):
    config = TrainConfig(model="m", data=["d"], system=system, arm=arm)
    with pytest.raises(ValueError, match="can only be planned and simulated"):
        systems.check(config)


def test_gradients_kept_in_memory_are_not_planned_on_the_ssd(capsys):
    swapped, kept = (planned(capsys, "--arm", arm) for arm in ("memascend", "memascend_kept_gradients"))
    gradients = swapped["io_bytes"]["write"]["backward"]
    assert kept["io_bytes"]["write"]["backward"] == 0
    assert swapped["io_bytes"]["read"]["optimizer"] - kept["io_bytes"]["read"]["optimizer"] == gradients
    assert swapped["ssd_bytes"] - kept["ssd_bytes"] == gradients
    name = "optimizer-state and swap-out buffers"  # three per sub-group instead of four
    less = swapped["components_bytes"][name] - kept["components_bytes"][name]
    assert 0 < less < swapped["components_bytes"][name] / 4
    # differs by the piece that is being converted
    assert swapped["host_bytes"] - kept["host_bytes"] == pytest.approx(less, rel=0.01)


@pytest.mark.parametrize("system", ["memascend", "zero_infinity", "zero_offload"])
@pytest.mark.parametrize("more", [{}, {"dtype": "fp16", "ranks": 2, "batch": 2, "accumulate": 4}], ids=str)
def test_the_written_configuration_is_what_train_runs(capsys, tmp_path, system, more):
    """They agree key by key, except for what the adaptive pool derives from the model itself."""
    words = [word for name, value in more.items() for word in (f"--{name}", str(value))]
    planned(capsys, "--system", system, *words, config=tmp_path / "ds.json")
    written = json.loads((tmp_path / "ds.json").read_text())
    config = TrainConfig(model=MODEL, system=system, **more)
    spec = model_spec(MODEL)
    flow = streamed(spec.tensors(), element_bytes=2, ranks=config.ranks, threshold_bytes=1 << 20)
    prepared = {"context": 4096, "largest_tensor": flow.largest, "parameters": spec.parameters,
                "pool_buffers": flow.monolithic_count(),
                "sub_group_size": Workload(spec=spec, ranks=config.ranks).sub_group_size}  # fmt: skip
    run = systems.setup(config, prepared, "run", str(tmp_path)).settings["deepspeed_config"]
    section = written.pop("memascend")
    options = {name: getattr(config, name) for name in ("attention", "loss", "checkpointing")}
    assert enable_options({"memascend": section}, {}) == enable_options(
        {}, {**options, **found.load(system).parts(found.default_arm(system))}
    )
    if system == "memascend":
        assert section == options
        for name in ("buffer_count", "buffer_size"):
            run["zero_optimization"]["offload_param"].pop(name)
    assert written == run


DEEPSPEED = [
    (name, arm)
    for name in found.names()
    if hasattr(found.load(name), "planned_config")
    for arm, arrangement in found.load(name).arms.items()
    if arrangement.runs and arrangement.placement != "process_interleave"
]


@pytest.mark.parametrize(("system", "arm"), DEEPSPEED)
def test_written_configuration_is_planned_as_the_same_run(system, arm):
    """The direct engine of an arm with DeepSpeed's I/O settings has smaller buffers than those that a plan derives."""
    ranks = 1 if "published" in arm or "016" in arm else 2  # as_published_one_tensor has a larger buffer with two
    dtype = "bf16" if "bf16" in arm else "fp16"
    given = Workload(
        spec=model_spec("llama3.2-1b"), system=system, arm=arm, dtype=dtype, ranks=ranks, batch=2, device="cuda"
    )
    config = deepspeed_config(given, "/nvme")
    again = replace(workload_of(config, given.spec, ranks=ranks), device="cuda")
    assert plan(again).host_bytes == pytest.approx(plan(given).host_bytes, abs=1 << 20)
    for name in ("dtype", "kept_states", "batch", "stack", "sub_group_size"):
        assert getattr(again, name) == getattr(given, name), name


@pytest.mark.parametrize("arm", found.load("memascend").arms)
def test_configuration_written_for_an_arm_sets_its_parts(capsys, tmp_path, arm):
    dtype = "bf16" if "bf16" in arm else "fp16"
    planned(capsys, "--arm", arm, "--dtype", dtype, config=tmp_path / "ds.json")
    section = json.loads((tmp_path / "ds.json").read_text())["memascend"]
    wanted = found.load("memascend", arm).arms[arm].parts
    defaults = dataclasses.asdict(Parts())
    assert defaults | {k: v for k, v in section.items() if k in defaults} == defaults | wanted


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"enabled": "false"}, "\"memascend.enabled\" must be true or false, got 'false'"),
        ([], '"memascend" must be a section such as {"pool": "adaptive"}, got []'),
    ],
)
def test_invalid_memascend_section_is_refused(section, line) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        enable_options({"memascend": section}, {})


def test_missing_empty_and_enabled_sections_enable_everything() -> None:
    assert all(
        enable_options({"memascend": section}, {}) == enable_options({}, {})
        for section in (None, {}, {"enabled": True})
    )


def test_keywords_override_the_section_unless_they_are_none() -> None:
    section = {"pool": "monolithic", "loss": "chunked", "devices": None}
    options = enable_options({"memascend": section}, {"pool": None, "overflow": "chain", "blocks_in_flight": 2})
    assert options.parts == Parts(pool="monolithic", overflow="chain")
    assert (options.memory.loss, options.blocks_in_flight, options.devices) == ("chunked", 2, ())


def test_unknown_keywords_and_program_keywords_in_section_are_refused() -> None:
    with pytest.raises(TypeError, match=r"memascend.enable has no keyword 'poool' \(did you mean pool\?\)"):
        enable_options({}, {"poool": "adaptive"})
    with pytest.raises(ValueError, match="unknown key 'gather_clone'"):
        enable_options({"memascend": {"gather_clone": False}}, {})
    assert not enable_options({}, {"gather_clone": False}).gather_clone


@pytest.mark.parametrize(
    ("clip", "versions", "per_parameter"),
    [
        (0, "auto", 18),
        (0, "one", 18),
        (0, "two", 28),
        (0, "checkpoint", 14),
        (1, "auto", 18),  # the gradients that wait for their norm are those from which a step can be repeated
        (1, "one", 18),
        (1, "two", 28 + 4),
        (1, "checkpoint", 14 + 4),
    ],
)
def test_state_versions_take_the_same_space_in_plan_and_train(capsys, clip, versions, per_parameter):
    """In addition there are inputs of blocks, space for two blocks and the spare space of the gradients' file."""
    words = ("--system", "lohan", "--clip", str(clip), "--state-versions", versions, "--ssd-space", "150")
    made = planned(capsys, *words)
    config = TrainConfig(model=MODEL, system="lohan", clip=float(clip), state_versions=versions)
    train = _plan(config, model_spec(MODEL).hf_config_dict(), made["context"], [])
    need = next(each for each in made["needs"] if each["name"] == "SSD space")
    assert train["planned_swap_bytes"] == made["ssd_bytes"]
    assert train["least_swap_bytes"] == need["needed_bytes"]  # two versions, which are 200 GiB, do not fit
    assert need["needed_bytes"] / made["parameters"] == pytest.approx(per_parameter, rel=0.1)
    assert need["fits"] == (versions != "two")


@pytest.mark.parametrize(
    ("options", "written"),
    [
        ({"clip": 0}, 2 + 12),
        ({}, 2 + 12),  # a step that is not clipped
        ({"state-versions": "one"}, 2 + 12 + 4),
        ({"clip": 0, "accumulate": 4}, 2 + 12 + 3 * 4),
        ({"accumulate": 4}, 2 + 12 + 3 * 4),
        ({"accumulate": 4, "arm": "none"}, 2 + 12 + 4 * 4),
        ({"gradients": "bf16", "states": "bf16"}, 2 + 4),
        ({"state-versions": "checkpoint"}, 2 + 12 + 4),
        ({"clip": 0, "states": "int8"}, 2 + 2 + 2 / 32),
        ({"clip": 0, "state-versions": "one"}, 2 + 12 + 4),
    ],
    ids=str,
)
def test_planned_step_writes_the_expected_bytes_per_parameter(capsys, options, written):
    """Bytes per parameter; the bytes written determine a drive's life."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    made = planned(capsys, "--system", "lohan", "--checkpointing", "plain", "--ssd-endurance", "1000", *words)
    assert made["wear"]["bytes_per_step"] == sum(made["io_bytes"]["write"].values())
    assert made["wear"]["bytes_per_step"] / made["parameters"] == pytest.approx(written, rel=0.01)
    assert made["wear"]["steps_of_life"] == pytest.approx(1e15 / made["wear"]["bytes_per_step"])


def test_plan_says_where_vertical_accumulation_is_not_possible(capsys):
    note = "counted with horizontal accumulation"
    command = ["plan", "--model", MODEL, "--system", "lohan", "--accumulate", "4", "--accumulation"]
    for order, device, noted in (("vertical", "cuda", True), ("vertical", "cpu", False), ("horizontal", "cuda", False)):
        assert main([*command, order, "--device", device]) == 0
        assert (note in capsys.readouterr().out) == noted, (order, device)


@pytest.mark.parametrize(("versions", "per_parameter"), [("checkpoint", 4.0625), ("two", 2 * 4.0625)])
def test_int8_states_take_four_bytes_per_parameter_and_version(capsys, versions, per_parameter):
    """There is a margin for inputs of blocks, and for space of two units with one version."""
    words = ("--system", "lohan", "--clip", "0", "--states", "int8", "--checkpointing", "plain")
    made = planned(capsys, *words, "--state-versions", versions)
    config = TrainConfig(
        model=MODEL, system="lohan", clip=0.0, states="int8", checkpointing="plain", state_versions=versions
    )
    train = _plan(config, model_spec(MODEL).hf_config_dict(), made["context"], [])
    assert train["planned_swap_bytes"] == made["ssd_bytes"]
    assert train["planned_host_bytes"] == made["host_bytes"]
    assert made["ssd_bytes"] / made["parameters"] == pytest.approx(per_parameter, rel=0.1)


def test_disk_too_small_for_two_versions_is_planned_with_one(capsys):
    words = ("--system", "lohan", "--clip", "0", "--ssd-space")
    ample, tight, asked = (
        planned(capsys, *words, space, *more)
        for space, more in (("400", ()), ("150", ()), ("400", ("--state-versions", "one")))
    )
    assert tight["io_bytes"] == asked["io_bytes"] != ample["io_bytes"]


@pytest.mark.parametrize("limit", ["ram", "ssd-space"])
def test_largest_context_is_exact_with_checkpoints_on_the_ssd(capsys, limit):
    """A few checkpoints are in host memory, and all of them on the SSD."""
    given = ("--gpu-memory", "8000", f"--{limit}", {"ram": "5", "ssd-space": "240"}[limit])
    words = ("--system", "lohan", "--batch", "4", *given)
    most = planned(capsys, *words)["largest"]["context"]
    fits = [
        all(need["fits"] is not False for need in planned(capsys, *words, "--context", str(context))["needs"])
        for context in (most, most + CONTEXT_STEP)
    ]
    assert fits == [True, False]


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "much"])
def test_invalid_clip_norm_is_refused(capsys, value):
    assert main(["plan", "--model", MODEL, f"--clip={value}"]) == 2
    assert f"argument --clip: '{value}' is not a number of at least 0" in capsys.readouterr().err


def test_plan_names_requested_state_versions_and_refuses_unsupported_ones(capsys):
    words = ["plan", "--model", MODEL, "--system", "lohan", "--state-versions"]
    assert main([*words, "checkpoint"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "one version of the states alone, as requested" in text
    assert "resumes from the last checkpoint" in text
    assert main([*words, "one"]) == 0
    assert "to repeat a step, as requested: " in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "--model", MODEL, "--state-versions", "one"]) == 2
    assert "state_versions 'one': system 'memascend' keeps no versions" in capsys.readouterr().err
