"""The `memascend plan` command as users and programs run it."""

import json
import re

import pytest

from memascend.cli import main
from memascend.engine.layout import PIECE_ELEMENTS


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_plan_prints_every_component_and_a_total(capsys):
    status, out, err = run(capsys, "plan", "--model", "Qwen/Qwen2.5-7B", "--system", "zero_infinity", "--ram", "128",
                           "--dtype", "fp16")  # fmt: skip
    assert (status, err) == (0, "")
    assert "overflow check overhead" in out
    assert "host memory: fits 128 GiB" in out
    shares = [float(line.split()[-1].rstrip("%")) for line in out.splitlines() if line.endswith("%")]
    tables = out.count("  total  ")
    assert tables == 2
    assert sum(shares) == pytest.approx(200 * tables, abs=0.5 * tables)  # the rows of each, and their total


def test_system_without_a_schedule_has_a_plan_of_its_memory(capsys):
    command = ("plan", "--model", "llama3.2-1b", "--system", "flashneuron", "--gpu-memory", "24", "--ssd-space", "1")
    status, out, err = run(capsys, *command)
    assert (status, err) == (0, "")
    assert "GPU memory: fits 24 GiB" in out
    assert "SSD: its traffic and space are not counted; system 'flashneuron' has no schedule" in out
    made = json.loads(run(capsys, *command, "--json")[1])
    assert made["io_bytes"] is made["ssd_bytes"] is None
    assert made["device_bytes"] > 0


def test_streamed_gradients_from_a_gpu_need_their_own_host_memory(capsys):
    common = ("plan", "--model", "qwen2.5-7b", "--system", "lohan", "--json")
    here, there = (json.loads(run(capsys, *common, *more)[1]) for more in (("--device", "cpu"), ()))
    name = "gradients on their way"
    assert there["components_bytes"][name] - here["components_bytes"][name] == 2 * PIECE_ELEMENTS


