"""The `memascend plan` command as a person and as a program use it."""

import json

import pytest

from memascend.cli import main


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_plan_prints_every_component_and_a_total(capsys):
    status, out, err = run(capsys, "plan", "--model", "Qwen/Qwen2.5-7B", "--system", "zero_infinity", "--ram", "128")
    assert (status, err) == (0, "")
    assert "overflow check overhead" in out
    assert "fits 128 GiB" in out
    shares = [float(line.split()[-1].rstrip("%")) for line in out.splitlines() if line.endswith("%")]
    assert shares.pop() == 100  # the last row is the total
    assert sum(shares) == pytest.approx(100, abs=0.5)


def test_plan_says_how_much_is_missing_and_what_is_largest(capsys):
    _, out, _ = run(capsys, "plan", "--model", "qwen2.5-32b", "--ram", "64")
    assert "does not fit 64 GiB" in out
    assert "GiB short; largest part: gradient flat buffer" in out


def test_plan_as_json_holds_the_ledger(capsys):
    status, out, _ = run(capsys, "plan", "--model", "llama3.2-1b", "--json", "--ram", "8", "--context", "1024")
    made = json.loads(out)
    assert status == 0
    assert made["fits"] is False
    assert sum(made["components_bytes"].values()) == made["host_bytes"]
    assert sum(entry["reserved_bytes"] for entry in made["ledger"]) == made["host_bytes"]


def test_plan_grows_with_context_and_gpus(capsys):
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
        (["plan", "--model", "llama3.2-1b", "--ram", "lots"], "'lots' is not a positive number of GiB"),
        (["plan", "--model", "llama3.2-1b", "--ram", "nan"], "'nan' is not a positive number of GiB"),
        (["plan", "--model", "llama3.2-1b", "--gpus", "0"], "'0' is not a positive whole number"),
        (["plan", "--model", "llama3.2-1b", "--system", "ssd"], "unknown system 'ssd'"),
        (["plan", "--model", "llama3.2-1b", "--arm", "today"], "has no arm 'today'"),
        (["plan", "--model", "llama3.2-1b", "--dtype", "int8"], "unknown dtype 'int8'"),
        (["plan", "--model", "llama3.2-1b", "--contxt", "1"], "--contxt"),
        (["plan", "--model", "missing/config.json"], "No such file"),
        (["train", "--config", "run.yaml"], "'train' is not built yet"),
        (["explode"], "explode"),
    ],
)
def test_every_error_is_one_line_and_status_2(capsys, arguments, words):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert words in err
    assert err.startswith("memascend: error: ")
    assert err.count("\n") == 1


def test_an_unreadable_folder_is_one_line(capsys, tmp_path):
    status, _, err = run(capsys, "plan", "--model", str(tmp_path))
    assert status == 2
    assert "holds no config.json" in err
