"""SIGTERM ends `memascend train` while the drive of its states hangs, and --resume then continues the run."""

import signal
import subprocess
import time

import pytest

from tests.train_runs import command, losses, patched_environment, text_folder, train

OPTIONS = ["--model", "llama3.2-1b", "--twin", "32", "--context", "32", "--files", "*.py", "--system", "lohan"]
OPTIONS += ["--accumulate", "1", "--eval-sequences", "0", "--seed", "1", "--schedule", "constant"]
OPTIONS += ["--steps", "4", "--checkpoints", "none"]
# In the worker, every command to the drive takes five minutes from the second step on.
HANGS = """
def patch(engine):
    from memascend import _C

    faults, start, keep = _C.FaultLayer(), engine.start.__func__, engine.keep
    engine.start = classmethod(lambda cls, *args, **named: start(cls, *args, faults=faults, **named))

    def kept(self, facts):
        keep(self, facts)
        if facts.get("step") == 2:
            faults.add("any", delay_us=300_000_000)

    engine.keep = kept
"""


@pytest.mark.slow
def test_stop_ends_a_run_whose_drive_hangs_and_resume_continues(tmp_path):
    text, run = text_folder(tmp_path), tmp_path / "run"
    started = subprocess.Popen(
        command(run, *OPTIONS, "--data", str(text)),
        env=patched_environment(tmp_path, HANGS),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        while " 2/4 " not in (line := started.stdout.readline()):
            assert line, "it ended before the second step"
        time.sleep(1)  # it is in the third step
        started.send_signal(signal.SIGTERM)
        said, _ = started.communicate(timeout=120)
    finally:
        started.kill()
    assert started.returncode == 2
    assert "memascend-states" in said.splitlines()[-1]
    assert "the drive or the mount hangs" in said.splitlines()[-1]
    resumed = train(run, "--resume")
    assert "resume  from step 2, whose states are on the SSD" in resumed.stdout, resumed.stdout + resumed.stderr
    assert sorted(losses(run)) == [1, 2, 3, 4]
