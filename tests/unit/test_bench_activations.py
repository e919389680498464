"""`memascend bench activations`, and its prediction, calculated manually."""

import json
from pathlib import Path

import pytest

from memascend.activation.peak import predicted_peak
from memascend.activation.record import Plan, Record
from memascend.bench.activations import ActivationOptions
from memascend.cli import main

BLOCK = 100.0  # bytes, in two regions of half of it, one second each


def record(blocks=3):
    tensors = [
        (f"model.layers.{block}.part[{part}]", BLOCK / 2, 2 * block + part + 1.0)
        for block in range(blocks)
        for part in (0, 1)
    ]
    made = Record(tensors)
    made.forward_s = 2.0 * blocks
    return made


def simulated(*policies, rate=1e9, prefetch=BLOCK / 2):
    return predicted_peak(
        record(len(policies)),
        Plan(),
        write_bytes_per_s=rate,
        read_bytes_per_s=rate,
        prefetch_bytes=prefetch,
        policies={f"model.layers.{number}": policy for number, policy in enumerate(policies)},
        entry_bytes=10.0,
    )


def test_predicted_peak_and_time_match_manual_calculation():
    kept = simulated("keep", "keep", "keep")
    assert (kept.peak_bytes, kept.seconds, kept.offloaded_bytes) == (300, 18, 0)
    again = simulated("recompute", "recompute", "recompute")
    # three inputs and one block; each block is computed once more
    assert (again.peak_bytes, again.seconds) == (130, 24)
    sent = simulated("offload", "offload", "keep")
    assert (sent.peak_bytes, sent.offloaded_bytes) == (150, 200)  # half a block is being written or read
    assert sent.seconds == pytest.approx(18)


def test_predicted_mix_and_slow_drive_match_manual_calculation():
    mixed = simulated("offload", "recompute", "keep")
    assert mixed.seconds == pytest.approx(20)
    assert mixed.peak_bytes == pytest.approx(10 + BLOCK + BLOCK / 2)
    # It is written from 1 s to 11 s, 5 s for each half. Backward needs the halves at 14 s, and takes 2 s for each.
    assert simulated("offload", "keep", "keep", rate=10.0).seconds == pytest.approx(25)  # 11 + 5 + 2 + 5 + 2
    ahead = simulated("offload", "keep", "keep", rate=10.0, prefetch=BLOCK)
    assert ahead.seconds == pytest.approx(23)  # 11 + 5 + 5 + 2
    assert simulated("offload", "keep", "keep", rate=1e9).seconds == pytest.approx(18)


@pytest.mark.parametrize("layers", [2, 3, 4, 28])
def test_default_mix_offloads_the_first_block_and_keeps_the_last(layers):
    policies = ActivationOptions(model="any", folder=Path(".")).policy(layers).per_block(layers, "")
    assert policies[0] == "offload"
    assert policies[-1] == "keep"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ways", "keep,swap"], "--ways: unknown way 'swap'; use keep and some of recompute"),
        (["--ways", "ssd"], "--ways: without 'keep' there is nothing to compare with"),
        (["--mix", "offload:3"], "--mix: offload:3 covers 3 blocks and the model has 16; cover all of them"),
        (["--mix", "drop:3"], "--mix: 'drop:3' is an invalid activation policy"),
        (["--model", "nothing"], "unknown model 'nothing'"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, said, tmp_path, capsys):
    assert main(["bench", "activations", "--folder", str(tmp_path), *options]) == 2
    out = capsys.readouterr().err.strip()
    assert said in out
    assert "\n" not in out


@pytest.mark.slow
def test_all_ways_have_equal_gradients_and_predicted_memory_savings(tmp_path, capsys):
    model = tmp_path / "model.json"
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
    model.write_text(json.dumps({"model_type": "llama", "vocab_size": 512, "num_key_value_heads": 4} | sizes))
    (tmp_path / "ssd").mkdir()
    words = ["--folder", str(tmp_path / "ssd"), "--model", str(model), "--twin", "1", "--batches", "4,8"]
    words += ["--context", "512", "--mix", "offload:2,recompute:1,keep:1", "--repeats", "1", "--json"]
    assert main(["bench", "activations", *words]) == 0
    assert list((tmp_path / "ssd").iterdir()) == []
    result = json.loads(capsys.readouterr().out)
    rows = {(row["batch"], row["way"]): row for row in result["summary"]}
    assert len(rows) == 10
    assert all(row["gradients_equal"] for row in rows.values())
    for way in ("recompute", "ssd", "mix"):
        row = rows[8, way]
        assert row["peak_reduction"] == pytest.approx(row["predicted_peak_reduction"], abs=0.1), way
        assert row["peak_reduction"] > 0.2, way
    assert rows[8, "ssd"]["written_bytes"] > 1.9 * rows[4, "ssd"]["written_bytes"] > 0
    assert rows[8, "save_on_cpu"]["host_copy_bytes"] >= result["kept_pass"]["8"]["saved_bytes"]
