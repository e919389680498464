"""`memascend compare` of two sets of results: records by their quartiles, claims by their verdicts, artifacts."""

import hashlib
import json
import os
import zipfile

import pytest

from memascend import cli
from memascend.simulator import Event, write_trace


def record(folder, seconds, name="r"):
    folder.mkdir(exist_ok=True)
    points = [{"arm": "one", "batch": 4, "forward_s": seconds, "bytes": [1, 2]}]
    (folder / f"{name}.json").write_text(json.dumps({"run_id": name, "points": points}))


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        ([2.0, 2.1, 2.2, 2.3, 2.4], "B is slower"),
        ([0.9, 1.0, 1.1, 1.2, 3.0], "within the spread"),
        ([9.0], "a single value"),
    ],
)
def test_results_are_compared_by_their_quartiles(tmp_path, capsys, other, verdict):
    record(tmp_path / "a", [1.0, 1.1, 1.2, 1.3, 1.4])
    record(tmp_path / "b", other)
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["name"], found["verdict"]) == ("r: one 4 forward_s", verdict)


def streams(folder, name, engine, **settings):
    """Write a record of `bench nvme`, whose repeats each run for 0.7 s."""
    point = {"question": "stream", "method": "engine io_uring", "op": "write", "engine": engine, "fio": [2e9, 2e9]}
    folder.mkdir(exist_ok=True)
    record = {"benchmark": "nvme", **settings, "points": [point | {"seconds": [0.7] * len(engine)}]}
    (folder / f"{name}.json").write_text(json.dumps(record))


def test_fixed_time_benchmarks_are_compared_by_rate(tmp_path, capsys):
    streams(tmp_path / "a", "one", [3.8e9, 3.9e9], target="file", depth=16)
    streams(tmp_path / "b", "one", [2.0e9, 2.1e9], target="loop", depth=16)
    command = ["compare", str(tmp_path / "a"), str(tmp_path / "b")]
    assert cli.main(command) == 0
    said = capsys.readouterr()
    assert (
        "nvme: stream engine io_uring write: A 3.85 [3.8, 3.9] GB/s, B 2.05 [2, 2.1] GB/s, B / A 0.532: B is slower"
        in said.out
    )
    assert "stream engine io_uring write fio: A 2 [2, 2] GB/s, B 2 [2, 2] GB/s, B / A 1.000: within the" in said.out
    assert "0.7" not in said.out
    assert said.err == "note: nvme: target is file in A and loop in B\n"
    assert cli.main([command[0], command[2], command[1]]) == 0
    assert "B is faster" in capsys.readouterr().out
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)[0]
    assert (found["a_bytes_per_s"], found["b_bytes_per_s"]) == ([3.8e9, 3.85e9, 3.9e9], [2.0e9, 2.05e9, 2.1e9])
    assert "a_s" not in found


def test_registered_and_unregistered_benchmarks_are_compared_separately(tmp_path, capsys):
    for folder, rates in (("a", (3.8e9, 2.8e9)), ("b", (3.7e9, 2.7e9))):
        for registered, rate in zip((True, False), rates, strict=True):
            streams(tmp_path / folder, str(registered), [rate], registered=registered)
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    said = capsys.readouterr()
    assert "nvme, registered: stream engine io_uring write: A 3.8 [3.8, 3.8] GB/s, B 3.7" in said.out
    assert "nvme: stream engine io_uring write: A 2.8 [2.8, 2.8] GB/s, B 2.7" in said.out
    assert said.err == ""


def test_claims_that_change_their_verdict_are_named(tmp_path, capsys):
    header = "claim_id,lane,verdict,value\n"
    (tmp_path / "a.csv").write_text(header + "x,modelled,deviates,23.6\ny,modelled,reproduced,1\n")
    (tmp_path / "b.csv").write_text(header + "x,modelled,reproduced,23.5\ny,modelled,reproduced,2\n")
    assert cli.main(["compare", str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]) == 0
    said = capsys.readouterr().out
    assert "x (modelled): A deviates (23.6), B reproduced (23.5)" in said
    assert "2 in common: 1 other verdict, 1 other value" in said or "2 in common: 1 other value, 1 other" in said
    assert "y (modelled)" not in said
    assert cli.main(["compare", str(tmp_path / "a.csv"), str(tmp_path / "b.csv"), "--all"]) == 0
    assert "y (modelled): A reproduced (1), B reproduced (2)" in capsys.readouterr().out


