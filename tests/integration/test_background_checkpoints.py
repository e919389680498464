"""`memascend train --system lohan` writes checkpoints while it trains; they
equal those of a run that waits for them bit by bit."""

import functools
import json
import os
import subprocess

import pytest

from memascend.training.checkpoint import file_checksum, listed
from memascend.training.progress import read_metrics
from tests.loop_devices import small_file_system
from tests.train_runs import MODEL, command, environment, losses, text_folder, train

OPTIONS = [*MODEL, "--context", "32", "--files", "*.py", "--system", "lohan", "--steps", "7", "--save-every", "2"]
OPTIONS += ["--eval-sequences", "0", "--keep", "4", "--seed", "1"]
# With the defaults clipping is speculative: gradients wait for their
# norm, or a step that has to be clipped is repeated.
WAYS = {
    "defaults": (),
    "accumulated, one version": ("--accumulate", "2", "--state-versions", "one"),
    "8-bit states, not clipped": ("--states", "int8", "--clip", "0"),
    "bf16 states, torn by a kill": ("--states", "bf16", "--state-versions", "checkpoint", "--clip", "0"),
}


def files_of(checkpoint):
    """Return the checksums of all files that do not depend on the process."""
    paths = [path for path in checkpoint.path.rglob("*") if path.is_file()]
    names = {path.relative_to(checkpoint.path).as_posix(): file_checksum(path) for path in paths}
    return {name: crc for name, crc in names.items() if name not in ("manifest.json", "state/trainer.json")}


def facts_of(checkpoint):
    (facts,) = json.loads((checkpoint.state / "trainer.json").read_text()).values()
    return {name: value for name, value in facts.items() if "random" not in name}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return text_folder(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def waiting(tmp_path_factory, text):
    """Return a function from options beyond `OPTIONS` to the output of a run
    that waits for its checkpoints; it trains once."""

    @functools.cache
    def run(*more):
        output = tmp_path_factory.mktemp("waiting") / "run"
        done = train(output, *OPTIONS, "--data", str(text), *more, "--save-in-foreground")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "of which training waited" not in done.stdout
        return output

    return run


@pytest.mark.parametrize(
    "more",
    [pytest.param(more, id=name, marks=[pytest.mark.slow] if more else []) for name, more in WAYS.items()],
)
def test_background_checkpoints_equal_those_of_a_waiting_run(tmp_path, text, waiting, more):
    done = train(tmp_path / "ours", *OPTIONS, "--data", str(text), *more)
    assert done.returncode == 0, done.stdout + done.stderr
    checkpoints = [line for line in done.stdout.splitlines() if "of which training waited" in line]
    assert [line.split()[0] for line in checkpoints] == ["2", "4", "6"]
    assert losses(tmp_path / "ours") == losses(waiting(*more))
    found, expected = (listed(output / "checkpoints")[0] for output in (tmp_path / "ours", waiting(*more)))
    assert [each.step for each in found] == [each.step for each in expected] == [2, 4, 6, 7]
    for ours, theirs in zip(found, expected, strict=True):
        assert files_of(ours) == files_of(theirs)
        assert facts_of(ours) == facts_of(theirs)
        assert ours.manifest["files"].keys() == theirs.manifest["files"].keys()
        for name in files_of(ours):
            ours.check(ours.path / name)
    assert (tmp_path / "ours" / "model").resolve() == found[-1].model
    rows = [row for row in read_metrics(tmp_path / "ours" / "metrics.jsonl") if row["kind"] == "checkpoint"]
    assert [row["step"] for row in rows] == [2, 4, 6, 7]
    assert all(row["stood_still_s"] <= row["seconds"] for row in rows[:3])
    assert all(row["written_bytes"] > 0 for row in rows)
    assert rows[3]["stood_still_s"] == rows[3]["seconds"]  # no training follows the last checkpoint


def test_full_disk_during_checkpoint_ends_run_without_losing_steps(tmp_path, text, waiting):
    with small_file_system(tmp_path / "small", 160 << 20) as small:
        output, filler = small / "run", small / "filler"
        options = [*OPTIONS, "--data", str(text), "--nvme", str(tmp_path / "nvme"), "--log-every", "1"]
        (tmp_path / "nvme").mkdir()
        said = []
        with subprocess.Popen(
            command(output, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
        ) as run:
            for line in run.stdout:
                said.append(line)
                if " 1/7 " in line:
                    fill(filler, leave=6 << 20)  # enough for the weights, but not for the states
            errors = run.stderr.read()
        assert run.returncode == 2, "".join(said) + errors
        (line,) = errors.splitlines()
        assert f"cannot save the checkpoint of step 2 in {output / 'checkpoints'} (No space left on device)" in line
        assert "make room, then: memascend train --output " in line
        assert "--resume (continues after step " in line
        assert not list((output / "checkpoints").iterdir())
        filler.unlink()
        done = train(output, "--resume")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "whose states are on the SSD" in done.stdout
        assert losses(output) == losses(waiting())


def fill(path, leave):
    """Fill the file system except for `leave` bytes."""
    status = os.statvfs(path.parent)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize - leave)
