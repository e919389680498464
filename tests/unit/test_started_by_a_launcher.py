"""The ranks that a launcher started wait for the first one to prepare the run, however long that takes."""

import os
import subprocess
import sys

from memascend.training.processes import free_port
from tests import forked

SCRIPT = """
import contextlib, datetime, os, sys, time
from pathlib import Path
import torch.distributed as group
from memascend.training import backends, launch, worker
from memascend.training.config import complete

folder, end, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])

class Backend:
    @staticmethod
    def start(threads):
        (folder / str(rank)).touch()
        while not all((folder / each).exists() for each in "01"):
            time.sleep(0.02)
        group.init_process_group("gloo", timeout=datetime.timedelta(seconds=5))

class Worker:
    def __init__(self, job, out):
        print(job["said"])

    def run(self):
        return "done"

@contextlib.contextmanager
def prepared(config, resume, wanted):
    time.sleep(8 if end == "slow" else 1)
    if end == "killed":
        os._exit(9)
    yield {"said": "prepared by the first rank"}

backends.load, launch._first_rank, worker.Worker = lambda name: Backend, prepared, Worker
try:
    sys.exit(launch.join(complete({"model": "?", "data": ["?"]}), resume=False, wanted={}))
except ValueError as error:
    print(error)
    sys.exit(3)
"""


def ranks(folder, end):
    """Run both ranks to their ends, and return the exit status and the output of each."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    outputs, started = [folder / f"said{rank}" for rank in range(2)], []
    for rank, output in enumerate(outputs):
        with output.open("w") as said:
            settings = os.environ | address | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-c", SCRIPT, str(folder), end]
            started.append(forked.Popen(command, env=settings, stdout=said, stderr=subprocess.STDOUT))
    try:
        return [(each.wait(120), path.read_text().splitlines()) for each, path in zip(started, outputs, strict=True)]
    finally:
        for each in started:
            each.kill()
            each.wait()


def test_preparation_may_take_longer_than_the_limit_of_the_process_group(tmp_path):
    for status, said in ranks(tmp_path, "slow"):
        assert status == 0, said
        assert "prepared by the first rank" in said


def test_other_ranks_end_in_one_line_if_the_first_dies_while_preparing(tmp_path):
    _, (status, said) = ranks(tmp_path, "killed")
    assert status == 3, said
    assert "the first rank ended while it prepared the run: its own output says why" in said