def test_cpu_plan_puts_computation_in_host_memory_without_cuda_overhead(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    command = ("plan", "--model", "qwen2.5-7b", "--json")
    for system in ((), ("--system", "lohan", "--states", "int8")):
        cuda, cpu = (json.loads(run(capsys, *command, *system, *more)[1]) for more in ((), ("--device", "cpu")))
        assert cpu["device_bytes"] == 0
        assert cpu["components_bytes"]["process overhead"] < 2**29 < cuda["components_bytes"]["process overhead"]
        computed = cpu["components_bytes"]["computation on the CPU (estimate)"]
        assert 0 < computed < cuda["device_bytes"]
        assert sum(cpu["components_bytes"].values()) == cpu["host_bytes"]
    status, _, error = run(capsys, *command, "--device", "cpu", "--gpu-memory", "24")
    assert (status, error.count("\n")) == (2, 1)
    assert "exclude each other" in error


def test_small_run_on_a_cpu_fits_in_one_gigabyte(capsys, tmp_path):
    """It peaks at half of that; a process with CUDA would not fit."""
    command = ("plan", "--model", "qwen2.5-0.5b", "--twin", "16", "--context", "64", "--host-memory", "1GB")
    assert run(capsys, *command)[0] == 2
    status, out, _ = run(capsys, *command, "--device", "cpu")
    assert (status, "no GPU:" in out) == (0, True)


def test_largest_context_on_a_cpu_fits_and_next_does_not(capsys):
    command = ("plan", "--model", "llama3.2-1b", "--device", "cpu", "--json", "--ram", "24")
    made = json.loads(run(capsys, *command)[1])
    context = made["largest"]["context"]
    assert json.loads(run(capsys, *command, "--context", str(context))[1])["fits"]
    assert not json.loads(run(capsys, *command, "--context", str(context + 256))[1])["fits"]


def test_plan_reports_the_shortfall_and_the_largest_component(capsys):
    status, out, _ = run(capsys, "plan", "--model", "qwen2.5-32b", "--ram", "64")
    assert status == 1
    assert "does not fit 64 GiB" in out
    assert "GiB short; largest part: gradient flat buffer" in out


def test_comparison_includes_the_baseline_with_rounding_bounded_by_pytorch(capsys):
    _, out, _ = run(capsys, "plan", "--model", "qwen2.5-7b", "--dtype", "fp16", "--checkpointing", "plain")
    (line,) = (line for line in out.splitlines() if "rounding bounded by PyTorch" in line)
    assert " 85.77 " in line
    made = json.loads(run(capsys, "plan", "--model", "qwen2.5-7b", "--dtype", "fp16", "--json")[1])
    assert made["others"]["zero_infinity"] == made["arms"]["zero_infinity/as_published"]
    assert made["arms"]["zero_infinity/as_published_round_threshold"] < made["others"]["zero_infinity"]


@pytest.mark.parametrize(("given", "size"), [("64", 64), ("64GiB", 64), ("64GB", 64e9 / 2**30), ("65536MiB", 64)])
def test_host_memory_is_given_in_gib_or_with_a_unit(capsys, given, size):
    made = json.loads(run(capsys, "plan", "--model", "llama3.2-1b", "--json", "--ram", given)[1])
    assert made["ram_gib"] == pytest.approx(size)


def test_comparison_labels_systems_with_a_different_state_type(capsys):
    _, out, _ = run(capsys, "plan", "--model", "llama3.2-1b", "--states", "bf16", "--ram", "64")
    (line,) = (line for line in out.splitlines() if "DeepSpeed 0.19.8" in line)
    assert ", fp32 states" in line
    assert "in 64 GiB" in out
    _, out, _ = run(capsys, "plan", "--model", "llama3.2-1b", "--states", "fp32")
    assert "fp32 states" not in out


def test_json_plan_contains_a_ledger_that_adds_up(capsys):
    status, out, _ = run(capsys, "plan", "--model", "llama3.2-1b", "--json", "--ram", "8", "--context", "1024")
    made = json.loads(out)
    assert status == 1
    assert made["fits"] is False
    assert sum(made["components_bytes"].values()) == made["host_bytes"]
    for role, whole in (("host", "host_bytes"), ("device", "device_bytes")):
        assert sum(e["reserved_bytes"] for e in made["ledger"] if e["role"] == role) == made[whole]


def test_plan_grows_with_context_batch_and_gpus(capsys):
    def host(*more):
        return json.loads(run(capsys, "plan", "--model", "llama3.2-1b", "--json", *more)[1])["host_bytes"]

    assert host("--context", "8192") - host("--context", "4096") == 4096 * 16 * 2048 * 2
    assert host("--batch", "3") - host("--batch", "2") == 4096 * 16 * 2048 * 2
    assert host("--gpus", "2") > host("--gpus", "1")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "command"),
        (["plan"], "--model"),
        (["plan", "--model", "qwen2.5-7"], "did you mean qwen2.5-7b?"),
        (["plan", "--model", "gpt-5"], "Known: llama3.1-8b"),
        (
            ["plan", "--model", "llama3.2-1b", "--ram", "lots"],
            "'lots' is not an amount of memory: write 64 (GiB), 64GiB or 64GB",
        ),
        (["plan", "--model", "llama3.2-1b", "--ssd-endurance", "long"], "'long' is not a positive number of TB"),
        (["plan", "--model", "llama3.2-1b", "--ram", "nan"], "'nan' is not an amount of memory"),
        (["plan", "--model", "llama3.2-1b", "--gpus", "0"], "'0' is not a positive whole number"),
        (["plan", "--model", "llama3.2-1b", "--system", "ssd"], "unknown system 'ssd'"),
        (["plan", "--model", "llama3.2-1b", "--arm", "today"], "has no arm 'today'"),
        (["plan", "--model", "llama3.2-1b", "--dtype", "int8"], "unknown dtype 'int8'"),
        (["plan", "--model", "llama3.2-1b", "--contxt", "1"], "unknown option --contxt (did you mean --context?)"),
        (
            ["plan", "--modle", "llama3.2-1b"],
            "unknown option --modle (did you mean --model?) (see memascend plan --help)",
        ),
        (["train", "--lerning-rate=1"], "unknown option --lerning-rate (did you mean --learning-rate?)"),
        (["trainn"], "command: 'trainn' is unknown (did you mean train?); choose one of plan, doctor,"),
        (["bench", "overfloww"], "part: 'overfloww' is unknown (did you mean overflow?)"),
        (["plan", "--model", "llama3.2-1b", "--experts", "fuse"], "--experts: 'fuse' is unknown (did you mean fused?)"),
        (["plan", "--model", "llama3.2-1b", "--system", "lohn"], "unknown system 'lohn' (did you mean lohan?); known"),
        (["plan", "--model", "llama3.2-1b", "--arm", "memascend_bf"], "'memascend_bf' (did you mean memascend_bf16?)"),
        (["plan", "--model", "llama3.2-1b", "--dtype", "pf16"], "unknown dtype 'pf16' (did you mean fp16?)"),
        (["plan", "--model", "llama3.2-1b", "--loss", "chunkd"], "unknown loss 'chunkd' (did you mean chunked?)"),
        (["plan", "--model", "llama3.2-1b", "--testbed", "memascend-c3x"], "(did you mean memascend-c"),
        (["train", "--accumulation", "4"], "(did you mean the number of micro-batches, --accumulate 4?)"),
        (["--verison"], "unknown option --verison (did you mean --version?)"),
        (["plan", "--model", "./no-model"], "there is no ./no-model: name a model's folder"),
        (["plan", "--model", __file__], "is no model configuration: name a config.json"),
        (["plan", "--model", "missing/config.json"], "No such file"),
        (["plan", "--model", "llama3.2-1b", "--checkpointing", "magic"], "unknown checkpointing 'magic'"),
        (
            ["plan", "--model", "llama3.2-1b", "--dtype", "fp16", "--states", "bf16"],
            "optimizer states in bf16 need a model in bf16",
        ),
        (
            ["plan", "--model", "llama3.2-1b", "--system", "zero_infinity", "--dtype", "bf16", "--states", "bf16"],
            "stock DeepSpeed fails with bf16 optimizer states on NVMe",
        ),
        (["plan", "--model", "llama3.2-1b", "--states", "int4"], "unknown dtype 'int4' of the optimizer states"),
        (["plan", "--model", "llama3.2-1b", "--states", "int8"], "system 'memascend' keeps no 8-bit moments: set"),
        (
            ["plan", "--model", "llama3.2-1b", "--system", "lohan", "--dtype", "fp16", "--states", "int8"],
            "states 'int8' need bf16 weights, which are rounded stochastically and have no other master, but dtype is "
            "'fp16': set",
        ),
        (["plan", "--model", "llama3.2-1b", "--gradients", "int8"], "unknown dtype 'int8' of the gradients"),
        (["plan", "--model", "llama3.2-1b", "--testbed", "cray"], "unknown testbed 'cray'"),
        (["plan", "--model", "llama3.2-1b", "--testbed", "none.yaml"], "cannot read the testbed none.yaml"),
        (["plan", "--model", "llama3.2-1b", "--nvme", "no-such-folder"], "no-such-folder is no folder"),
        (["plan", "--model", "llama3.2-1b", "--write-config", "ds.json"], "--write-config needs --nvme"),
        (["plan", "--model", "llama3.2-1b", "--picture", "plan.bmp"], "end the name in .svg, .png, .pdf"),
        (["plan", "--model", "llama3.2-1b", "--twin", "3"], "not a power of two"),
        (["explode"], "explode"),
    ],
)
def test_every_error_is_one_line_with_status_2(capsys, arguments, words):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert words in err
    assert err.startswith("memascend: error: ")
    assert err.count("\n") == 1


