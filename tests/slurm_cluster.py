"""A Slurm cluster of several nodes on this machine, for tests: Debian's own munged, slurmctld and slurmd.

Everything is in a temporary folder and on free ports; nothing of an installed Slurm is read or changed. A node is one
slurmd with its own name (`slurmd -N`), as Debian's package allows. There is no accounting database: finished jobs stay
in squeue's list. Needs root, as a slurmd that starts jobs for other users does.

Manually, until Ctrl-C: python -m tests.slurm_cluster
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from memascend.training.processes import die_with_parent

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "srun")
NODES = ("node1", "node2")
START_S = 60
CONFIGURATION = """\
ClusterName=trial
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
# Nodes of one machine: no control groups, which they would share.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
KillWait=2
ReturnToService=2
# squeue alone knows how jobs ended: they stay in its list.
MinJobAge=3600
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=60 OverSubscribe=NO State=UP
"""


def missing() -> str | None:
    """Return why such a cluster cannot run here, or None."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if lacking:
        return f"no {', '.join(lacking)}: apt-get install slurmctld slurmd slurm-client munge"
    return None if os.geteuid() == 0 else "slurmd needs root"


@dataclass(frozen=True)
class Job:
    """A job. ``comment`` is Snakemake's, with rule and wildcards. ``began``
    and ``ended`` are whole seconds, NaN until then."""

    job: int
    node: str
    state: str
    began: float
    ended: float
    comment: str


class Cluster:
    """A running cluster. ``environment`` is what programs of Slurm need to find it."""

    def __init__(self, folder: Path, cores: int, memory_mib: int) -> None:
        self.folder, self.cores, self.memory_mib = folder, cores, memory_mib
        path = f"{folder}/bin:{_path()}"
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start the daemons. Raises RuntimeError with the logs' last lines if the cluster does not come up."""
        ports = _free_ports(1 + len(NODES))
        host = socket.gethostname().partition(".")[0]
        has = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs={self.cores} Boards=1 SocketsPerBoard=1"
        has += f" CoresPerSocket={self.cores} ThreadsPerCore=1 RealMemory={self.memory_mib}"
        nodes = "\n".join(f"NodeName={name} {has} Port={port}" for name, port in zip(NODES, ports[1:]))
        words = {"folder": self.folder, "host": host, "controller": ports[0], "nodes": nodes}
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(**words))
        # Snakemake's job steps start srun without SLURM_CONF, as on a cluster whose configuration is in /etc.
        srun = self.folder / "bin" / "srun"
        srun.parent.mkdir()
        srun.write_text(f'#!/bin/sh\nSLURM_CONF={self.folder}/slurm.conf exec {shutil.which("srun")} "$@"\n')
        srun.chmod(0o755)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        own = [f"--{what}-file={self.folder}/munge.{what}" for what in ("key", "log", "pid", "seed")]
        self._start("munged", "munged", "-F", "--force", f"--socket={self.folder}/munge.socket", *own)
        self._until((self.folder / "munge.socket").exists, "munged")
        self._start("slurmctld", "slurmctld", "-D")
        for name in NODES:
            self.start_node(name)
        self._until(lambda: all(self.state(name) == "idle" for name in NODES), "nodes that are idle")

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                command,
                env=self.environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def start_node(self, name: str) -> None:
        self._start(name, "slurmd", "-D", "-N", name)

    def _until(self, holds, what: str) -> None:
        limit = time.monotonic() + START_S
        while not holds():
            ended = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if ended or time.monotonic() > limit:
                logs = "\n".join(f"{p}:\n{p.read_text()[-2000:]}" for p in sorted(self.folder.glob("*.[lo][ou][gt]")))
                raise RuntimeError(f"waited for {what}; ended: {', '.join(ended) or 'nothing'}\n{logs}")
            time.sleep(0.2)

    def call(self, *command: str) -> str:
        """Return what a program of Slurm prints; an empty string if it fails."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else ""

    def state(self, node: str) -> str:
        return self.call("sinfo", "-h", "-N", "-n", node, "-o", "%t").strip()

    def jobs(self) -> list[Job]:
        """Return all jobs that were ever submitted."""
        lines = self.call("squeue", "-h", "-t", "all", "-o", "%A|%N|%T|%S|%e|%k").splitlines()
        words = sorted((line.split("|", 5) for line in lines), key=lambda line: int(line[0]))
        return [Job(int(w[0]), w[1], w[2], _seconds(w[3]), _seconds(w[4]), w[5]) for w in words]

    def lose(self, node: str) -> None:
        """Lose a node as if its power had failed: its daemon and processes are killed, then the controller is told."""
        jobs = self.call("squeue", "-h", "-w", node, "-o", "%A").split()
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        self._kill(jobs)
        self.call("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def _kill(self, jobs: list[str]) -> None:
        """Kill every process of these jobs, found by its environment, and the
        daemons of their steps, found by their names."""
        wanted = [f"SLURM_JOB_ID={job}".encode() for job in jobs]
        steps = tuple(f"slurmstepd: [{job}.".encode() for job in jobs)
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # the process has ended
                words = path.read_bytes().split(b"\0")
                is_ours = f"SLURM_CONF={self.folder}/slurm.conf".encode() in words
                is_step = path.with_name("cmdline").read_bytes().startswith(steps)
                if is_ours and (is_step or any(word in words for word in wanted)):
                    os.kill(int(path.parent.name), signal.SIGKILL)

    def stop(self) -> None:
        jobs = [str(job.job) for job in self.jobs()]
        self.call("scancel", "--user=root")
        time.sleep(0.5)
        for daemon in reversed(list(self._daemons.values())):
            daemon.terminate()
        for daemon in self._daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()
        self._kill(jobs)


@contextlib.contextmanager
def slurm(cores: int = 2, memory_mib: int = 8000) -> Iterator[Cluster]:
    """Run a cluster whose nodes have so many cores and MiB, whatever this machine has. It ends with the block."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        cluster = Cluster(Path(name), cores, memory_mib)
        Path(name).chmod(0o755)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp() if text[0].isdigit() else math.nan


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


if __name__ == "__main__":
    with slurm() as made, contextlib.suppress(KeyboardInterrupt):
        print(f"export SLURM_CONF={made.folder}/slurm.conf", flush=True)
        signal.pause()