def test_claim_in_two_tables_of_one_folder_is_noted(tmp_path, capsys):
    header = "claim_id,lane,verdict,value\n"
    for name, verdict in (
        ("a/claims.csv", "reproduced"),
        ("a/more-claims.csv", "deviates"),
        ("b/claims.csv", "deviates"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{header}x,modelled,{verdict},1\n")
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    said = capsys.readouterr()
    assert (
        f"note: {tmp_path / 'a'}: 1 measurements or claims (such as 'x (modelled)') in more than one file" in said.err
    )
    assert "1 equal" in said.out


def artifact(path, files, **later):
    """Write a zip of `files` with their sums.

    `later`: contents that replace or add entries without changing the sums (None: no such entry); `__` stands for a
    slash.
    """
    files = {"artifact.json": '{"version": "1.0", "profile": "smoke"}'} | files
    sums = "".join(f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n" for name, text in files.items())
    files = files | {"SHA256SUMS": sums} | {name.replace("__", "/"): text for name, text in later.items()}
    with zipfile.ZipFile(path, "w") as file:
        for name, text in files.items():
            if text is not None:
                file.writestr(f"root/{name}", text)


def test_two_artifacts_are_compared_by_their_records_and_claims(tmp_path, capsys):
    for name, verdict, seconds in (("a", "deviates", 1.0), ("b", "reproduced", 0.0)):
        record(tmp_path / name, [seconds] * 5)
        artifact(
            tmp_path / f"{name}.zip",
            {
                "tables/claims.csv": f"claim_id,lane,verdict,value\nx,modelled,{verdict},1\n",
                "records/r.json": (tmp_path / name / "r.json").read_text(),
                "source/results/reference/claims.csv": "not,read\n",
            },
        )
    command = ["compare", str(tmp_path / "a.zip"), str(tmp_path / "b.zip")]
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert "x (modelled): A deviates (1), B reproduced (1)" in said
    assert "r: one 4 forward_s: A 1 [1, 1] s, B 0 [0, 0] s, B / A 0.000: B is faster" in said
    assert cli.main([command[0], command[2], command[1]]) == 0  # no division by a median of zero
    assert "B 1 [1, 1] s: B is slower" in capsys.readouterr().out
    (tmp_path / "a.zip").write_bytes(b"PK")
    assert cli.main(command) == 2
    assert "as an artifact" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ("none.json", "r/r.json", "there is no"),
        ("t.json", "r/r.json", "is a step and"),
        ("empty", "r/r.json", "holds no records"),
        ("other", "r/r.json", "have no measurement in common"),
    ],
)
def test_incomparable_inputs_are_refused_in_one_line(tmp_path, capsys, a, b, said):
    event = Event(name="forward", phase="forward", resource="main", begin_s=0.0, end_s=1.0)
    write_trace(tmp_path / "t.json", [event], lane="measured", source="here", system="x", arm="y")
    record(tmp_path / "r", [1.0])
    record(tmp_path / "other", [1.0], "else")
    (tmp_path / "empty").mkdir()
    assert cli.main(["compare", str(tmp_path / a), str(tmp_path / b)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_measurement_in_two_records_of_one_folder_is_noted(tmp_path, capsys):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for name, seconds in (("first", [1.0]), ("second", [2.0])):
            record = {"run_id": "same", "points": [{"arm": "x", "seconds": seconds}]}
            (tmp_path / folder / f"{name}.json").write_text(json.dumps(record))
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    said = capsys.readouterr()
    assert f"note: {tmp_path / 'a'}: 1 measurements or claims (such as 'same: x') in more than one file" in said.err
    assert "A 2 [2, 2] s" in said.out


def test_profile_difference_between_artifacts_is_noted(tmp_path, capsys):
    for name, profile in (("a", "smoke"), ("b", "paper")):
        made = json.dumps({"version": "1.0", "profile": profile})
        artifact(tmp_path / f"{name}.zip", {"tables/claims.csv": CLAIMS, "artifact.json": made})
    assert cli.main(["compare", str(tmp_path / "a.zip"), str(tmp_path / "b.zip")]) == 0
    assert capsys.readouterr().err == "note: artifact.json: profile is smoke in A and paper in B\n"


CLAIMS = "claim_id,lane,verdict,value\nx,modelled,deviates,1\n"


@pytest.mark.parametrize(
    ("later", "said"),
    [
        (
            {"tables__claims.csv": CLAIMS.replace("deviates", "reproduced")},
            "tables/claims.csv is not what its checksum",
        ),
        ({"tables__claims.csv": None}, "tables/claims.csv is missing"),
        ({"README.md": "other", "claims.json": "{"}, "README.md is not what its checksum says, and 1 more"),
        ({"records__new.json": "{}"}, "records/new.json was added"),
        ({"..__..__x": "out"}, "root/../../x leads out of the artifact"),
        ({"SHA256SUMS": None}, "must hold one folder with SHA256SUMS"),
        ({"records__\x1b[2K.json": "{}"}, r"root/records/\x1b[2K.json holds control characters"),
    ],
)
def test_modified_artifact_is_not_compared(tmp_path, capsys, later, said):
    files = {"tables/claims.csv": CLAIMS, "README.md": "read", "claims.json": "{}"}
    artifact(tmp_path / "a.zip", files)
    artifact(tmp_path / "b.zip", files, **later)
    assert cli.main(["compare", str(tmp_path / "a.zip"), str(tmp_path / "b.zip")]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/b.zip is not" in error
    assert said in error
    assert error.count("\n") == 1
    assert cli.main(["compare", str(tmp_path / "a.zip"), str(tmp_path / "a.zip")]) == 0


@pytest.mark.parametrize("value", ["NaN", "-1.0", "true", "Infinity", "1" + "0" * 308, "1" + "0" * 400])
def test_invalid_times_are_reported_and_not_compared(tmp_path, capsys, value):
    record(tmp_path / "a", [1.0] * 5)
    (tmp_path / "b.json").write_text(f'{{"run_id": "r", "points": [{{"arm": "one", "forward_s": [1.0, {value}]}}]}}')
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b.json")]) == 2
    error = capsys.readouterr().err
    assert "b.json is not compared: r: forward_s holds " in error
    assert "which no time or rate can be" in error
    assert error.count("\n") == 1


def test_an_artifact_without_a_version_is_refused(tmp_path, capsys):
    artifact(tmp_path / "a.zip", {"tables/claims.csv": CLAIMS, "artifact.json": "[1]"})
    assert cli.main(["compare", str(tmp_path / "a.zip"), str(tmp_path / "a.zip")]) == 2
    assert "its artifact.json names no version and no profile" in capsys.readouterr().err


def test_names_in_an_artifact_cannot_steer_a_terminal(tmp_path, capsys):
    for name, verdict in (("a", "deviates"), ("b", "reproduced")):
        table = f"claim_id,lane,verdict,value\n\x1b[2Kx,modelled,{verdict},1\n"
        artifact(tmp_path / f"{name}.zip", {"tables/claims.csv": table})
    assert cli.main(["compare", str(tmp_path / "a.zip"), str(tmp_path / "b.zip")]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert r"\x1b[2Kx (modelled): A deviates (1), B reproduced (1)" in said


def test_differing_settings_of_single_run_benchmarks_are_noted(tmp_path, capsys):
    for name, target in (("a", "loop"), ("b", "file")):
        record = {"run_id": "r", "benchmark": "nvme", "target": target, "commit": name, "conditions": {"threads": 2}}
        record["options"] = {"contexts": [96 if name == "a" else 128], "folder": name}
        (tmp_path / f"{name}.json").write_text(json.dumps(record | {"points": [{"method": "x", "seconds": [1.0]}]}))
    assert cli.main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "note: r: contexts is [96] in A and [128] in B",
        "note: r: target is loop in A and file in B",
    ]


def test_folder_entries_that_are_not_files_are_ignored(tmp_path, capsys):
    record(tmp_path / "a", [1.0])
    os.mkfifo(tmp_path / "a/x.json")
    (tmp_path / "a/y.json").mkdir()
    (tmp_path / "a/z.json").symlink_to("nowhere")
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 0


def test_damaged_artifact_gives_a_short_error(tmp_path, capsys):
    artifact(tmp_path / "a.zip", {"tables/claims.csv": CLAIMS, "records/long.json": "x" * 10_000})
    whole = bytearray((tmp_path / "a.zip").read_bytes())
    whole[27] = 0x20  # the high byte of the first name's length
    (tmp_path / "a.zip").write_bytes(whole)
    assert cli.main(["compare", str(tmp_path / "a.zip"), str(tmp_path / "a.zip")]) == 2
    assert len(capsys.readouterr().err) < 500


def test_non_finite_ratio_is_left_out(tmp_path, capsys):
    for name, seconds in (("a", 5e-324), ("b", 1e18)):
        record(tmp_path / name, [seconds] * 5)
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["ratio"] is None


def test_claims_table_with_a_byte_order_mark_is_read(tmp_path, capsys):
    (tmp_path / "claims.csv").write_text(CLAIMS, encoding="utf-8-sig")
    assert cli.main(["compare", str(tmp_path / "claims.csv"), str(tmp_path / "claims.csv")]) == 0
    assert "1 equal" in capsys.readouterr().out