def test_ctrl_c_prints_one_line(capsys, monkeypatch):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr("memascend.planner.command.run", interrupted)
    assert run(capsys, "plan", "--model", "llama3.2-1b") == (130, "", "memascend: interrupted\n")


def test_folder_without_a_configuration_is_refused(capsys, tmp_path):
    status, _, err = run(capsys, "plan", "--model", str(tmp_path))
    assert status == 2
    assert "holds no config.json" in err


def planned(capsys, *arguments: str) -> dict:
    """Return the JSON answer for Qwen2.5-7B on the paper's first machine."""
    status, out, err = run(capsys, "plan", "--model", "qwen2.5-7b", "--json", *arguments)
    assert status in (0, 1), err
    return json.loads(out)


def test_plan_without_limits_judges_nothing_and_says_how_to_ask(capsys):
    status, out, _ = run(capsys, "plan", "--model", "qwen2.5-7b")
    assert status == 0
    assert "to check whether it fits, give --gpu-memory" in out
    assert "step time: not predicted; no machine was named" in out
    assert planned(capsys)["fits"] is None


@pytest.mark.parametrize(
    ("limit", "name"), [("--gpu-memory", "GPU memory"), ("--ram", "host memory"), ("--ssd-space", "SSD space")]
)
def test_each_limit_alone_decides_and_sets_the_exit_status(capsys, limit, name):
    for size, fits in (("4", False), ("4000", True)):
        status, out, _ = run(capsys, "plan", "--model", "qwen2.5-7b", limit, size)
        assert status == (0 if fits else 1)
        assert f"{name}: {'fits' if fits else 'does not fit'} {size} GiB" in out


@pytest.mark.parametrize("system", ["memascend", "zero_infinity", "zero_offload", "all_in_gpu"])
def test_largest_context_and_batch_fit_and_larger_ones_do_not(capsys, system):
    limits = ("--gpu-memory", "141", "--ram", "320", "--system", system)
    found = planned(capsys, *limits)["largest"]
    for option, size, step in (("--context", found["context"], 256), ("--batch", found["batch"], 1)):
        assert planned(capsys, *limits, option, str(size))["fits"] is True
        assert planned(capsys, *limits, option, str(size + step))["fits"] is False


def test_the_largest_model_is_the_largest_that_fits(capsys):
    found = planned(capsys, "--ram", "128", "--gpu-memory", "24")["largest"]["model"]
    assert found == "Qwen3-30B-A3B"
    for model, status in ((found, 0), ("qwen2.5-32b", 1)):
        assert run(capsys, "plan", "--model", model, "--ram", "128", "--gpu-memory", "24")[0] == status


def test_limit_that_bounds_nothing_is_reported(capsys):
    _, out, _ = run(capsys, "plan", "--model", "qwen2.5-7b", "--ssd-space", "500")
    assert "the given limits bound neither context nor batch" in out


def test_testbed_provides_limits_step_time_and_the_bottleneck(capsys):
    made = planned(capsys, "--gpus", "2", "--batch", "8", "--testbed", "memascend-c1")
    assert made["fits"] is True
    assert [need["limit_bytes"] for need in made["needs"]] == [80 * 2**30, 1024 * 2**30, None]
    time = made["time"]
    assert time["lane"] == "modelled"
    assert time["bottleneck"] == "SSD"
    assert time["tokens_per_second"] == pytest.approx(2 * 8 * 4096 / time["seconds"])
    assert set(time["reasons"]) <= set(time["calibrations"])


def test_more_gpus_than_the_testbed_has_give_no_time(capsys):
    made = planned(capsys, "--gpus", "4", "--testbed", "memascend-c1")
    assert made["time"] == {"reason": "memascend-c1 has 2 GPUs, not 4"}


def test_activations_on_the_ssd_add_wear_and_need_bandwidth(capsys):
    words = ("--testbed", "memascend-c1", "--ssd-endurance", "600", "--loss", "chunked", "--accumulate", "2")
    kept = planned(capsys, "--checkpointing", "none", *words)
    sent = planned(capsys, "--checkpointing", "ssd", *words)
    gained = planned(capsys, "--checkpointing", "ssd", *words, "--ssd-endurance-gain", "215")
    written = sent["wear"]["activation_bytes_per_step"]
    blocks = kept["device_components_bytes"]["activations of all blocks"]
    layers = 28
    assert written == 2 * blocks * (layers - 1) // layers
    assert sent["device_components_bytes"]["activations of 2 blocks"] == 2 * blocks // layers
    assert sent["wear"]["bytes_per_step"] == kept["wear"]["bytes_per_step"] + written
    assert sent["wear"]["activation_write_bytes_per_s"] == pytest.approx(2 * written / sent["time"]["seconds"])
    assert gained["wear"]["days_of_life"] == pytest.approx(215 * sent["wear"]["days_of_life"])
    assert kept["wear"]["activation_write_bytes_per_s"] is None
    _, out, _ = run(capsys, "plan", "--model", "qwen2.5-7b", "--checkpointing", "ssd", *words)
    assert "activations: a step writes" in out
    assert "writing them within half of the step takes" in out


def test_wear_follows_from_bytes_and_seconds(capsys):
    made = planned(capsys, "--testbed", "memascend-c1", "--ssd-endurance", "600")
    wear, seconds = made["wear"], made["time"]["seconds"]
    assert wear["bytes_per_step"] == sum(made["io_bytes"]["write"].values())
    assert wear["tb_per_day"] == pytest.approx(wear["bytes_per_step"] / 1e12 * 86400 / seconds)
    assert wear["days_of_life"] == pytest.approx(600 / wear["tb_per_day"])
    assert wear["steps_of_life"] == pytest.approx(600e12 / wear["bytes_per_step"])


def test_drive_lifetime_is_not_invented_without_an_endurance(capsys):
    _, out, _ = run(capsys, "plan", "--model", "qwen2.5-7b", "--testbed", "memascend-c1")
    assert "drive lifetime: needs the rated endurance (--ssd-endurance" in out
    assert planned(capsys)["wear"]["days_of_life"] is None


def test_a_yaml_file_describes_a_machine(capsys, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("memory_gib: 64\ngpus: [{model: RTX 4090, count: 1, memory_gib: 24}]\n")
    made = planned(capsys, "--testbed", str(path))
    assert [need["fits"] for need in made["needs"]] == [True, True, None]
    assert "does not say rates.gpu_tflops_16bit" in made["time"]["reason"]


def test_bf16_states_halve_what_the_optimizer_reads(capsys):
    fp32, bf16 = (planned(capsys, "--dtype", "bf16", "--states", states) for states in ("fp32", "bf16"))
    assert bf16["io_bytes"]["read"]["optimizer"] * 2 == fp32["io_bytes"]["read"]["optimizer"]
    assert bf16["host_bytes"] < fp32["host_bytes"]


def test_systems_without_8_bit_moments_are_compared_with_fp32_states(capsys):
    status, out, _ = run(capsys, "plan", "--model", "llama3.2-1b", "--system", "lohan", "--states", "int8")
    assert status == 0
    assert "bf16, int8 optimizer states" in out
    fp32, int8 = (planned(capsys, "--system", "lohan", "--states", states) for states in ("fp32", "int8"))
    assert int8["others"] == fp32["others"]
    assert int8["host_bytes"] < fp32["host_bytes"]


def test_a_bf16_gradient_buffer_is_half_as_large(capsys):
    fp32, bf16 = (planned(capsys, "--dtype", "bf16", "--gradients", dtype) for dtype in ("fp32", "bf16"))
    parts = (fp32["components_bytes"], bf16["components_bytes"])
    assert parts[1]["gradient flat buffer"] * 2 == parts[0]["gradient flat buffer"]
    assert run(capsys, "plan", "--model", "llama3.2-1b", "--dtype", "fp16", "--gradients", "bf16")[0] == 2


def test_checkpoints_that_stay_on_the_gpu_take_no_host_memory(capsys):
    there, here = (planned(capsys, "--checkpointing", words) for words in ("offloaded", "plain"))
    moved = there["components_bytes"]["activation checkpoints"]
    assert there["host_bytes"] - here["host_bytes"] == moved
    assert here["device_bytes"] > there["device_bytes"]


def test_configuration_is_written_and_only_replaced_with_force(capsys, tmp_path):
    path, nvme = tmp_path / "ds.json", tmp_path / "nvme"
    nvme.mkdir()
    arguments = ("plan", "--model", "qwen2.5-7b", "--gpus", "2", "--batch", "3", "--accumulate", "4")
    arguments += ("--nvme", str(nvme), "--write-config", str(path))
    status, out, _ = run(capsys, *arguments)
    assert status in (0, 1)
    assert str(path) in out
    config = json.loads(path.read_text())
    assert config["train_batch_size"] == 24
    zero = config["zero_optimization"]
    assert zero["offload_param"]["nvme_path"] == zero["offload_optimizer"]["nvme_path"] == str(nvme)
    assert "buffer_size" not in zero["offload_param"]  # our configuration never sets it
    before = path.read_bytes()
    status, _, err = run(capsys, *arguments)
    assert (status, path.read_bytes()) == (2, before)
    assert "exists: --force replaces it" in err
    assert run(capsys, *arguments, "--force")[0] in (0, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--system", "lohan"), "lohan needs no DeepSpeed configuration"),
        (("--system", "in_memory"), "in_memory needs no DeepSpeed configuration"),
        (("--system", "cxl", "--arm", "as_published"), "can only be planned and simulated"),
        (("--system", "cxl", "--arm", "naive"), "interleaves the whole process, which no DeepSpeed configuration does"),
    ],
    ids=str,
)
def test_configuration_of_a_system_without_one_is_refused(capsys, tmp_path, options, words):
    more = ("--nvme", str(tmp_path), "--write-config", str(tmp_path / "ds.json"))
    status, _, err = run(capsys, "plan", "--model", "llama3.2-1b", *options, *more)
    assert (status, err.count("\n")) == (2, 1)
    assert words in err
    assert not (tmp_path / "ds.json").exists()


def test_baseline_configuration_names_its_buffers(capsys, tmp_path):
    path = tmp_path / "ds.json"
    run(capsys, "plan", "--model", "qwen2.5-7b", "--system", "zero_infinity", "--nvme", str(tmp_path),
        "--write-config", str(path))  # fmt: skip
    config = json.loads(path.read_text())
    param = config["zero_optimization"]["offload_param"]
    assert (param["buffer_count"], param["buffer_size"]) == (9, 152064 * 3584)
    parts = {"pinned": "power_of_two", "pool": "monolithic_separate", "overflow": "chain", "aio": "file"}
    assert {name: config["memascend"][name] for name in parts} == parts


def test_all_in_gpu_has_no_deepspeed_configuration(capsys, tmp_path):
    status, _, err = run(capsys, "plan", "--model", "llama3.2-1b", "--system", "all_in_gpu", "--write-config",
                         str(tmp_path / "ds.json"))  # fmt: skip
    assert status == 2
    assert "needs no DeepSpeed configuration" in err


@pytest.mark.parametrize(("suffix", "magic"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_a_picture_is_drawn_and_not_overwritten(capsys, tmp_path, suffix, magic):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan{suffix}"
    arguments = ("plan", "--model", "qwen2.5-7b", "--ram", "64", "--picture", str(path))
    assert run(capsys, *arguments)[0] == 0
    assert path.read_bytes().startswith(magic)
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert "exists: --force replaces it" in err


def test_missing_matplotlib_is_reported_with_how_to_install_it(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    status, _, err = run(capsys, "plan", "--model", "qwen2.5-7b", "--picture", str(tmp_path / "plan.svg"))
    assert status == 2
    assert "pip install matplotlib" in err


def test_printed_train_command_is_accepted_by_train(capsys, tmp_path):
    from memascend.training.config import complete, from_text

    arguments = ("plan", "--model", "qwen2.5-7b", "--dtype", "bf16", "--states", "bf16", "--gradients", "bf16")
    arguments += ("--gpus", "2", "--nvme", str(tmp_path), "--write-config", str(tmp_path / "ds.json"))
    _, out, _ = run(capsys, *arguments)
    line = next(line for line in out.splitlines() if line.startswith("the same run: memascend train "))
    words = line.removeprefix("the same run: memascend train ").split()
    keys = {flag.removeprefix("--").replace("-", "_"): text for flag, text in zip(words[::2], words[1::2], strict=True)}
    values = {name: [text] if name == "data" else from_text(name, text) for name, text in keys.items()}
    config = complete(values)
    assert (config.ranks, config.context, config.states, config.dtype) == (2, 4096, "bf16", "bf16")
    assert (config.gradients, config.checkpointing) == ("bf16", "offloaded")


def test_experts_are_planned_as_the_installed_transformers_stores_them(capsys):
    def made(*more):
        return json.loads(run(capsys, "plan", "--model", "qwen3-30b-a3b", "--json", *more)[1])

    import transformers

    fused, separate, auto = made("--experts", "fused"), made("--experts", "separate"), made()
    buffers = "optimizer-state and swap-out buffers"  # as large as the largest tensor
    assert fused["components_bytes"][buffers] > separate["components_bytes"][buffers]
    assert auto["fused_experts"] is (int(transformers.__version__.split(".")[0]) >= 5)


def test_a_twin_is_printed_in_mib(capsys):
    _, out, _ = run(capsys, "plan", "--model", "qwen2.5-0.5b", "--twin", "16")
    rows = {line[:44].strip(): line.split()[-2] for line in out.splitlines() if line.endswith("%")}
    assert "MiB   share" in out
    assert float(rows["process overhead"]) == pytest.approx(1.63 * 1024, rel=0.001)
    assert float(rows["gradient flat buffer"]) == pytest.approx(4 * 494_032_768 / 256 / 2**20, rel=0.01)


def test_measured_limit_is_printed_with_two_decimals(capsys):
    _, out, _ = run(capsys, "plan", "--model", "llama3.2-1b", "--ram", "69.86412")
    assert "host memory: fits 69.86 GiB, with" in out


def test_host_memory_budget_bounds_the_largest_context(capsys):
    """--host-memory limits the answer too, and is not only a reason to refuse."""
    words = ["plan", "--model", "qwen2.5-14b", "--batch", "2", "--gradients", "bf16", "--host-memory", "64GiB"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "host memory: fits 64 GiB" in said
    context = re.search(r"largest context at batch 2: ([0-9,]+)", said)[1].replace(",", "")
    assert main([*words, "--context", context]) == 0
    assert main([*words, "--context", str(int(context) + 256)]) == 2


def test_largest_model_that_fits_counts_experts_as_stored_by_transformers(capsys):
    words = ["--gpus", "4", "--context", "2", "--batch", "2", "--clip", "0", "--ssd-space", "500"]
    assert main(["plan", "--model", "llama3.2-3b", *words]) == 0
    assert "Qwen3-30B-A3B" not in capsys.readouterr().out
